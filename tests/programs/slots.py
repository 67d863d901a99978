"""Weights gathered per routed slot."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs.hooks import Hooks
from tests.programs.program import Program, Slots
from tests.programs.routing import Routed
from tests.programs.selected import Mix
from tests.programs.store import ExpertStore, Stacked
from tests.programs.style import Style

ROWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "repeat_interleave": lambda x, k: x.repeat_interleave(k, dim=0),
    "expand": lambda x, k: x.unsqueeze(1).expand(-1, k, -1).reshape(-1, x.shape[-1]),
    "index": lambda x, k: x[torch.arange(x.shape[0], device=x.device).repeat_interleave(k)],
    "repeat": lambda x, k: x[:, None, :].repeat(1, k, 1).view(-1, x.size(-1)),
}


ADD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"infix": operator.add, "iadd": operator.iadd}


def take(s: Slots, w: Tensor, idx: Tensor) -> Tensor:
    """What each slot reads of a stack."""
    if s.gather == "ellipsis":
        return w[idx, ...]
    return w[idx] if s.gather == "index" or idx.dim() > 1 else torch.index_select(w, 0, idx)


def _product(how: str, layout: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(gathered weights [S, ...], rows [S, in]) -> [S, out]."""
    if layout == "out-in":
        return {
            "bmm": lambda w, x: torch.bmm(w, x.unsqueeze(-1)).squeeze(-1),
            "matmul": lambda w, x: torch.matmul(w, x[..., None])[..., 0],
            "einsum": lambda w, x: torch.einsum("si,soi->so", x, w),
            "einsum_weight_first": lambda w, x: torch.einsum("soi,si->so", w, x),
            "einsum_ellipsis": lambda w, x: torch.einsum("...oi,...i->...o", w, x),
        }[how]
    return {
        "bmm": lambda w, x: torch.bmm(x.unsqueeze(1), w).squeeze(1),
        "matmul": lambda w, x: (x[:, None] @ w)[:, 0],
        "einsum": lambda w, x: torch.einsum("si,sio->so", x, w),
        "einsum_weight_first": lambda w, x: torch.einsum("sio,si->so", w, x),
        "einsum_ellipsis": lambda w, x: torch.einsum("...i,...io", x, w),
    }[how]


def _grid_product(how: str, layout: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(gathered weights [T, K, ...], rows [T, in] or [T, K, in]) -> [T, K, out]."""
    if how == "einsum":
        letters = "tkoi" if layout == "out-in" else "tkio"
        return lambda w, x: torch.einsum(f"{'ti' if x.dim() == 2 else 'tki'},{letters}->tko", x, w)
    if how == "einsum_weight_first":
        letters = "tkoi" if layout == "out-in" else "tkio"
        return lambda w, x: torch.einsum(f"{letters},{'ti' if x.dim() == 2 else 'tki'}->tko", w, x)
    if how == "einsum_ellipsis":
        letters = "koi" if layout == "out-in" else "kio"
        return lambda w, x: torch.einsum(f"...{'' if x.dim() == 2 else 'k'}i,...{letters}->...ko", x, w)
    if layout == "out-in":
        return lambda w, x: torch.matmul(w, (x[:, None] if x.dim() == 2 else x).unsqueeze(-1)).squeeze(-1)
    return lambda w, x: torch.matmul((x[:, None] if x.dim() == 2 else x).unsqueeze(-2), w).squeeze(-2)


def combine_grid(how: str, y: Tensor, weights: Tensor, style: Style) -> Tensor:
    """Weighted sum over K of [T, K, H]."""
    match how:
        case "einsum":
            return torch.einsum("tk,tkh->th", weights.to(y.dtype), y)
        case "matmul":
            return torch.matmul(weights[:, None, :].to(y.dtype), y).squeeze(1)
        case "bmm":
            return torch.bmm(weights.unsqueeze(1).to(y.dtype), y)[:, 0]
    return style.weigh(y, style.last(weights)).sum(dim=-2)


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    s, style = p.spelling, Style(p.noise)
    assert isinstance(s, Slots)

    def experts(store: ExpertStore, rows: Tensor, idx: Tensor) -> Tensor:
        assert isinstance(store, Stacked)
        table = _product if idx.dim() == 1 else _grid_product

        def project(name: str, h: Tensor) -> Tensor:
            y = table(s.product, store.layout_of(name))(take(s, store.weight(name), idx), h)
            b = store.bias(name)
            return y if b is None else ADD[s.add](y, take(s, b, idx))

        def vector(name: str) -> Tensor:
            v = getattr(store, name)
            return v[idx] if store.vecs[name][1] else v

        return store.bodies[0](project, vector, rows)

    def flat(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        tokens, k = r.ids.shape
        idx = r.ids.reshape(-1)
        rows = style.noop(ROWS[s.rows](x, k))
        if s.weight_on == "input":
            rows = style.weigh(rows, style.last(r.weights.reshape(-1)))
        y = hooks.rows(experts(store, rows, idx))
        if s.weight_on == "output" and s.combine in ("mul_view_sum", "index_add"):
            y = style.weigh(y, style.last(r.weights.reshape(-1)))
        if s.combine == "index_add":
            token = torch.arange(tokens, device=x.device).repeat_interleave(k)
            return torch.zeros_like(x).index_add_(0, token, y)
        grid = hooks.parts(y.view(tokens, k, -1))
        if s.weight_on == "input" or s.combine == "mul_view_sum":
            return grid.sum(dim=1)
        return combine_grid(s.combine, grid, r.weights, style)

    def grid(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        y = hooks.parts(hooks.rows(experts(store, style.noop(x), r.ids)))
        return combine_grid(s.combine, y, r.weights, style)

    return flat if s.ids == "flat" else grid
