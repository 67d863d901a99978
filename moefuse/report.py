"""FusionReport: what was fused, what was not, and the user's line for each. Text and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

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
    """

    module: str
    location: str
    spec: ExpertsSpec
    domain: Domain
    tier: Tier
    error: float | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            "module": self.module,
            "location": self.location,
            "spec": self.spec.to_dict(),
            "domain": self.domain,
            "tier": self.tier,
            "error": self.error,
        }


@dataclass(frozen=True)
class Skipped:
    """One mixture-of-experts-looking region that stayed as it was, and why. ``code`` is a key of :data:`moefuse.errors.CODES`."""

    code: str
    message: str
    module: str
    location: str

    def to_dict(self) -> dict[str, object]:
        return {"code": self.code, "message": self.message, "module": self.module, "location": self.location}


@dataclass
class FusionReport:
    """What one compilation did; graphs are counted as Dynamo hands them over."""

    fused: list[Fused] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    graph_count: int = 0
    graph_breaks: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        return {
            "fused": [f.to_dict() for f in self.fused],
            "skipped": [s.to_dict() for s in self.skipped],
            "graph_count": self.graph_count,
            "graph_breaks": list(self.graph_breaks),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)
