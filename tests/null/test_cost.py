"""The model of what it costs to send bytes: sizes that it was not fitted on, and every choice that is made by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefuse.parallel.cost import cheapest, far_us, fitted, links, predicted, tokens_us, waits_us, weights_us
from moefuse.parallel.meshes import register
from moefuse.runtime import groups

ROW = 2048 * 2
HELD_OUT = (512, 4096)
RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks/results/comm-h200x2.json").read_text())["results"]
MEASURED = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
EXPERTS = 128 * 3 * 2048 * 768 * 2
"""Bytes of 128 experts of width 768."""


def points(name: str, rows: Callable[[int], bool]) -> dict[int, float]:
    """Microseconds in a CUDA graph on two H200, by the bytes that a rank receives."""
    found = [r for r in RESULTS if (r["what"], r["how"]) == (name, "graph") and rows(r["rows"])]
    return {r["bytes"]: r["us"]["median"] for r in found}


@pytest.mark.parametrize(
    "name",
    [
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        # NCCL changes its protocol between 256 and 512 rows: 0.78 of what was measured there. No choice is made by it.
        pytest.param("all_reduce", marks=pytest.mark.xfail(strict=True)),
    ],
)
def test_sizes_that_were_held_out(name: str) -> None:
    fit = fitted(points(name, lambda rows: rows not in HELD_OUT))
    held = points(name, lambda rows: rows in HELD_OUT)
    assert len(held) == 2
    for size, us in held.items():
        assert predicted(fit, size) == pytest.approx(us, rel=0.2), (name, size)


def test_what_is_shipped_was_fitted_to_what_was_measured() -> None:
    for name in MEASURED:
        assert links()[name] == pytest.approx(fitted(points(name, lambda rows: True)), rel=1e-4)

    assert links()["symm"] == pytest.approx(fitted(points("moefuse symm", lambda rows: True)), rel=1e-4)


def test_shared_memory_at_sizes_that_were_held_out() -> None:
    """Both ways of all that travels; with 512 rows a GPU is not full yet, which no power law has: 1.21 of what was measured."""
    fit = fitted(points("moefuse symm", lambda rows: rows not in HELD_OUT))
    few, many = points("moefuse symm", lambda rows: rows in HELD_OUT).items()
    assert predicted(fit, few[0]) == pytest.approx(few[1], rel=0.25)
    assert predicted(fit, many[0]) == pytest.approx(many[1], rel=0.1)


def test_shared_memory_is_faster_at_every_size_that_was_measured() -> None:
    """Why ``auto`` takes it wherever it is to be had: in a CUDA graph, and launched."""
    for how in ("graph", "launched"):
        shared, gathered = (
            {r["rows"]: r["us"]["median"] for r in RESULTS if (r["what"], r["how"]) == (f"moefuse {name}", how)}
            for name in ("symm", "allgather")
        )
        assert len(shared) >= 5
        assert all(us < gathered[rows] for rows, us in shared.items())


def test_what_the_host_waits_for_exact_splits_is_what_was_measured() -> None:
    splits, gathered = (
        median(r["us"]["median"] for r in RESULTS if (r["what"], r["how"]) == (f"moefuse {name}", "launched"))
        for name in ("all_to_all", "allgather")
    )
    assert waits_us() == pytest.approx(splits - gathered, rel=1e-4)


def test_a_known_law_is_found() -> None:
    fit = fitted({size: 5 + 1e-4 * size**0.9 for size in (10**3, 10**4, 10**5, 10**6, 10**7)})
    assert predicted(fit, 3 * 10**6) == pytest.approx(5 + 1e-4 * (3 * 10**6) ** 0.9, rel=0.02)


def test_shipped_constants() -> None:
    """Every collective is there, slower for more bytes, and for many of them no faster than twice a link in one direction."""
    assert links().keys() == {*MEASURED, "symm"}
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        times = [predicted(links()[name], size) for size in (0, 10**4, 10**6, 10**8)]
        assert times == sorted(times)
        assert times[-1] > 10**8 / 900e3, name


def test_choices() -> None:
    assert cheapest(None, ROW, EXPERTS, 16, hosts=2) == "all_to_all"  # nothing is known
    assert cheapest(10**7, ROW, EXPERTS, 8, hosts=2) == "all_to_all"
    assert cheapest(None, ROW, EXPERTS, 8, hosts=1) == "allgather"  # nothing is known
    assert cheapest(4096, ROW, EXPERTS, 8, hosts=1) == "allgather"
    assert cheapest(10**6, ROW, EXPERTS, 8, hosts=1) == "gather"
    assert cheapest(10**9, ROW, EXPERTS, 1, hosts=1) == "allgather"  # alone
    assert cheapest(8, ROW, EXPERTS, 8, hosts=1, shared=True) == cheapest(4096, ROW, EXPERTS, 2, hosts=1, shared=True) == "symm"
    assert cheapest(None, ROW, EXPERTS, 8, hosts=1, shared=True) == "symm"  # equal numbers, which buffers grow with
    assert cheapest(10**6, ROW, EXPERTS, 8, hosts=1, shared=True) == "gather"


@pytest.mark.parametrize(("world", "hosts"), [(16, 2), (64, 8), (9, 2), (1024, 128)])
def test_rows_of_few_tokens_may_all_cross(world: int, hosts: int) -> None:
    """Up to one number of tokens, and no further: where all rows over a slow network cost what the host waits for exact splits."""
    chosen = [cheapest(tokens, ROW, EXPERTS, world, hosts) for tokens in range(1, 300)]
    change = chosen.index("all_to_all")
    assert set(chosen[:change]) <= {"allgather"}
    assert set(chosen[change:]) == {"all_to_all"}
    others = world - -(-world // hosts)
    assert far_us(others * change, ROW) < waits_us() <= far_us(others * (change + 1), ROW)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_there_is_one_number_of_tokens_from_which_weights_travel(world: int) -> None:
    chosen = [cheapest(1 << step, ROW, EXPERTS, world, hosts=1) for step in range(25)]
    change = chosen.index("gather")
    assert set(chosen[:change]) == {"allgather"}
    assert set(chosen[change:]) == {"gather"}
    assert 2 * tokens_us(1 << change, ROW, world) > 3 * weights_us(EXPERTS, world) >= 2 * tokens_us(1 << (change - 1), ROW, world)


@pytest.mark.parametrize(("local", "hosts"), [("", 1), ("8", 1), ("4", 1), ("2", 2), ("1", 4)])
def test_hosts(monkeypatch: pytest.MonkeyPatch, local: str, hosts: int) -> None:
    """Of a fake group, which has nobody to ask: as the launcher says how many processes a host has."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
    monkeypatch.setenv("MOEFUSE_HOST", "no one is asked")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh: DeviceMesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        assert groups.group(register(mesh)).spans == hosts
    finally:
        dist.destroy_process_group()
        groups._groups.clear()
