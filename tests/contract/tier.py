"""The rows of the grouped tier: each op beside a definition in plain torch, a loop over experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse.ops.meaning.encoding import Encoding
from tests.contract.rows import Drawn
from tests.cpu.coded_case import ENCODINGS, hold

ops = torch.ops.moefuse
EXPERTS = 4


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same in every dtype but for their rounding."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ids_of(tokens: int, top_k: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high, (tokens, top_k), generator=torch.Generator().manual_seed(0))


ROUTINGS = {
    "some-ids-out-of-range": ids_of(5, 2, -1, 5),
    "no-tokens": ids_of(0, 2, 0, 4),
    "one-slot": ids_of(1, 1, 0, 4),
    "all-to-one-expert": ids_of(7, 3, 2, 3),
    "no-valid-id": ids_of(4, 2, -3, 0),
    "many-rows-int8": ids_of(90, 3, -1, 5).to(torch.int8),
    "transposed": ids_of(2, 30, -1, 5).t(),
    "expanded": ids_of(30, 1, 0, 9).expand(-1, 3),
    "uint8": ids_of(30, 2, 0, 250).to(torch.uint8),
}


def sorted_slots(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(order, offsets): slots sorted by expert, stably, those of nobody last."""
    key = [e if 0 <= e < EXPERTS else EXPERTS for e in ids.flatten().tolist()]
    order = sorted(range(len(key)), key=key.__getitem__)
    return torch.tensor(order, dtype=torch.int64), torch.tensor([sum(k < e for k in key) for e in range(EXPERTS + 1)])


def lists(form: str, *shape: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor for all experts, stored the other way, one for each, or these with strides that differ."""
    whole = draw(EXPERTS, *shape, seed=seed, dtype=dtype)
    if form == "stacked":
        return [whole]
    if form == "in-out":
        return [whole.mT.contiguous().mT if whole.dim() == 3 else whole]
    each = [v.clone() for v in whole]
    if form == "mixed":
        each[1] = each[1].t().contiguous().t() if whole.dim() == 3 else each[1].repeat_interleave(2)[::2]
    return each


def linear(xs: Tensor, offsets: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
    """Each expert's rows by its weights; zeros behind the last one's."""
    weights, biases = _each(w), _each(b)
    at = offsets.tolist()
    parts = [F.linear(xs[at[e] : at[e + 1]], weights[e], biases[e] if biases else None) for e in range(EXPERTS)]
    return torch.cat([*parts, xs.new_zeros(len(xs) - at[-1], parts[0].shape[1])])


def rows_of(v: list[Tensor], offsets: Tensor, slots: int) -> Tensor:
    """An expert's vector for each of its rows; zeros behind."""
    at, of = offsets.tolist(), _each(v)
    return torch.cat([*(of[e].expand(at[e + 1] - at[e], -1) for e in range(EXPERTS)), of[0].new_zeros(slots - at[-1], of[0].shape[0])])


def combined(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """Sums over a token's slots; those of nobody are not there, whatever they hold."""
    live = torch.zeros(len(order), dtype=torch.bool)
    live[order[: int(offsets[-1])]] = True
    by_slot = torch.zeros_like(ys).index_copy(0, order, ys)
    weighted = by_slot if weights is None else by_slot * weights.reshape(-1, 1).to(ys.dtype)
    return torch.where(live[:, None], weighted, 0).view(-1, top_k, ys.shape[1]).sum(1)


def body(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor], scale: list[Tensor], w2: list[Tensor]) -> Tensor:
    """An expert that no template describes: normalised, times a vector, then the square of a sine."""
    xs, order, offsets = ops.permute(x, ids, EXPERTS)
    h = ops.grouped_linear(xs, offsets, w, b)
    h = F.layer_norm(h, h.shape[-1:]) * ops.expert_rows(scale, offsets, h.shape[0])
    return ops.combine(ops.grouped_linear(h.sin().square(), offsets, w2, []), weights, order, offsets, ids.shape[1], None)  # type: ignore[no-any-return]


def body_loop(x: Tensor, ids: Tensor, weights: Tensor, w: list[Tensor], b: list[Tensor], scale: list[Tensor], w2: list[Tensor]) -> Tensor:
    """The same, expert by expert."""
    out = torch.zeros((x.shape[0], w2[0].shape[-2]), dtype=x.dtype) + 0 * x.sum()
    for e, (first, bias, vector, last) in enumerate(zip(_each(w), _each(b), _each(scale), _each(w2), strict=True)):
        token, slot = torch.where(ids == e)
        h = F.layer_norm(F.linear(x[token], first, bias), first.shape[:1]) * vector
        out = out.index_add(0, token, F.linear(h.sin().square(), last) * weights[token, slot, None])
    return out


def _each(tensors: list[Tensor]) -> list[Tensor]:
    return tensors if len(tensors) != 1 else list(tensors[0].unbind())


class Call(NamedTuple):
    """What the rows are made of: routed slots, sizes and a dtype."""

    ids: Tensor
    order: Tensor
    offsets: Tensor
    inp: int
    out: int
    dtype: torch.dtype
    encoding: Callable[[str], Encoding]


@dataclass(frozen=True)
class TierRow:
    """A call of one op of the tier, whose slots are routed by ``ids`` of :data:`ROUTINGS`. Weights have the form ``form``."""

    name: str
    why: str
    op: str
    ids: str = "some-ids-out-of-range"
    form: str = "stacked"
    bias: bool = True
    encoding: str = ""
    wider: bool = False

    def drawn(self, by: Any, dtype: torch.dtype, **_: Any) -> Drawn:
        """The call, on the device of who runs it."""
        ids, device = ROUTINGS[self.ids], by.device
        inp, out = (32, 48) if self.encoding else (by.sizes.get("hidden", 6), by.sizes.get("hidden_out", 5))
        args, op, places, meaning = getattr(self, f"_{self.op}")(Call(ids, *sorted_slots(ids), inp, out, dtype, by.encoding))
        moved = [[t.to(device) for t in a] if isinstance(a, list) else a.to(device) if isinstance(a, Tensor) else a for a in args]

        def run(given: list[Any]) -> Tensor:
            found = op(*given)
            return found if isinstance(found, Tensor) else found[0]  # type: ignore[no-any-return]

        def on_host(given: list[Any]) -> Tensor:
            at = [[t.cpu() for t in a] if isinstance(a, list) else a.cpu() if isinstance(a, Tensor) else a for a in given]
            return meaning(at).to(device)  # type: ignore[no-any-return]

        return Drawn(moved, run, on_host, places, (op, {}), dtype)

    def _permute(self, c: Call) -> Any:
        top_k = c.ids.shape[1]
        return [draw(len(c.ids), c.inp, dtype=c.dtype), c.ids, EXPERTS], ops.permute.default, (0,), lambda a: a[0][c.order // top_k]

    def _linear(self, c: Call) -> Any:
        xs = draw(c.ids.numel(), c.inp, dtype=c.dtype)
        b = lists(self.form, c.out, seed=2, dtype=c.dtype) if self.bias else []
        if not self.encoding:
            args = [xs, c.offsets, lists(self.form, c.out, c.inp, seed=1, dtype=c.dtype), b]
            return args, ops.grouped_linear.default, (0, 2, 3), lambda a: linear(*a)
        held = hold(c.encoding(self.encoding), EXPERTS, c.out, c.inp, torch.Generator().manual_seed(0))
        storage, codes = held.lists(self.form == "separate")
        dense = held.dense(c.dtype)
        args = [xs, c.offsets, storage, codes, b, str(held.encoding)]
        return args, ops.grouped_linear_coded.default, (0, 4), lambda a: linear(a[0], a[1], [dense.to(a[0].dtype)], a[4])

    def _rows(self, c: Call) -> Any:
        args = [lists(self.form, c.out, seed=2, dtype=c.dtype), c.offsets, c.ids.numel()]
        return args, ops.expert_rows.default, (0,), lambda a: rows_of(*a)

    def _combine(self, c: Call) -> Any:
        top_k = c.ids.shape[1]
        ys, weights = draw(c.ids.numel(), c.out, seed=1, dtype=c.dtype), draw(len(c.ids), top_k, seed=2, dtype=c.dtype)
        of = torch.promote_types(c.dtype, torch.float32) if self.wider else None
        args = [ys, weights if self.bias else None, c.order, c.offsets, top_k, of]

        def meaning(a: list[Any]) -> Tensor:
            wide = a[0].dtype if of is None else torch.promote_types(a[0].dtype, torch.float32)
            return combined(a[0].to(wide), *a[1:5])

        return args, ops.combine.default, (0, 1) if self.bias else (0,), meaning

    def _body(self, c: Call) -> Any:
        args = [draw(len(c.ids), 6, dtype=c.dtype), c.ids, draw(len(c.ids), c.ids.shape[1], seed=1, dtype=c.dtype)]
        args += [lists(self.form, *shape, seed=i, dtype=c.dtype) for i, shape in enumerate(((5, 6), (5,), (5,), (3, 5)))]
        return args, body, (0, 2, 3, 4, 5, 6), lambda a: body_loop(*a)


FORMS = ("stacked", "in-out", "separate", "mixed")
ALONE = [
    *(TierRow(f"permute-{ids}", "slots are sorted stably by expert, those of nobody last", "permute", ids) for ids in ROUTINGS),
    *(TierRow(f"{op}-{ids}", "each op with each kind of routing", op, ids) for op in ("linear", "rows", "combine") for ids in ROUTINGS),
    *(TierRow(f"{op}-{form}", "weights are read where they lie", op, form=form) for op in ("linear", "rows") for form in FORMS),
    TierRow("linear-no-bias", "products alone", "linear", bias=False),
    TierRow("combine-no-weights", "sums alone", "combine", bias=False),
    TierRow("combine-wider", "sums that are not rounded to 16 bits", "combine", wider=True),
]
WHOLE = [TierRow(f"body-{ids}", "all ops of the tier together", "body", ids) for ids in ROUTINGS if ids != "uint8"]
PACKED = [
    TierRow(f"coded-{name}-{form}", "each kind of encoding; an expert without rows, rows of nobody", "linear", form=form, encoding=name)
    for name, form in itertools.product(ENCODINGS, ("stacked", "separate"))
]
