"""What a choice of kernels is about: the problem of a call, and a configuration of kernels and tile sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


def power_of_two(n: float) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << (math.ceil(max(n, 1)) - 1).bit_length()


def hint(size: Any) -> int:
    """A size as a number; of a symbolic one, the value that it was traced with."""
    node = getattr(size, "node", None)
    return int(size if node is None else node.hint)


@dataclass(frozen=True)
class Vectors:
    """Block sizes of one kernel in ``gemv.py``: bn features by bk inputs per step.

    Down only: ``at`` slots at a time; or with ``parts`` > 0, each slot's inputs are shared out to so many programs, and summed later.
    """

    bn: int = 4
    bk: int = 512
    warps: int = 4
    stages: int = 1
    at: int = 8
    parts: int = 0


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and form of one kernel in ``gemm.py``; the number of rows bm is the layer's.

    ``rows_desc`` of the up kernel: token rows are copied into sorted order first, so that they come through a descriptor as well.
    """

    bn: int = 128
    bk: int = 64
    warps: int = 4
    stages: int = 3
    group: int = 1
    swap: bool = False
    desc: bool = False
    rows_desc: bool = False
    join: bool = False
    tail: bool = False
    persistent: bool = False
    flatten: bool = False
    store: int = 0
    """Blocks of columns in which a tile is stored through a descriptor; 0: by pointers."""
    per_sm: int = 1
    """Programs per multiprocessor of a persistent grid."""
    specialised: str = ""
    """The kernels of ``hopper/``: "pingpong", "shared" (``ring.py``); "" for one group of warps that does everything."""


SPECIALISED = {"shared": (128,), "pingpong": (64, 128)}
"""Forms of warp-specialised kernels (``hopper/ring.py``) and the rows that their tiles can have."""
BLOCK_INPUTS = 64
"""Inputs of a step of theirs."""


@dataclass(frozen=True)
class Config:
    """bm = 0: the vector kernels; else tiles of bm rows."""

    bm: int
    up: Any
    down: Any
    pdl: bool = False

    @property
    def specialised(self) -> bool:
        """Whether a warp-specialised kernel is among them."""
        return any(getattr(part, "specialised", "") for part in (self.up, self.down))

    @property
    def possible(self) -> bool:
        """Whether warp-specialised kernels, where they are named, have such tiles."""
        parts = [part for part in (self.up, self.down) if getattr(part, "specialised", "")]
        return all(
            self.bm in SPECIALISED.get(part.specialised, ()) and part.bk == BLOCK_INPUTS and part.store in (1, 2, 4) and part.stages >= 2
            for part in parts
        ) and (self.up not in parts or self.up.rows_desc)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Config:
        kind = Tiles if data["bm"] else Vectors
        return Config(data["bm"], kind(**data["up"]), kind(**data["down"]), data.get("pdl", False))


@dataclass(frozen=True)
class Problem:
    """What a choice may depend on; I, H, N: inner features, inputs, outputs of one expert."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    out: int
    gating: str
    dtype: str
    transposed_in: bool = False
    transposed_out: bool = False
    separate: bool = False
    """Experts are separate Parameters, reached through a table of addresses."""

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    @property
    def rows(self) -> float:
        """Mean rows of an expert that has any, for uniform routing."""
        hit = self.experts * (1.0 - (1.0 - 1.0 / self.experts) ** self.slots)
        return self.slots / max(hit, 1.0)

    @property
    def bucket(self) -> int:
        """b for T*K/E in (2**(b-1), 2**b]: what is measured for one problem of a bucket serves all with these sizes."""
        return math.ceil(math.log2(max(self.slots, 1) / max(self.experts, 1)))

    @property
    def form(self) -> tuple[str, str, bool, bool]:
        """What a configuration is for: problems of different forms have nothing to tell each other."""
        gating = "halves" if self.gating in ("merged", "separate") else self.gating
        width = "16 bit" if self.dtype in ("bfloat16", "float16") else self.dtype
        return width, gating, self.transposed_in, self.transposed_out

    def distance(self, other: Problem) -> float:
        """How far apart two problems of one form are, in powers of two."""

        def apart(a: float, b: float) -> float:
            return abs(math.log2(max(a, 1) / max(b, 1)))

        routing = 2 * apart(self.rows, other.rows) + apart(self.slots, other.slots)
        sizes = apart(self.hidden, other.hidden) + apart(self.inter, other.inter) + apart(self.out, other.out)
        return routing + 0.5 * sizes + 0.1 * apart(self.experts, other.experts)


def problem_of(x: Any, ids: Any, w_in: Sequence[Any], w_out: Sequence[Any], gating: str) -> Problem:
    """The problem of a call of ``moefuse::experts``, from its tensors (fake ones too: sizes that are symbolic count as their hint)."""
    first, last = w_in[0], w_out[0]
    inner, outer = first.stride()[-2:], last.stride()[-2:]
    return Problem(
        tokens=hint(x.shape[0]),
        top_k=hint(ids.shape[1]),
        experts=hint(first.shape[0]) if len(w_in) == 1 and first.dim() == 3 else len(w_in),
        hidden=hint(x.shape[1]),
        inter=hint(last.shape[-1]),
        out=hint(last.shape[-2]),
        gating=gating,
        dtype=str(x.dtype).removeprefix("torch."),
        transposed_in=bool(inner[1] != 1 and inner[0] == 1),
        transposed_out=bool(outer[1] != 1 and outer[0] == 1),
        separate=len(w_in) > 1,
    )
