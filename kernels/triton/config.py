"""Which kernels a call takes and with what tile sizes: what this user measured, then shipped tables, then rules that hold anywhere.

A table is JSON under ``tables/``, one file per device name, measured by ``benchmarks/sweep_gpu.py``. What decides is how many slots there
are, how many rows an expert gets of them, and the sizes of an expert; an entry is a problem with its configuration. A call takes the entry
that is nearest in these (on a logarithmic scale) among those with its storage, as long as one is near enough; else the rules below.
What ``moefuse.warmup`` measured on this machine (``moefuse/tuning/store.py``) comes before both, for the same sizes and the same bucket of
rows per expert. Every choice is clamped to the shared memory of the device.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moefuse.tuning import store
from moefuse.tuning.problem import Config, Problem, Tiles, Vectors, power_of_two

PRODUCTS: str | None = None
"""Whose products training takes, "own" or "library", for every call that either can run; None: by a rule. Benchmarks set it."""
SPECIALISED_ROWS = 128
"""Mean rows of an expert from which on warp-specialised kernels are taken without a measurement. At 256 and more they were quicker
on an H100 and an H200 wherever that was measured but for three points, at 128 mostly, at 64 they were not
(``benchmarks/specialised_gpu.py``)."""
SHARED_BYTES = 99 << 10
"""Shared memory per program that every CUDA device since sm_80 has; used where the device is not known."""


def shared_bytes(p: Problem, bm: int, up: Tiles, itemsize: int, second: bool = False) -> int:
    """Shared memory that an up kernel (second: a down kernel) takes: its pipeline, and a block of columns that is being stored."""
    return tile_bytes(up, bm, _products(p, second), itemsize)


def _products(p: Problem, second: bool) -> int:
    """How many blocks of weights one tile is multiplied with."""
    return 1 if second or p.gating == "plain" else 2


def tile_bytes(t: Tiles, bm: int, products: int, itemsize: int, held: int = 0) -> int:
    """Shared memory of tiles of bm rows that are multiplied with so many blocks of weights.

    ``held``: bytes of an element of weights that are rounded before they are multiplied, which takes a block more; 0: those of the rows.
    """
    if t.specialised:
        return ring_bytes(t.specialised, bm, products * t.bn, t.bk, t.stages, t.bn // (t.store or 1), itemsize)
    store = bm * t.bn // t.store if t.store else 0
    blocks = products * t.bn * t.bk
    weights = t.stages * blocks * held + blocks * itemsize if held else t.stages * blocks * itemsize
    return (t.stages * bm * t.bk + store) * itemsize + weights


def ring_bytes(form: str, bm: int, columns: int, bk: int, stages: int, stored: int, itemsize: int = 2) -> int:
    """Shared memory of a warp-specialised kernel: its ring, what each group stores (``stored`` columns of its rows), and barriers."""
    rows = 2 * bm if form == "pingpong" else bm
    return (stages * bk * (bm + columns) + rows * stored) * itemsize + 1024


def within(t: Tiles, bm: int, products: int, itemsize: int, limit: int, held: int = 0) -> Tiles:
    """The tiles with stages, then block sizes, reduced until they take at most ``limit`` bytes of shared memory."""
    while tile_bytes(t, bm, products, itemsize, held) > limit:
        if t.stages > 2:
            t = replace(t, stages=t.stages - 1)
        elif t.bk > 32:
            t = replace(t, bk=t.bk // 2)
        elif t.bn > 32:
            t = replace(t, bn=t.bn // 2)
        else:
            break
    return t


def fit(p: Problem, config: Config, limit: int, itemsize: int) -> Config:
    """The configuration reduced until both of its kernels fit."""
    if not config.bm:
        return config
    up, down = (within(t, config.bm, _products(p, second), itemsize, limit) for t, second in ((config.up, False), (config.down, True)))
    return replace(config, up=up, down=down)


def vectors(p: Problem) -> Config:
    """Programs of 4 warps that keep 16 bytes per thread and row in flight; features side by side where storage is in-out."""
    up = Vectors(64, 16) if p.transposed_in else Vectors(4, min(512, power_of_two(p.hidden)))
    at = min(power_of_two(p.top_k), 4 if p.dtype == "float64" else 8)
    down = Vectors(64, 16, at=min(at, 4)) if p.transposed_out else Vectors(4, min(256, power_of_two(p.inter)), at=at)
    return Config(0, up, down)


def rules(p: Problem, hopper: bool, specialised: bool = False) -> Config:
    """A choice without measurements. ``specialised``: warp-specialised kernels may be chosen."""
    if p.dtype == "float64" or p.slots <= 2 * max(p.top_k, 4):
        return vectors(p)
    if p.dtype == "float32":
        bm = min(max(power_of_two(1.3 * p.rows), 16), 64)
        # The parts of a tile take registers beside its sums, and so do addresses of rows that are not whole 16 bytes.
        whole = not (p.hidden % 4 or p.inter % 4)
        bn, warps = 64 if bm == 64 and hopper and whole else 32, 4 if whole else 8
        return Config(bm, Tiles(bn, 32, warps, 3, 8), Tiles(2 * bn, 32, warps, 3, 8))
    gates = 1 if p.gating == "plain" else 2
    bm = min(max(power_of_two(1.3 * p.rows), 16), 128)
    if bm < 64:
        # Rows that are not whole 16 bytes are loaded element by element: more warps have registers for the addresses.
        narrow = Tiles(64, 64, 8 if p.hidden % 8 or p.inter % 8 else 4, 4, swap=hopper)
        return Config(bm, narrow, replace(narrow, bk=128, stages=3))
    if bm == 64:
        return Config(bm, Tiles(128 // gates, 64, 4, 3, 4), Tiles(128, 64, 4, 3, 4))
    if not hopper:
        return Config(bm, Tiles(128 // gates, 64, 8, 3, 8), Tiles(128, 64, 8, 3, 8))
    if specialised and p.rows >= SPECIALISED_ROWS:
        return specialised_tiles(p, bm, "shared")
    up = Tiles(256 // gates, 64, 8, 3, 8, desc=True, join=True, persistent=True, flatten=True, store=1)
    return Config(bm, up, Tiles(256, 64, 8, 3, 8, desc=True, rows_desc=True, persistent=True, flatten=True, store=2))


def specialised_down(bm: int, form: str) -> Tiles:
    """The usual tiles of warp-specialised kernels: sums of 128 x 128 or 64 x 256 for each group, or of 128 x 256 for both."""
    width, stages = (128, 6) if bm == 128 and form == "pingpong" else (256, 4)
    group = 8 if form == "shared" else 2
    return Tiles(width, 64, 4, stages, group, rows_desc=True, specialised=form, store=4 if bm == 64 else 2)


def specialised_tiles(p: Problem, bm: int, form: str = "pingpong") -> Config:
    """:func:`specialised_down` for both projections; of two that are multiplied together each has half of the columns."""
    down = specialised_down(bm, form)
    parts = {"plain": 2, "interleaved": 2}.get(p.gating, 1)
    return Config(bm, replace(down, bn=down.bn // (1 if p.gating == "plain" else 2), store=parts), down)


FAR = 5.0
"""A problem this far from every entry of a table takes the rules: twice the slots and rows of the nearest one are 3 apart."""

HOPPER = "NVIDIA H200"
"""The device whose table is a better guess than the rules for others of its kind."""


@functools.cache
def table(device: str, specialised: bool = False) -> tuple[tuple[Problem, Config], ...]:
    """The entries for the device with this name; none if it has no table. ``specialised``: with warp-specialised kernels, where they
    are quicker."""
    return tuple((Problem(**entry["problem"]), _entry_config(entry, specialised)) for entry in table_entries(device))


def _entry_config(entry: dict[str, Any], specialised: bool) -> Config:
    other = entry.get("specialised") if specialised else None
    return Config.from_json(entry["config"] if other is None else other["config"])


@functools.cache
def table_times(device: str) -> tuple[tuple[Problem, float, float], ...]:
    """(problem, microseconds of the op, of the compiled grouped program) of the table's entries that have both."""
    entries = [e for e in table_entries(device) if "peer_us" in e]
    return tuple((Problem(**e["problem"]), min((e["us"], *e.get("grouped_mm", {}).values())), e["peer_us"]) for e in entries)


def table_entries(device: str) -> list[dict[str, Any]]:
    """What the table of a device says, as it stands in its file.

    A table "from" another device's has that one's configurations for problems that it does not name itself, without times.
    """
    path = _table_path(device)
    data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"entries": []}
    found: list[dict[str, Any]] = data["entries"]
    if "from" not in data:
        return found
    named = [entry["problem"] for entry in found]
    others = [entry for entry in table_entries(data["from"]) if entry["problem"] not in named]
    return found + [{"problem": entry["problem"], "config": entry["config"]} for entry in others]


def _table_path(device: str) -> Path:
    return Path(__file__).parent / "tables" / f"{device.replace(' ', '_').replace('/', '_')}.json"


def _usable(p: Problem, entry: Problem, config: Config) -> bool:
    """The vector kernels read an expert once for every slot, so their time grows past the sizes where they won."""
    return p.form == entry.form and (config.bm > 0 or p.slots <= 1.5 * entry.slots)


def choose(p: Problem, device: str, hopper: bool, limit: int, itemsize: int, specialised: bool = False) -> Config:
    """The configuration of a call on the device called ``device`` with ``limit`` bytes of shared memory per program.

    ``specialised``: the warp-specialised kernels take the call (``plan_specialised.refusal``).
    """
    mine = store.find(device, p)
    if mine is not None and _usable(p, mine.problem, mine.config) and (specialised or not mine.config.specialised):
        return fit(p, mine.config, limit, itemsize)
    return shipped(p, device, hopper, limit, itemsize, specialised)


def shipped(p: Problem, device: str, hopper: bool, limit: int, itemsize: int, specialised: bool = False) -> Config:
    """What :func:`choose` takes where this user has measured nothing."""
    entries = table(device, specialised) or (table(HOPPER, specialised) if hopper else ())
    near = [(p.distance(entry), i) for i, (entry, config) in enumerate(entries) if _usable(p, entry, config)]
    if near and min(near)[0] < FAR:
        return fit(p, entries[min(near)[1]][1], limit, itemsize)
    return fit(p, rules(p, hopper, specialised), limit, itemsize)
