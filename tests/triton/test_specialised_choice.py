"""Which calls the kernels with specialised warps take, and how tables and measurements name them; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack
from tests.triton.test_compiled import SHARED

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def prefill() -> Any:
    from moefuse.tuning.problem import Problem

    return Problem(4096, 8, 64, 2048, 1024, 2048, "merged", "bfloat16")


def plan(hidden: int = 512, inter: int = 384, dtype: torch.dtype = torch.bfloat16, in_out: bool = False, hopper: bool = True) -> Any:
    """A plan of 4096 tokens over meta tensors."""
    from moefuse.kernels.triton.host import plan as plans
    from moefuse.kernels.triton.host.layout import Device

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def weight(out: int, inp: int) -> list[torch.Tensor]:
        return [draw(8, inp, out).transpose(1, 2) if in_out else draw(8, out, inp)]

    ids = torch.empty(4096, 2, dtype=torch.int64, device="meta")
    stacks = Stack(weight(2 * inter, hidden), []), Stack([], []), Stack(weight(hidden, inter), [])
    call = ExpertsCall(draw(4096, hidden), ids, draw(4096, 2), *stacks, Body("silu", (), "merged"), dtype)
    return plans.Plan(call, None, Device(H200, 132, SHARED[90], hopper))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process could run them, under the interpreter too."""
    from moefuse.kernels.triton.host import plan_specialised, specialised

    for module in (plan_specialised, specialised):
        monkeypatch.setattr(module, "available", lambda device: device.hopper)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"hopper": False}, "need Hopper"),
        ({"dtype": torch.float32}, "they multiply 16 bits, not torch.float32"),
        ({"hidden": 508}, "rows are not whole 16 bytes"),
        ({"in_out": True, "inter": 392}, "reach into the next expert"),
    ],
    ids=lambda v: "" if isinstance(v, dict) else v[:20],
)
def test_a_refusal_says_why(what: dict[str, Any], told: str) -> None:
    from moefuse.kernels.triton.host import plan_specialised

    refused = plan(**what)
    assert told in (plan_specialised.refusal(refused) or "")
    assert not refused.config.specialised


@pytest.mark.usefixtures("anywhere")
def test_what_nothing_is_against_is_taken() -> None:
    assert plan().config.specialised
    assert plan(in_out=True).config.specialised


def test_rules_without_a_measurement() -> None:
    """Few rows of an expert stay with Triton's kernels: there these were not quicker."""
    from moefuse.kernels.triton.config import rules

    assert rules(prefill(), True, specialised=True).specialised
    assert not rules(replace(prefill(), tokens=512), True, specialised=True).specialised


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.host import available
    from moefuse.kernels.triton.host.layout import Device

    monkeypatch.setattr(available, "INTERPRETED", False)
    monkeypatch.setattr(available.gluon, "unusable", lambda: None)
    assert available.available(Device("", 132, SHARED[90], True))
    assert not available.available(Device("", 132, SHARED[90], False))
    monkeypatch.setenv(available.SWITCH, "0")
    assert not available.available(Device("", 132, SHARED[90], True))


def test_a_table_names_both() -> None:
    """With them where they are quicker, and without them what ran before."""
    from moefuse.kernels.triton.config import shipped

    with_them, without = (shipped(prefill(), H200, True, SHARED[90], 2, specialised) for specialised in (True, False))
    assert with_them.specialised
    assert not without.specialised
    few = replace(prefill(), tokens=1)
    assert shipped(few, H200, True, SHARED[90], 2, True) == shipped(few, H200, True, SHARED[90], 2, False)


def test_every_table_fits() -> None:
    """Shared memory of what a table says is within Hopper's as it stands: nothing is reduced when it is used."""
    from moefuse.kernels.triton.config import fit, table

    for device in (H200, H100):
        for problem, config in table(device, True):
            assert fit(problem, config, SHARED[90], 2) == config


def test_a_table_from_another() -> None:
    """Configurations of the other device, without its times; its own come first."""
    from moefuse.kernels.triton.config import shipped, table, table_entries, table_times
    from moefuse.tuning.problem import Problem

    assert table_times(H200)
    assert not table_times(H100)
    assert {problem for problem, _ in table(H100)} == {problem for problem, _ in table(H200)}
    named = [entry["problem"] for entry in table_entries(H100)]
    assert len(named) == len({str(problem) for problem in named})
    gptoss = Problem(16384, 4, 32, 2880, 2880, 2880, "interleaved", "bfloat16", True, True)
    assert shipped(gptoss, H200, True, SHARED[90], 2, True).specialised
    assert not shipped(gptoss, H100, True, SHARED[90], 2, True).specialised


def test_a_measurement_with_them_is_not_used_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call of the same sizes that they do not take, unaligned rows say, falls back to the table."""
    from moefuse.kernels.triton import config
    from moefuse.tuning import store

    mine = config.specialised_tiles(prefill(), 128, "shared")

    class Found:
        problem = prefill()
        config = mine

    monkeypatch.setattr(store, "find", lambda device, problem: Found)
    assert config.choose(prefill(), H200, True, SHARED[90], 2, True) == config.fit(prefill(), mine, SHARED[90], 2)
    assert config.choose(prefill(), H200, True, SHARED[90], 2, False) == config.shipped(prefill(), H200, True, SHARED[90], 2, False)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("separate", [False, True])
def test_a_worker_compiles_them_for_its_device(separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors are on no device: the worker's counts. Without it the search would never find these kernels."""
    from triton.runtime.jit import JITFunction

    from moefuse.kernels.triton.config import specialised_tiles
    from moefuse.kernels.triton.host.layout import Device
    from moefuse.kernels.triton.tune import compiling
    from moefuse.kernels.triton.tune.call import Kind

    made: list[str] = []
    monkeypatch.setattr(JITFunction, "warmup", lambda self, *args, **options: made.append(self.fn.__name__))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(compiling, "device_of", lambda device: Device(H200, 132, SHARED[90], True))
    problem = replace(prefill(), separate=separate)
    assert compiling.compile_one((problem, Kind(), specialised_tiles(problem, 128, "shared"))) is None
    assert made.count("product_tiles") == 2


@pytest.mark.usefixtures("anywhere")
def test_the_search_begins_with_them() -> None:
    from moefuse.kernels.triton.config import rules
    from moefuse.kernels.triton.host.layout import Device
    from moefuse.kernels.triton.tune import candidates

    device, current = Device(H200, 132, SHARED[90], True), rules(prefill(), True)
    assert sum(c.specialised for c in candidates.starts(prefill(), device, current, True)) >= 5
    assert not any(c.specialised for c in candidates.starts(prefill(), device, current, False))
    part = next(c for c in candidates.starts(prefill(), device, current, True) if c.specialised).up
    near = candidates.neighbours(part)
    assert all(other.specialised == part.specialised and other.warps == part.warps for other in near)
    assert 2 * part.group in {other.group for other in near}
    assert {part.bk} == {other.bk for other in near}
    few = replace(prefill(), tokens=8)
    assert not any(c.specialised for c in candidates.starts(few, device, rules(few, True), True))
