"""A rank that raises, stalls, leaves or does something else: what the others get, how soon, and that nothing is wrong afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.dist import faults, scenes
from tests.dist.faults import LATE, TIMEOUT
from tests.dist.workers import Workers

SEES = "rank 1 raised before it sent its tokens; its own error says why"
ALL_TO_ALL = {"transport": "all_to_all"}
APART = "PeerError: first: rank 1 runs {} of {}, where rank 0 runs ep_dispatch of first with float32[8], int64[2] ("
OUT_OF_STEP = "PeerError: first: this rank and the others of the mesh 'ep"


@pytest.mark.parametrize(
    ("name", "how", "own"),
    [
        ("wrong shape", {}, "ValueError: ep_dispatch takes ids [T, K] of integers and rows [T, ..], not torch.int64 [4, 2] and [3, 8]"),
        ("wrong shape", ALL_TO_ALL, "ValueError: ep_dispatch takes ids [T, K]"),
        ("no memory", ALL_TO_ALL, "OutOfMemoryError: rank 1 has no memory"),
        ("too many", {**ALL_TO_ALL, "max_tokens": 6}, "TooManyTokens: first: rank 1 has 9 tokens, and max_tokens=6 was promised"),
    ],
)
def test_who_raises_first_says_so(two: Workers, name: str, how: dict[str, Any], own: str) -> None:
    """In place of its number of tokens: nobody waits, and ranks that go on are in step."""
    (text, seconds, again, later), (theirs, _, there_again, there_later) = two.run(faults.fault, name, **how)
    assert text == f"PeerError: first: {SEES}"
    assert seconds < TIMEOUT / 2
    assert theirs.startswith(own)
    assert (again, later, there_again, there_later) == ("nothing", True, "nothing", True)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("other layers", {}, ("ep_dispatch", "second with float32[8], int64[2] (ep")),
        ("other layers", ALL_TO_ALL, ("ep_dispatch", "second with float32[8], int64[2] (ep")),
        ("other dtypes", {}, ("ep_dispatch", "first with float64[8], int64[2] (ep")),
        ("gathers of other layers", {}, ("gathered gate_up", "first with float32[24, 8] (ep")),
        ("eager and compiled", {}, ("gathered gate_up", "first with float32[24, 8] (ep")),
    ],
)
def test_ranks_that_run_something_else(two: Workers, name: str, how: dict[str, Any], said: tuple[str, str]) -> None:
    """Collectives that would fit each other by chance, or kill the process in gloo: found before a row has travelled."""
    for rank, (text, seconds, again, later) in enumerate(two.run(faults.fault, name, **how)):
        wanted = "rank 1 runs {} of {}".format(*said)
        assert wanted in text, (rank, text)
        assert text.startswith("PeerError: ")
        there = "gathered gate_up of second with float32[24, 8]" if "gathers" in name else "ep_dispatch of first with float32[8], int64[2]"
        assert f"where rank 0 runs {there} (ep" in text
        assert text.endswith("in the same order, with the same numbers in their experts, and all compiled or all in eager mode")
        assert ("(a rank that gathers is in eager mode, or its report says why)" in text) is (name == "eager and compiled")
        assert seconds < TIMEOUT / 2
        assert (again, later) == ("nothing", True), (rank, again)


def test_a_failure_in_the_middle(two: Workers) -> None:
    """Who has left the order of collectives never sends rows again, and says so instead of the next ones."""
    (text, _, again, later), (theirs, _, there_again, there_later) = two.run(faults.fault, "in the middle")
    assert (text, theirs) == ("nothing", "OutOfMemoryError: rank 1 has no memory")
    assert again == "PeerError: first: rank 1 failed in the middle of an earlier call; its own error says why"
    assert there_again.startswith(OUT_OF_STEP)
    assert "since an earlier error (rank 1 has no memory): start all processes again" in there_again
    assert (later, there_later) == ("nothing", "nothing")


LEAVING = {
    "idle": ({}, "nothing"),
    "between": ({}, "ValueError: rank 1 has a bad batch"),
    "backward": ({}, "ValueError: rank 1 has a bad gradient"),
    "too many": ({"max_tokens": 6}, "TooManyTokens: first: rank 1 has 9 tokens, and max_tokens=6 was promised"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LEAVING)
def test_a_rank_that_does_not_come(two: Workers, name: str) -> None:
    """The group's timeout, and the layer's name; a rank that goes on afterwards raises, too, or is in step."""
    how, own = LEAVING[name]
    (text, seconds, again, later), (theirs, _, there_again, there_later) = two.run(faults.fault, name, **how)
    assert text.startswith("PeerError: first: another rank of the mesh 'ep"), text
    assert LATE <= seconds < LATE + 5
    assert theirs == own
    for found in (again, there_again):
        assert found.startswith("PeerError: first: "), found
    assert (later, there_later) == ("nothing", "nothing")


def test_a_slow_rank(two: Workers) -> None:
    assert two.run(faults.slow) == [True, True]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_rank(where: str) -> None:
    """At once, for its connections are closed; and it is gone."""
    workers = Workers(2, timeout=60)
    try:
        (alive, text), (there, _) = workers.try_to(faults.killed, where)
        workers.processes[1].join(5)
        assert workers.processes[1].exitcode == 1
    finally:
        workers.close()
    assert alive, text
    assert not there
    assert text.startswith("PeerError: first: another rank of the mesh 'ep' failed, or did not come: "), text


def test_other_graphs(two: Workers) -> None:
    """Sizes that are symbols on one rank and constants, compiled again, on the other, a second later."""
    for found in two.run(faults.programs, "shapes", scenes.BEHIND):
        assert len(found) == 3
        assert max(found) <= 1e-5, found


def test_a_break_inside_of_experts_on_one_rank(two: Workers) -> None:
    """There weights are gathered, here tokens travel: both are told, before a number is wrong."""
    for found in two.run(faults.programs, "a break inside", scenes.BEHIND):
        (text,) = found
        assert text.startswith("PeerError: "), text
        assert "rank 1 runs gathered gate_up of second with " in text
        assert re.search(r"where rank 0 runs ep_experts \[\w{8}\] of second with ", text)


@pytest.mark.every_value
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transport", ["allgather", "all_to_all"])
@pytest.mark.parametrize("what", faults.OWN)
def test_experts_with_numbers_of_a_rank(two: Workers, what: str, transport: str, grad: bool) -> None:
    """A rank's experts run on the tokens of all, by its numbers: ranks that have others are told, and those that have the same go on."""
    for errors, text in two.run(faults.numbers, what, transport, grad, scenes.BEHIND):
        assert (len(errors), max(errors, default=0.0) <= 1e-5) == (0 if what == "a float" else 2, True)
        assert re.search(r"PeerError: second: rank 1 runs (.*) of second with .*, where rank 0 runs ", text), text
        assert len(set(re.findall(r" ep_\w+ (\[\w{8}\])", text))) == 2, text
        assert text.endswith("with the same numbers in their experts, and all compiled or all in eager mode")
