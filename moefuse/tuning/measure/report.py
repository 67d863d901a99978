"""WarmupReport: what was measured, what is taken from now on, and what could not be measured and why. Text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moefuse.spec import ExpertsSpec


@dataclass(frozen=True)
class Tuned:
    """One layer at one number of tokens.

    Attributes:
        name: modules of the layers that are equal, or ``"spec 0"``, ... of what was given.
        spec: sizes, dtype, activation and layout.
        tokens: T, as measured; it stands for the whole bucket of T*K/E.
        asked: the numbers of tokens that were asked for and are in this bucket.
        us: microseconds of the op with the best configuration; infinite if none was found.
        before_us: microseconds with what was taken until now; infinite if that could not be measured.
        config: the best configuration, as JSON data; empty if none was found.
        library: the form in which products by the library (``grouped_mm``) are quicker than that; empty if none is.
        tried: configurations that were timed.
        problem: why nothing was measured; empty if something was.
        programs: a program that was matched -> (its microseconds, those of what replaces it), both compiled by Inductor.
        not_compared: why a program that was matched was not measured.
    """

    name: str
    spec: ExpertsSpec
    tokens: int
    asked: tuple[int, ...]
    us: float = math.inf
    before_us: float = math.inf
    config: Mapping[str, Any] = field(default_factory=dict)
    library: str = ""
    tried: int = 0
    problem: str = ""
    programs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    not_compared: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        data = asdict(self)
        return data | {name: None for name in ("us", "before_us") if math.isinf(data[name])}


@dataclass
class WarmupReport:
    """What one :func:`moefuse.warmup` did.

    Attributes:
        tuned: one entry for each different layer and bucket of tokens.
        device: name of the device; empty if there was none to measure on.
        path: file that the measurements went to; empty if none did.
        seconds: how long it took.
        notes: what else there is to say, such as why nothing was measured.
    """

    tuned: list[Tuned] = field(default_factory=list)
    device: str = ""
    path: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> list[Tuned]:
        """The entries that have a time."""
        return [t for t in self.tuned if math.isfinite(t.us)]

    def to_dict(self) -> dict[str, object]:
        return {
            "tuned": [t.to_dict() for t in self.tuned],
            "device": self.device,
            "path": self.path,
            "seconds": self.seconds,
            "notes": list(self.notes),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        head = f"moefuse: measured {len(self.measured)} of {len(self.tuned)} in {self.seconds:.0f} s"
        head += f" on {self.device}" if self.device else ""
        return "\n".join([head, *(line for t in self.tuned for line in _lines(t)), *(f"  note    {note}" for note in self.notes)])


def _lines(t: Tuned) -> list[str]:
    title = f"T={t.tokens}  {t.name}  {t.spec}"
    if t.problem:
        return [f"  failed  {title}: {t.problem}"]
    before = f"{t.before_us:.1f} -> " if math.isfinite(t.before_us) else ""
    lines = [f"  tuned   {title}: {before}{t.us:.1f} us, {t.tried} configurations{', products by the library' if t.library else ''}"]
    for name, (program, fused) in t.programs.items():
        verdict = "stays as it is from the next compilation on" if program <= fused else "is replaced"
        lines.append(f"          program {name}: {program:.1f} us, fused {fused:.1f} us: {verdict}")
    return lines + [f"          not compared: {why}" for why in t.not_compared]
