"""Experts on two ranks compute what one process computes: outputs, and every gradient, with mean loss."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.dist import equal, layers, scenes
from tests.dist.equal import Case
from tests.dist.workers import Workers
from tests.strategies import THOROUGH

EXACT = {"transport": "all_to_all"}
CASES = {
    # Each case says why it is there.
    "stacked, uneven": Case(layers.Stacked, (5, 7)),
    "a list of modules": Case(layers.Listed, (6, 4)),
    "a list for each projection": Case(layers.ByProjection, (6, 4)),
    "a module for each projection": Case(layers.ByModule, (6, 4), how=EXACT),
    "a module for each projection, round robin": Case(layers.ByModule, (6, 4), how={"placement": "round_robin"}, train=False),
    "transposed, biases, dense": Case(layers.Transposed, (5, 7)),
    "grouped products": Case(layers.Grouped, (5, 7)),
    "a shared expert": Case(layers.Shared, (5, 7)),
    "a buffer that counts": Case(layers.Counting, (5, 7)),
    "weight on the input": Case(layers.OnInput, (5, 7)),
    "nothing on one rank": Case(layers.Stacked, (9, 0)),
    "nothing on the other": Case(layers.Listed, (0, 3)),
    "a loop over experts that were hit": Case(layers.Hit, (5, 7)),
    "a loop over hit experts, nothing on one rank": Case(layers.Hit, (4, 0)),
    "a loop over hit experts, nothing on the other, exact splits": Case(layers.Hit, (0, 5), dtype=torch.float64, how=EXACT),
    "a loop over hit experts, nothing anywhere": Case(layers.Hit, (0, 0)),
    "a loop over hit experts, nothing on one rank, slices": Case(layers.Hit, (4, 0), how={"experts": "tp"}),
    "a loop that asks for sizes, nothing on one rank": Case(layers.Skipping, (4, 0)),
    "a loop that asks for sizes, nothing anywhere, slices": Case(layers.Skipping, (0, 0), how={"experts": "tp"}),
    "a loop over distinct ids, nothing on one rank": Case(layers.Distinct, (0, 5)),
    "a loop over distinct ids, nothing anywhere, exact splits": Case(layers.Distinct, (0, 0), how=EXACT),
    "one token": Case(layers.Stacked, (1, 1)),
    "all tokens to one rank's experts": Case(layers.Stacked, (6, 5), skew=True),
    "experts without remainder": Case(layers.Stacked, (6, 5), experts=4),
    "as many experts as ranks": Case(layers.Stacked, (6, 5), experts=2),
    "round robin": Case(layers.Stacked, (6, 5), how={"placement": "round_robin"}),
    "a table": Case(layers.Listed, (6, 5), how={"placement": [1, 0, 1]}),
    "most tokens known": Case(layers.Stacked, (3, 8), how={"max_tokens": 11}),
    "equal numbers of tokens": Case(layers.Stacked, (6, 6), how={"max_tokens": "equal"}),
    "sums of gradients": Case(layers.Stacked, (6, 5), how={"grads": "sum"}),
    "a part of a sequence": Case(layers.Stacked, (6, 5), how={"tokens": "sequence"}),
    "the same tokens": Case(layers.Stacked, (6, 6), how={"tokens": "replicated"}),
    "the same tokens, a list": Case(layers.Listed, (6, 6), how={"tokens": "replicated"}),
    "inference": Case(layers.Stacked, (5, 7), train=False),
    "inference, the same tokens": Case(layers.Shared, (6, 6), how={"tokens": "replicated"}, train=False),
    "computed again in backward": Case(layers.Stacked, (5, 7), checkpointed=True),
    "slices": Case(layers.Stacked, (5, 7), how={"experts": "tp"}),
    "slices, the same tokens": Case(layers.Shared, (6, 6), how={"experts": "tp", "tokens": "replicated"}),
    "slices of modules in a list": Case(layers.Listed, (5, 7), how={"experts": "tp"}),
    "slices, the same tokens, a list": Case(layers.Listed, (6, 6), how={"experts": "tp", "tokens": "replicated"}),
    "slices, transposed, biases": Case(layers.Transposed, (5, 0), how={"experts": "tp"}),
    "slices, row by row, sums": Case(layers.Interleaved, (5, 3), how={"experts": "tp", "grads": "sum"}),
    "slices, a part of a sequence": Case(layers.OnInput, (5, 3), how={"experts": "tp", "tokens": "sequence"}),
    "slices, what no template has": Case(layers.Grouped, (5, 7), how={"experts": "tp"}),
    "slices, what no template has, one Parameter, biases": Case(layers.OwnMerged, (5, 7), how={"experts": "tp"}),
    "slices, what no template has, row by row, sums": Case(layers.OwnInTurns, (5, 0), how={"experts": "tp", "grads": "sum"}),
    "slices, what no template has, inference": Case(layers.OwnMerged, (4, 4), how={"experts": "tp", "tokens": "replicated"}, train=False),
    "exact splits": Case(layers.Stacked, (5, 7), how=EXACT),
    "exact splits of a list": Case(layers.Listed, (9, 0), how=EXACT),
    "exact splits, all to one rank": Case(layers.Stacked, (6, 5), skew=True, how=EXACT),
    "exact splits, computed again": Case(layers.Stacked, (5, 7), checkpointed=True, how=EXACT),
    "exact splits, grouped products, a table": Case(layers.Grouped, (0, 7), how={**EXACT, "placement": [1, 0, 1]}),
    "exact splits, weight on the input": Case(layers.OnInput, (1, 1), dtype=torch.float64, how=EXACT),
    "exact splits of slices": Case(layers.Transposed, (4, 5), how={**EXACT, "experts": "tp"}),
    "exact splits, inference": Case(layers.Shared, (4, 5), how=EXACT, train=False),
    "float64": Case(layers.Stacked, (5, 7), dtype=torch.float64),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(two: Workers, name: str) -> None:
    case = CASES[name]
    for found in two.run(equal.run, case):
        assert found.worst <= (1e-12 if case.dtype == torch.float64 else 2e-6), found
        assert (len(found.report.fused), found.report.skipped) == (2, []), found.report
        assert not {op for op in found.ops if "gathered" in op}
        assert found.traveled == 2


FOUR = {
    "two experts on four ranks": Case(layers.Stacked, (5, 0, 7, 3), experts=2),
    "two experts of a list, sums": Case(layers.Listed, (5, 0, 7, 3), experts=2, how={"grads": "sum"}),
    "two experts, the same tokens": Case(layers.Shared, (5, 5, 5, 5), experts=2, how={"tokens": "replicated"}),
    "experts and slices": Case(layers.Stacked, (5, 7), how={"experts": ("ep", "tp")}, tensor=2),
    "experts and slices, biases, a table": Case(
        layers.Interleaved, (5, 0), how={"experts": ("ep", "tp"), "placement": [1, 0, 1]}, tensor=2
    ),
    "experts and slices, tokens of each rank's own": Case(layers.Stacked, (5, 0, 7, 3), how={"experts": ("ep", "tp")}, tensor=2),
    "experts and slices, most tokens known, sums": Case(
        layers.OnInput, (5, 1, 7, 3), how={"experts": ("ep", "tp"), "max_tokens": 8, "grads": "sum"}, tensor=2
    ),
    "experts and slices of a list": Case(layers.Listed, (5, 7), how={"experts": ("ep", "tp")}, tensor=2),
    "experts and slices, what no template has, a table": Case(
        layers.OwnMerged, (5, 4), how={"experts": ("ep", "tp"), "placement": [1, 0, 1]}, tensor=2
    ),
    "experts and slices, the same tokens": Case(layers.Shared, (5, 5), how={"experts": ("ep", "tp"), "tokens": "replicated"}, tensor=2),
}


@pytest.mark.thorough
def test_four_ranks() -> None:
    """Two with other experts, twice, of which each has one half; or copies of two experts, whose gradients are averaged."""
    workers = Workers(4)
    try:
        for name, case in list(FOUR.items())[:: 1 if THOROUGH else 2]:
            for found in workers.run(equal.run, case):
                assert found.worst <= 2e-6, (name, found)
                assert (len(found.report.fused), found.report.skipped) == (2, []), (name, found.report)
                assert not {op for op in found.ops if "gathered" in op}, (name, found.ops)
                assert found.traveled == (4 if case.tensor > 1 else 2), name
        for norms, outs in workers.run(scenes.training, layers.Listed, 2):
            assert max(norms, outs) <= 1e-5  # gradients of two backward passes are added up
        for name in ("two experts on four ranks", "experts and slices of a list"):
            gathered = workers.run(equal.run, replace(FOUR[name], behind=None))
            assert max(found.worst for found in gathered) <= 2e-6, (name, gathered)
    finally:
        workers.close()


@pytest.mark.parametrize(
    "name", ["stacked, uneven", "a list of modules", "round robin", "the same tokens", "slices", "slices, row by row, sums"]
)
def test_eager_gathers(two: Workers, name: str) -> None:
    """A model that is not compiled is right, too."""
    case = CASES[name]
    for found in two.run(equal.run, replace(case, behind=None)):
        assert found.worst <= 2e-6, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.Mixed, layers.Hit, layers.Skipping])
def test_weights_that_are_to_travel(two: Workers, kind: type[torch.nn.Module]) -> None:
    """``transport="gather"``: fused on gathered weights, and nothing to complain of; what is refused is so for its own reason.

    Where a rank has no tokens, its gradients of zeros are waited for.
    """
    tokens = (5, 0) if kind in (layers.Hit, layers.Skipping) else (5, 7)
    for found in two.run(equal.run, Case(kind, tokens, how={"transport": "gather"})):
        assert found.worst <= 2e-6, found
        assert not {op for op in found.ops if "ep_" in op}
        if kind is layers.Mixed:
            assert {s.code for s in found.report.skipped} == {"not-row-local"}
        else:
            assert (len(found.report.fused), found.report.skipped) == (2, []), found.report
            assert "gather" in found.report.fused[0].parallel


def test_all_sizes_dynamic(two: Workers) -> None:
    """E is none of them, though it is read from a weight that is put together."""
    for found in two.run(equal.run, Case(layers.Transposed, (5, 7), dynamic=True)):
        assert found.worst <= 2e-6, found
        assert {fused.module for fused in found.report.fused} == {"first", "second"}
        assert not found.report.skipped


def test_buffers_of_experts(two: Workers) -> None:
    """They may be statistics of a rank's own tokens: the layer gathers, and says of what."""
    for found in two.run(equal.run, Case(layers.Buffers, (5, 7), train=False, behind=scenes.BEHIND)):
        assert found.worst <= 2e-6, found
        texts = {s.message for s in found.report.skipped if s.code == "experts-gathered"}
        said = "`{}.bias` may differ from rank to rank: only Parameters are alike"
        assert [said.format(layer) in text for layer, text in zip(("first", "second"), sorted(texts), strict=True)] == [True, True], texts


def test_weights_that_are_computed_of_sharded_ones(two: Workers) -> None:
    """They are alike on all ranks; the layer gathers since nobody computes them of a rank's own rows, and says that."""
    for found in two.run(equal.run, Case(layers.Scaled, (5, 7), behind=scenes.BEHIND)):
        assert found.worst <= 2e-6, found
        said = {s.message for s in found.report.skipped if s.code == "experts-gathered"}
        assert said
        assert all(re.search(r"it computes weights from all of (gate_up|scale) in each call: only views", text) for text in said), said


def test_weights_that_are_read_twice(two: Workers) -> None:
    """Views of a read whose place another one has taken are views of that, and what nobody reads of them gathers nothing."""
    for found in two.run(equal.run, Case(layers.Twice, (5, 7), train=False, behind=scenes.BEHIND)):
        assert found.worst <= 2e-6, found
        assert (len(found.report.fused), found.report.skipped, found.report.notes) == (2, [], []), found.report
        assert "gathered" not in str(found.ops)


def test_what_is_refused_gathers(two: Workers) -> None:
    """Rows are mixed: nothing is fused, nothing is wrong, and both is said."""
    for found in two.run(equal.run, Case(layers.Mixed, (5, 7), experts=2, behind=scenes.BEHIND)):
        assert found.worst <= 2e-6, found
        assert not found.report.fused
        assert {s.code for s in found.report.skipped} == {"not-row-local", "experts-gathered"}, found.report


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_through_inductor(two: Workers, kind: type[torch.nn.Module]) -> None:
    how = EXACT if kind is layers.Listed else {}
    for found in two.run(equal.run, Case(kind, (5, 0), 2, behind="inductor", how=how)):
        assert found.worst <= 2e-6, found
        assert len(found.report.fused) == 2


def test_checkpoints_and_one_token(two: Workers) -> None:
    """Inductor partitions by sizes, and ranks have to dispatch again in the same order."""
    for found in two.run(equal.run, Case(layers.Again, (1, 4), behind="front")):
        assert found.worst <= 2e-6, found
        assert (len(found.report.fused), found.report.skipped) == (2, []), found.report
