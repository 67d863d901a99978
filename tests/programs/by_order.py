"""Slots sorted by expert, grouped products, and the way back to token order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.hooks import Hooks
from tests.programs.program import Program, Sorted
from tests.programs.routing import Routed
from tests.programs.selected import Mix
from tests.programs.store import ExpertStore, Stacked
from tests.programs.style import Style

COUNTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "histc": lambda ids, e: torch.histc(ids.float(), bins=e, min=0, max=e - 1),
    "histc_int": lambda ids, e: torch.histc(ids.to(torch.float32), e, 0, e - 1).to(torch.int64),
    "histc_first": lambda ids, e: torch.histc(ids.double().view(-1), bins=e, min=0, max=e - 1),
    "stacked": lambda ids, e: torch.stack([(ids == i).sum() for i in range(e)]),
    "one_hot": lambda ids, e: F.one_hot(ids, num_classes=e).sum(dim=0),
    "padded": lambda ids, e: F.one_hot(ids, e + 1)[:, :e].sum(dim=0),
    "scatter_add": lambda ids, e: torch.zeros(e, dtype=torch.int64).scatter_add_(0, ids, torch.ones_like(ids)),
    "compare": lambda ids, e: (ids.unsqueeze(-1) == torch.arange(e, device=ids.device)).sum(0),
}


def _grouped(how: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if how == "fallback":
        import transformers.integrations.moe  # noqa: F401  (registers the op)

        return lambda x, w, offs: torch.ops.transformers.grouped_mm_fallback(x, w, offs=offs)
    if how == "private":
        return lambda x, w, offs: torch._grouped_mm(x, w, offs=offs)
    return lambda x, w, offs: F.grouped_mm(x, w, offs=offs)


def _order(how: str, flat: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """(sorted ids, permutation)."""
    if descending:
        return torch.sort(flat, descending=True)
    match how:
        case "sort":
            return torch.sort(flat)
        case "sort_stable":
            out = flat.sort(stable=True)
            return out.values, out.indices
        case "argsort":
            perm = torch.argsort(flat)
        case _:
            perm = flat.argsort(stable=True)
    return flat[perm], perm


def _back(how: str, y: Tensor, perm: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows in slot order."""
    match how:
        case "inverse_setitem":
            inverse = torch.empty_like(perm)
            inverse[perm] = torch.arange(perm.size(0), device=perm.device)
            return y[order(inverse)]
        case "argsort":
            return y[order(perm.argsort())]
        case "setitem":
            out = torch.empty_like(y)
            out[order(perm)] = y
            return out
        case "index_copy_":
            return torch.zeros_like(y).index_copy_(0, order(perm), y)
    return torch.zeros_like(y).scatter(0, order(perm).unsqueeze(-1).expand_as(y), y)


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    s, style = p.spelling, Style(p.noise)
    assert isinstance(s, Sorted)
    gemm = _grouped(s.gemm)

    def offsets(flat: Tensor, ordered: Tensor, experts: int) -> Tensor:
        if s.counts == "searchsorted":
            return torch.searchsorted(ordered, torch.arange(experts, device=flat.device), right=True).to(torch.int32)
        counts = COUNTS[s.counts](ordered if s.counts == "histc" else flat, experts)
        return torch.cumsum(counts, dim=0, dtype=torch.int32) if s.counts == "histc" else counts.cumsum(0).to(torch.int32)

    def mix(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        assert isinstance(store, Stacked)
        tokens, k = r.ids.shape
        flat = r.ids.reshape(-1)
        ordered, perm = _order(s.sort, flat, hooks.descending)
        match s.token:
            case "floordiv":
                token = perm // k
            case "div_floor":
                token = torch.div(perm, k, rounding_mode="floor")
            case _:
                token = torch.arange(tokens, device=x.device).repeat_interleave(k)[perm]
        rows = style.noop(x[token])
        offs = hooks.offsets(offsets(flat, ordered, store.count))

        def project(name: str, h: Tensor) -> Tensor:
            w, b = store.weight(name), store.bias(name)
            y = gemm(h, w.transpose(-2, -1) if store.layout_of(name) == "out-in" else w, offs)
            return y if b is None else y + b[ordered]

        def vector(name: str) -> Tensor:
            v = getattr(store, name)
            return v[ordered] if store.vecs[name][1] else v

        y = hooks.rows(store.bodies[0](project, vector, rows))
        if s.weigh == "before":
            y = style.weigh(y, style.last(hooks.perm_weights(r.weights.reshape(-1), perm)))
        if s.unsort == "index_add_":
            return torch.zeros_like(x).index_add_(0, token, y)
        grid = hooks.parts(_back(s.unsort, y, perm, hooks.order).view(tokens, k, -1))
        return grid.sum(dim=1) if s.weigh == "before" else style.weigh(grid, style.last(r.weights)).sum(1)

    return mix
