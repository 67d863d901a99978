"""One measurement as data, and the check that a text from disk is one.

A file in the user's cache folder may be old, cut off, or edited: every field is compared with its type and its bounds before it is
believed. The fields are those of the dataclasses in ``moefuse/tuning/problem.py``, whichever these are.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from moefuse.ops.meaning.reference import GATINGS
from moefuse.tuning.problem import Config, Problem, Tiles, Vectors

MAX_SIZE = 1 << 40
"""Bound of the sizes of a problem."""
MAX_SETTING = 1 << 16
"""Bound of a whole number in a configuration."""
MAX_TIME = 1e9
"""Bound of a time in microseconds."""
MAX_PROGRAMS = 64
"""Programs that one problem is compared with."""
MAX_FORMS = 8
"""Forms of the library's."""
POWERS = {"bm", "bn", "bk", "warps", "at"}
"""Settings that Triton asks powers of two for; bm may also be 0."""
LIMITS = {"bm": 512, "bn": 1024, "bk": 4096, "warps": 32, "stages": 16, "at": 64, "parts": 64, "group": 1024, "per_sm": 32}
"""Tighter bounds for the settings that are known; a setting that is not listed has :data:`MAX_SETTING`."""
FIRST_ZERO = {"bm", "parts", "stages"}
"""Settings that may be 0."""

_WORD = re.compile(r"[\w+./ -]{0,64}")
_FORM = re.compile(r"[a-z_]{1,16}")
_PROGRAM = re.compile(r"[a-z]{1,16}:[0-9a-f]{12}")


class InvalidEntryError(ValueError):
    """What was read is no measurement; the text says why."""


@dataclass(frozen=True)
class Pair:
    """Microseconds of one program that was matched, compiled by Inductor, and of what replaces it, for ``tokens`` tokens."""

    program_us: float
    fused_us: float
    tokens: int


@dataclass(frozen=True)
class Entry:
    """The best configuration found for a problem, its time, and how the programs that were matched compare.

    Attributes:
        problem: what was measured; it stands for its whole bucket.
        config: the winner.
        us: microseconds of the op with it.
        library: microseconds of the op with products by the library, by form (``kernels/triton/provide/library.py``).
        programs: :func:`moefuse.passes.lower.program.name_of` of a program -> times.
        when: seconds since 1970.
    """

    problem: Problem
    config: Config
    us: float
    library: Mapping[str, float] = field(default_factory=dict)
    programs: Mapping[str, Pair] = field(default_factory=dict)
    when: int = 0

    @property
    def key(self) -> Problem:
        """Equal for problems that share an entry."""
        return key_of(self.problem)

    @property
    def form(self) -> str | None:
        """The form of the library's that is the quickest; None if our own kernels are."""
        best = min(self.library, key=self.library.__getitem__, default=None)
        return best if best is not None and self.library[best] < self.us else None

    def merged(self, other: Entry) -> Entry:
        """One entry for two with the same key: the newer configuration, and of each program the newer comparison."""
        old, new = (self, other) if self.when <= other.when else (other, self)
        return replace(new, programs={**old.programs, **new.programs})

    def to_json(self) -> dict[str, Any]:
        programs = {name: asdict(pair) for name, pair in self.programs.items()}
        return {
            "problem": asdict(self.problem),
            "config": self.config.to_json(),
            "us": self.us,
            "library": dict(self.library),
            "programs": programs,
            "when": self.when,
        }


def key_of(problem: Problem) -> Problem:
    """The problem with its bucket in place of its number of tokens."""
    return replace(problem, tokens=problem.bucket)


def parse(data: Any) -> Entry:
    """The entry that ``data``, read from JSON, stands for.

    Raises:
        InvalidEntryError: anything is missing, unknown, of another type, or out of bounds.
    """
    names = _keys(data, "an entry", {"problem", "config", "us", "library", "programs", "when"})
    return Entry(
        problem_from(names["problem"]),
        config_from(names["config"]),
        _time(names["us"], "us"),
        _library(names["library"]),
        _programs(names["programs"]),
        _whole(names["when"], "when", 0, MAX_SIZE),
    )


def problem_from(data: Any) -> Problem:
    """A checked problem."""
    values = _record(Problem, data, lambda name, value: _whole(value, name, 0, MAX_SIZE))
    problem = Problem(**values)
    dtype = getattr(torch, problem.dtype, None)
    if problem.gating not in GATINGS or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidEntryError(f"gating {problem.gating!r} or dtype {problem.dtype!r} is unknown")
    if not (problem.tokens and problem.top_k and problem.experts):
        raise InvalidEntryError("a problem without tokens or experts")
    return problem


def config_from(data: Any) -> Config:
    """A checked configuration."""
    values = _keys(data, "a configuration", {f.name for f in fields(Config)})
    bm = _setting("bm", values["bm"])
    kind = Tiles if bm else Vectors
    parts: dict[str, Any] = {name: kind(**_record(kind, values[name], _setting)) for name in ("up", "down")}
    rest = {name: value for name, value in values.items() if name not in ("bm", "up", "down")}
    hints = typing.get_type_hints(Config)
    for name, value in rest.items():
        _typed(hints[name], name, value, _setting)
    config = Config(bm=bm, **parts, **rest)
    if not config.possible:
        raise InvalidEntryError("warp-specialised kernels have no such tiles")
    return config


def _record(kind: type, data: Any, whole: Any) -> dict[str, Any]:
    """The fields of a dataclass, each of its declared type."""
    values = _keys(data, kind.__name__, {f.name for f in fields(kind)})
    hints = typing.get_type_hints(kind)
    return {name: _typed(hints[name], name, value, whole) for name, value in values.items()}


def _keys(data: Any, what: str, names: set[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidEntryError(f"{what} is a {type(data).__name__}")
    if set(data) != names:
        raise InvalidEntryError(f"{what} has the fields {sorted(map(str, data))}, not {sorted(names)}")
    return data


def _typed(hint: Any, name: str, value: Any, whole: Any) -> Any:
    """``value`` if its type is exactly the declared one (True is no number), within bounds."""
    if hint not in (bool, int, float, str) or type(value) is not hint:
        raise InvalidEntryError(f"{name} is {value!r}")
    if hint is int:
        whole(name, value)
    if hint is str and not _WORD.fullmatch(value):
        raise InvalidEntryError(f"{name} is {value!r}")
    if hint is float and not math.isfinite(value):
        raise InvalidEntryError(f"{name} is {value!r}")
    return value


def _setting(name: str, value: Any) -> int:
    number = _whole(value, name, 0 if name in FIRST_ZERO or name not in LIMITS else 1, LIMITS.get(name, MAX_SETTING))
    if name in POWERS and number & (number - 1):
        raise InvalidEntryError(f"{name} is {number}, not a power of two")
    return number


def _whole(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidEntryError(f"{name} is {value!r}")
    return value


def _time(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= MAX_TIME:
        raise InvalidEntryError(f"{name} is {value!r}")
    return float(value)


def _library(data: Any) -> dict[str, float]:
    if not isinstance(data, dict) or len(data) > MAX_FORMS or not all(_FORM.fullmatch(str(name)) for name in data):
        raise InvalidEntryError(f"library is {data!r}")
    return {name: _time(value, name) for name, value in data.items()}


def _programs(data: Any) -> dict[str, Pair]:
    if not isinstance(data, dict) or len(data) > MAX_PROGRAMS:
        raise InvalidEntryError("programs is no small object")
    out = {}
    for name, value in data.items():
        values = _keys(value, "a comparison", {"program_us", "fused_us", "tokens"})
        if not _PROGRAM.fullmatch(name):
            raise InvalidEntryError(f"program {name!r}")
        times = {which: _time(values[which], which) for which in ("program_us", "fused_us")}
        out[name] = Pair(**times, tokens=_whole(values["tokens"], "tokens", 1, MAX_SIZE))
    return out
