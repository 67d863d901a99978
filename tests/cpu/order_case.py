"""Every op with its tensors in other orders of memory: what a fake says of a result's strides, and those that it has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moefuse.ops import autograd
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.encoding import Encoding, Rounding
from moefuse.ops.meaning.recipe import Recipe
from tests.cpu.coded_case import ENCODINGS, coded, hold
from tests.cpu.lora_case import SCALES, Sizes, arguments as lora_arguments
from tests.cpu.ops_case import Case

ops = torch.ops.moefuse


def _turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def _spaced(t: Tensor) -> Tensor:
    return torch.stack([t, t], -1)[..., 0]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t) if t.dim() and t.shape[0] else t


def _last_first(t: Tensor) -> Tensor:
    return t.movedim(0, -1).contiguous().movedim(-1, 0) if t.dim() > 1 else t


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": _turned,  # behind a transposition: `conv(x)[0].t()`
    "spaced": _spaced,  # a column of something wider
    "expanded": _expanded,  # stride 0: the gradient of a sum, one row for all
    "last first": _last_first,  # the outermost dimension is the fastest
}


class FakeBeside(TorchDispatchMode):
    """Runs each op of ours with fake tensors, too; ``seen``: its name, ``wrong``: results of which the fake says other things."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func.namespace == "moefuse":
            with FakeTensorMode() as mode, torch.no_grad():
                given = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
                said = func(*given[0], **given[1])
            name = func._schema.name.partition("::")[2]
            self.seen.add(name)
            for i, (real, fake) in enumerate(zip(tree_leaves(found), tree_leaves(said), strict=True)):
                if _layout(real) != _layout(fake):
                    self.wrong.append(f"{name}, result {i}: {_layout(real)}, and its fake says {_layout(fake)}")
        return found


def _layout(t: Tensor) -> tuple[Any, ...]:
    """What a compiler relies on: strides where there are several elements along a dimension."""
    strides = [stride if size > 1 else None for size, stride in zip(t.shape, t.stride(), strict=True)] if t.numel() else []
    return tuple(t.shape), strides, t.dtype, t.device


def differentiated(run: Callable[..., Any], args: list[Any], order: Callable[[Tensor], Tensor]) -> None:
    """``run(*args)`` with all tensors in that order, and every gradient for a gradient of the result in that order."""

    def placed(t: Tensor) -> Tensor:
        t = order(t.detach())
        return t.requires_grad_() if t.is_floating_point() and t.dtype.itemsize > 1 else t

    given = tree_map_only(Tensor, placed, args)
    outs = [t for t in tree_leaves(run(*given)) if t.requires_grad]
    leaves = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
    torch.autograd.grad(outs, leaves, [order(torch.ones_like(t)) for t in outs], allow_unused=True)


def _experts(order: Any, case: Case, op: Any = ops.experts) -> None:
    differentiated(lambda *args: op(*args, **case.options), case.args(), order)


def _general(order: Any, case: Case) -> None:
    call = ExpertsCall.of(*tree_map_only(Tensor, order, case.args()), **case.options)
    tensors, counts, *how = call.pack()
    ops.experts_infer(tensors, counts, *how)
    ops.experts_infer_general(tensors, counts, *how)
    out, h, sorted_to, offsets = ops.experts_forward_general(tensors, counts, *how)
    x, _, weights, *flat = tensors
    kept = [order(torch.ones_like(out)), x, weights, h, sorted_to, offsets, *flat]
    needs = sum(1 << i for i, n in enumerate((1, 1, *counts)) if n)
    ops.experts_backward_general(kept, counts, needs, *how[:-1])


def _in_parts(order: Any, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "IN_PARTS", ("cpu",))
        _experts(order, case)


def _bounded(order: Any, case: Case) -> None:
    room = torch.empty(case.tokens * case.top_k, dtype=torch.uint8)
    options = {**case.options, "room": room, "terms": "", "layer": ""}
    differentiated(lambda *args: ops.bounded_experts(*args, **options), case.args(), order)


def _lora(**more: Any) -> Callable[[Any, Case], None]:
    def run(order: Any, case: Case) -> None:
        args = lora_arguments(case.gating, torch.float32, torch.float32, stacked=not case.separate, sizes=Sizes(tokens=case.tokens))
        if case.high_id == 0:
            args[1] = torch.full_like(args[1], -1)
        options = {"scales": SCALES, "gating": case.gating, "weight_on_input": case.weight_on_input}
        differentiated(lambda *given: ops.experts_extended(*given, **options, **more), args, order)
        ops.experts_extended(*tree_map_only(Tensor, lambda t: order(t.detach()), args), **options)

    return run


def _coded(encoding: Encoding) -> Callable[[Any, Case], None]:
    def run(order: Any, case: Case) -> None:
        case = case.with_(hidden=32, inter=32, hidden_out=32)
        args, _, options = coded(case, encoding, encoding if case.gating == "separate" else None, encoding)
        frozen = tree_map_only(Tensor, order, args)
        leaves = [0, 2, 6, 7, 8]

        def call(*given: Any) -> Any:
            whole = list(frozen)
            for i, value in zip(leaves, given, strict=True):
                whole[i] = value
            return ops.experts_extended(*whole, **options)

        differentiated(call, [args[i] for i in leaves], order)
        ops.experts_extended(*frozen, **options)

    return run


def _tier(order: Any, case: Case) -> None:
    x, ids, weights, w_in, _, _, b_in, *_ = case.args()

    def run(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        xs, sorted_to, offsets = ops.permute(x, ids, case.experts)
        ys = ops.grouped_linear(order(xs), offsets, w, b) + ops.expert_rows(b, offsets, xs.shape[0])
        out = ops.combine(order(ys), weights, sorted_to, offsets, case.top_k, None)
        return out + ops.combine(order(ys), None, sorted_to, offsets, case.top_k, torch.float64)

    differentiated(run, [x, ids, weights, w_in, b_in], order)


def _grouped_coded(order: Any, case: Case) -> None:
    g = torch.Generator().manual_seed(0)
    held = hold(ENCODINGS["nibbles, zeros"], 4, 32, 16, g)
    w, codes = (tree_map_only(Tensor, order, part) for part in held.lists(case.separate))
    rows = 2 * case.tokens
    offsets = torch.tensor([0, rows // 2, rows // 2, rows, rows])
    given = [torch.randn(rows, 16, generator=g), [torch.randn(4, 32, generator=g)]]
    differentiated(lambda xs, b: ops.grouped_linear_coded(xs, offsets, w, codes, b, str(held.encoding)), given, order)


def _router(order: Any, case: Case) -> None:
    g = torch.Generator().manual_seed(0)
    x, w, bias = (torch.randn(*size, generator=g) for size in ((case.tokens, 6), (8, 6), (8,)))
    differentiated(lambda scores: ops.topk(scores, 2)[0], [torch.randn(case.tokens, 8, generator=g)], order)
    logits = ops.router_logits(order(x), order(w), order(bias), torch.float32)
    ops.route(order(logits), order(bias), *Recipe(2, "softmax", renormalise=True).arguments, torch.float32)


def _shared(order: Any, case: Case) -> None:
    one = Case(tokens=case.tokens, experts=1, hidden_out=case.hidden, dtype=torch.float32)
    x, _, _, w_in, _, w_out, *_ = tree_map_only(Tensor, order, one.args())
    tensors = [x, *w_in, *w_out]
    shared = ops.shared_start(tensors, [1, 0, 1, 0, 0, 0], *one.call().body.encode(), x.dtype, 8)
    for weight in (order(torch.ones(case.tokens, 1)), None):
        ops.shared_join(order(torch.ones_like(shared)), shared, weight, 1.0, tensors, 8)


def _alone(order: Any, case: Case) -> None:
    held = hold(ENCODINGS["nibbles, zeros"], 4, 32, 16, torch.Generator().manual_seed(0))
    ops.unpacked(order(held.storage), [order(held.scale), order(held.zero)], str(held.encoding), torch.float32)
    ops.row_codes(order(torch.randn(case.tokens, 32)), "e4m3/16/number/1e-12")
    differentiated(ops.own, [torch.randn(case.tokens, 6)], order)
    for dtype in (torch.int64, torch.uint8):
        ops.ep_local_ids(order(torch.zeros(case.tokens, 3, dtype=dtype)), None, 0, "")


KEPT = {"experts_forward", "experts_backward"}
EXTENDED = {"experts_extended_forward", "experts_extended_backward"}
GROUPED = {"permute", "grouped_linear", "expert_rows", "combine"}
CASES: dict[str, tuple[set[str], Callable[[Any, Case], None]]] = {
    "experts": (KEPT, _experts),
    "experts, general": ({"experts_infer"} | {f"experts_{n}_general" for n in ("infer", "forward", "backward")}, _general),
    "experts, in parts": ({"experts_forward", *(f"experts_backward_{n}" for n in ("rows", "in", "out"))}, _in_parts),
    "recomputed": (KEPT | {"experts_hidden"}, lambda order, case: _experts(order, case, ops.recomputed_experts)),
    "bounded": (KEPT | {"keep_rows", "restore_rows"}, _bounded),
    "lora": (EXTENDED | {"experts_extended_infer"}, _lora()),
    "recomputed, lora": (EXTENDED | {"experts_extended_infer", "experts_extended_hidden"}, _lora(recompute=True)),
    "coded": (EXTENDED | {"experts_extended_infer"}, _coded(ENCODINGS["int8 channels"])),
    "coded, rounded": (EXTENDED | {"experts_extended_infer"}, _coded(Encoding("e4m3", (32, 32), activation=Rounding("e4m3", 32)))),
    "coded, in pairs": (EXTENDED | {"experts_extended_infer"}, _coded(ENCODINGS["nibbles, zeros"])),
    "grouped tier": (GROUPED | {f"{n}_backward" for n in GROUPED - {"permute"}}, _tier),
    "grouped, coded": ({"grouped_linear_coded", "grouped_linear_coded_backward"}, _grouped_coded),
    "router": ({"topk", "router_logits", "route"}, _router),
    "shared": ({"shared_start", "shared_join"}, _shared),
    "alone": ({"unpacked", "row_codes", "own", "ep_local_ids"}, _alone),
}
"""Ops that a case runs, and how, of an order and sizes."""
BODIES = (
    Case(dtype=torch.float32),
    Case(dtype=torch.float32, gating="separate", separate=True, weight_on_input=True),
    Case(dtype=torch.float32, low_id=-3, high_id=0),  # nobody chooses an expert: gradients are zeros, which are made elsewhere
)


@contextlib.contextmanager
def compared() -> Iterator[FakeBeside]:
    """Within it each op is compared; behind it an error says what differs."""
    with FakeBeside() as mode:
        yield mode
    assert not mode.wrong, "\n".join(dict.fromkeys(mode.wrong))
