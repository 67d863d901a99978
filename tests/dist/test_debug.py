"""``debug=True``: what ranks were said to have alike, and have not, in one sentence that names two ranks and the layer."""

from __future__ import annotations

from typing import Any

import pytest

from moefuse.runtime.groups import Terms
from tests.dist import equal, faults, layers
from tests.dist.equal import Case
from tests.dist.workers import Workers

PROMISES: dict[str, tuple[tuple[int, int], dict[str, Any], str]] = {
    "tokens": (
        (3, 3),
        {"tokens": "replicated"},
        'ParallelError: ranks 0 and 1 hold different tokens at first, but tokens="replicated" was said',
    ),
    "more tokens": (
        (3, 4),
        {"tokens": "replicated"},
        'ParallelError: ranks 0 and 1 have 3 and 4 tokens at first, but tokens="replicated" was said',
    ),
    "equal numbers": (
        (5, 6),
        {"max_tokens": "equal"},
        'ParallelError: ranks 0 and 1 have 5 and 6 tokens at first, but max_tokens="equal" was said',
    ),
    "most tokens": ((6, 9), {"max_tokens": 6}, "TooManyTokens: first: rank 1 has 9 tokens, and max_tokens=6 was promised"),
}


@pytest.mark.parametrize("name", PROMISES)
def test_promises(two: Workers, name: str) -> None:
    """The same sentence on both ranks, which are in step afterwards."""
    counts, how, wanted = PROMISES[name]
    assert two.run(faults.promised, counts, how) == [(wanted, "nothing")] * 2


@pytest.mark.parametrize("name", ["first.router.weight", "norm.bias", "first._moefuse_place"])
def test_weights(two: Workers, name: str) -> None:
    """One number of one tensor, a buffer's as well: found at the first call."""
    wanted = (
        f"ParallelError: ranks 0 and 1 hold different values of {name}, which all ranks should have alike: build the model from one seed, "
        "or load the same weights, on all of them"
    )
    assert two.run(faults.weights, name) == [wanted] * 2


def test_other_models(two: Workers) -> None:
    wanted = "ParallelError: the models of ranks 0 and 1 have Parameters of other names or shapes: build the same model on all ranks"
    assert two.run(faults.weights, "one_more") == [wanted] * 2


def test_other_ops(two: Workers) -> None:
    """With a known number of tokens nothing is exchanged, and only this finds ranks that are not in step."""
    for text, _, again, later in two.run(faults.fault, "other layers", max_tokens=8, debug=True):
        assert text.startswith("PeerError: "), text
        assert "rank 1 runs ep_dispatch of second with float32[8], int64[2] (ep" in text
        assert "where rank 0 runs ep_dispatch of first with " in text
        assert (again, later) == ("nothing", True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{"debug": True}, {"debug": True, "tokens": "replicated", "experts": "tp"}])
def test_nothing_to_complain_of(two: Workers, how: dict[str, Any]) -> None:
    """A model that is right stays so, with gradients."""
    kind, tokens = (layers.Shared, (6, 6)) if "tokens" in how else (layers.Stacked, (5, 7))
    for found in two.run(equal.run, Case(kind, tokens, how=how)):
        assert found.worst <= 2e-6, found
        assert len(found.report.fused) == 2


def test_terms() -> None:
    """Graphs of others are what they were."""
    for terms in (Terms("ep", most=5), Terms("a/b", debug=True)):
        assert Terms.parse(terms.text) == terms
        assert ("debug" in terms.text) == terms.debug
