"""Loops over experts where each expert sees only the rows routed to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.hooks import Hooks
from tests.programs.program import Program, Selected
from tests.programs.routing import Routed
from tests.programs.store import ExpertStore
from tests.programs.style import Style

Mix = Callable[[ExpertStore, Tensor, Routed], Tensor]

INIT: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "zeros": lambda x: torch.zeros((x.shape[0], x.shape[1]), dtype=x.dtype, device=x.device),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "full": lambda x: torch.full_like(x, 0.0),
}
GATHER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, tok: x[tok],
    "index_select": lambda x, tok: x.index_select(0, tok),
    "none_index": lambda x, tok: x[None, tok].reshape(-1, x.shape[-1]),
    "ellipsis": lambda x, tok: x[tok, ...],
    "gather": lambda x, tok: torch.gather(x, 0, tok.unsqueeze(-1).expand(-1, x.shape[-1])),
}


def _iadd(out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
    out[tok] += y
    return out


COMBINE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add_": lambda out, tok, y: out.index_add_(0, tok, y),
    "index_add": lambda out, tok, y: torch.index_add(out, 0, tok, y),
    "iadd": _iadd,
    "index_put_": lambda out, tok, y: out.index_put_((tok,), y, accumulate=True),
    "scatter_reduce": lambda out, tok, y: torch.scatter_reduce(out, 0, tok.view(-1, 1).repeat(1, y.shape[-1]), y, reduce="sum"),
    "scatter_add_": lambda out, tok, y: out.scatter_add_(0, tok.unsqueeze(-1).expand(-1, y.shape[-1]), y),
}


WEIGH: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "mask": lambda w, ids, tok, e: w[ids == e],
    "argmax": lambda w, ids, tok, e: w[tok].gather(-1, (ids == e)[tok].int().argmax(-1, keepdim=True)).squeeze(-1),
    "own_ids": lambda w, ids, tok, e: (w[tok] * (ids[tok] == e)).sum(-1),
    "own_mask": lambda w, ids, tok, e: (w * (ids == e))[tok].sum(-1),
    "where": lambda w, ids, tok, e: torch.where(ids[tok] == e, w[tok], 0.0).sum(-1),
}


def _into_mask(how: str, out: Tensor, mask: Tensor, y: Tensor) -> None:
    if how == "iadd":
        out[mask] += y
    elif how == "set_sum":
        out[mask] = out[mask] + y
    elif how == "masked_sum":
        out.masked_scatter_(mask.unsqueeze(-1), (out[mask] + y).to(out.dtype))
    elif how == "masked_part":
        out += torch.zeros_like(out).masked_scatter(mask[:, None].expand_as(out), y.to(out.dtype))
    else:
        out[mask] = y


def _find(s: Selected, ids: Tensor, weights: Tensor, hits: Tensor | None, e: int) -> tuple[Tensor, Tensor]:
    """(token index, weight per row) of one expert."""
    if s.find == "where":
        tok, slot = torch.where(ids == e)
        return tok, weights[tok, slot]
    if s.find == "nonzero_tuple":
        tok, slot = (ids == e).nonzero(as_tuple=True)
        return tok, weights[tok, slot]
    if hits is not None:
        slot, tok = torch.where(hits[e])
        return tok, weights[tok, slot]
    chosen = ids == e
    mask, w = chosen.any(dim=-1), (weights * chosen).sum(-1)
    if s.find == "any_where":
        tok = torch.where(mask)[0]
    elif s.find == "any_squeeze":
        tok = torch.nonzero(mask).squeeze(-1)
    elif s.find == "any_flatten":
        tok = mask.nonzero().flatten()
    else:
        tok = mask.nonzero()[:, 0]
    return tok, w[tok] if s.weigh == "summed" else WEIGH[s.weigh](weights, ids, tok, e)


def _hits(s: Selected, ids: Tensor, experts: int) -> Tensor | None:
    """Who chose whom, of all experts at once; ``padded``: slots of padding have a number of their own."""
    if s.find == "onehot_padded":
        return F.one_hot(ids, experts + 1)[..., :experts].permute(2, 1, 0)
    return F.one_hot(ids, num_classes=experts).permute(2, 1, 0) if s.find == "onehot_where" else None


def _by_index(s: Selected, style: Style, hooks: Hooks) -> Mix:
    gather, combine, init = GATHER[s.gather], COMBINE[s.combine], INIT[s.init]

    def mix(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        out = init(x)
        hits = _hits(s, r.ids, store.count)
        for e in hooks.experts(store.count):
            tok, w = _find(s, r.ids, r.weights, hits, e)
            w = style.last(hooks.weight(e, w))
            source = hooks.source(e, x)
            if s.rows == "behind":
                y = style.weigh(hooks.routed(e, gather(store.run(e, style.noop(source)), tok)), w)
            elif s.weight_on == "input":
                y = hooks.routed(e, store.run(e, style.weigh(style.noop(gather(source, tok)), w)))
            else:
                y = style.weigh(hooks.routed(e, store.run(e, style.noop(gather(source, tok)))), w)
            if hooks.join is not None:
                out[tok] = hooks.join(out[tok], y)
            else:
                out = combine(out, tok, y.to(out.dtype))
            out = hooks.partial(e, out)
        return out

    return mix


def _by_mask(s: Selected, style: Style, hooks: Hooks) -> Mix:
    init = INIT[s.init]

    def take(x: Tensor, mask: Tensor) -> Tensor:
        return x[mask] if s.gather == "index" else x.masked_select(mask[:, None]).view(-1, x.shape[-1])

    def run(store: ExpertStore, e: int, x: Tensor, mask: Tensor) -> Tensor:
        """The rows of one expert, taken in front of it or behind."""
        return take(store.run(e, style.noop(x)), mask) if s.rows == "behind" else store.run(e, style.noop(take(x, mask)))

    def any_mask(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        out = init(x)
        for e in hooks.experts(store.count):
            mask = (r.ids == e).any(-1)
            w = hooks.weight(e, (r.weights * (r.ids == e)).sum(-1))
            y = hooks.routed(e, run(store, e, hooks.source(e, x), mask))
            _into_mask(s.combine, out, mask, style.weigh(y, style.last(w[mask])))
            out = hooks.partial(e, out)
        return out

    def top1(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        out = init(x)
        for e in hooks.experts(store.count):
            mask = r.ids == e
            y = hooks.routed(e, run(store, e, hooks.source(e, x), mask))
            _into_mask(s.combine, out, mask, style.weigh(y, style.last(hooks.weight(e, r.weights)[mask])))
            out = hooks.partial(e, out)
        return out

    def slot_loop(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        out = init(x)
        for k in range(r.ids.shape[1]):
            for e in hooks.experts(store.count):
                mask = r.ids[:, k] == e
                w = hooks.weight(e, r.weights[:, k])
                y = hooks.routed(e, run(store, e, hooks.source(e, x), mask))
                _into_mask(s.combine, out, mask, style.weigh(y, style.last(w[mask])))
                out = hooks.partial(e, out)
        return out

    return {"any_mask": any_mask, "top1_mask": top1, "slot_loop": slot_loop}[s.find]


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    s, style = p.spelling, Style(p.noise)
    assert isinstance(s, Selected)
    return _by_mask(s, style, hooks) if s.find in ("any_mask", "top1_mask", "slot_loop") else _by_index(s, style, hooks)
