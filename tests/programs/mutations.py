"""Near-misses: a program changed in one place, so that it is not a plain mixture of experts, or only just still one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.bodies import Expert, Project, Vector
from tests.programs.hooks import PLAIN, Hooks
from tests.programs.model import MoE, build
from tests.programs.program import Dense, Filled, Masked, Program, Selected, Slots, Sorted
from tests.programs.routing import Routed, Router

LOOPS, BATCHED = (Selected, Filled, Masked), (Slots, Sorted, Dense)
LISTED = ("list_sum", "stack_sum", "stack_einsum", "stack_dim1", "cat_sum", "cat_dense")
Alter = Callable[[MoE], None]


@dataclass(frozen=True)
class Mutation:
    """One way to change a program.

    Attributes:
        name: what was done.
        applies: which programs it can be done to.
        hooks: the changed points, made anew for every model.
        alter: further changes of the built model.
        grad: False where autograd itself refuses the program (a saved value is written to); it then runs under no_grad.
        code: the refusal that must be reported for a loop with `where` (or, where that is no loop, for sorted rows); None when fusing
            may still be right.
    """

    name: str
    applies: Callable[[Program], bool]
    hooks: Callable[[], Hooks] = lambda: PLAIN
    alter: Alter | None = None
    code: str | None = None
    grad: bool = True

    def build(self, p: Program) -> MoE:
        """The mutated model. Counting ids stays out: it raises for ids outside the range."""
        model = build(replace(p, noise=replace(p.noise, counts_out=False)), self.hooks())
        if self.alter is not None:
            self.alter(model)
        return model


def loops(p: Program) -> bool:
    """Loops over experts."""
    return isinstance(p.spelling, LOOPS)


def summing_loops(p: Program) -> bool:
    """Loops that keep one accumulator."""
    return loops(p) and not isinstance(p.spelling, Filled) and not (isinstance(p.spelling, Masked) and p.spelling.accumulate in LISTED)


def index_loops(p: Program) -> bool:
    """Loops whose accumulation a near-miss can replace."""
    s = p.spelling
    return summing_loops(p) and not (isinstance(s, Selected) and s.find in ("any_mask", "top1_mask", "slot_loop"))


def stacked_loops(p: Program) -> bool:
    return loops(p) and p.store.kind in ("stacked", "flat", "parameter_list")


def sorts(p: Program) -> bool:
    return isinstance(p.spelling, Sorted)


def weighs_sorted(p: Program) -> bool:
    return isinstance(p.spelling, Sorted) and p.spelling.weigh == "before"


def unsorts(p: Program) -> bool:
    return isinstance(p.spelling, Sorted) and p.spelling.unsort != "index_add_"


def batched(p: Program) -> bool:
    return isinstance(p.spelling, BATCHED)


def gridded(p: Program) -> bool:
    """Programs with a [T, K, H] value."""
    s = p.spelling
    return (
        unsorts(p)
        or isinstance(s, Filled)
        or (isinstance(s, Slots) and s.combine != "index_add")
        or (isinstance(s, Dense) and s.weights == "gather")
    )


def replaceable_body(p: Program) -> bool:
    return p.store.kind != "sequential"


def one_body(p: Program) -> bool:
    return replaceable_body(p) and loops(p)


def _only(e: int, change: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    return lambda i, t: change(t) if i == e else t


def _each(change: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    return lambda _i, t: change(t)


def _set_body(model: MoE, e: int, body: Expert) -> None:
    model.experts.bodies[e] = body
    if hasattr(model.experts, "mlps"):
        model.experts.module(e).body = body


def _wrap_bodies(wrap: Callable[[Expert], Expert], experts: slice = slice(None)) -> Alter:
    def alter(model: MoE) -> None:
        model.experts.bodies = list(model.experts.bodies)
        for e in range(model.experts.count)[experts]:
            _set_body(model, e, wrap(model.experts.bodies[e]))

    return alter


def _before_down(change: Callable[[Tensor], Tensor]) -> Callable[[Expert], Expert]:
    """Change what enters the down projection."""

    def wrap(inner: Expert) -> Expert:
        def body(project: Project, vector: Vector, x: Tensor) -> Tensor:
            return inner(lambda name, h: project(name, change(h) if name == "down" else h), vector, x)

        return body

    return wrap


def _before_first(change: Callable[[Tensor], Tensor]) -> Callable[[Expert], Expert]:
    return lambda inner: lambda project, vector, x: inner(project, vector, change(x))


def _other_source(name: str) -> Alter:
    def alter(model: MoE) -> None:
        model.experts.source[name] = [0, 0, *range(2, model.experts.count)]

    return alter


class ChangedRouter(nn.Module):
    """A router whose result is changed before the experts see it."""

    def __init__(self, inner: Router, change: Callable[[Routed], Routed]) -> None:
        super().__init__()
        self.inner, self.change = inner, change
        self.recipe, self.correction = inner.recipe, getattr(inner, "correction", None)

    def forward(self, x: Tensor) -> Routed:
        return self.change(self.inner(x))


def _routed(change: Callable[[Routed, int], Routed]) -> Alter:
    def alter(model: MoE) -> None:
        experts, inner = model.experts.count, model.router
        model.router = ChangedRouter(inner, lambda r: change(r, experts))

    return alter


def routes(p: Program) -> bool:
    return p.routing.recipe != "inputs" and not p.routing.recipe.startswith("neg_inf")


class Tapped(MoE):
    """A layer that also returns values from inside it, as an auxiliary loss would use."""

    def forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        taps = self.taps()
        taps.clear()
        outputs = super().forward(x, *rest)
        held = tuple(taps)
        taps.clear()
        return outputs + held


def _tap(point: str, measure: Callable[[Tensor], Tensor]) -> tuple[Callable[[], Hooks], Alter]:
    """Hooks and alteration that return ``measure`` of the values passing one point."""
    held: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        held.append(measure(t))
        return t

    def alter(model: MoE) -> None:
        model.__class__ = Tapped
        model.taps = lambda: held  # type: ignore[assignment]

    changed = (lambda _e, t: keep(t)) if point in ("source", "routed", "weight", "partial") else keep
    return (lambda: Hooks(**{point: changed})), alter


def _tapped(name: str, point: str, applies: Callable[[Program], bool], measure: Callable[[Tensor], Tensor], code: str | None) -> Mutation:
    hooks, alter = _tap(point, measure)
    return Mutation(name, applies, hooks, alter, code)


def _escapes() -> list[Mutation]:
    return [
        _tapped("sum of every expert's rows returned", "routed", loops, lambda y: y.sum(), None),
        _tapped("norm of every expert's rows returned", "routed", loops, lambda y: 0.1 * y.square().sum(0), "value-escapes"),
        _tapped("partial sums returned", "partial", summing_loops, lambda out: out.clone(), "value-escapes"),
        _tapped("partial sums returned, detached", "partial", summing_loops, lambda out: out.detach().sum(), "value-escapes"),
        _tapped("weights returned", "weight", loops, lambda w: w.sum(), None),
        _tapped("routed rows returned", "rows", batched, lambda y: y.square().sum(), "value-escapes"),
        _tapped("slot rows returned", "parts", gridded, lambda g: g.clone(), None),
        _tapped("order returned", "order", unsorts, lambda i: i.clone(), None),
        _tapped("offsets returned", "offsets", sorts, lambda o: o.clone(), None),
    ]


def _sequential_experts() -> Hooks:
    held: list[Tensor] = []

    def source(e: int, x: Tensor) -> Tensor:
        return x if not held or e == 0 else x + 0.1 * held.pop()

    def partial(_e: int, out: Tensor) -> Tensor:
        held.append(out.clone())
        return out

    return Hooks(source=source, partial=partial)


def _halve_first_row(_e: int, out: Tensor) -> Tensor:
    out[:1].mul_(0.5)
    return out


def _no_grad(_e: int, y: Tensor) -> Tensor:
    with torch.no_grad():
        return y * 1.0


def _write_weight(_e: int, w: Tensor) -> Tensor:
    return w.mul_(0.5)


def _loop_mutations() -> list[Mutation]:
    return [
        Mutation("last expert left out", loops, lambda: Hooks(experts=lambda n: range(n - 1)), code="missing-experts"),
        Mutation("first expert left out", loops, lambda: Hooks(experts=lambda n: range(1, n)), code="missing-experts"),
        Mutation("first expert twice", summing_loops, lambda: Hooks(experts=lambda n: [*range(n), 0])),
        Mutation("every second expert", loops, lambda: Hooks(experts=lambda n: range(0, n, 2)), code="missing-experts"),
        Mutation("experts in reverse order", loops, lambda: Hooks(experts=lambda n: reversed(range(n)))),
        Mutation("index of the expert added", loops, lambda: Hooks(routed=lambda e, y: y + e), code="experts-differ"),
        Mutation("input scaled by expert index", loops, lambda: Hooks(source=lambda e, x: x * (e + 1.0)), code="experts-differ"),
        Mutation("one expert sees another tensor", loops, lambda: Hooks(source=_only(1, torch.tanh)), code="experts-differ"),
        Mutation("tokens in another order", loops, lambda: Hooks(source=_each(lambda x: x.flip(0)))),
        Mutation("one expert's tokens rolled", loops, lambda: Hooks(source=_only(1, lambda x: x.roll(1, 0)))),
        Mutation("batch mean subtracted", loops, lambda: Hooks(routed=_each(lambda y: y - y.mean(0))), code="not-row-local"),
        Mutation("batch mean added by one expert", loops, lambda: Hooks(routed=_only(1, lambda y: y + y.sum(0)))),
        Mutation("softmax over rows", loops, lambda: Hooks(routed=_each(lambda y: y.softmax(0))), code="not-row-local"),
        Mutation("running sum over rows", loops, lambda: Hooks(routed=_each(lambda y: y.cumsum(0))), code="not-row-local"),
        Mutation("divided by a sum over all rows", loops, lambda: Hooks(routed=_each(lambda y: y / (1 + y.square().sum())))),
        Mutation("weight squared", loops, lambda: Hooks(weight=_each(lambda w: w * w))),
        Mutation("weight one", loops, lambda: Hooks(weight=_each(torch.ones_like))),
        Mutation("weight one for one expert", loops, lambda: Hooks(weight=_only(1, torch.ones_like))),
        Mutation("sigmoid of the weight", loops, lambda: Hooks(weight=_each(torch.sigmoid))),
        Mutation("constant added to the weight", loops, lambda: Hooks(weight=_each(lambda w: w + 0.1))),
        Mutation("weights reversed over rows", loops, lambda: Hooks(weight=_each(lambda w: w.flip(0)))),
        Mutation("small weights dropped", loops, lambda: Hooks(weight=_each(lambda w: w * (w > 0.3)))),
        Mutation("weights detached", loops, lambda: Hooks(weight=_each(torch.detach))),
        Mutation("weight written in place", loops, lambda: Hooks(weight=_write_weight), grad=False),
        Mutation("input detached", loops, lambda: Hooks(source=_each(torch.detach))),
        Mutation("output detached", loops, lambda: Hooks(routed=_each(torch.detach))),
        Mutation("one expert detached", loops, lambda: Hooks(routed=_only(1, torch.detach))),
        Mutation("output under no_grad", loops, lambda: Hooks(routed=_no_grad)),
        Mutation("assigned instead of added", index_loops, lambda: Hooks(join=lambda _old, new: new)),
        Mutation("largest expert wins", index_loops, lambda: Hooks(join=torch.maximum)),
        Mutation("experts subtracted", index_loops, lambda: Hooks(join=lambda old, new: old - new)),
        Mutation("product of experts", index_loops, lambda: Hooks(join=lambda old, new: (old + 1) * (new + 1))),
        Mutation("sum decays", summing_loops, lambda: Hooks(partial=_each(lambda out: out * 0.9))),
        Mutation("sum squashed once", summing_loops, lambda: Hooks(partial=_only(1, lambda out: out.tanh() * 1.0))),
        Mutation("constant added to the sum", summing_loops, lambda: Hooks(partial=_each(lambda out: out + 0.25))),
        Mutation("first row halved through a view", summing_loops, lambda: Hooks(partial=_halve_first_row)),
        Mutation("experts in sequence", summing_loops, _sequential_experts),
        Mutation("input changed in place by every expert", loops, lambda: Hooks(source=_each(lambda x: x.add_(0.1))), grad=False),
        Mutation("output changed in place", loops, lambda: Hooks(routed=_each(lambda y: y.mul_(2.0)))),
        Mutation("random slopes on expert output", loops, lambda: Hooks(routed=_each(lambda y: F.rrelu(y, training=True))), code="random"),
        Mutation("dropout with p=0", loops, lambda: Hooks(routed=_each(lambda y: F.dropout(y, 0.0, training=True)))),
        Mutation("dropout in eval mode", loops, lambda: Hooks(routed=_each(lambda y: F.dropout(y, 0.5, training=False)))),
        Mutation("noise on expert output", loops, lambda: Hooks(routed=_each(lambda y: y + torch.randn_like(y))), code="random"),
        Mutation("another expert's last projection", stacked_loops, alter=_other_source("down")),
        Mutation("one expert scaled", one_body, alter=_wrap_bodies(_before_down(lambda h: h * 1.5), slice(1, 2)), code="experts-differ"),
        Mutation(
            "one expert's hidden squashed", one_body, alter=_wrap_bodies(_before_down(torch.tanh), slice(1, 2)), code="experts-differ"
        ),
    ]


def _body_mutations() -> list[Mutation]:
    def change(name: str, wrap: Callable[[Expert], Expert], grad: bool = True) -> Mutation:
        return Mutation(name, replaceable_body, alter=_wrap_bodies(wrap), grad=grad)

    return [
        change("hidden divided by its total", _before_down(lambda h: h / (1 + h.abs().sum()))),
        change("hidden rows reversed", _before_down(lambda h: h.flip(0))),
        change("hidden centred over rows", _before_down(lambda h: h - h.mean(0, keepdim=True))),
        change("hidden centred over features", _before_down(lambda h: h - h.mean(-1, keepdim=True))),
        change("hidden detached", _before_down(torch.detach)),
        change("hidden through a straight-through rounding", _before_down(lambda h: h + (h.round() - h).detach())),
        change("hidden rounded", _before_down(torch.round)),
        change("hidden features reversed", _before_down(lambda h: h.flip(-1))),
        change("hidden changed in place", _before_down(lambda h: h.mul_(0.5)), grad=False),
        change("hidden through random slopes", _before_down(lambda h: F.rrelu(h, training=True))),
        change("hidden scaled", _before_down(lambda h: h * 0.3)),
        change("input scaled", _before_first(lambda x: x * 0.3)),
        change("input normalised over features", _before_first(lambda x: F.layer_norm(x, x.shape[-1:]))),
        change("input normalised over everything", _before_first(lambda x: x / (1 + x.norm()))),
        change("input cast down and up", _before_first(lambda x: x.to(torch.bfloat16).to(x.dtype))),
        change("hidden cast down and up", _before_down(lambda h: h.to(torch.bfloat16).to(h.dtype))),
    ]


def _batched_mutations() -> list[Mutation]:
    return [
        Mutation("weights not sorted", weighs_sorted, lambda: Hooks(perm_weights=lambda w, _perm: w)),
        Mutation("weights sorted backwards", weighs_sorted, lambda: Hooks(perm_weights=lambda w, perm: w[perm.flip(0)])),
        Mutation("weights sorted by the inverse", weighs_sorted, lambda: Hooks(perm_weights=lambda w, perm: w[perm.argsort()])),
        Mutation("offsets one too small", sorts, lambda: Hooks(offsets=lambda o: (o - 1).clamp(min=0))),
        Mutation("offsets cut", sorts, lambda: Hooks(offsets=lambda o: o.clamp(max=1))),
        Mutation("offsets shifted by one group", sorts, lambda: Hooks(offsets=lambda o: F.pad(o[:-1], (1, 0)))),
        Mutation("sorted downwards", sorts, lambda: Hooks(descending=True)),
        Mutation("brought back in reverse", unsorts, lambda: Hooks(order=lambda i: i.flip(0))),
        Mutation("brought back by the wrong permutation", unsorts, lambda: Hooks(order=torch.argsort)),
        Mutation("brought back by no permutation", unsorts, lambda: Hooks(order=lambda i: i.sort().values)),
        Mutation("rows dropped out", batched, lambda: Hooks(rows=lambda y: F.alpha_dropout(y, 0.5, training=True))),
        Mutation("rows centred", batched, lambda: Hooks(rows=lambda y: y - y.mean(0))),
        Mutation("rows rolled", batched, lambda: Hooks(rows=lambda y: y.roll(1, 0))),
        Mutation("rows detached", batched, lambda: Hooks(rows=torch.detach)),
        Mutation("rows scaled in place", batched, lambda: Hooks(rows=lambda y: y.mul_(0.5))),
        Mutation("rows scaled", batched, lambda: Hooks(rows=lambda y: y * 3.0)),
        Mutation("slots swapped", gridded, lambda: Hooks(parts=lambda g: g.roll(1, 1))),
        Mutation("tokens swapped", gridded, lambda: Hooks(parts=lambda g: g.flip(0))),
        Mutation("running sum over slots", gridded, lambda: Hooks(parts=lambda g: g.cumsum(1))),
        Mutation("largest slot", gridded, lambda: Hooks(parts=lambda g: g.amax(1, keepdim=True).expand_as(g))),
        Mutation("first slot only", gridded, lambda: Hooks(parts=lambda g: g * (torch.arange(g.shape[1])[:, None] == 0))),
        Mutation("negative rows cut", gridded, lambda: Hooks(parts=torch.relu)),
    ]


def _routing_mutations() -> list[Mutation]:
    def change(name: str, fn: Callable[[Routed, int], Routed], applies: Callable[[Program], bool] = routes) -> Mutation:
        return Mutation(name, applies, alter=_routed(fn))

    def unflat(p: Program) -> bool:
        return routes(p) and not p.routing.flat

    def unflat_loops(p: Program) -> bool:
        return (
            unflat(p)
            and loops(p)
            and getattr(p.spelling, "weight", "") not in ("scatter", "onehot_sum", "onehot_padded", "onehot_einsum")
            and (getattr(p.spelling, "find", "") not in ("onehot_where", "onehot_padded"))
        )

    return [
        change("repeated ids", lambda r, _e: r._replace(ids=r.ids // 2)),
        change("all ids the same", lambda r, _e: r._replace(ids=torch.zeros_like(r.ids))),
        change("ids shifted", lambda r, e: r._replace(ids=(r.ids + 1) % e)),
        change("ids of the next token", lambda r, _e: r._replace(ids=r.ids.roll(1, 0))),
        change("weights of the next token", lambda r, _e: r._replace(weights=r.weights.roll(1, 0))),
        change("ids of the smallest scores", lambda r, _e: r._replace(ids=torch.topk(r.logits, r.ids.shape[1], largest=False)[1]), unflat),
        change("slots of ids reversed", lambda r, _e: r._replace(ids=r.ids.flip(-1)), unflat),
        change("weights negative", lambda r, _e: r._replace(weights=-r.weights)),
        change("weights detached by the router", lambda r, _e: r._replace(weights=r.weights.detach())),
        change("ids out of range", lambda r, _e: r._replace(ids=r.ids + 1), unflat_loops),
        change("ids below zero", lambda r, _e: r._replace(ids=r.ids - 1), unflat_loops),
        change("ids as int32", lambda r, _e: r._replace(ids=r.ids.int()), unflat_loops),
        change("ids as float", lambda r, _e: r._replace(ids=r.ids.float()), unflat_loops),
    ]


def viewable(p: Program) -> bool:
    """Programs that flatten an expanded input without an error."""
    return len(p.tokens) == 1 or p.noise.flatten == "reshape" or p.noise.pre_norm


class Around(MoE):
    """A layer with something done before and after it."""

    before: Callable[[Tensor], Tensor]
    after: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        x = self.before(x)
        out, *more = super().forward(x, *rest)
        return (self.after(x, out), x, *more)


def _around(before: Callable[[Tensor], Tensor], after: Callable[[Tensor, Tensor], Tensor]) -> Alter:
    def alter(model: MoE) -> None:
        model.__class__ = Around
        model.before, model.after = before, after  # type: ignore[assignment]

    return alter


def _around_mutations() -> list[Mutation]:
    def same(x: Tensor) -> Tensor:
        return x

    def result(_x: Tensor, out: Tensor) -> Tensor:
        return out

    def anywhere(_p: Program) -> bool:
        return True

    def change(
        name: str, before: Callable[[Tensor], Tensor] = same, after: Callable[[Tensor, Tensor], Tensor] = result, grad: bool = True
    ) -> Mutation:
        return Mutation(name, anywhere, alter=_around(before, after), grad=grad)

    return [
        change("input changed in place before", before=lambda x: x.mul_(0.5)),
        change("input changed in place after", after=lambda x, out: x.add_(out), grad=False),
        change("result changed in place", after=lambda x, out: out.mul_(2.0)),
        change("one output row zeroed", after=lambda x, out: out.index_fill(0, torch.tensor([0]), 0.0)),
        change("token mean subtracted after", after=lambda x, out: out - out.mean(0, keepdim=True)),
        Mutation("expanded input", viewable, alter=_around(lambda x: x[..., :1, :].expand_as(x), result)),
        change("strided input", before=lambda x: torch.stack((x, x * 2), dim=-1)[..., 0].contiguous()),
        change("input zero", before=lambda x: x * 0.0),
    ]


MUTATIONS: tuple[Mutation, ...] = (
    *_loop_mutations(),
    *_body_mutations(),
    *_batched_mutations(),
    *_routing_mutations(),
    *_around_mutations(),
    *_escapes(),
)
BY_NAME: dict[str, Mutation] = {m.name: m for m in MUTATIONS}
assert len(BY_NAME) == len(MUTATIONS)
