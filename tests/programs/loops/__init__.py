"""Expert loops that depend on data, as people write them, and loops that only look like one.

Every layer takes ``x [T, H]`` and router ``logits [T, E]``, so that a test decides which experts get no token at all.
"""

from tests.programs.loops import (
    capacity,
    conditions,
    dummies,
    ends,
    gradients,
    hits,
    names,
    near_conditions,
    near_python,
    near_rows,
    near_segments,
    near_tutorials,
    numbers,
    offsets,
    segments,
    tutorials,
    unique,
    weightless,
)
from tests.programs.loops.base import KINDS, NEAR_MISS, POSITIVE, E, Expert, H, I, K, Layer, logits_for

__all__ = [
    "KINDS",
    "NEAR_MISS",
    "POSITIVE",
    "E",
    "Expert",
    "H",
    "I",
    "K",
    "Layer",
    "capacity",
    "conditions",
    "dummies",
    "ends",
    "gradients",
    "hits",
    "logits_for",
    "names",
    "near_conditions",
    "near_python",
    "near_rows",
    "near_segments",
    "near_tutorials",
    "numbers",
    "offsets",
    "segments",
    "tutorials",
    "unique",
    "weightless",
]
