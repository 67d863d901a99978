"""What is worth trying for a problem: where a search begins, and the neighbours of a configuration.

Neighbours are made from the fields of the dataclasses, so a setting that is added to a kernel is searched without a line here; what a
kernel cannot do does not compile, or fails the check, and is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from moefuse.kernels.triton.config import fit, rules, specialised_tiles, table
from moefuse.kernels.triton.host.layout import Device
from moefuse.tuning.problem import Config, Problem, Tiles, Vectors, power_of_two

NEAR = 3
"""Entries of the table that a search begins with."""
BOUNDS: dict[str, tuple[int, int]] = {
    "bn": (16, 256), "bk": (16, 1024), "warps": (2, 16), "stages": (1, 6), "group": (1, 32), "per_sm": (1, 4),
    "at": (1, 16), "parts": (0, 8),
}  # fmt: skip
"""Smallest and largest value worth trying of the settings that are known; others go from 1 to :data:`LARGE`."""
LARGE = 1024
LEAST_ROWS = 24
"""Mean rows of an expert from which on warp-specialised kernels, whose tiles are high, are tried."""
SPECIALISED = ("bn", "stages", "group", "store")
"""What warp-specialised kernels read of their tiles."""
FEW_SLOTS = 64
"""Up to so many slots the vector kernels are a candidate."""


def starts(p: Problem, device: Device, current: Config, specialised: bool = False) -> list[Config]:
    """Where a search begins: what the call takes now, the nearest entries of the table, the rules, and each height of tiles in its usual
    forms, with ``specialised`` those of warp-specialised kernels too. The first is ``current``."""
    entries = [(q, c) for q, c in table(device.name, specialised) if q.form == p.form]
    near = [c for q, c in sorted(entries, key=lambda e: p.distance(e[0]))[:NEAR]]
    found = [current, *near, rules(p, device.hopper), *(_specialised(p) if specialised else ())]
    found += [c for bm in heights(p) for c in forms(p, bm, device.hopper)]
    # An entry for fewer slots may have vectors, which read an expert once for every slot.
    return unique(p, device, (c for c in found if c.bm or c == current or 0 in heights(p)))


def unique(p: Problem, device: Device, configs: Iterable[Config]) -> list[Config]:
    """The configurations as the device's shared memory lets them be, each once."""
    item = itemsize(p)
    return list(dict.fromkeys(fit(p, c, device.shared, item) for c in configs))


def itemsize(p: Problem) -> int:
    """Bytes of a stored number."""
    return {"float64": 8, "float32": 4}.get(p.dtype, 2)


def heights(p: Problem) -> list[int]:
    """Numbers of rows worth trying; 0 stands for the vector kernels."""
    if p.dtype == "float64" or p.slots <= p.top_k:
        return [0]
    few = [0] if p.slots <= FEW_SLOTS else []
    if p.dtype == "float32":
        return [*few, 16, 32, 64]
    for limit, some in ((5, [16]), (20, [16, 32]), (40, [32, 64]), (100, [64, 128]), (150, [128, 64])):
        if p.rows <= limit:
            return few + some
    return [128]


def forms(p: Problem, bm: int, hopper: bool) -> Iterator[Config]:
    """The usual forms of one height."""
    if not bm:
        yield from _vectors(p)
    elif p.dtype == "float32":
        yield from (Config(bm, Tiles(n, 32, 4, 3), Tiles(2 * n, 32, 4, 3)) for n in (32, 64))
    elif bm <= 32:
        for bn, bk, swap in itertools.product((64, 128), (64, 128), (True, False) if hopper else (False,)):
            part = Tiles(bn, bk, 8 if bn * bk >= 128 * 128 else 4, 3, swap=swap)
            yield Config(bm, part, part, pdl=hopper)
    else:
        yield from _tall(p, bm, hopper)


def _specialised(p: Problem) -> Iterator[Config]:
    """The usual forms of warp-specialised kernels, and each form of the first beside the other of the second."""
    if p.rows < LEAST_ROWS:
        return
    shared, turns = (specialised_tiles(p, 128, form) for form in ("shared", "pingpong"))
    yield from (shared, turns, replace(shared, down=turns.down), replace(turns, down=shared.down), specialised_tiles(p, 64))


def _vectors(p: Problem) -> Iterator[Config]:
    k = power_of_two(p.top_k)
    ups = [Vectors(4, 512), Vectors(4, 1024, stages=3), Vectors(8, 256)]
    if p.transposed_in:
        ups = [Vectors(64, 16), Vectors(32, 64, stages=3), Vectors(128, 16)]
    if p.transposed_out:
        downs = [Vectors(64, 16, at=min(k, 4)), Vectors(64, 32, at=1, parts=4), Vectors(128, 16, at=1)]
    else:
        downs = [Vectors(4, 256, at=min(k, 8)), Vectors(4, 256, stages=3, at=min(k, 2)), Vectors(2, 512, at=min(k, 4))]
    yield from (Config(0, up, down) for up, down in zip(ups, downs, strict=True))


def _tall(p: Problem, bm: int, hopper: bool) -> Iterator[Config]:
    gates = 1 if p.gating == "plain" else 2
    warps = 8 if bm == 128 else 4
    yield Config(bm, Tiles(128 // gates, 64, warps, 3, 8), Tiles(128, 64, warps, 3, 8), pdl=hopper)
    if not hopper:
        yield Config(bm, Tiles(128 // gates, 32, warps, 4, 8), Tiles(128, 32, warps, 4, 8))
        yield Config(bm, Tiles(64, 64, 4, 3, 8), Tiles(64, 64, 4, 3, 8))
        return
    wide = Tiles(256 // gates, 64, 8, 3, 8, desc=True)
    down = Tiles(256 if bm == 128 else 128, 64, 8, 3, 8, desc=True, rows_desc=True)
    walks: tuple[dict[str, Any], ...] = ({"tail": True}, {"persistent": True, "flatten": True}, {"tail": True, "persistent": True})
    for walk in walks:
        yield Config(bm, replace(wide, join=True, **walk), replace(down, **walk), pdl=True)
        yield Config(bm, replace(wide, store=1, **walk), replace(down, store=2, **walk), pdl=True)


def neighbours(part: Any) -> list[Any]:
    """The settings of one kernel with one of them changed: switched, doubled, halved; pipelines one stage longer and shorter."""
    found = []
    for f in fields(part):
        if getattr(part, "specialised", "") and f.name not in SPECIALISED:
            continue
        value = getattr(part, f.name)
        if isinstance(value, bool):
            found.append(replace(part, **{f.name: not value}))
        elif isinstance(value, int):
            found += [replace(part, **{f.name: n}) for n in _around(f.name, value)]
    # What keeps the size of a tile and changes its shape is one step too; inputs of a step with specialised warps are given.
    if not getattr(part, "specialised", ""):
        found += [replace(part, bn=2 * part.bn, bk=part.bk // 2), replace(part, bn=part.bn // 2, bk=2 * part.bk)]
    return [q for q in dict.fromkeys(found) if q != part and all(_legal(q, f.name) for f in fields(q) if _differ(q, part, f.name))]


def _differ(a: Any, b: Any, name: str) -> bool:
    return bool(getattr(a, name) != getattr(b, name))


def _around(name: str, value: int) -> list[int]:
    if name == "stages":
        return [value - 1, value + 1, value + 2]
    return [2 * value, value // 2] if value else [1, 2, 4]


def _legal(part: Any, name: str) -> bool:
    value = getattr(part, name)
    if isinstance(value, bool) or not isinstance(value, int):
        return True
    low, high = BOUNDS.get(name, (0, LARGE))
    # Tensor cores take no less than 16 features; vectors do.
    return (1 if isinstance(part, Vectors) and name == "bn" else low) <= value <= high
