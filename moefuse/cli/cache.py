"""``python -m moefuse cache``: what lies in the cache folder, and removing it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from moefuse.cli.command import CommandError
from moefuse.machine import cache_folder
from moefuse.report.entries import amount

ROOMS = {"cpu-kernels": "C++ kernels for CPUs", "cuda-launch": "launchers for CUDA devices", "tuning": "measurements of warmup"}
"""Folders of the cache, and what is in them. Nothing else is ever removed."""
MEASURED = "tuning"


def run(given: argparse.Namespace) -> int:
    print(cache_folder.root())
    for name, what in ROOMS.items():
        folder = cache_folder.root() / name
        files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() and not folder.is_symlink() else []
        text = f"  {name:<12} {what:<28} {len(files):>4} files  {amount(sum(path.stat().st_size for path in files)):>10}"
        kept = given.what == "show" or (given.keep_measurements and name == MEASURED)
        if not kept and folder.exists():
            _remove(folder)
            text += "  removed"
        print(text)
    return 0


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        raise CommandError(f"{folder} is a link to another place: nothing is removed there")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CommandError(f"{error.filename or folder} cannot be removed: {error.strerror}") from error
