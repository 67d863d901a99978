"""Generated programs with effects at random places: whatever is fused, a user sees what eager does."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cpu.test_around_calls import DUALS_LEFT
from tests.programs.effects import NAMES, Program, draw, shrunk, verdict
from tests.programs.effects.faults import FAULTS, shows
from tests.programs.effects.found import FOUND
from tests.programs.effects.layers import Spelling
from tests.programs.effects.program import Effect
from tests.programs.effects.run import fails
from tests.programs.effects.views import NAMES as NAMESPACE, chain, shares, views
from tests.programs.effects.writes import writes
from tests.strategies import THOROUGH

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PROGRAMS = 400 if THOROUGH else 5
"""Of each kind of effect: a minute for all of them. benchmarks/deep_programs.py runs thousands."""

REFUSED = ("orders",)
"""What is not to be fused: no op has its features first."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", NAMES)
def test_effects_are_kept(kind: str) -> None:
    """Outputs, inputs, parameters, buffers, gradients, random numbers and Python's state of several calls."""
    fused = 0
    for seed in range(PROGRAMS):
        p = draw(seed, kind)
        found = verdict(p)
        fused += found.fused > 0
        if found.failed:
            small = shrunk(p, fails)
            pytest.fail(f"{kind} {seed}: {found.wrong[:3]} {found.codes}\n{p}\n# made small: {verdict(small).wrong[:3]}\n{small}")
    assert fused >= max(1, PROGRAMS // 4) or kind in REFUSED, "little is fused in spite of effects, or beside them"


@pytest.mark.parametrize(("seed", "behind"), [(2, "aot_eager"), (3, "aot_eager"), (5, "inductor")])
def test_effects_behind_torchs_compilers(seed: int, behind: str) -> None:
    """The same through what users have behind moefuse, for a few."""
    p = draw(seed)
    found = verdict(p, behind)
    assert not found.failed, f"{found.wrong[:3]} {found.codes}\n{p}"


@pytest.mark.thorough
def test_what_eager_says_wrongly_is_no_truth() -> None:
    """Eager stops at an assertion that Inductor drops, in a program whose saved ids NumPy has changed: both say nothing of gradients."""
    asserts = Effect("promises", (("tabled", "torch._assert_async((w > 0.2).all())"),))
    later = Effect("ids later", (("before", "self.kept = torch.from_numpy(ids.detach().numpy())"), ("caller", "kept.copy_(kept.flip(0))")))
    spelling = Spelling("table", "sorted", add="index_add", sum="add_", skip="numel", own="x = x * 1")
    found = verdict(Program(spelling, (asserts, later), twins=True, tokens=(5, 5, 5), seed=3, patient=False))
    assert found.theirs
    assert not found.failed, found.wrong


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in FAULTS if n != "tangents unseen" or not DUALS_LEFT])
def test_a_fault_is_seen(name: str) -> None:
    """Were it put back, its program would be wrong; as it is, the program is right. Or nothing is left of what this is a test of."""
    fault = FAULTS[name]
    assert shows(fault).wrong, f"{name} is not seen\n{fault.program}"
    found = verdict(fault.program)
    assert not found.failed, f"{found.wrong[:3]} {found.codes}\n{fault.program}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "defence"), [(name, defence) for name, fault in FAULTS.items() for defence in fault.defences])
def test_each_defence_is_enough(name: str, defence: str) -> None:
    """A fault that has to pass several is caught by any of them: or one of them guards nothing, and nobody would see it go."""
    found = shows(FAULTS[name], on=defence)
    assert not found.failed, f"{defence} lets {name} through: {found.wrong[:3]}\n{FAULTS[name].program}"
    assert defence != "last look" or "effects-differ" in found.codes


LONG = "columns, compiled for any number"
"""Beside the same for one number."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) if name == LONG else name for name in FOUND])
def test_what_was_wrong_once(name: str) -> None:
    """Two calls, between which parameters change: everything that a user can see of them is eager's, and as much is fused as can be."""
    case = FOUND[name]
    seen = verdict(case.program, case.behind)
    assert (seen.wrong, seen.theirs, seen.no_program) == ([], [], ""), f"{seen}\n{case.program}"
    assert (seen.fused, case.codes and tuple(sorted(set(seen.codes)))) == (case.fused, case.codes), f"{seen}\n{case.program}"


def test_views_and_writes_come_from_torch() -> None:
    """Those that once nobody had thought of are among them."""
    names = {
        "hsplit",
        "atleast_2d",
        "positive",
        "cpu",
        "as_strided",
        "broadcast_to",
        "data",
        "real",
        "mT",
        "alias",
        "view",
        "unbind",
        "expand",
    }
    assert names <= set(views())
    assert {"add_", "_foreach_mul_", "index_fill_", "relu", "add", "masked_fill_", "scatter_", "index_add_", "index_copy_"} <= set(
        writes(False)
    )
    assert "clamp_" in writes(True)


def test_chains_share_memory() -> None:
    """A chain is drawn for several sizes at once, or a program would write to a copy for some of them."""
    rng, base = random.Random(0), torch.rand(5, 6, dtype=torch.float64)
    for _ in range(20):
        now = base
        for expr in chain(rng, (base, torch.rand(7, 6, dtype=torch.float64)), 3):
            now = eval(expr.replace("{t}", "t"), {**NAMESPACE, "t": now})
            assert shares(base, now)
