"""A tensor of all slots that experts fill in one after another; weighed and summed at the end. (DeepSeek's remote code in training.)"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.programs.hooks import PLAIN, Hooks
from tests.programs.program import Filled, Program
from tests.programs.routing import Routed
from tests.programs.selected import Mix
from tests.programs.slots import ROWS, combine_grid
from tests.programs.store import ExpertStore
from tests.programs.style import Style

INIT: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "empty": lambda x, shape: torch.empty(shape, dtype=x.dtype, device=x.device),
    "zeros": lambda x, shape: torch.zeros(shape, dtype=x.dtype, device=x.device),
    "new_zeros": lambda x, shape: x.new_zeros(shape),
}
FIND: dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
    "flat_mask": lambda ids, e: (ids.view(-1) == e,),
    "flat_nonzero": lambda ids, e: ((ids.flatten() == e).nonzero().squeeze(-1),),
    "flat_where": lambda ids, e: torch.where(ids.reshape(-1) == e),
    "grid_mask": lambda ids, e: (ids == e,),
    "pairs": lambda ids, e: torch.where(ids == e),
}
FLAT = ("flat_mask", "flat_nonzero", "flat_where")


def _write(how: str, y: Tensor, where: tuple[Tensor, ...], rows: Tensor) -> None:
    if how == "index_put_":
        y.index_put_(where, rows)
    elif len(where) == 1 and how == "setitem_rest":
        y[where[0], ...] = rows
    else:
        y[where] = rows


def make(p: Program, hooks: Hooks) -> Mix:
    """The layer's combine as a function of (store, x, routed)."""
    s, style = p.spelling, Style(p.noise)
    assert isinstance(s, Filled)
    # What nobody writes is left as it was: with an expert left out, that has to be something.
    init = INIT[s.init if hooks.experts is PLAIN.experts else "zeros"]

    def source(x: Tensor, k: int, where: tuple[Tensor, ...]) -> Tensor:
        if s.rows == "token" and s.find == "pairs":
            return x[where[0]]
        if s.rows == "token" and s.find in ("flat_nonzero", "flat_where"):
            return x[where[0] // k]
        all_rows = ROWS["repeat_interleave" if s.rows == "token" else s.rows](x, k)
        return all_rows[where] if s.find in FLAT else all_rows.view(x.shape[0], k, -1)[where]

    def mix(store: ExpertStore, x: Tensor, r: Routed) -> Tensor:
        tokens, k = r.ids.shape
        flat = s.find in FLAT
        y = init(x, (tokens * k, x.shape[-1]) if flat else (tokens, k, x.shape[-1]))
        for e in hooks.experts(store.count):
            where = FIND[s.find](r.ids, e)
            rows = hooks.routed(e, store.run(e, style.noop(source(hooks.source(e, x), k, where))))
            if s.weigh == "before":
                w = (r.weights.reshape(-1) if flat else r.weights)[where]
                rows = style.weigh(rows, style.last(hooks.weight(e, w)))
            _write(s.write, y, where, rows.to(y.dtype))
        grid = hooks.parts(y.view(tokens, k, -1))
        return grid.sum(dim=1) if s.weigh == "before" else combine_grid(s.combine, grid, r.weights, style)

    return mix
