"""``python -m moefuse doctor``: what there is, what would run, what is missing and how to repair it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, NamedTuple

import torch
from torch.torch_version import TorchVersion

from moefuse import _torch_private
from moefuse._version import __version__
from moefuse.capture import entry
from moefuse.cli.command import doing
from moefuse.config import ENVIRONMENT, SWITCHES
from moefuse.kernels.triton import config
from moefuse.kernels.triton.provide import choice
from moefuse.machine import cache_folder
from moefuse.runtime import native, providers
from moefuse.tuning import store

OLDEST = "2.11"
"""The oldest torch that moefuse works with."""

State = Literal["ok", "note", "missing"]


class Finding(NamedTuple):
    """One line. ``missing`` is what would not work as it should, and ``repair`` what to do about it."""

    state: State
    what: str
    text: str
    repair: str = ""


def run(given: argparse.Namespace) -> int:
    findings = [*_versions(), *_compiler(given.quick), *_cache(), *_inductors_cache(), *_devices(), *_environment()]
    for finding in findings:
        print(f"{finding.state:<8} {finding.what:<14} {finding.text}")
        if finding.repair:
            print(f"{'':<23} -> {finding.repair}")
    wrong = sum(finding.state == "missing" for finding in findings)
    print(f"\n{wrong} to repair" if wrong else "\nEverything that moefuse needs is there.")
    return 1 if wrong else 0


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "moefuse", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    if TorchVersion(torch.__version__) < OLDEST:
        yield Finding("missing", "torch", str(torch.__version__), f"moefuse needs torch {OLDEST} or newer")
    else:
        yield Finding("ok", "torch", str(torch.__version__))
    capture = entry.unavailable()
    if capture is not None:
        yield Finding("missing", "capture", capture, "use a torch that this moefuse was tested with")
    yield Finding("ok", "transformers", _installed("transformers") or "not installed: only needed for its integration")


def _compiler(quick: bool) -> Iterator[Finding]:
    try:
        compiler = _torch_private.cpp_compiler()
    except Exception:
        yield Finding(
            "missing",
            "C++ compiler",
            "none found: most models on a CPU do not compile, calls on CUDA take longer",
            "install g++ (apt-get install g++), or let CXX name a compiler",
        )
        return
    yield Finding("ok", "C++ compiler", compiler)
    if quick or os.environ.get(native.SWITCH) == "0" or native.problem() is not None:
        return
    doing("compiling the C++ kernels, if they are not there yet")
    failed = [unit for unit in native.UNITS if not native.ready(unit)]
    if failed:
        reason = native.UNITS[failed[0]].failure
        yield Finding("missing", "CPU kernels", f"cannot be compiled: {reason}", "experts on the CPU run in torch until then, more slowly")
    else:
        yield Finding("ok", "CPU kernels", "experts on the CPU run in C++, for inference and training")


def _cache() -> Iterator[Finding]:
    problem = cache_folder.problem(native.FOLDER)
    if problem is None:
        yield Finding("ok", "cache", str(cache_folder.root()))
    else:
        yield Finding("missing", "cache", str(cache_folder.root()), problem)


def _inductors_cache() -> Iterator[Finding]:
    """torch writes paths into the compiler's command without quotes, so that a space in them ends its word."""
    folder = _torch_private.inductor_folder()
    if any(map(str.isspace, folder)):
        repair = "let TORCHINDUCTOR_CACHE_DIR name a folder without a space: torch cannot compile C++ in this one"
        yield Finding("missing", "torch's cache", folder, repair)


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None or torch.version.hip is not None
        yield Finding("note", "GPU", "none that torch can use" if built else "none: this torch is built for CPUs")
        return
    triton = store.triton_version()
    if triton == "none":
        yield Finding("missing", "Triton", "not installed", "pip install triton: without it experts on a GPU run in torch, more slowly")
    else:
        yield Finding("ok", "Triton", triton)
    for index in range(torch.cuda.device_count()):
        yield from _device(torch.cuda.get_device_name(index), ".".join(map(str, torch.cuda.get_device_capability(index))))
    yield from _kernels()


def _kernels() -> Iterator[Finding]:
    """Whether there are kernels in Gluon, and the tables from which those for weights in few bits and for adapters are chosen: the first
    line that takes a call."""
    gluon = providers.triton_module("launch.gluon")
    if not isinstance(gluon, str) and (why := gluon.unusable()) is not None:
        yield Finding("missing", "Gluon", why, f"{gluon.LOST}: another triton may have what they need")
    found = providers.triton_module("provide.extended"), providers.triton_module("provide.coded_products")
    for what, module in zip(("few bits, LoRA", "one product"), found, strict=True):
        if not isinstance(module, str):
            yield from (Finding("ok", what, line) for line in choice.lines(module.KERNELS))


def _device(name: str, capability: str) -> Iterator[Finding]:
    shipped, measured = len(config.table(name)), len(store.entries(name)) if store.enabled() else 0
    tables = f"{shipped} shipped configurations, {measured} measured here"
    yield Finding("ok", "GPU", f"{name} (compute capability {capability}): {tables}")
    if not shipped and not measured:
        yield Finding("note", "", "sizes of tiles follow rules; `python -m moefuse warmup` measures them on this GPU")


def _environment() -> Iterator[Finding]:
    legal = {**{name: tuple(values) for name, (_, values) in ENVIRONMENT.items()}, **SWITCHES}
    for name in sorted(n for n in os.environ if n.startswith("MOEFUSE_")):
        value = os.environ[name]
        if name not in legal:
            yield Finding("missing", "environment", f"{name} means nothing to moefuse", f"unset it; there are {', '.join(sorted(legal))}")
        elif legal[name] and value not in legal[name]:
            yield Finding("missing", "environment", f"{name}={value} is not legal", f"use {' or '.join(legal[name])}")
        else:
            yield Finding("note", "environment", f"{name}={value}")


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
