"""Loops that call some of the experts, hooked or not, in eager mode and compiled: right on all ranks, whatever tokens they have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import hooked
from tests.dist.workers import TIMEOUT, Workers
from tests.strategies import THOROUGH

CASES = [(kind, hook) for kind in hooked.KINDS for hook in hooked.HOOKS if hook == "none" or kind in ("skipping", "hit")]
COUNTS = ((5, 0), (1, 2), (0, 0))
"""Nothing on one rank, few that want other experts on each rank, and nothing anywhere."""
COMPILED = [(kind, hook, train) for kind in ("skipping", "hit") for hook in hooked.HOOKS if hook != "none" for train in (True, False)]
COMPILED += [(kind, hook, False) for kind in ("distinct", "acting", "breaking") for hook in ("none", "doubles")]


@pytest.mark.parametrize(("kind", "hook"), CASES)
def test_right(two: Workers, kind: str, hook: str) -> None:
    """Nobody waits for who calls less."""
    for counts in COUNTS[:2] if THOROUGH else (COUNTS[CASES.index((kind, hook)) % 2],):
        assert max(two.run(hooked.hooked, kind, hook, counts)) <= 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{"experts": "tp"}, {"placement": "round_robin"}, {"max_tokens": 8}, {"tokens": "replicated"}], ids=str)
def test_terms(two: Workers, how: dict[str, Any]) -> None:
    counts = (5, 5) if "tokens" in how else (0, 5)
    assert max(two.run(hooked.hooked, "hit", "doubles", counts, train="max_tokens" in how, **how)) <= 1e-5


def test_a_hook_on_one_rank(two: Workers) -> None:
    assert max(two.run(hooked.hooked, "hit", "records", (5, 0), alone=True)) <= 1e-5


@pytest.mark.parametrize("counts", [(5, 0), (1, 2)])
def test_computed_again(two: Workers, counts: tuple[int, int]) -> None:
    assert max(two.run(hooked.hooked, "skipping", "doubles", counts, again=True)) <= 1e-5


def test_in_inference(two: Workers) -> None:
    assert max(two.run(hooked.hooked, "skipping", "records", (0, 5), train=False)) <= 1e-5


def test_what_a_call_gives(two: Workers) -> None:
    """Weights that a call has read are behind it; on a rank that read none they are put there."""
    some, none = two.run(hooked.nothing_behind)
    assert some == ["IndexAddBackward0", "False"]
    assert none == ["_BehindBackward", "False"]


@pytest.mark.parametrize(
    ("kind", "hook", "counts"),
    [
        ("skipping", "records", COUNTS[::2]),  # torch knows that nobody has tokens: the rank's graph had no experts at all
        ("hit", "before", COUNTS[1:2]),
        ("breaking", "none", COUNTS[:1]),  # which experts are compiled, each by itself, depends on a rank's tokens
    ],
)
def test_compiled(two: Workers, kind: str, hook: str, counts: tuple[tuple[int, int], ...]) -> None:
    """What a rank's tokens decide about calls of experts decides nothing about its collectives."""
    for some in counts if not THOROUGH else COUNTS:
        assert max(two.run(hooked.hooked, kind, hook, some, compiled=True)) <= 1e-5


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("kind", "hook", "train"), COMPILED)
def test_compiled_all(two: Workers, kind: str, hook: str, train: bool) -> None:
    for counts in COUNTS:
        assert max(two.run(hooked.hooked, kind, hook, counts, train=train, compiled=True)) <= 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", [{"experts": "tp"}, {"placement": "round_robin"}, {"max_tokens": 8}, {"tokens": "replicated"}], ids=str)
def test_compiled_terms(two: Workers, how: dict[str, Any]) -> None:
    counts = (5, 5) if "tokens" in how else (0, 5)
    assert max(two.run(hooked.hooked, "hit", "doubles", counts, compiled=True, **how)) <= 1e-5


def test_a_hook_that_comes_and_goes(two: Workers) -> None:
    """What was compiled without a hook is not used with one, and is again once it has gone, on a rank without tokens as well."""
    for worst, fused in two.run(hooked.comes_and_goes, (5, 0)):
        assert max(worst) <= 1e-5
        assert fused[0] == ["first", "second"]
        assert "first" not in (*fused[1], *fused[2])


def test_one_graph(two: Workers) -> None:
    """Whoever wants one graph is told of the hook, on a rank without tokens as well."""
    for said in two.run(hooked.one_graph):
        assert "first.experts.1 has one (register_forward_hook)" in said
        assert "hook the layer's input or output" in said


def test_the_report_names_the_hook(two: Workers) -> None:
    for skipped in two.run(hooked.reported):
        ((_, module, text),) = [found for found in skipped if found[0] == "hook"]
        assert module == "first"
        assert "first.experts.1 has one (register_forward_pre_hook)" in text
        assert {code for code, *_ in skipped} == {"hook"}


def test_compiled_with_a_hook_on_one_rank(two: Workers) -> None:
    """Ranks that run other programs are told at once, and which hook it is."""
    for said, seconds in two.run(hooked.other_programs):
        assert "first.experts.1 has one (register_forward_hook)" in said
        assert seconds < TIMEOUT
