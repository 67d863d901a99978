"""What was measured of a model in eager, with Inductor and with moefuse."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from moefuse.gains.turns import Ratio, percentile
from moefuse.report.entries import amount
from moefuse.report.report import FusionReport

EAGER, INDUCTOR, MOEFUSE = NAMES = ("eager", "Inductor", "moefuse")


@dataclass(frozen=True)
class Row:
    """One way to run something.

    Attributes:
        name: ``eager``, ``Inductor`` or ``moefuse``.
        ms: of each turn, in their order; those of one turn are comparable.
        memory: bytes of CUDA memory that a call takes beyond what was there before it; None on a CPU, where nobody measures it.
        difference: of outputs (and gradients) from those in eager, divided by the largest value; None where that says nothing.
        problem: why it did not run.
    """

    name: str
    ms: tuple[float, ...] = ()
    memory: int | None = None
    difference: float | None = None
    problem: str = ""

    @property
    def median(self) -> float:
        return percentile(self.ms, 0.5)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        return percentile(self.ms, 0.1), percentile(self.ms, 0.9)

    def to_dict(self) -> dict[str, object]:
        times = {"ms": self.median, "p10": self.spread[0], "p90": self.spread[1], "turns": len(self.ms)} if self.ms else {"ms": None}
        return {"name": self.name, **times, "memory": self.memory, "difference": self.difference, "problem": self.problem}


@dataclass(frozen=True)
class Timed:
    """A model, or a layer by itself, in the three ways.

    Attributes:
        rows: eager, Inductor, moefuse.
        tolerance: of differences: above it a result is off.
        name: of the layer, or of several that are equal; empty for the model.
        fused: whether moefuse fused something here.
    """

    rows: tuple[Row, Row, Row]
    tolerance: float
    name: str = ""
    fused: bool = True

    def row(self, name: str) -> Row:
        return self.rows[NAMES.index(name)]

    def ratio(self, than: str = INDUCTOR) -> Ratio | None:
        """How many times as fast moefuse is as another way; None where one of the two did not run."""
        slow, fast = self.row(than).ms, self.row(MOEFUSE).ms
        return Ratio.of(slow, fast) if slow and fast else None

    @property
    def off(self) -> list[Row]:
        """Ways whose result is not the one in eager."""
        return [row for row in self.rows if row.difference is not None and not row.difference <= self.tolerance]

    @property
    def verdict(self) -> str:
        """How moefuse compares with the others, in a sentence."""
        than, eager = self.ratio(), self.ratio(EAGER)
        if than is None or eager is None:
            return "; ".join(f"{row.name} did not run: {row.problem}" for row in self.rows if row.problem)
        return f"{'' if self.fused else 'nothing was fused; '}{_said(than, INDUCTOR)}, {_said(eager, EAGER)}"

    def to_dict(self) -> dict[str, object]:
        ratios = {f"times_as_fast_as_{name}": ratio and ratio.to_dict() for name, ratio in self._ratios()}
        rows = [row.to_dict() for row in self.rows]
        return {
            "name": self.name,
            "fused": self.fused,
            "rows": rows,
            **ratios,
            "tolerance": self.tolerance,
            "off": [r.name for r in self.off],
        }

    def _ratios(self) -> list[tuple[str, Ratio | None]]:
        return [("inductor", self.ratio()), ("eager", self.ratio(EAGER))]


def _said(ratio: Ratio, name: str) -> str:
    text = f"{times(ratio)} times as fast"
    if ratio.verdict == "faster":
        return f"{text} as {name}"
    return f"slower than {name} ({text})" if ratio.verdict == "slower" else f"no measurable difference from {name} ({text})"


def times(ratio: Ratio) -> str:
    """Its median; two digits behind the point near 1, where they say which side it is on."""
    return f"{ratio.median:.2f}" if ratio.median < 9.95 else f"{ratio.median:.1f}"


@dataclass
class Measured:
    """What :func:`moefuse.benchmark` measured.

    Attributes:
        model: the whole call.
        layers: those that moefuse fused, each kind by itself, on what it gets in the model.
        train: whether a call is forward and backward.
        device: name of the device.
        report: what moefuse fused and what not.
        seconds: how long all of it took, with the compilations.
        notes: what else there is to say.
    """

    model: Timed
    layers: list[Timed] = field(default_factory=list)
    train: bool = False
    device: str = ""
    report: FusionReport = field(default_factory=FusionReport)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def off(self) -> bool:
        """Whether a result is not the one in eager."""
        return any(timed.off for timed in (self.model, *self.layers))

    @property
    def headline(self) -> str:
        return f"{'training' if self.train else 'inference'}, {self.model.verdict}"

    @property
    def warnings(self) -> list[str]:
        """Results that are off."""
        return [_off(row, timed) for timed in (self.model, *self.layers) for row in timed.off]

    def to_dict(self) -> dict[str, object]:
        return {
            "train": self.train,
            "device": self.device,
            "model": self.model.to_dict(),
            "layers": [layer.to_dict() for layer in self.layers],
            "report": self.report.to_dict(),
            "seconds": self.seconds,
            "notes": [*self.warnings, *self.notes],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """What was measured, as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)


def _off(row: Row, timed: Timed) -> str:
    apart = f"differs from eager's by {row.difference:.2g} of the largest value; rounding makes {timed.tolerance:.2g} at most"
    return f"{row.name}'s result{timed.name and f' of {timed.name}'} is off: it {apart}"


def cells(row: Row, timed: Timed) -> list[str]:
    """What a table says of one way; empty where nothing is known."""
    if not row.ms:
        return ["did not run", row.problem, "", "", ""]
    inductor = timed.row(INDUCTOR).ms
    ratio = Ratio.of(inductor, row.ms) if inductor else None
    low, high = row.spread
    return [
        milliseconds(row.median),
        f"{milliseconds(low)} to {milliseconds(high)}",
        times(ratio) if ratio is not None else "",
        amount(row.memory) if row.memory is not None else "not measured",
        f"{row.difference:.1e}" if row.difference is not None else "",
    ]


HEADS = ("ms", "10% to 90%", "times as fast as Inductor", "memory", "difference")


def milliseconds(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
