"""What an adversary found: ranks that do other things than each other without knowing it, and writes that would be lost."""

from __future__ import annotations

import pytest

from tests.dist import attacks
from tests.dist.workers import Workers

APART = {
    "layers": (attacks.other_layers, "of 0 ", "of 1 "),
    "models": (attacks.other_models, "(model 2)", "ep_experts"),
    "weights": (attacks.other_weights, "gathered first", "gathered third"),
    "gradients": (attacks.other_gradients, "gathered_backward first", "gathered_backward third"),
    "backward, debug=True": (attacks.other_backward, "ep_send of first", "ep_send of second"),
}


@pytest.mark.parametrize("name", APART)
def test_ranks_that_do_other_things(two: Workers, name: str) -> None:
    """Of equal shapes, so that numbers would be mixed up. Both ranks raise, and say what each of them ran."""
    function, *said = APART[name]
    for text in two.run(function):
        assert text.startswith("PeerError: "), text
        for part in said:
            assert part in text


def test_writes_that_would_be_lost(two: Workers) -> None:
    for found in two.run(attacks.writes):
        for text in found:
            assert "was written to, and is put together from all ranks each time it is read" in text, found


def test_what_is_read_is_plain(two: Workers) -> None:
    assert two.run(attacks.reads) == [(True, True, True)] * 2


def test_a_checkpoint_without_an_expert(two: Workers) -> None:
    """Rank 1 does not hold that expert, and says what rank 0 says."""
    (lacks, differs, only), other = two.run(attacks.incomplete)
    assert [lacks, differs, only] == other
    assert "Missing key(s) in state_dict" in lacks
    assert "size mismatch for" in differs
    assert only == "True"


def test_a_checkpoint_in_parts(two: Workers) -> None:
    """What is there is loaded: the rest of a list that lacks a key, and experts file by file."""
    assert two.run(attacks.in_parts) == [["True", "['router.weight']"]] * 2
