"""A program: a spelling of the layer, and effects at its places. Drawn from a seed, and written as Python source."""

from __future__ import annotations

import functools
import itertools
import linecache
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.programs.effects import ambient, behind, idioms, kinks, layers
from tests.programs.effects.layers import LOOPED, SIZED, STATE, TURNED, UNROLLED, E, H, I, K, Layer, Spelling, samples
from tests.programs.effects.overlaps import RELATED, statements
from tests.programs.effects.views import applied, chain, evaluated
from tests.programs.effects.writes import executed, write

TOKENS = (5, 7)
VERIFY = ("probe", "probe", "probe", "off", "off")
"""Without the proof too, which would catch what the facts get wrong."""

CALLER = "caller"
"""The place between a call and its backward pass, where the caller may write to what the layer has ``kept``."""

AROUND = "around"
"""The place around each call, of which :data:`ambient.AROUND` has what may be there."""

MEANWHILE = "meanwhile"
"""The place between the first call and the second, where the caller may change the ``layer``."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Effect:
    """Statements at places, which belong together."""

    kind: str
    statements: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Program:
    """``tokens``: of each call, behind the first of which parameters change. ``twins``: a second layer with another number, never neutral.
    ``patient``: run on where a loop that depends on data is refused."""

    spelling: Spelling
    effects: tuple[Effect, ...]
    twins: bool = False
    grad: bool = True
    verify: str = "probe"
    dynamic: bool | None = None
    tokens: tuple[int, ...] = (5, 5, 7)
    seed: int = 0
    patient: bool = True

    @property
    def source(self) -> str:
        """The source of ``forward``."""
        at: dict[str, list[str]] = {}
        for effect in self.effects:
            for place, statement in effect.statements:
                at.setdefault(place, []).append(statement)
        return self.spelling.source(at)

    @property
    def later(self) -> str:
        """What the caller does before the backward pass."""
        return self._at(CALLER)

    @property
    def meanwhile(self) -> str:
        """What the caller does to each layer between the first call and the second."""
        return self._at(MEANWHILE)

    @property
    def around(self) -> list[str]:
        """What is around each call, from the first one on again where there are more."""
        return [s for effect in self.effects for place, s in effect.statements if place == AROUND]

    @property
    def related(self) -> list[str]:
        """What the caller does before each call to what is beside its input."""
        return [s for effect in self.effects for place, s in effect.statements if place == RELATED]

    @property
    def behind(self) -> str:
        """What the model does behind its layers, in a frame around theirs."""
        return self._at(behind.BEHIND)

    def _at(self, wanted: str) -> str:
        return "\n".join(s for effect in self.effects for place, s in effect.statements if place == wanted)

    @property
    def promises(self) -> bool:
        """Whether something is asserted, so that calls may raise."""
        return any(effect.kind == "promises" for effect in self.effects)

    def __str__(self) -> str:
        late = f"# before backward: {self.later}\n" if self.later else ""
        late += f"# between calls: {self.meanwhile}\n" if self.meanwhile else ""
        late += f"# around calls: {', '.join(self.around)}\n" if self.around else ""
        late += f"# behind the layers, in the model's frame: {self.behind}\n" if self.behind else ""
        late += "".join(f"# before a call: {statement}\n" for statement in self.related)
        how = f"twins={self.twins} grad={self.grad} verify={self.verify} dynamic={self.dynamic} tokens={self.tokens} seed={self.seed}"
        return f"{self.source}{late}# {how}; {', '.join(e.kind for e in self.effects)}"


def build(p: Program) -> nn.Module:
    """The model, from a file that Dynamo and tracebacks can read."""
    name = f"<effects {next(_numbers)}>"
    linecache.cache[name] = (len(p.source), None, p.source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, "F": F, "np": numpy, "checkpoint": checkpoint, "E": E, "H": H, "K": K, "I": I}
    exec(compile(p.source, name, "exec"), space)
    methods = {method: space[method] for method in ("forward", "inner") if method in space}
    cls = type("Effects", (Layer,), methods)
    torch.manual_seed(p.seed)
    model = behind.model(p.behind, [cls() for _ in range(1 + p.twins)])
    if p.twins:
        change(model[1])
        model[1].number = 1
    return model


def change(model: nn.Module) -> None:
    """What an optimizer does between two calls: nothing is neutral behind it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.rand(parameter.shape, generator=generator) + 0.1)


def interfere(p: Program, model: nn.Module) -> None:
    """What the program's caller does to its layers between two calls."""
    torch.manual_seed(p.seed)
    for layer in model.children() if p.meanwhile else ():
        exec(p.meanwhile, {"layer": layer, "torch": torch, "nn": nn, "E": E, "H": H, "I": I})


# --- drawing ----------------------------------------------------------------------------------------------------------------------


def draw(seed: int, kind: str = "mixed") -> Program:
    """The program of a seed. Some raise in eager: whoever runs them draws again."""
    rng = random.Random(f"{kind} {seed}")
    spelling = _spelling(rng, BODIES.get(kind, ()))
    if kind in ("casts", *OPENED) and spelling.body in layers.ROWS and rng.random() < (0.9 if kind in OPENED else 0.7):
        spelling = replace(spelling, expert="open")  # most casts of people's are inside of experts
    effects = [KINDS[kind](rng, spelling, 0)] if kind != "mixed" else []
    if kind in ("mixed", "twins"):
        some = [k for k in KINDS if k not in (*ALONE, *(() if spelling.body in UNROLLED else ("numbers",)))]
        effects += [KINDS[rng.choice(some)](rng, spelling, n + 1) for n in range(rng.randint(1, 3) - len(effects))]
    found = tuple(e for e in effects if e is not None)
    dynamic = rng.choice((None, None, None, True))
    tokens = (5, 5, 7) if dynamic or rng.random() < 0.15 else (5, 5, 5)
    if spelling.body in TURNED:
        tokens, dynamic = (H, H, H), rng.choice((None, False))
    late = any("out later" in e.kind for e in found)  # one layer's sum is the next one's tokens, which the op keeps: the README says so
    twins = (kind == "twins" or rng.random() < 0.08) and not late
    grad, verify = rng.random() < GRADIENTS.get(kind, 0.6), rng.choice(VERIFY)
    if any(e.kind == "rounds" for e in found):  # templates look through such a cast: it takes the proof to see how much it changes
        verify = "probe"
    return Program(spelling, found, twins, grad, verify, dynamic, tokens, rng.randrange(4), rng.random() < 0.25)


def _spelling(rng: random.Random, bodies: tuple[str, ...]) -> Spelling:
    """Of some bodies, or of any but those that only fit some numbers of tokens."""
    # Those whose sizes depend on data take Dynamo the longest.
    bodies = bodies or (*("dense", "table") * 5, *("bmm", "einsum") * 2, *("rows", "hits") * 3, "sorted", "masks")
    some = {
        name: rng.choice(list(table))
        for name, table in (("route", layers.ROUTES), ("expert", layers.EXPERTS), ("add", layers.ADDS), ("sum", layers.SUMS))
    }
    start = rng.choice(("zeros", "zeros", *layers.STARTS))
    skip = rng.choice(("", "", *layers.SKIPS))
    own = rng.choice(("", "x = x.clone()", "x = x * 1"))
    return Spelling(rng.choice(bodies), start=start, skip=skip, own=own, checkpoint=rng.random() < 0.06, **some)


def _write(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    """A write through up to three views of something, perhaps taken earlier, perhaps read afterwards."""
    place = rng.choice(spelling.places)
    target = rng.choice(spelling.knows(place)) if rng.random() < 0.7 else rng.choice(list(STATE))
    tensors = tuple(samples(target, t) for t in TOKENS)
    exprs = chain(rng, tensors, rng.choice((0, 1, 1, 1, 2, 3)))
    statement = _fitting(rng, target, exprs)
    if statement is None:
        return None
    view = f"v{n} = {applied(exprs, target)}" if exprs else ""
    lines = statement.replace("{v}", f"v{n}" if exprs else target)
    early = rng.random() < 0.25 and view and _earlier(rng, spelling, place, target)
    if not early and view:
        lines = f"{view}\n{lines}"
    lines = _wrapped(rng, lines, parameter=target in STATE)
    found = [(early, view)] if early else []
    if rng.random() < 0.2 and (first := _earlier(rng, spelling, place, target)):
        stale = applied(chain(rng, tensors, rng.choice((0, 1, 1, 2))), target)
        found += [(first, f"r{n} = {stale}"), (place, _guarded(rng, spelling, place, lines)), ("after", f"out = out + r{n}.sum() * 0.1")]
        return Effect(f"write to {target}, read behind it", tuple(found))
    return Effect(f"write to {target}", (*found, (place, _guarded(rng, spelling, place, lines))))


def _fitting(rng: random.Random, target: str, exprs: list[str]) -> str | None:
    """A statement that runs on that view of a target for several numbers of tokens, and changes what it may."""
    lenient = rng.random() < 0.15
    for _ in range(30):
        statement = write(rng, target in ("ids", "self.hits"))
        if all(_changes(target, exprs, statement, tokens, lenient) for tokens in TOKENS):
            return statement
    return None


def _changes(target: str, exprs: list[str], statement: str, tokens: int, lenient: bool) -> bool:
    base = samples(target, tokens)
    before, view = base.clone(), evaluated(applied(exprs, "t"), t=base)
    if not isinstance(view, Tensor) or not executed(statement, view) or torch.equal(base, before) or base.shape != before.shape:
        return False
    return lenient or target != "ids" or bool(((base >= 0) & (base < E)).all())


def _earlier(rng: random.Random, spelling: Spelling, place: str, target: str) -> str | None:
    """A place before another one, outside of loops, that knows a target."""
    order = spelling.places
    found = [p for p in order[: order.index(place)] if p not in LOOPED and (target in STATE or target in spelling.knows(p))]
    return rng.choice(found) if found else None


def _wrapped(rng: random.Random, lines: str, *, parameter: bool) -> str:
    """The statements, or under ``no_grad``: nearly always where they write to parameters, which autograd forbids otherwise."""
    if rng.random() < (0.8 if parameter else 0.15):
        return "with torch.no_grad():\n" + _indented(lines)
    return "if self.training:\n" + _indented(lines) if rng.random() < 0.1 else lines


def _guarded(rng: random.Random, spelling: Spelling, place: str, lines: str) -> str:
    """In a loop, for every expert or for one of them."""
    if place in LOOPED and spelling.body in UNROLLED and rng.random() < 0.6:
        return f"if e == {rng.randrange(E)}:\n{_indented(lines)}"
    return lines


def _indented(lines: str) -> str:
    return "\n".join("    " + line for line in lines.splitlines())


def _update(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    statement = rng.choice(idioms.UPDATES).replace("{count}", rng.choice(idioms.COUNTS))
    place = _place(rng, spelling, "ids")
    wrapped = _wrapped(rng, statement, parameter=False)
    return Effect("update", ((place, _guarded(rng, spelling, place, wrapped)),))


def _python(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    place = _place(rng, spelling, "ids")
    return Effect("Python", ((place, _guarded(rng, spelling, place, rng.choice(idioms.PYTHON))),))


def _neutral(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    known = sorted({name for place in spelling.places for name in spelling.knows(place)} & set(idioms.NEUTRAL))
    target = "out" if "out" in known and rng.random() < 0.5 else rng.choice(known)
    place = _place(rng, spelling, target)
    return Effect(f"neutral {target}", ((place, _guarded(rng, spelling, place, rng.choice(idioms.NEUTRAL[target]))),))


def _ids(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("ids", (("routed", rng.choice(idioms.IDS)),))


def _draws(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    statement = rng.choice(idioms.DRAWS)
    named = next((name for name in ("scores", "out", "w", "x") if re.search(rf"\b{name}\b", statement)), "x")
    place = _place(rng, spelling, named)
    return Effect("draws", ((place, _guarded(rng, spelling, place, statement)),))


def _promise(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    """Of an expert's number of rows, of what the loop adds up of them, or of a tensor."""
    if spelling.body not in idioms.COUNTED or rng.random() < 0.25:
        return Effect("promises", ((_place(rng, spelling, "ids"), rng.choice(idioms.ASSERTED)),))
    names = {"{n}": idioms.COUNTED[spelling.body], "{m}": str(rng.randint(3, 6)), "{rows}": "x.shape[0] * K"}
    if rng.random() < 0.3:
        added, asked = (_filled(rng.choice(choice), names) for choice in (idioms.ADDED, idioms.TOTALS))
        return Effect("promises", (("routed", "total = 0"), ("inside", added), ("after", asked)))
    statement = _filled(rng.choice(idioms.PROMISES), names)
    return Effect("promises", (("inside", _guarded(rng, spelling, "inside", statement)),))


def _filled(statement: str, names: dict[str, str]) -> str:
    for name, instead in names.items():
        statement = statement.replace(name, instead)
    return statement


def _later(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    """Something leaves the layer by its side, and is written to before the backward pass."""
    place = rng.choice([place for place in spelling.places if place not in ("entry", *LOOPED)])
    target = rng.choice([name for name in spelling.knows(place) if name not in ("x", "rows")])
    forms = idioms.KEPT if target == "ids" else (*idioms.KEPT, idioms.COPY)
    kept = rng.choice(forms).replace("{v}", target)
    return Effect(f"{target} later", ((place, f"self.kept = {kept}"), (CALLER, rng.choice(idioms.LATER).replace("{v}", "kept"))))


def _cast(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    """There and back, of anything that is floating point."""
    place, target = _anything(rng, spelling)
    dtype = rng.choice(_dtypes())
    statement = rng.choice(idioms.CASTS).replace("{v}", target).replace("{dtype}", str(dtype))
    rounds = dtype.is_floating_point and dtype.itemsize > 1
    everywhere = statement if rng.random() < 0.6 else _guarded(rng, spelling, place, statement)
    return Effect("rounds" if rounds else "casts", ((place, everywhere),))


@functools.cache
def _dtypes() -> list[torch.dtype]:
    """What torch can cast to and back from."""
    found = []
    for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and not d.is_complex}, key=str):
        try:
            torch.ones(2, dtype=torch.float64).to(dtype).to(torch.float64)
        except Exception:
            continue
        found.append(dtype)
    return found


def _layout(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    place, target = _anything(rng, spelling)
    return Effect("layouts", ((place, rng.choice(idioms.LAYOUTS).replace("{v}", target)),))


def _anything(rng: random.Random, spelling: Spelling) -> tuple[str, str]:
    """A place, and a matrix of floating-point numbers that it knows."""
    place = rng.choice(spelling.places)
    known = [name for name in spelling.knows(place) if name not in ("ids", "rows" if spelling.body == "bmm" else "")]
    return place, rng.choice(known)


def _numbers_asked(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    asked, question = rng.choice(idioms.NUMBERS)
    return Effect("numbers", (("routed", asked), ("inside", question)))


def _meanwhile(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("meanwhile", ((MEANWHILE, rng.choice(idioms.MEANWHILE)),))


def _kinks(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("kinks", kinks.at_kinks(rng, spelling.places, MEANWHILE))


def _options(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("options", kinks.with_options(rng, spelling.places, spelling.body in ("rows", "hits")))


def _overlaps(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("overlaps", tuple(statements(rng, spelling)))


def _behind(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    return Effect("behind", tuple(behind.statements(rng)))


def _place(rng: random.Random, spelling: Spelling, target: str) -> str:
    places = [place for place in spelling.places if target in spelling.knows(place)]
    return rng.choice(places or ["after"])


def _ambient(rng: random.Random, spelling: Spelling, n: int) -> Effect | None:
    """Around each of the calls something else; what few programs bear in eager is rare."""
    names = [name for name in ambient.AROUND if name not in ambient.SELDOM or rng.random() < 0.2]
    return Effect("ambient", tuple((AROUND, rng.choice(names)) for _ in range(3)))


KINDS = {
    "views": _write, "updates": _update, "python": _python, "neutral": _neutral, "ids": _ids, "draws": _draws, "twins": _neutral,
    "promises": _promise, "later": _later, "orders": _neutral, "casts": _cast, "layouts": _layout, "numbers": _numbers_asked,
    "meanwhile": _meanwhile,
    "kinks": _kinks, "options": _options, "ambient": _ambient, "overlaps": _overlaps,
    "behind": _behind,
}  # fmt: skip
"""What an effect is; in "twins" of two equal layers, of which one is never neutral, in "orders" of sums with their features first."""

OPENED = ("kinks", "options")
"""Kinds about what stands inside of experts, and its gradients."""

ALONE = ("twins", "orders", "ambient", "overlaps", "behind", *OPENED)
"""Kinds that are not mixed with others."""

GRADIENTS = {**dict.fromkeys((*OPENED, "behind"), 0.9), "overlaps": 0.2}
"""How often gradients are recorded, where it is not as usual: a write to what eager has saved is an error, or eager is wrong."""

BODIES = {
    "promises": (*SIZED, *SIZED, "dense"), "orders": TURNED, "numbers": UNROLLED[:3] + UNROLLED[5:], "meanwhile": SIZED,
    "kinks": ("rows", "rows", "dense", "table", "hits"), "options": ("rows", "rows", "rows", "hits", "table", "dense"),
    "overlaps": (*SIZED, "rows", "dense"), "behind": (*SIZED, "rows"),
}  # fmt: skip
"""Spellings of a kind that does not fit all."""


NAMES = (*KINDS, "mixed")
"""Of all kinds of programs."""
