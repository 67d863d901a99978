"""Faults put back one at a time, each with a program that shows it: whether the generator would see what it is there for.

A fault is a context manager that makes moefuse wrong in one way. ``program`` is the smallest one known to show it, ``kinds`` are the kinds
of programs among which a search finds some: benchmarks/fault_injection.py counts how many it takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from tests.programs.effects.layers import Spelling
from tests.programs.effects.program import NAMES, Effect, Program, draw
from tests.programs.effects.run import Verdict, verdict


def there() -> AbstractContextManager[None]:
    """Nothing to put back: the fault is still there."""
    return nullcontext()


@dataclass(frozen=True)
class Fault:
    """``put_back``: what makes moefuse wrong, and why that is wrong."""

    why: str
    put_back: Callable[[], AbstractContextManager[None]]
    program: Program
    kinds: tuple[str, ...] = NAMES


def _program(body: str, *statements: tuple[str, str], route: str = "softmax", twins: bool = False, verify: str = "probe") -> Program:
    effects = tuple(Effect("written by hand", (statement,)) for statement in statements)
    return Program(Spelling(body, route, expert="stacked"), effects, twins=twins, grad=False, verify=verify, tokens=(5, 5))


FAULTS: dict[str, Fault] = {
    "storage by names": Fault(
        "a view whose name is on no list is taken for a new tensor",
        there,
        _program("table", ("tabled", "torch.atleast_2d(weights).cpu().clamp_(min=0.05)"), verify="off"),
        ("views", "updates", "mixed"),
    ),
    "updates dropped": Fault(
        "a write to what outlives the call seems to write to nothing, and goes with a captured loop",
        there,
        _program("hits", ("routed", "self.usage.data.add_(1)")),
        ("updates", "views", "mixed"),
    ),
    "erased in the region": Fault(
        "a write goes because it stands in the region",
        there,
        _program("rows", ("before", "out.add_(x)"), verify="off"),
        ("neutral", "views", "mixed"),
    ),
    "proof on neutral values": Fault(
        "a write goes because it stands in the region, and the proof takes the values that parameters happen to have",
        there,
        _program("rows", ("before", "out.add_(self.shift)")),
        ("neutral", "mixed"),
    ),
    "casts keep ids": Fault(
        "a cast that makes one id of several keeps what is known of ids",
        there,
        replace(_program("rows", ("routed", "ids = ids.bool().long()"), verify="off"), spelling=Spelling("rows", add="iadd")),
        ("ids", "mixed"),
    ),
    "equal layers": Fault(
        "a layer is not proved because one like it was, whatever is added to either",
        there,
        _program("rows", ("before", "out.add_(self.shift)"), twins=True),
        ("twins", "mixed"),
    ),
    "no last look": Fault(
        "a write goes because it stands in the region, and effects are not compared at the end",
        there,
        _program("rows", ("before", "out.add_(x)"), verify="off"),
        ("neutral", "views", "mixed"),
    ),
}
"""By name. Where a cause is mended, ``there`` is replaced by what breaks it again."""


def shows(fault: Fault) -> Verdict:
    """What its own program says with the fault put back."""
    with fault.put_back():
        return verdict(fault.program)


def search(fault: Fault, most: int = 500, seed: int = 0) -> Iterator[tuple[int, Program, Verdict]]:
    """(how many programs have run, program, what it says) while the fault is there; ends behind the first that fails."""
    count, rng = 0, random.Random(seed)
    with fault.put_back():
        while count < most:
            p = draw(rng.randrange(1 << 30), rng.choice(fault.kinds))
            found = verdict(p)
            if found.no_program:
                continue
            count += 1
            yield count, p, found
            if found.failed:
                return
