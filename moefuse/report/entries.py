"""What a report is made of: what was fused, what was refused, and what else is known of the graphs of one compilation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from moefuse.evidence.few_bits import Rounded
from moefuse.evidence.flows import Flow
from moefuse.program.breaks import Stop, function_at
from moefuse.program.module_tree import Tree
from moefuse.program.steps import Run
from moefuse.spec import Domain, ExpertsSpec, Tier


@dataclass(frozen=True)
class Fused:
    """One region that was replaced.

    Attributes:
        module: dotted path of the user's module, e.g. ``model.layers.0.mlp`` (empty when torch recorded none).
        location: the user's ``file:line`` of the combine.
        spec: sizes, dtype, activation and layout.
        domain: which spelling the rows were in.
        tier: ``"fused"`` for one op, ``"grouped"`` for grouped GEMMs around the user's own pointwise code.
        error: error of the fused op against an fp64 reference divided by the original's allowance (at most 1 passes); None if not verified.
        shared: whether a shared expert runs beside it.
        workspace: bytes that a call in inference takes in addition to its result, on CUDA devices; None where nothing is known.
        tokens: with so many tokens.
        parallel: where its experts are, if they are spread over ranks, and how tokens get there; else empty.
        before: names of the operations that were replaced, repeated ones folded; what a page draws, and no part of the JSON.
        after: names of those in their place.
    """

    module: str
    location: str
    spec: ExpertsSpec
    domain: Domain
    tier: Tier
    error: float | None = None
    shared: bool = False
    workspace: int | None = None
    tokens: int | None = None
    parallel: str = ""
    before: tuple[Run, ...] = field(default=(), repr=False, compare=False)
    after: tuple[Run, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, object]:
        return {
            "module": self.module,
            "location": self.location,
            "spec": self.spec.to_dict(),
            "domain": self.domain,
            "tier": self.tier,
            "error": self.error,
            "shared": self.shared,
            "workspace": self.workspace,
            "tokens": self.tokens,
            "parallel": self.parallel,
        }


Cause = Literal["", "uncounted"]


@dataclass(frozen=True)
class Skipped:
    """One mixture-of-experts-looking region that stayed as it was, and why. ``code`` is a key of :data:`moefuse.errors.CODES`."""

    code: str
    message: str
    module: str
    location: str
    combine: str = field(default="", repr=False, compare=False)
    """The ``file:line`` at which the report would say that it is fused; empty where the experts were not understood."""
    given_up: bool = field(default=False, repr=False, compare=False)
    """Whether the graph it was in was given up: the frames that Dynamo makes instead may have it fused."""
    attempt: int = field(default=0, repr=False, compare=False)
    """Which of all graphs that were given up that was, in their order; 0 for one that was not."""
    fused_too: bool = field(default=False, repr=False, compare=False)
    """Whether the layer is fused in another mode: in inference and not in training, for example."""
    when: str = field(default="", repr=False, compare=False)
    """In which mode, where it is fused in another one only: ``in training``."""
    cause: Cause = field(default="", repr=False, compare=False)
    """``uncounted``: of a check that could not run because nobody can say how many tokens to draw."""

    @property
    def text(self) -> str:
        """The message, with the mode in which it holds."""
        return f"{self.message} ({self.when})" if self.when else self.message

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.text, "module": self.module, "location": self.location}


class RejectedError(Exception):
    """A rewrite that a last check of the whole graph rejects: the graph goes back to what it was, and ``skipped`` says why."""

    def __init__(self, skipped: Skipped) -> None:
        super().__init__(skipped.message)
        self.skipped = skipped


@dataclass
class Entries:
    """What is known of one compilation; graphs are counted as Dynamo hands them over."""

    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    graph_count: int = 0
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list, repr=False, compare=False)
    """What moefuse could not look into in graphs without mixture-of-experts code; only for the text about nothing found."""
    rounded: list[Rounded] = field(default_factory=list, repr=False, compare=False)
    """Weights that graphs round to few bits; for the same text."""
    stops: list[Stop] = field(default_factory=list, repr=False, compare=False)
    """The graph breaks with their stacks, those that made moefuse trace a frame again without capture included; for the same text."""
    flows: list[Flow] = field(default_factory=list, repr=False, compare=False)
    """What depends on what in the graphs, as they went to the compiler; for the same text."""
    seen: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Names of tensors that are read, but for experts that are fused, also in attempts that were given up; for the same text."""
    weights: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Those of experts that are fused."""
    modules: tuple[tuple[str, Tree], ...] = field(default=(), repr=False, compare=False)
    """The modules of what was compiled, behind the prefix of their names; what a page draws, and no part of the JSON."""
    root: str = field(default="", repr=False, compare=False)
    """The class of the module that was compiled, which has no name as a layer; empty for a function."""
    disabled: str = field(default="", repr=False, compare=False)
    """By what moefuse is switched off; empty where it is not."""
    followed: list[str] = field(default_factory=list, repr=False, compare=False)
    """Places at which graphs break because of a refusal: with it, the text has them said."""
    called: list[str] = field(default_factory=list, repr=False, compare=False)
    """Modules that call moefuse's ops themselves, where nothing else is to say."""

    def to_dict(self) -> dict[str, object]:
        return {
            "fused": [f.to_dict() for f in self.fused],
            "skipped": [s.to_dict() for s in self.skipped],
            "graph_count": self.graph_count,
            "graph_breaks": list(self.graph_breaks),
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def extend(self, other: Entries) -> None:
        """Add what another graph's report says."""
        self.fused += other.fused
        self.skipped += other.skipped
        self.graph_count += other.graph_count
        self.graph_breaks += other.graph_breaks
        self.notes += [note for note in other.notes if note not in self.notes]
        self.opaque += [text for text in other.opaque if text not in self.opaque]
        self.rounded += [weight for weight in other.rounded if weight not in self.rounded]
        self.stops += [stop for stop in other.stops if stop not in self.stops]
        self.flows += other.flows
        self.disabled = other.disabled or self.disabled
        self.followed += [place for place in other.followed if place not in self.followed]

    @classmethod
    def merged(cls, reports: Iterable[Entries]) -> Self:
        """One report of several graphs.

        What a frame could not fuse and gave up on is tried again in the frames that it calls: the same refusal of one place counts once.
        """
        merged = cls()
        for report in sorted(reports, key=lambda report: report.graph_count == 0):
            known = list(merged.skipped)
            merged.extend(replace(report, skipped=[s for s in report.skipped if not _repeats(s, known, report.graph_count > 0)]))
        return merged

    @property
    def layers(self) -> tuple[int, int]:
        """(layers fused, layers found). A layer is a module, or where there is none a line; it counts once, however often it is called."""
        done = {_layer(f) for f in self.fused}
        left = {_layer(s) for s in self.skipped if not s.fused_too and not self._comes_of_it(s)}
        # What is said of one expert is said of its layer.
        names = [str(one) for one in left if isinstance(one, str)]
        inner = {one for one in names for other in names if other and one.startswith(f"{other}.")}
        return len(done), len(done | (left - inner))

    def _comes_of_it(self, skipped: Skipped) -> bool:
        """Whether a refusal is what is left of a layer in pieces of a graph that was given up for another refusal in the same function."""
        if skipped.module or skipped.code not in _IN_PIECES:
            return False
        causes = (s for s in self.skipped if s.given_up and not s.module and (not skipped.given_up or s.attempt < skipped.attempt))
        own = function_at(skipped.location)
        return own != "" and any(function_at(s.location) == own for s in causes)

    @property
    def summary(self) -> str:
        """The first line of the text, without its counts of graphs and breaks."""
        if self.disabled and not self.fused and not self.skipped:
            return f"disabled by {self.disabled}: graphs go to Inductor as they are"
        if self.called and not self.fused and not self.skipped:
            return "; ".join(self.called)
        done, found = self.layers
        return f"fused {done} of {count(found, 'MoE layer')}" if found else "no mixture-of-experts code found"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def amount(size: int) -> str:
    """Bytes as people say them: ``1.5 MiB``."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "bytes" else f"{value:.3g} {unit}"


_IN_PIECES = frozenset(("tokens-differ", "ids-not-distinct", "mutation"))
"""What is said of a layer whose ids, rows or sum are made in front of a graph break."""
_OF_ROWS = frozenset(("no-rule", "tokens-differ", "threshold", "not-row-local", "experts-gathered"))
"""What is said of rows that are not understood, and so of the weights that are read for them."""


def may_be_done(skipped: Skipped) -> bool:
    """Whether it is known which experts a refusal is about, so that it can be told whether another graph has them fused."""
    return bool(skipped.combine) or (skipped.code in _OF_ROWS and skipped.module != "")


def done_instead(skipped: Skipped, fused: Iterable[Fused]) -> bool:
    """Whether a refusal in a graph that was given up is about experts that are among those fused.

    Of experts that were not understood there it is known in which module they are: a layer in a layer is read in a frame of its own.
    """
    if not skipped.given_up or not may_be_done(skipped):
        return False
    if not skipped.combine:
        return any(f.module == skipped.module for f in fused)
    return any(f.location == skipped.combine and _around(f.module, skipped.module) for f in fused)


def _repeats(skipped: Skipped, known: list[Skipped], traced: bool) -> bool:
    """Whether a refusal is one of those known; of a frame that Dynamo gave up on, the module may be another than in the frames it calls."""
    same = [other for other in known if (other.code, other.location) == (skipped.code, skipped.location)]
    return any(other.module == skipped.module != "" if traced else _around(other.module, skipped.module) for other in same)


def _layer(item: Fused | Skipped) -> object:
    """What tells layers apart."""
    return item.module or item.location or id(item)


def _around(first: str, second: str) -> bool:
    """Whether one of two modules is, or holds, the other."""
    return any(not outer or f"{inner}.".startswith(f"{outer}.") for outer, inner in ((first, second), (second, first)))
