"""Every expert on every token as batched products."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.hooks import Hooks
from tests.programs.masked import dense_weights
from tests.programs.program import Dense, Program
from tests.programs.routing import Routed
from tests.programs.selected import Mix
from tests.programs.store import ExpertStore, Stacked
from tests.programs.style import Style


def _project(how: str, store: Stacked, name: str, h: Tensor) -> Tensor:
    """One projection of every expert."""
    w, b, out_in = store.weight(name), store.bias(name), store.layout_of(name) == "out-in"
    letters = "eoi" if out_in else "eio"
    match how:
        case "einsum_te":
            y = torch.einsum(f"{'ti' if h.dim() == 2 else 'tei'},{letters}->teo", h, w)
            return y if b is None else y + b
        case "einsum_et":
            y = torch.einsum(f"{'ti' if h.dim() == 2 else 'eti'},{letters}->eto", h, w)
        case "matmul":
            y = torch.matmul(h, w.transpose(1, 2) if out_in else w)
        case _:
            y = torch.bmm(h, w.transpose(1, 2) if out_in else w)
    return y if b is None else y + b[:, None, :]


class DenseMix:
    """The layer's combine as a callable of (store, x, routed)."""

    def __init__(self, s: Dense, style: Style, hooks: Hooks) -> None:
        self.s, self.style, self.hooks = s, style, hooks
        self.token_first = s.product == "einsum_te"

    def experts(self, store: Stacked, rows: Tensor) -> Tensor:
        """All experts on given rows."""

        def vector(name: str) -> Tensor:
            v = getattr(store, name)
            return v if not store.vecs[name][1] or self.token_first else v[:, None, :]

        return store.bodies[0](lambda name, h: _project(self.s.product, store, name, h), vector, rows)

    def all_rows(self, store: Stacked, x: Tensor) -> Tensor:
        """Every expert on every token, [E, T, H] or [T, E, H]."""
        x, count = self.style.noop(x), store.count
        if self.s.product == "bmm":
            x = self.repeated(x, count).view(count, -1, x.shape[-1]) if self.s.rows != "expand" else x.unsqueeze(0).expand(count, -1, -1)
        return self.hooks.rows(self.experts(store, x))

    def repeated(self, x: Tensor, count: int) -> Tensor:
        """Every token once for each expert, one expert behind the other."""
        if self.s.rows not in ("gather", "numbers"):
            return x.repeat(count, 1)
        numbers = torch.arange(x.shape[0], device=x.device).view(1, -1).expand(count, -1)
        if self.s.rows == "numbers":
            return x[numbers].reshape(-1, x.shape[-1])
        return torch.gather(x, 0, numbers.reshape(-1, 1).expand(-1, x.shape[-1]))

    def added(self, y: Tensor, like: Tensor) -> Tensor:
        """The sum over the experts of [E, T, H] or [T, E, H], by the numbers of the tokens."""
        numbers = torch.arange(like.shape[0], device=y.device)
        numbers = numbers.repeat_interleave(y.shape[1]) if self.token_first else numbers.repeat(y.shape[0])
        rows, out = y.reshape(-1, y.shape[-1]), torch.zeros_like(like)
        if self.s.combine == "index_add":
            return out.index_add(0, numbers, rows)
        return out.scatter_add_(0, numbers.view(-1, 1).expand(-1, rows.shape[-1]), rows)

    def gathered(self, store: Stacked, x: Tensor, r: Routed) -> Tensor:
        """Pick the chosen experts' rows, then weigh and sum."""
        y = self.all_rows(store, x)
        if self.token_first:
            y = torch.gather(y, 1, r.ids.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        else:
            y = y[r.ids, torch.arange(y.shape[1], device=y.device)[:, None]]
        return self.style.weigh(self.hooks.parts(y), self.style.last(r.weights)).sum(dim=1)

    def weighted_input(self, store: Stacked, x: Tensor, dense: Tensor) -> Tensor:
        """The weight multiplies what enters the expert."""
        rows = self.style.weigh(self.repeated(x, store.count), dense.transpose(0, 1).reshape(-1, 1))
        y = self.hooks.rows(self.experts(store, rows.view(store.count, -1, x.shape[-1])))
        return self.added(y, x) if self.s.combine in ("scatter_add_", "index_add") else y.sum(dim=0)

    def weighted_output(self, store: Stacked, x: Tensor, dense: Tensor) -> Tensor:
        """The weight multiplies what leaves the expert."""
        y = self.all_rows(store, x)
        dense = dense.to(y.dtype)
        if self.s.combine == "einsum":
            return torch.einsum("te,teh->th" if self.token_first else "te,eth->th", dense, y)
        if self.s.combine == "bmm":
            return torch.bmm(dense.unsqueeze(1), y if self.token_first else y.transpose(0, 1)).squeeze(1)
        y = self.style.mul(y, self.style.last(dense) if self.token_first else dense.transpose(0, 1).unsqueeze(-1))
        return self.added(y, x) if self.s.combine in ("scatter_add_", "index_add") else y.sum(dim=1 if self.token_first else 0)

    def __call__(self, store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        assert isinstance(store, Stacked)
        if self.s.weights == "gather":
            return self.gathered(store, x, r)
        dense = dense_weights(self.s.weights, r, store.count)
        dense = (dense.t() * 1.0).t() if self.s.table == "by_expert" else dense
        return (self.weighted_input if self.s.weight_on == "input" else self.weighted_output)(store, x, dense)


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    assert isinstance(p.spelling, Dense)
    return DenseMix(p.spelling, Style(p.noise), hooks)
