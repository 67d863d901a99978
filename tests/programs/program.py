"""The description of a generated program: frozen data whose repr builds the same program again."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from moefuse.spec import Domain, Gating

GATED: tuple[str, ...] = ("merged", "interleaved", "split")
SMOOTH: tuple[str, ...] = ("silu", "gelu", "gelu_tanh", "tanh_mix", "softplus", "tanh", "mish", "quick_gelu", "identity")
"""Activations without kinks: rounding moves neither them nor their gradients by a jump."""
NEEDS_GATE: tuple[str, ...] = ("swiglu_oai", "silu_clamp", "gate_only", "oai_two_limits", "oai_plus_two", "clamp_both")
NONZERO_AT_ZERO: tuple[str, ...] = ("softplus", "softmax", "sigmoid")
CUSTOM: tuple[str, ...] = (
    "tanh_mix",
    "softplus",
    "softmax",
    "quick_gelu",
    "relu_of_square",
    "leaky_by_hand",
    "gate_only",
    "oai_two_limits",
    "oai_plus_two",
    "clamp_both",
)
"""Activations that no template describes, some of them close to one: they must reach the grouped tier."""


class _Short:
    """A repr that leaves out what has its default, and still evaluates to the same program."""

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if value != default or type(value) is not type(default):
                shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Routing(_Short):
    """How ids and weights come about. ``flat`` gives 1-D ids and weights (top-1 only); ``ids`` what the router makes of the chosen ones."""

    recipe: Literal[
        "softmax_topk",
        "topk_softmax",
        "topk_sigmoid",
        "sigmoid_bias",
        "argmax",
        "max",
        "sort_slice",
        "noisy",
        "neg_inf_softmax",
        "neg_inf_sigmoid",
        "inputs",
    ] = "softmax_topk"
    renorm: Literal["none", "div", "idiv", "eps", "clamp"] = "none"
    scale: float = 1.0
    upcast: bool = False
    router_bias: bool = False
    flat: bool = False
    ids: Literal[
        "chosen",
        "minus_one",
        "minus_all",
        "twice",
        "table",
        "dropped",
        "sentinel",
        "where",
        "remainder",
        "modulo",
        "clamped",
        "bool",
        "uint8",
        "int8",
        "int32",
        "half",
        "bfloat16",
    ] = "chosen"


@dataclass(frozen=True, repr=False)
class Body(_Short):
    """One expert: gate/up projection, activation, down projection, and row-local extras that no template knows."""

    gating: Gating = "merged"
    activation: Literal[
        "silu",
        "gelu",
        "gelu_tanh",
        "relu",
        "relu2",
        "sigmoid",
        "tanh",
        "mish",
        "identity",
        "swiglu_oai",
        "silu_clamp",
        "tanh_mix",
        "softplus",
        "softmax",
        "quick_gelu",
        "relu_of_square",
        "leaky_by_hand",
        "gate_only",
        "oai_two_limits",
        "oai_plus_two",
        "clamp_both",
    ] = "silu"
    form: int = 0
    split: Literal["chunk", "split", "slice", "unflatten", "sizes"] = "chunk"
    up_first: bool = False
    bias: bool = False
    extra: Literal["none", "norm_shared", "norm_each", "layernorm_each", "out_norm", "middle"] = "none"


@dataclass(frozen=True, repr=False)
class Store(_Short):
    """Where the weights live and how one expert's (or all experts') weight is read."""

    kind: Literal["stacked", "flat", "parameter_list", "module_list", "module_dict", "sequential"] = "stacked"
    layout: tuple[str, str] = ("out-in", "out-in")
    access: Literal["index", "select", "unbind", "chunk", "slice", "narrow"] = "index"
    linear: int = 0


@dataclass(frozen=True, repr=False)
class Selected(_Short):
    """A loop over experts; each sees only its own rows."""

    find: Literal[
        "where",
        "nonzero_tuple",
        "onehot_where",
        "onehot_padded",
        "any_mask",
        "any_where",
        "any_squeeze",
        "any_flatten",
        "any_column",
        "top1_mask",
        "slot_loop",
    ] = "where"
    gather: Literal["index", "index_select", "none_index", "ellipsis", "gather", "masked_select"] = "index"
    combine: Literal[
        "index_add_",
        "index_add",
        "iadd",
        "set_sum",
        "masked_sum",
        "masked_part",
        "index_put_",
        "scatter_add_",
        "scatter_reduce",
        "assign",
    ] = "index_add_"
    init: Literal["zeros_like", "zeros", "new_zeros", "full"] = "zeros_like"
    weight_on: Literal["output", "input"] = "output"
    rows: Literal["before", "behind"] = "before"
    """Whether rows are taken in front of an expert, or it runs on every token and they are taken from the result."""
    weigh: Literal["summed", "mask", "argmax", "own_ids", "own_mask", "where"] = "summed"
    """How a row whose token is found by ``any`` gets its weight."""


ON_MASKS = ("iadd", "set_sum", "masked_sum", "masked_part", "assign")
"""How a boolean mask is combined."""


@dataclass(frozen=True, repr=False)
class Filled(_Short):
    """A loop over experts; each writes its rows into a tensor of all slots, which is weighed and summed at the end."""

    find: Literal["flat_mask", "flat_nonzero", "flat_where", "grid_mask", "pairs"] = "flat_mask"
    rows: Literal["repeat_interleave", "expand", "repeat", "token"] = "repeat_interleave"
    init: Literal["empty", "zeros", "new_zeros"] = "empty"
    write: Literal["setitem", "setitem_rest", "index_put_"] = "setitem"
    weigh: Literal["after", "before"] = "after"
    combine: Literal["view_mul_sum", "einsum", "matmul", "bmm"] = "view_mul_sum"


@dataclass(frozen=True, repr=False)
class Masked(_Short):
    """A loop over experts; each sees every token, and a mask or a dense routing weight picks the rows."""

    weight: Literal[
        "sum_mask",
        "where",
        "scatter",
        "scatter_slots",
        "onehot_einsum",
        "onehot_sum",
        "onehot_padded",
        "given",
        "slot_loop",
        "mask_mul",
        "top1",
    ] = "sum_mask"
    accumulate: Literal["add", "iadd", "list_sum", "stack_sum", "stack_einsum", "stack_dim1", "add_", "cat_sum", "cat_dense"] = "add"
    hit: Literal["all", "where", "masked_fill", "chain", "replace"] = "all"
    """Tokens that an expert's rows are added to: all of them, or only those that chose it."""


@dataclass(frozen=True, repr=False)
class Slots(_Short):
    """Weights gathered per routed slot, then batched products."""

    ids: Literal["flat", "grid"] = "flat"
    rows: Literal["repeat_interleave", "expand", "index", "repeat"] = "repeat_interleave"
    product: Literal["bmm", "matmul", "einsum", "einsum_weight_first", "einsum_ellipsis"] = "bmm"
    gather: Literal["index", "index_select", "ellipsis"] = "index"
    add: Literal["infix", "iadd"] = "infix"
    combine: Literal["mul_view_sum", "view_mul_sum", "einsum", "matmul", "bmm", "index_add"] = "mul_view_sum"
    weight_on: Literal["output", "input"] = "output"


@dataclass(frozen=True, repr=False)
class Sorted(_Short):
    """Slots sorted by expert, grouped products, and the way back."""

    sort: Literal["sort", "sort_stable", "argsort", "argsort_stable"] = "sort"
    token: Literal["floordiv", "div_floor", "repeat_index"] = "floordiv"
    counts: Literal["histc", "histc_int", "histc_first", "one_hot", "padded", "scatter_add", "compare", "stacked", "searchsorted"] = "histc"
    gemm: Literal["fallback", "private", "functional"] = "fallback"
    unsort: Literal["inverse_setitem", "argsort", "setitem", "index_copy_", "index_add_", "scatter"] = "inverse_setitem"
    weigh: Literal["before", "after"] = "before"


@dataclass(frozen=True, repr=False)
class Dense(_Short):
    """Every expert on every token as one batched product, combined by dense routing weights."""

    product: Literal["bmm", "matmul", "einsum_te", "einsum_et"] = "bmm"
    weights: Literal["scatter", "scatter_", "scatter_slots", "onehot_sum", "onehot_padded", "onehot_einsum", "given", "gather"] = "scatter"
    rows: Literal["repeat", "expand", "gather", "numbers"] = "repeat"
    combine: Literal["mul_sum", "einsum", "bmm", "scatter_add_", "index_add"] = "mul_sum"
    table: Literal["by_token", "by_expert"] = "by_token"
    weight_on: Literal["output", "input"] = "output"


@dataclass(frozen=True, repr=False)
class Noise(_Short):
    """Changes of spelling that change nothing, and things around the layer. ``layout``: that of the input, of which rows are made."""

    noop: Literal["none", "contiguous", "reshape", "to", "clone", "view_as", "double_unsqueeze"] = "none"
    mul: Literal["infix", "commuted", "method", "function"] = "infix"
    last: Literal["none_index", "unsqueeze", "view", "keyword"] = "unsqueeze"
    flatten: Literal["view", "reshape", "flatten"] = "view"
    layout: Literal["features_last", "features_first", "tokens_swapped"] = "features_last"
    logits_out: bool = False
    counts_out: bool = False
    residual: bool = False
    shared: Literal["none", "plain", "gated"] = "none"
    pre_norm: bool = False


@dataclass(frozen=True, repr=False)
class Program(_Short):
    """One generated model: spelling x routing x body x storage x noise, with sizes."""

    spelling: Selected | Filled | Masked | Slots | Sorted | Dense = field(default_factory=Selected)
    routing: Routing = field(default_factory=Routing)
    body: Body = field(default_factory=Body)
    store: Store = field(default_factory=Store)
    noise: Noise = field(default_factory=Noise)
    tokens: tuple[int, ...] = (5,)
    experts: int = 4
    top_k: int = 2
    hidden: int = 8
    inter: int = 4
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The row domains a correct report may name for this spelling."""
        match self.spelling:
            case Selected(rows="behind"):
                return ("masked",)
            case Selected() | Filled():
                return ("selected",)
            case Masked(accumulate=how) if how.startswith(("stack", "cat")):
                return ("masked", "dense")
            case Masked():
                return ("masked",)
            case Slots():
                return ("slots",)
            case Sorted():
                return ("sorted",)
            case _:
                return ("dense",)

    @property
    def tier(self) -> str:
        """``fused`` when the body is a known expert, ``grouped`` for any other row-local body."""
        return "grouped" if self.body.activation in CUSTOM or self.body.extra != "none" else "fused"

    @property
    def weight_on(self) -> str:
        return getattr(self.spelling, "weight_on", "output")


Rule = tuple[bool, str]


def _routing_rules(p: Program) -> list[Rule]:
    s, r = p.spelling, p.routing
    reads_flat = (isinstance(s, Selected) and s.find == "top1_mask") or (isinstance(s, Masked) and s.weight == "top1")
    how = getattr(s, "weights", getattr(s, "weight", ""))
    loses_repeats = (
        isinstance(s, Selected) and s.combine == "iadd" and s.find in ("where", "nonzero_tuple", "onehot_where", "onehot_padded")
    )
    return [
        (p.top_k > p.experts, "more chosen experts than experts"),
        (r.recipe in ("argmax", "max") and p.top_k != 1, "argmax chooses one expert"),
        (r.flat and r.recipe not in ("argmax", "max"), "1-D ids mean top-1"),
        (r.flat != reads_flat, "1-D ids and the spelling that reads them go together"),
        (r.recipe.startswith("neg_inf") != (how == "given"), "dense weights from the router and the spelling that reads them go together"),
        (r.recipe.startswith(("neg_inf", "topk")) and r.renorm != "none", "softmax over the chosen needs no renormalisation"),
        (how == "slot_loop" and getattr(s, "accumulate", "") in ("stack_einsum", "cat_dense"), "one term per expert"),
        (getattr(s, "hit", "") == "replace" and p.top_k != 1, "of several experts the last one would stay"),
        (r.recipe == "inputs" and (loses_repeats or how in ("scatter", "scatter_", "scatter_slots")), "a repeated id would be lost"),
    ]


def _storage_rules(p: Program) -> list[Rule]:
    s, b, st = p.spelling, p.body, p.store
    modules = st.kind in ("module_list", "module_dict", "sequential")
    return [
        (isinstance(s, Slots | Sorted | Dense) and st.kind not in ("stacked", "flat"), "batched products need stacked weights"),
        (modules and (st.layout != ("out-in", "out-in") or st.access != "index"), "nn.Linear stores out-in"),
        (st.kind == "flat" and st.layout[0] != st.layout[1], "flat storage has one layout"),
        (st.kind == "sequential" and (b.gating != "plain" or b.extra not in ("none", "middle")), "nn.Sequential holds a plain expert"),
        (
            st.access != "index" and not (st.kind == "stacked" and isinstance(s, Selected | Filled | Masked)),
            "only stacked weights have several ways to read one expert",
        ),
        (b.activation in NEEDS_GATE and b.gating == "plain", "this activation needs a gate"),
        (b.activation == "gate_only" and b.gating == "split", "a gate without the other half is a whole expert"),
        (b.gating != "merged" and (b.split != "chunk" or (b.up_first and b.gating != "interleaved")), "nothing to split"),
    ]


def _sorted_rules(p: Program, s: Sorted) -> list[Rule]:
    return [
        ((s.gemm == "fallback") != (p.dtype == "float32"), "torch's own grouped_mm traces in bfloat16 only"),
        (p.dtype == "bfloat16" and bool(p.hidden % 8 or p.inter % 8), "grouped_mm needs rows of a multiple of 16 bytes"),
        (s.unsort == "index_add_" and s.weigh == "after", "nothing left to weigh after index_add"),
    ]


def _slots_rules(_p: Program, s: Slots) -> list[Rule]:
    return [
        (s.weight_on == "input" and s.ids == "grid", "not written"),
        (s.combine in ("einsum", "matmul", "bmm") and s.weight_on == "input", "weight used twice"),
        (s.ids == "grid" and s.combine == "index_add", "not written"),
    ]


def _dense_rules(p: Program, s: Dense) -> list[Rule]:
    b = p.body
    nonzero = b.bias or b.activation in NONZERO_AT_ZERO or b.extra == "layernorm_each" or s.weights == "gather"
    return [
        (s.weight_on == "input" and nonzero, "an unchosen expert of a zero row must give zero"),
        (s.weight_on == "input" and s.product != "bmm", "not written"),
    ]


def _filled_rules(p: Program, s: Filled) -> list[Rule]:
    strided = p.routing.recipe == "sort_slice" and p.top_k < p.experts and p.tokens != (1,) * len(p.tokens)
    return [(s.find == "flat_mask" and strided, "the first columns of sorted ids cannot be viewed as flat")]


def _selected_rules(p: Program, s: Selected) -> list[Rule]:
    boolean = s.find in ("any_mask", "top1_mask", "slot_loop")
    return [
        (s.weight_on == "input" and (boolean or s.rows == "behind"), "not written"),
        (s.weigh != "summed" and s.find not in ("any_where", "any_squeeze", "any_flatten", "any_column"), "weights of rows found by any"),
        (
            s.weigh in ("mask", "argmax") and (p.routing.recipe == "inputs" or p.routing.ids != "chosen"),
            "a repeated id has one row and two weights",
        ),
        (s.combine in ON_MASKS and s.combine != "iadd" and not boolean, "boolean masks only"),
        (boolean and s.combine not in ON_MASKS, "a boolean mask is combined by assignment"),
        (s.combine == "assign" and s.find != "top1_mask", "assignment is a sum for top-1 only"),
        (boolean and s.gather not in ("index", "masked_select"), "a boolean mask is indexed"),
        (not boolean and s.gather == "masked_select", "boolean masks only"),
    ]


def invalid(p: Program) -> str | None:
    """Why this combination is not a program anybody can run (or not a mixture of experts); None when it is fine."""
    rules = _routing_rules(p) + _storage_rules(p)
    rules += [(p.noise.layout != "features_last" and len(p.tokens) == 1, "one dimension of tokens has nothing to be swapped with")]
    rules += [(p.inter == 1 and "norm" in p.body.extra, "a norm over one feature is nothing but rounding")]
    match p.spelling:
        case Sorted() as s:
            rules += _sorted_rules(p, s)
        case Slots() as s:
            rules += _slots_rules(p, s)
        case Dense() as s:
            rules += _dense_rules(p, s)
        case Filled() as s:
            rules += _filled_rules(p, s)
        case Selected() as s:
            rules += _selected_rules(p, s)
    return next((reason for broken, reason in rules if broken), None)
