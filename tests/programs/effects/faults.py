"""Faults put back one at a time, each with a program that shows it: whether the generator would see what it is there for.

A fault makes moefuse wrong in one way. ``program`` is the smallest one known to show it, ``kinds`` are the kinds of programs among which a
search finds some: benchmarks/fault_injection.py counts how many it takes. Where something else would catch the fault, that is switched off
with it, and tested to catch it: ``defences``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from tests.programs.effects import broken, kinks
from tests.programs.effects.broken import Broken
from tests.programs.effects.layers import Spelling
from tests.programs.effects.program import NAMES, Effect, Program, draw
from tests.programs.effects.run import Verdict, verdict


@dataclass(frozen=True)
class Fault:
    """``cause``: what makes moefuse wrong; ``why`` that is wrong. ``defences``: what has to be off, too, each of which alone catches it."""

    why: str
    cause: Broken
    program: Program
    kinds: tuple[str, ...] = NAMES
    defences: Mapping[str, Broken] = field(default_factory=dict)

    def put_back(self, on: str | None = None) -> AbstractContextManager[None]:
        """Moefuse with the fault; ``on``: a defence that stays."""
        return broken.put_back(self.cause, *(part for name, part in self.defences.items() if name != on))


def _program(
    body: str, *statements: tuple[str, str], route: str = "softmax", expert: str = "stacked", twins: bool = False, verify: str = "probe"
) -> Program:
    effects = tuple(Effect("written by hand", (statement,)) for statement in statements)
    return Program(Spelling(body, route, expert=expert), effects, twins=twins, grad=False, verify=verify, tokens=(5, 5))


LOOK = {"last look": broken.NO_LAST_LOOK}
GRADIENTS = {"gradients of the proof": broken.NO_GRADIENTS}

FAULTS: dict[str, Fault] = {
    "storage by names": Fault(
        "a view whose name is on no list is taken for a new tensor, by the last look too",
        broken.STORAGE_BY_NAMES,
        _program("table", ("tabled", "torch.atleast_2d(weights).cpu().clamp_(min=0.05)"), verify="off"),
        ("views", "updates", "mixed"),
    ),
    "updates dropped": Fault(
        "a write to what outlives the call seems to write to nothing, and goes with a captured loop",
        broken.UPDATES_DROPPED,
        _program("hits", ("routed", "self.usage.data.add_(1)")),
        ("updates", "views", "mixed"),
        LOOK,
    ),
    "erased in the region": Fault(
        "a write goes because it stands in the region: it is to the accumulator, but not the region's own",
        broken.ERASED_IN_REGION,
        _program("rows", ("before", "out.add_(x)"), verify="off"),
        ("neutral", "views", "mixed"),
        LOOK,
    ),
    "proof on neutral values": Fault(
        "a write goes because it stands in the region, and the proof takes the values that parameters happen to have",
        broken.ERASED_IN_REGION,
        _program("rows", ("before", "out.add_(self.shift)")),
        ("neutral", "mixed"),
        LOOK | {"drawn values": broken.REAL_VALUES},
    ),
    "casts keep ids": Fault(
        "a cast that makes one id of several keeps what is known of ids",
        broken.CASTS_KEEP_IDS,
        replace(_program("rows", ("routed", "ids = ids.bool().long()"), verify="off"), spelling=Spelling("rows", add="iadd")),
        ("ids", "mixed"),
    ),
    "equal layers": Fault(
        "a layer is not proved because one like it was, whatever is added to either",
        broken.ERASED_IN_REGION,
        _program("rows", ("before", "out.add_(self.number)"), twins=True),
        ("twins", "mixed"),
        LOOK | {"layers that are the same": broken.EQUAL_LAYERS},
    ),
    "casts that cut": Fault(
        "a cast to integers inside an expert is left out, as one is that rounds",
        broken.ALL_CASTS_ROUND,
        _program("rows", ("hidden", "h = h.to(torch.int32).to(h.dtype)"), expert="open", verify="off"),
        ("casts",),
    ),
    "numbers that equal none": Fault(
        "a number that capture made symbolic is sought by `in`, where Dynamo finds none of them",
        broken.EQUAL_BY_NAME,
        _program("dense", ("routed", "chosen = ids.flatten().tolist()"), ("inside", "if e not in chosen: continue")),
        ("numbers",),
        {"comparison by value": broken.COMPARED_AS_OBJECTS},
    ),
    "other strides": Fault(
        "a result is contiguous where the program's is not",
        broken.CONTIGUOUS,
        _program("dense", ("entry", "x = x.t().contiguous().t()")),
        ("layouts",),
    ),
    "hooks unseen": Fault(
        "a hook that is put on an expert after the compilation never runs",
        broken.HOOKS_UNSEEN,
        _program("rows", ("meanwhile", "layer.experts[1].register_forward_hook(lambda m, a, o: o * 2)"), expert="modules"),
        ("meanwhile",),
    ),
    "tangents unseen": Fault(
        "under forward-mode AD a kernel runs, and its result has no tangent",
        broken.TANGENTS_UNSEEN,
        _program("rows", ("around", "dual")),
        ("ambient",),
    ),
    "overlaps unasked": Fault(
        "a tensor that is written to between experts lies in their tokens in a later call, which runs the code for one that is apart",
        broken.OVERLAPS_UNASKED,
        _program(
            "rows",
            ("related", "layer.side = torch.zeros(2, H)"),
            ("related", "layer.side = x.data[:2]"),
            ("inside", "if e == 1: self.side.add_(1)"),
        ),
        ("overlaps",),
    ),
    "written behind": Fault(
        "a frame around the experts writes to their tokens before the backward pass, which reads them, and not the rows of the program",
        broken.KEPT_AS_GIVEN,
        replace(_program("rows", ("behind", "x.data.mul_(0.5)")), grad=True),
        ("behind",),
    ),
    "no last look": Fault(
        "a write goes because it stands in the region, and effects are not compared at the end",
        broken.NO_LAST_LOOK,
        _program("rows", ("before", "out.add_(x)"), verify="off"),
        ("neutral", "views", "mixed"),
        {"own writes": broken.ERASED_IN_REGION},
    ),
    "equal values with other derivatives": Fault(
        "a clamp at 0 becomes relu, which has another derivative there",
        broken.ONLY_VALUES,
        replace(_program("rows", ("entry", kinks.TOKENS[0]), ("hidden", f"h = {kinks.A}.clamp(min=0)"), expert="open"), grad=True),
        ("kinks",),
        GRADIENTS,
    ),
    "swallowed arguments": Fault(
        "a rule takes options that it does not read",
        broken.SWALLOWED,
        replace(_program("rows", ("given", "given = F.embedding(tok, x, padding_idx=1)"), expert="open"), grad=True),
        ("options",),
        GRADIENTS,
    ),
    "names of nodes": Fault(
        "a refusal names a value as the graph does, and not as the program",
        broken.NAMES_OF_NODES,
        replace(
            _program("dense", ("inside", "self.experts[0].up.weight.data.mul_(0.9)")),
            spelling=Spelling("dense", "softmax", expert="modules"),
        ),
        ("views", "updates", "mixed"),
    ),
}
"""By name."""


def shows(fault: Fault, on: str | None = None) -> Verdict:
    """What its own program says with the fault put back, but for one of the defences."""
    with fault.put_back(on):
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
