"""Representative programs by name, with the reason each is here, and the domain and tier a report must give."""

from __future__ import annotations

from dataclasses import dataclass

from moefuse.spec import Domain, Tier
from tests.programs.program import Body, Dense, Filled, Masked, Noise, Program, Routing, Selected, Slots, Sorted, Store


@dataclass(frozen=True)
class Entry:
    """One named program."""

    name: str
    why: str
    program: Program
    domain: Domain
    tier: Tier = "fused"


_IN_OUT = Store(layout=("in-out", "in-out"))
_LIST = Store(kind="module_list")
_OAI = Body(gating="interleaved", activation="swiglu_oai", bias=True)
_SPLIT = Body(gating="split")

_SELECTED = (
    ("olmoe", "range(E) loop, one_hot mask, ModuleList, index_add_", Selected(find="onehot_where", gather="none_index"), _SPLIT, _LIST),
    ("qwen3_stacked", "range(E) loop over stacked weights with chunk", Selected(find="onehot_where"), Body(), Store()),
    ("where_linear", "torch.where and F.linear by keywords", Selected(), Body(), Store(linear=4)),
    ("nonzero_matmul", "nonzero(as_tuple) and x @ W[e].T", Selected(find="nonzero_tuple", gather="index_select"), Body(), Store(linear=1)),
    ("boolean_mask", "out[mask] += expert(x[mask]) * w[mask]", Selected(find="any_mask", combine="iadd"), _SPLIT, _LIST),
    (
        "boolean_mask_set",
        "out[mask] = out[mask] + ...",
        Selected(find="any_mask", combine="set_sum"),
        Body(gating="plain", activation="gelu"),
        _LIST,
    ),
    (
        "masked_select",
        "x.masked_select(mask[:, None]), put back by masked_scatter",
        Selected(find="any_mask", gather="masked_select", combine="masked_part"),
        _SPLIT,
        _LIST,
    ),
    ("masked_scatter", "out.masked_scatter_(mask, out[mask] + ...)", Selected(find="slot_loop", combine="masked_sum"), Body(), Store()),
    (
        "tutorial_slots",
        "for k, for e: out[mask] += ..., nn.Sequential experts",
        Selected(find="slot_loop", combine="iadd"),
        Body(gating="plain", activation="relu", bias=True),
        Store(kind="sequential"),
    ),
    ("iadd_index", "out[tok] += y with distinct tokens", Selected(combine="iadd"), Body(), Store(kind="parameter_list")),
    ("index_put", "index_put_(accumulate=True)", Selected(combine="index_put_", init="new_zeros"), Body(split="slice"), Store()),
    (
        "scatter_add",
        "scatter_add_ with an expanded index, gather by torch.gather",
        Selected(combine="scatter_add_", gather="gather"),
        Body(),
        Store(),
    ),
    ("functional_index_add", "torch.index_add out of place", Selected(combine="index_add", find="any_where"), Body(split="split"), Store()),
    ("squeezed_nonzero", "nonzero(mask).squeeze(-1)", Selected(find="any_squeeze"), Body(), Store(access="unbind")),
    ("flat_nonzero", "mask.nonzero().flatten(), nllb's ModuleDict", Selected(find="any_flatten"), _SPLIT, Store(kind="module_dict")),
    ("weights_by_mask", "w[ids == e] of rows by any(-1)", Selected(find="any_flatten", weigh="mask"), Body(), Store()),
    ("weights_by_argmax", "the slot by argmax, the weight by gather", Selected(find="any_squeeze", weigh="argmax"), Body(), Store()),
    ("weights_by_own_ids", "(w[tok] * (ids[tok] == e)).sum(-1)", Selected(find="any_where", weigh="own_ids"), Body(), Store()),
    ("column_nonzero", "mask.nonzero()[:, 0]", Selected(find="any_column"), Body(up_first=True), Store(access="select")),
    ("gpt_oss_loop", "GPT-OSS training loop: in-out, interleaved, biases", Selected(), _OAI, _IN_OUT),
    ("dbrx", "one flat matrix per projection, viewed", Selected(), _SPLIT, Store(kind="flat")),
    ("chunked", "W.chunk(E)[e].squeeze(0)", Selected(), _SPLIT, Store(access="chunk")),
    ("sliced", "W[e:e+1].squeeze(0)", Selected(), Body(), Store(access="slice", linear=1)),
    ("narrowed", "W.narrow(0, e, 1)[0]", Selected(), Body(), Store(access="narrow", layout=("in-out", "in-out"))),
    ("addmm", "torch.addmm with bias and x.mm", Selected(), Body(bias=True), Store(linear=3)),
    ("input_weight", "the routing weight multiplies the expert's input", Selected(weight_on="input"), Body(), Store()),
)
_MASKED = (
    ("masked_sum", "out += expert(x) * (w * mask).sum", Masked(), _SPLIT, _LIST),
    ("masked_iadd_where", "torch.where(mask, w, 0)", Masked(weight="where", accumulate="iadd"), Body(), Store()),
    (
        "masked_scatter_list",
        "dense weights by scatter, python sum of a list",
        Masked(weight="scatter", accumulate="list_sum"),
        Body(),
        Store(),
    ),
    ("masked_slot_loop", "for k, for e with 0/1 masks", Masked(weight="slot_loop"), Body(gating="plain", activation="relu2"), _LIST),
    ("masked_where", "out += torch.where(hit, expert(x) * w, 0)", Masked(hit="where"), Body(), _LIST),
    ("masked_fill", "out += (expert(x) * w).masked_fill(~hit, 0)", Masked(weight="scatter", hit="masked_fill"), Body(), Store()),
    ("masked_chain", "out = torch.where(hit, out + expert(x) * w, out)", Masked(hit="chain"), Body(), Store()),
    ("masked_onehot", "one_hot einsum, stack and sum", Masked(weight="onehot_einsum", accumulate="stack_sum"), Body(), Store()),
)
_FILLED = (
    ("deepseek_training", "y[flat == e] = expert(h[flat == e]) into empty_like", Filled(), _SPLIT, _LIST),
    ("filled_pairs", "y[token, slot] = expert(x[token]), weighed before", Filled("pairs", rows="token", weigh="before"), Body(), Store()),
    ("filled_grid", "a mask over tokens and slots, index_put_", Filled("grid_mask", write="index_put_", combine="einsum"), _OAI, _IN_OUT),
    ("filled_rows", "numbers of flat slots, their tokens by division", Filled("flat_nonzero", rows="token", init="zeros"), Body(), Store()),
)
_SLOTS = (
    ("batched_mm", "transformers batched_mm", Slots(), Body(), Store()),
    (
        "gathered_einsum",
        "GPT-OSS reference: 2-D ids, weights first in einsum, an ellipsis behind the ids, biases added in place",
        Slots(ids="grid", product="einsum_weight_first", gather="ellipsis", add="iadd", combine="einsum"),
        _OAI,
        Store(),
    ),
    ("gathered_ellipsis", "einsum with dots", Slots(ids="grid", product="einsum_ellipsis", gather="ellipsis"), _OAI, Store()),
    ("gathered_in_out", "stored transposed", Slots(rows="expand", combine="view_mul_sum"), Body(), _IN_OUT),
    ("gathered_matmul", "matmul with weights[:, None, :]", Slots(ids="grid", product="matmul", combine="matmul"), Body(), Store()),
    ("gathered_index_select", "index_select of weights, index_add_", Slots(gather="index_select", combine="index_add"), Body(), Store()),
)
_SORTED = (
    ("grouped_mm", "transformers grouped_mm", Sorted(), Body(), Store()),
    ("grouped_gpt_oss", "in-out weights with biases taken by sorted ids", Sorted(), _OAI, _IN_OUT),
    (
        "sorted_argsort",
        "argsort, one_hot counts, inverse by argsort",
        Sorted(sort="argsort_stable", counts="one_hot", unsort="argsort"),
        Body(),
        Store(),
    ),
    ("sorted_setitem", "rows set back, weights after", Sorted(unsort="setitem", weigh="after", token="div_floor"), Body(), Store()),
    (
        "sorted_index_add",
        "index_add_ by token",
        Sorted(unsort="index_add_", counts="compare"),
        Body(gating="plain", activation="gelu_tanh"),
        Store(),
    ),
    ("sorted_stacked_counts", "counts by stacked sums of masks", Sorted(counts="stacked"), Body(), Store()),
    ("sorted_cast_first", "counts by histc, cast before the view", Sorted(counts="histc_first"), Body(), Store()),
    ("sorted_index_copy", "index_copy_ and searchsorted offsets", Sorted(unsort="index_copy_", counts="searchsorted"), Body(), Store()),
)
_DENSE = (
    ("qwen3_vl", "x.repeat(E, 1), bmm, dense weights on the output", Dense(), Body(), _IN_OUT),
    (
        "dense_einsum",
        "einsum over all experts, token first",
        Dense(product="einsum_te", weights="onehot_sum", combine="einsum"),
        Body(),
        Store(),
    ),
    ("dense_expand", "expand and batched matmul", Dense(rows="expand", product="matmul", combine="bmm"), _OAI, Store()),
    (
        "dense_numbers",
        "tokens gathered by their numbers for each expert, and added by them",
        Dense(product="matmul", rows="numbers", combine="index_add", table="by_expert"),
        Body(),
        _IN_OUT,
    ),
    ("dense_gather", "rows of the chosen experts gathered", Dense(product="einsum_te", weights="gather"), Body(), Store()),
)
_GROUPED = (
    ("custom_gate_loop", "an unknown gate in a loop", Selected(), Body(activation="tanh_mix"), Store()),
    (
        "custom_norm_list",
        "RMSNorm inside each expert, ModuleList",
        Selected(find="any_mask", combine="iadd"),
        Body(extra="norm_each"),
        _LIST,
    ),
    ("custom_layernorm_sorted", "layer norm with per-expert weight between grouped GEMMs", Sorted(), Body(extra="layernorm_each"), Store()),
    ("custom_three_layers", "a third projection, batched", Slots(), Body(gating="plain", extra="middle"), Store()),
    ("custom_out_norm", "muse_spark's norm after the down projection", Sorted(), Body(extra="out_norm"), Store()),
    ("custom_softmax", "softmax over features", Masked(), Body(activation="softmax"), Store()),
    ("custom_oai_limits", "nearly GPT-OSS: two limits", Slots(), Body(activation="oai_two_limits", bias=True), Store()),
    ("custom_dense", "softplus on every expert", Dense(), Body(gating="plain", activation="softplus"), Store()),
)
_ODD = (
    Entry(
        "top1_mask",
        "K=1: out[mask] = expert(x[mask]) * p[mask]",
        Program(Selected(find="top1_mask", combine="assign"), Routing("argmax", flat=True), _SPLIT, _LIST, top_k=1),
        "selected",
    ),
    Entry("top1_sort", "K=1, sort(descending=True)[:, :1]", Program(Masked(), Routing("sort_slice"), top_k=1), "masked"),
    Entry(
        "calibrated",
        "every expert on every token, its rows taken from the result",
        Program(Selected(rows="behind"), Routing(), _SPLIT, _LIST),
        "masked",
    ),
    Entry(
        "top1_replace", "K=1, torch.where(hit, expert(x) * w, out)", Program(Masked(hit="replace"), Routing("argmax"), top_k=1), "masked"
    ),
    Entry("top1_max", "K=1 by max", Program(Masked(weight="top1"), Routing("max", flat=True), Body(), Store(), top_k=1), "masked"),
    Entry(
        "llama4",
        "dense -inf scatter, sigmoid, weight on the input",
        Program(Dense(weights="given", weight_on="input"), Routing("neg_inf_sigmoid"), Body(), _IN_OUT, top_k=1),
        "dense",
    ),
    Entry(
        "llama4_reference",
        "experts in [E, T] order: rows gathered and added by expanded numbers of tokens",
        Program(
            Dense(weights="given", rows="gather", combine="scatter_add_", table="by_expert", weight_on="input"),
            Routing("neg_inf_sigmoid"),
            Body(),
            _IN_OUT,
            top_k=1,
        ),
        "dense",
    ),
    Entry(
        "neg_inf_softmax", "softmax over -inf scattered logits, loop", Program(Masked(weight="given"), Routing("neg_inf_softmax")), "masked"
    ),
    Entry(
        "deepseek_v3",
        "sigmoid with correction bias, renormalised and scaled, shared expert, residual",
        Program(Sorted(), Routing("sigmoid_bias", "eps", 2.5), noise=Noise(shared="plain", residual=True), tokens=(2, 3)),
        "sorted",
    ),
    Entry(
        "qwen2_moe",
        "gated shared expert, float32 softmax, logits returned, bfloat16",
        Program(
            Selected(find="onehot_where"),
            Routing("softmax_topk", "idiv", upcast=True),
            noise=Noise(shared="gated", logits_out=True),
            dtype="bfloat16",
            tokens=(2, 4),
        ),
        "selected",
    ),
    Entry("grouped_bf16", "torch._grouped_mm in bfloat16", Program(Sorted(gemm="private"), inter=8, dtype="bfloat16"), "sorted"),
    Entry("given_ids", "ids and weights are inputs of the graph", Program(Slots(), Routing("inputs")), "slots"),
    Entry(
        "slots_stacked",
        "the terms of all slots and experts are stacked, so their places do not say whose they are",
        Program(Masked(weight="slot_loop", accumulate="stack_sum"), store=Store("module_dict"), tokens=(2, 3), experts=3, top_k=3),
        "masked",
    ),
    Entry(
        "one_token_weighed",
        "T = 1: tokens repeated for every expert and weighed by a table with a dimension of size one for them",
        Program(Dense(weights="given", combine="bmm", weight_on="input"), Routing("neg_inf_softmax"), tokens=(1, 1), experts=3),
        "dense",
    ),
    Entry(
        "softmax_between_norms",
        "a softmax over features before a norm, on plain tensors that are masked last",
        Program(
            Masked(weight="scatter", accumulate="list_sum"),
            body=Body(gating="split", activation="softmax", extra="norm_each"),
            store=Store("module_list"),
        ),
        "masked",
        "grouped",
    ),
    Entry(
        "weighed_rows_cast",
        "routing weights in float32 weigh bfloat16 tokens, which are cast back",
        Program(Slots(product="matmul", weight_on="input"), Routing(upcast=True), dtype="bfloat16"),
        "slots",
    ),
    Entry(
        "sort_then_slice",
        "the first K of a sorted dimension are distinct",
        Program(Dense(weights="scatter_"), Routing("sort_slice")),
        "dense",
    ),
    Entry(
        "one_token_index_add",
        "T = 1: the token numbers are K zeros",
        Program(Slots(combine="index_add"), tokens=(1,)),
        "slots",
    ),
    Entry(
        "channels_before_tokens",
        "[B, C, N] of a vision model: rows are copied out of the input",
        Program(noise=Noise(layout="features_first", flatten="reshape"), tokens=(2, 3)),
        "selected",
    ),
    Entry(
        "sequence_before_batch",
        "[S, B, H] of a time series, transposed and made contiguous",
        Program(Sorted(), noise=Noise(layout="tokens_swapped", residual=True), tokens=(2, 4)),
        "sorted",
    ),
    Entry(
        "masked_channels_before_tokens",
        "every expert on every token, of which rows were copied out of the input",
        Program(Masked(), noise=Noise(layout="features_first", shared="gated"), tokens=(2, 3)),
        "masked",
    ),
    Entry(
        "gathered_outputs_of_folded_tokens",
        "[B, S] tokens are flattened before every expert runs on them",
        Program(Dense(weights="gather"), noise=Noise(flatten="flatten", pre_norm=True), tokens=(2, 3), top_k=1),
        "dense",
    ),
    Entry(
        "weighed_rows_by_keyword",
        "every slot's token is weighed before the gathered weights, by torch.mul with keywords",
        Program(Slots(rows="index", product="einsum", combine="index_add", weight_on="input"), noise=Noise(mul="function", last="keyword")),
        "slots",
    ),
    Entry("one_token", "T = 1", Program(Selected(), tokens=(1,)), "selected"),
    Entry("all_experts", "K = E", Program(Slots(), experts=3, top_k=3), "slots"),
    Entry(
        "equal_sizes",
        "T = E = H / 2 = I: nothing tells the dimensions apart by size",
        Program(Dense(product="einsum_te"), tokens=(4,)),
        "dense",
    ),
    Entry(
        "addmm_of_every_token",
        "torch.addmm with a ParameterList, on every token",
        Program(
            Masked(accumulate="add_"), body=Body(gating="plain", bias=True), store=Store("parameter_list", ("in-out", "in-out"), linear=2)
        ),
        "masked",
    ),
    Entry(
        "einsum_of_every_token",
        "an einsum with a ParameterList, on every token, beside each other",
        Program(
            Masked("scatter", "stack_einsum"),
            body=Body(split="sizes"),
            store=Store("parameter_list", ("in-out", "in-out"), linear=4),
            top_k=1,
        ),
        "dense",
    ),
    Entry(
        "slot_loop_by_keyword",
        "for k, for e: torch.mul by keywords on every token",
        Program(Masked("slot_loop", "iadd"), body=_SPLIT, store=_LIST, noise=Noise(mul="function")),
        "masked",
    ),
)


def _entries(domain: Domain, rows: tuple[tuple[str, str, object, Body, Store], ...], tier: Tier = "fused") -> list[Entry]:
    return [Entry(name, why, Program(spelling, body=body, store=store), domain, tier) for name, why, spelling, body, store in rows]  # type: ignore[arg-type]


PROGRAMS: tuple[Entry, ...] = (
    *_entries("selected", _SELECTED),
    *_entries("selected", _FILLED),
    *_entries("masked", _MASKED),
    *_entries("slots", _SLOTS),
    *_entries("sorted", _SORTED),
    *_entries("dense", _DENSE),
    *(Entry(n, w, Program(s, body=b, store=st), Program(s).domains[0], "grouped") for n, w, s, b, st in _GROUPED),
    *_ODD,
)
