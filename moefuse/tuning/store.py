"""Where measurements are kept: one JSON file per device, Triton and kernels in the folder ``tuning`` of the user's cache.

The folder has mode 0700, and what lies in one that others can write to is not read. A file is replaced whole by an atomic rename, under a
lock, after what another process wrote meanwhile has been merged in. Reading never raises and never executes anything: what is not exactly
a measurement of this device, this Triton and these kernels is ignored, with one line in the log.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moefuse import _torch_private
from moefuse.machine import cache_folder, environment
from moefuse.tuning.entries import Entry, InvalidEntryError, Pair, key_of, parse
from moefuse.tuning.problem import Problem

log = logging.getLogger(__name__)

SWITCH = "MOEFUSE_AUTOTUNE"
"""Environment variable; 0 forbids tuning, and what was tuned earlier is not used."""
FOLDER = "tuning"
FORMAT = 1
MAX_BYTES = 16 << 20
MAX_ENTRIES = 4096
"""Entries of a file; the oldest go first."""

_known: dict[Path, tuple[Any, dict[Problem, Entry]]] = {}
"""File -> (its size and time, its entries)."""
_lock = threading.Lock()


def enabled() -> bool:
    """Whether measurements may be made and used."""
    return not environment.is_off(SWITCH)


@functools.cache
def kernel_hash() -> str:
    """SHA-256 over the sources of the kernels and of what chooses among them."""
    folder = Path(__file__).parent.parent / "kernels" / "triton"
    digest = hashlib.sha256()
    for path in sorted(path for room in (".", "device", "hopper", "launch") for path in folder.glob(f"{room}/*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def triton_version() -> str:
    """The version of Triton, or "none"."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return "none"


def header(device: str) -> dict[str, Any]:
    """What a file has to say of itself to be believed here."""
    return {"format": FORMAT, "device": device, "triton": triton_version(), "kernels": kernel_hash()}


def path_of(device: str) -> Path:
    """The file for the device with this name; need not exist."""
    name = re.sub(r"\W+", "_", device)[:40]
    digest = hashlib.sha256(json.dumps(header(device), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder.root() / FOLDER / f"{name}-{digest}.json"


def find(device: str, problem: Problem) -> Entry | None:
    """The measurement that speaks for ``problem`` on ``device``: the same sizes, the same bucket of T*K/E."""
    return entries(device).get(key_of(problem)) if enabled() and problem.slots and problem.experts else None


def comparison(device: str, problem: Problem, program: str) -> Pair | None:
    """How the named program compares with what replaces it, where that was measured for this problem's bucket."""
    entry = find(device, problem)
    return None if entry is None else entry.programs.get(program)


def entries(device: str) -> Mapping[Problem, Entry]:
    """All that is known of a device. Read again when the file has changed."""
    path = path_of(device)
    try:
        info = os.stat(path)
    except OSError:
        return {}
    mark = info.st_mtime_ns, info.st_size, info.st_ino
    with _lock:
        known = _known.get(path)
    if known is not None and known[0] == mark:
        return known[1]
    found = _read(path, device)
    with _lock:
        _known[path] = mark, found
    return found


def save(device: str, new: Iterable[Entry]) -> Path:
    """Add measurements to the file of ``device``; what others wrote there meanwhile stays.

    Raises:
        OSError: the folder or the file cannot be written, or the folder is not the user's alone.
    """
    folder = cache_folder.make(FOLDER)
    path = path_of(device)
    with _torch_private.file_lock(folder / f"{path.stem}.lock"):
        merged = dict(_read(path, device)) if path.exists() else {}
        for entry in new:
            merged[entry.key] = merged[entry.key].merged(entry) if entry.key in merged else entry
        kept = sorted(merged.values(), key=lambda e: e.when)[-MAX_ENTRIES:]
        _replace(path, json.dumps({**header(device), "entries": [e.to_json() for e in kept]}, indent=1))
    return path


def _replace(path: Path, text: str) -> None:
    # Made with mode 0600, in the same folder, so that the rename is atomic.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path, device: str) -> dict[Problem, Entry]:
    try:
        cache_folder.make(FOLDER)
        if path.stat().st_size > MAX_BYTES:
            raise InvalidEntryError(f"larger than {MAX_BYTES} bytes")
        found, problems = _parsed(json.loads(path.read_text()), device)
    except (OSError, ValueError, RecursionError) as error:
        log.warning("measurements in %s are ignored: %s", path, error)
        return {}
    if problems:
        log.warning("%d measurements in %s are ignored, the first because %s", len(problems), path, problems[0])
    return found


def _parsed(data: Any, device: str) -> tuple[dict[Problem, Entry], list[str]]:
    if not isinstance(data, dict) or set(data) != {*header(device), "entries"} or not isinstance(data["entries"], list):
        raise InvalidEntryError("not a file of measurements")
    for name, wanted in header(device).items():
        if data[name] != wanted or type(data[name]) is not type(wanted):
            raise InvalidEntryError(f"{name} is {data[name]!r}, here it is {wanted!r}")
    if len(data["entries"]) > MAX_ENTRIES:
        raise InvalidEntryError(f"more than {MAX_ENTRIES} entries")
    found, problems = {}, []
    for one in data["entries"]:
        try:
            entry = parse(one)
        except InvalidEntryError as error:
            problems.append(str(error))
            continue
        found[entry.key] = entry
    return found, problems


def fingerprint(device: str) -> str:
    """Equal as long as the cost gate decides alike on ``device``: which programs are to be left alone at which problems."""
    if not enabled():
        return ""
    slower = sorted(f"{key} {name}" for key, entry in entries(device).items() for name, pair in entry.programs.items() if not faster(pair))
    return hashlib.sha256("\n".join(slower).encode()).hexdigest() if slower else ""


def faster(pair: Pair) -> bool:
    """Whether the fused op beats the program."""
    return pair.fused_us < pair.program_us
