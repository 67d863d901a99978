"""Ranks of several hosts: a row crosses to each host once, and everything is as on one process. Four processes that pose as hosts."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.dist import layers, posing, scenes, travel
from tests.dist.equal import Case
from tests.dist.workers import Workers

five = functools.partial(Case, experts=5, behind=scenes.BEHIND)
CASES = {
    # Each case says why it is there. The letters are the hosts of ranks 0 to 3.
    "two of two": ("aabb", five(layers.Stacked, (5, 7, 3, 4))),
    "hosts of three and one": ("aaab", five(layers.Listed, (5, 7, 3, 4))),
    "ranks in turns": ("abab", five(layers.Stacked, (5, 7, 3, 4), how={"placement": "round_robin"})),
    "three hosts": ("abbc", five(layers.Shared, (2, 7, 0, 4), how={"placement": [3, 0, 0, 1, 2]})),
    "one host has no tokens": ("aabb", five(layers.OnInput, (5, 3, 0, 0), dtype=torch.float64)),
    "one rank has tokens": ("abbb", five(layers.Stacked, (0, 0, 9, 0))),
    "all tokens to one host": ("aabb", five(layers.Stacked, (6, 5, 4, 3), skew=True)),
    "computed again in backward": ("aaab", five(layers.Stacked, (5, 7, 1, 0), checkpointed=True)),
    "inference": ("aabb", five(layers.Grouped, (5, 7, 3, 4), train=False)),
    "slices": ("aabb", five(layers.Transposed, (5, 7, 3, 4), how={"experts": "tp"})),
    "two experts, which a host has": ("aabb", five(layers.Stacked, (5, 0, 7, 3), experts=2)),
    "each rank on a host of its own": ("abcd", five(layers.Stacked, (5, 7, 3, 4))),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(four: Workers, name: str) -> None:
    hosts, case = CASES[name]
    way = "all_to_all" if len(set(hosts)) == len(hosts) else "rails"
    for found, transports in four.run(posing.run, hosts, case):
        assert found.worst <= (1e-12 if case.dtype == torch.float64 else 2e-6), found
        assert (len(found.report.fused), found.report.skipped) == (2, []), found.report
        assert not {op for op in found.ops if "gathered" in op}
        assert transports == [way] * 2
        assert ("all_to_all" + f" over {len(set(hosts))} hosts" * (way == "rails")) in found.report.fused[0].parallel


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abca"])
@pytest.mark.parametrize("counts", [(5, 4, 2, 5), (0, 16, 0, 0)], ids=["uneven", "none"])
def test_rows_stay_together(four: Workers, hosts: str, counts: tuple[int, ...]) -> None:
    """Tensors of four dtypes arrive together, once each; float8 has the numbers below 17."""
    number = torch.arange(16)
    ids = travel.ids_of(number)
    for rank, found in enumerate(four.run(posing.together, hosts, counts)):
        wanted = number[travel.needs(ids, rank, 4)].tolist()
        assert sorted(found) == [(n, n * (8 + 3 + 1 + 5)) for n in wanted]


@pytest.mark.parametrize(("hosts", "numbers"), [("aabb", (0, 0, 1, 1)), ("abab", (0, 1, 0, 1)), ("xxxx", (0, 0, 0, 0))])
def test_hosts_are_known_to_all(four: Workers, hosts: str, numbers: tuple[int, ...]) -> None:
    assert four.run(posing.hosts_of, hosts) == [numbers] * 4


def test_equal_calls_give_equal_bits(four: Workers) -> None:
    assert all(all(found) for found in four.run(posing.several_times, "aaab"))


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_what_crosses(four: Workers, hosts: str) -> None:
    """One row for each (token, other host), each of four times; nothing of the second hop; counts are exchanged once, by dispatch."""
    for found, far, apart in four.run(posing.crossed, hosts, 40):
        assert found.exchanges == 1
        over, near = found.rows[:2], found.rows[2:4]
        assert over == [far, far]  # of rows and of ids
        assert near == [0, 0]
        assert len(found.rows) == 4 + 2 + 2 + 2  # dispatch, combine, and backward of both
        assert found.rows[4] == found.rows[7] == 0 or far
        assert far <= apart


@pytest.mark.thorough
def test_through_inductor(four: Workers) -> None:
    """In inference; the last one, for four compilers on few cores are slow."""
    for found, _ in four.run(posing.run, "aaab", five(layers.Stacked, (5, 0, 2, 1), behind="inductor", train=False), wait=300):
        assert found.worst <= 2e-6, found
        assert len(found.report.fused) == 2
