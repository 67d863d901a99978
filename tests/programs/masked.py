"""Loops over experts where each expert sees every token and a mask or dense weight picks the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.hooks import Hooks
from tests.programs.program import Masked, Program
from tests.programs.routing import Routed
from tests.programs.selected import Mix
from tests.programs.store import ExpertStore
from tests.programs.style import Style


def dense_weights(how: str, r: Routed, experts: int) -> Tensor:
    """Routing weights as [T, E]."""
    match how:
        case "scatter":
            return torch.zeros(r.ids.shape[0], experts, dtype=r.weights.dtype, device=r.ids.device).scatter(1, r.ids, r.weights)
        case "scatter_":
            return torch.zeros_like(r.logits, dtype=r.weights.dtype).scatter_(dim=1, index=r.ids, src=r.weights)
        case "scatter_slots":
            dense = torch.zeros_like(r.logits, dtype=r.weights.dtype)
            for k in range(r.ids.shape[1]):
                dense.scatter_(dim=-1, index=r.ids[..., k : k + 1], src=r.weights[..., k : k + 1])
            return dense
        case "onehot_sum":
            return (F.one_hot(r.ids, experts) * r.weights.unsqueeze(-1)).sum(dim=1)
        case "onehot_padded":
            return (F.one_hot(r.ids, experts + 1)[..., :-1] * r.weights.unsqueeze(-1)).sum(dim=1)
        case "onehot_einsum":
            return torch.einsum("tk,tke->te", r.weights, F.one_hot(r.ids, num_classes=experts).to(r.weights.dtype))
    assert r.dense is not None
    return r.dense


def _weight(how: str, r: Routed, dense: Tensor | None, e: int) -> Tensor:
    """[T] routing weight of one expert, zero where it was not chosen."""
    if dense is not None:
        return dense[:, e]
    chosen = r.ids == e
    if how == "top1":
        return r.weights * chosen
    if how == "where":
        return torch.where(chosen, r.weights, torch.zeros_like(r.weights)).sum(-1)
    if how == "mask_mul":
        return r.weights.masked_fill(~chosen, 0.0).sum(dim=1)
    return torch.sum(r.weights * chosen.to(r.weights.dtype), dim=-1)


class MaskedMix:
    """The layer's combine as a callable of (store, x, routed)."""

    def __init__(self, s: Masked, style: Style, hooks: Hooks) -> None:
        self.s, self.style, self.hooks = s, style, hooks

    def expert(self, store: ExpertStore, e: int, x: Tensor) -> Tensor:
        """One expert on every token."""
        return self.hooks.routed(e, store.run(e, self.style.noop(self.hooks.source(e, x))))

    def hit(self, r: Routed, e: int, k: int | None = None) -> Tensor:
        """[T, 1], whether a token (in its slot ``k``) chose the expert."""
        if k is not None:
            return self.style.last(r.ids[:, k] == e)
        return self.style.last(r.ids == e) if r.ids.dim() == 1 else (r.ids == e).any(-1, keepdim=True)

    def only(self, term: Tensor, hit: Callable[[], Tensor]) -> Tensor:
        """An expert's rows, zero where it was not chosen."""
        if self.s.hit == "where":
            return torch.where(hit(), term, 0.0)
        return term.masked_fill(~hit(), 0.0) if self.s.hit == "masked_fill" else term

    def terms(self, store: ExpertStore, x: Tensor, r: Routed) -> Iterator[tuple[int, Tensor]]:
        """Weighted rows per expert."""
        dense = None if self.s.weight in ("top1", "where", "mask_mul", "sum_mask") else dense_weights(self.s.weight, r, store.count)
        for e in self.hooks.experts(store.count):
            w = self.hooks.weight(e, _weight(self.s.weight, r, dense, e))
            y = self.style.weigh(self.expert(store, e, x), self.style.last(w)).to(x.dtype)
            yield e, self.only(y, lambda e=e: self.hit(r, e))

    def slot_terms(self, store: ExpertStore, x: Tensor, r: Routed) -> Iterator[tuple[int, Tensor]]:
        """Weighted rows per slot and expert."""
        for k in range(r.ids.shape[1]):
            for e in self.hooks.experts(store.count):
                w = self.style.last(self.hooks.weight(e, r.weights[:, k]))
                y = self.style.mul(self.expert(store, e, x), w)
                if self.s.hit in ("where", "masked_fill"):
                    yield e, self.only(y.to(x.dtype), lambda e=e, k=k: self.hit(r, e, k))
                else:
                    yield e, self.style.weigh(y, self.style.last(r.ids[:, k] == e)).to(x.dtype)

    def loop(self, store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        """One accumulator."""
        out = torch.zeros_like(x)
        for e, term in self.slot_terms(store, x, r) if self.s.weight == "slot_loop" else self.terms(store, x, r):
            if self.hooks.join is not None:
                out = self.hooks.join(out, term)
            elif self.s.hit == "chain":
                out = torch.where(self.hit(r, e), out + term, out)
            elif self.s.hit == "replace":
                out = torch.where(self.hit(r, e), term, out)
            elif self.s.accumulate == "add":
                out = out + term
            elif self.s.accumulate == "iadd":
                out += term
            else:
                out.add_(term)
            out = self.hooks.partial(e, out)
        return out

    def listed(self, store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        """All terms in a list, then one sum."""
        parts = [term for _, term in (self.slot_terms(store, x, r) if self.s.weight == "slot_loop" else self.terms(store, x, r))]
        if self.s.accumulate == "list_sum":
            return sum(parts[1:], parts[0])
        if self.s.accumulate == "cat_sum":
            return torch.cat([part.unsqueeze(0) for part in parts]).sum(dim=0)
        return torch.stack(parts).sum(0) if self.s.accumulate == "stack_sum" else torch.stack(parts, dim=1).sum(dim=1)

    def einsum(self, store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        """All experts stacked, combined by an einsum, or a product and a sum, with dense weights."""
        if self.s.weight in ("scatter", "scatter_slots", "onehot_einsum", "onehot_sum", "onehot_padded", "given"):
            dense = dense_weights(self.s.weight, r, store.count)
            dense = dense if self.hooks.experts is range else dense[:, list(self.hooks.experts(store.count))]
        else:
            columns = [self.hooks.weight(e, _weight(self.s.weight, r, None, e)) for e in self.hooks.experts(store.count)]
            dense = torch.stack(columns, dim=-1)
        ys = [self.expert(store, e, x) for e in self.hooks.experts(store.count)]
        if self.s.accumulate == "cat_dense":
            return (dense.to(ys[0].dtype).unsqueeze(-1) * torch.cat([y.unsqueeze(-2) for y in ys], dim=-2)).sum(dim=-2)
        return torch.einsum("te,teh->th", dense.to(ys[0].dtype), torch.stack(ys, dim=1))

    def __call__(self, store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        if self.s.accumulate in ("stack_einsum", "cat_dense"):
            return self.einsum(store, x, r)
        return (self.loop if self.s.accumulate in ("add", "iadd", "add_") else self.listed)(store, x, r)


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    assert isinstance(p.spelling, Masked)
    return MaskedMix(p.spelling, Style(p.noise), hooks)
