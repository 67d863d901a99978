"""The protocol of ``hopper/ring.py`` over random schedules (``ring_model.py``); a mutation of each rule shows that it is found broken."""

from __future__ import annotations

import random
import types
from dataclasses import replace
from typing import Any

import pytest

from tests.strategies import THOROUGH
from tests.triton.ring_machine import BrokenError
from tests.triton.ring_model import SLOTS, Case, Tile, advance, before, run, skip

KINDS = {
    "products, shared": (False, "shared", (2,)),
    "products, pingpong": (False, "pingpong", (1, 2)),
    "gradients, shared": (True, "shared", (2,)),
    "gradients, pingpong": (True, "pingpong", (1,)),
}


def case_of(kind: str, stages: int, seed: int) -> Case:
    """A random case: often fewer steps than stages, and of gradients some tiles without any."""
    draw = random.Random(f"{kind}{stages}{seed}")
    grads, form, pieces = KINDS[kind]
    most = draw.choice((1, 3, stages, 10, 20))
    each = draw.randint(1, most)
    many = draw.choice(pieces)
    rows = draw.choice((0.0, 0.4, 1.0))  # how often the second piece has none

    def tile() -> Tile:
        if grads:
            return Tile(draw.choice((0, draw.randint(0, most))), many)
        return Tile(each, 1 if draw.random() < rows else many)

    return Case(grads, form, stages, many, tuple(tile() for _ in range(draw.randint(0, 12))), draw.choice((1, 1, 2, 3)))


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_the_protocol(kind: str, stages: int) -> None:
    for seed in range(1000 if THOROUGH else 60):
        case = case_of(kind, stages, seed)
        try:
            run(case, seed)
        except BrokenError as broken:
            raise AssertionError(f"{broken}: {case}, seed {seed}") from broken


@pytest.mark.parametrize("kind", KINDS)
def test_programs_without_tiles(kind: str) -> None:
    """More programs than tiles, or no tile at all."""
    for tiles in (0, 1, 3):
        case = case_of(kind, 3, tiles)
        steps = case.tiles[0].steps if case.tiles else 2
        run(replace(case, tiles=(Tile(steps, case.pieces),) * tiles, programs=5), tiles)


BOTH, SHARED, IN_TURN = tuple(KINDS), ("products, shared", "gradients, shared"), ("products, pingpong", "gradients, pingpong")
PRODUCTS = ("products, shared", "products, pingpong")
WRONG: dict[str, tuple[str, ...]] = {
    "the producer waits at first": BOTH,
    "consumers do not wait at first": BOTH,
    "stages are written over": BOTH,
    "rows are not expected": BOTH,
    "a stage is given back while its product runs": BOTH,
    "products are not waited for": BOTH,
    "the last product is not waited for": BOTH,
    "the last stage is kept": BOTH,
    "notes are written over": BOTH,
    "notes are read at once": BOTH,
    "stages have one reader": SHARED,
    "notes have one reader": SHARED,
    "unread steps are given back before they come": ("products, shared",),
    "unread steps are kept": ("products, shared",),
    "turns are not waited for": IN_TURN,
    "turns end before steps are seen": IN_TURN,
    "turns do not end": IN_TURN,
    "both begin": IN_TURN,
    "nobody begins": IN_TURN,
    "one end for two groups": IN_TURN,
    "steps of the other are not skipped": IN_TURN,
    "skipped steps do not count for the phase": IN_TURN,
    "a tile's own steps are skipped": ("gradients, pingpong",),
    "draws begin at the first tile": PRODUCTS,
    "nobody resets": PRODUCTS,
    "every program resets": PRODUCTS,
    "the end overtakes draws": PRODUCTS,
}


@pytest.mark.parametrize(("wrong", "kind"), [(wrong, kind) for wrong, kinds in WRONG.items() for kind in kinds])
def test_the_model_catches(wrong: str, kind: str) -> None:
    """Each mutation breaks a rule in some schedule; what is right in the same ones, other tests show."""
    assert fails(wrong, kind), f"the model does not notice: {wrong}"


def fails(wrong: str, kind: str) -> bool:
    for seed in range(300):
        try:
            run(case_of(kind, 2 + seed % 7, seed), seed, wrong)
        except BrokenError:
            return True
    return False


def test_the_arithmetic_is_the_kernels() -> None:
    """The kernel's own functions, run by Python, against the model's."""
    from moefuse.kernels.triton.hopper import ring

    def python(function: Any) -> Any:
        where = types.SimpleNamespace(where=lambda which, yes, no: yes if which else no)
        return types.FunctionType(function.fn.__code__, {"gl": where})

    assert ring.SLOTS.value == SLOTS
    for stages in range(2, 9):
        for stage in range(stages):
            assert python(ring.before)(stage, stages) == before(stage, stages)
            for phase in (0, 1):
                assert python(ring.advance)(stage, phase, stages) == advance(stage, phase, stages)
                for steps in range(40):
                    assert python(ring.skip)(stage, phase, steps, stages) == skip(stage, phase, steps, stages)
