"""Who computes an op: ordered providers, each saying in one function what it supports.

A provider is a pair of functions for one op, both called with the op's arguments in schema order, those of the experts ops as one
(:class:`~moefuse.ops.meaning.call.ExpertsCall` and the calls of ``moefuse/ops/meaning/grad_calls.py``):
``supports(*args) -> None`` when it can run them, else a short reason; ``run(*args) -> result``. They are asked in order, the first that
supports the call runs it, and the portable implementation, which supports everything, is last. A GPU family under ``kernels/`` calls
:func:`register` when it is imported. The arrays that pass from one op to the next (h, order, offsets) have one layout, given in
``moefuse/ops/experts.py``, so the providers of a forward op and of its backward are chosen independently.

Most CPU calls do not come here: the C++ kernels (``moefuse/runtime/native.py``) have them, as long as no provider that may take CPU
tensors is registered for their ops.

``supports`` runs on every call: it looks at devices, dtypes and static sizes, and never reads data.

The GPU kernels are imported by the first call that has CUDA tensors; a program on the CPU never pays for Triton, nor needs it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from moefuse.machine import slow_paths
from moefuse.ops.meaning.call import first_tensor
from moefuse.ops.meaning.recipe import route_reference
from moefuse.ops.meaning.reference import router_logits_reference, topk_reference
from moefuse.ops.meaning.token_codes import packed
from moefuse.runtime import backward, cpu, dense, grouped, grouped_coded, native, ranks


@dataclass(frozen=True)
class Provider:
    """One implementation of one op."""

    name: str
    supports: Callable[..., str | None]
    run: Callable[..., Any]
    device: str | None = None
    """The only device type whose tensors it takes (or :data:`FALLBACK`); None if it may take those of the CPU."""
    traced: Callable[..., Any] | None = None
    """The same as ``run`` in operations that Inductor compiles, instead of a call of the op; the op says whether it asks for it."""


def _everything(*args: Any) -> None:
    return None


def _portable(run: Callable[..., Any]) -> list[Provider]:
    return [Provider("portable", _everything, run)]


FALLBACK = "fallback"
"""Stands for the device of a provider that takes no CPU tensors and is no reason to replace a program: right, but slow."""


def _on_cuda() -> list[Provider]:
    """The providers of ``experts`` for CUDA tensors; neither waits for the device."""
    return [
        *_triton("provide.experts", "experts"),
        *_triton("provide.library", "experts", "grouped_mm"),
        Provider("dense", dense.supports, dense.experts, device=FALLBACK),
    ]


@functools.cache
def triton_module(module: str) -> ModuleType | str:
    """A module of ``moefuse/kernels/triton``, or why there is none."""
    try:
        return importlib.import_module(f"moefuse.kernels.triton.{module}")
    except ImportError as error:
        return f"triton cannot be imported ({error})"


def triton_kernels() -> ModuleType | str:
    """The provider of ``moefuse::experts``, or why there is none."""
    return triton_module("provide.experts")


def _triton(module: str, op: str, name: str = "triton", traced: str | None = None) -> list[Provider]:
    """The provider of ``op`` for CUDA tensors: the function of that name in a module of ``moefuse/kernels/triton``, and its ``traced``."""

    def supports(first: Any, *rest: Any) -> str | None:
        device = first_tensor(first).device
        if device.type != "cuda":
            return f"tensors on {device.type}, the kernels run on CUDA devices"
        kernels = triton_module(module)
        return kernels if isinstance(kernels, str) else kernels.supports(first, *rest)

    def call(function: str) -> Callable[..., Any]:
        return lambda *args: getattr(triton_module(module), function)(*args)

    return [Provider(name, supports, call(op), "cuda", None if traced is None else call(traced))]


PROVIDERS: dict[str, list[Provider]] = {
    "experts": _on_cuda() + _portable(cpu.experts),
    "experts_forward": _triton("provide.training", "experts_forward") + _portable(cpu.experts_forward),
    "experts_hidden": _triton("provide.training", "experts_hidden") + _portable(cpu.experts_hidden),
    "experts_extended": _triton("provide.extended", "experts_extended") + _portable(cpu.experts_extended),
    "experts_extended_forward": _triton("provide.extended", "experts_extended_forward") + _portable(cpu.experts_extended_forward),
    "experts_extended_hidden": _triton("provide.extended", "experts_extended_hidden") + _portable(cpu.experts_extended_hidden),
    "experts_extended_backward": _triton("provide.extended", "experts_extended_backward") + _portable(backward.experts_extended_backward),
    "experts_backward": _portable(backward.experts_backward),
    "experts_backward_rows": _triton("provide.training", "experts_backward_rows") + _portable(backward.experts_backward_rows),
    "experts_backward_in": _triton("provide.training", "experts_backward_in") + _portable(backward.experts_backward_in),
    "experts_backward_out": _triton("provide.training", "experts_backward_out") + _portable(backward.experts_backward_out),
    "permute": _triton("provide.grouped", "permute") + _portable(grouped.permute),
    "grouped_linear": _triton("provide.grouped", "grouped_linear") + _portable(grouped.grouped_linear),
    "grouped_linear_backward": _triton("provide.grouped", "grouped_linear_backward") + _portable(grouped.grouped_linear_backward),
    "grouped_linear_coded": _triton("provide.grouped_coded", "grouped_linear_coded") + _portable(grouped_coded.grouped_linear_coded),
    "grouped_linear_coded_backward": _triton("provide.grouped_coded", "grouped_linear_coded_backward")
    + _portable(grouped_coded.grouped_linear_coded_backward),
    "expert_rows": _triton("provide.grouped", "expert_rows") + _portable(grouped.expert_rows),
    "expert_rows_backward": _triton("provide.grouped", "expert_rows_backward") + _portable(grouped.expert_rows_backward),
    "combine": _triton("provide.grouped", "combine") + _portable(grouped.combine),
    "combine_backward": _triton("provide.grouped", "combine_backward") + _portable(grouped.combine_backward),
    "route": _triton("provide.router", "route", traced="route_traced") + _portable(route_reference),
    "router_logits": _triton("provide.logits", "router_logits", traced="router_logits_traced") + _portable(router_logits_reference),
    "local_ids": _triton("provide.ranks", "local_ids") + _portable(ranks.local_ids),
    "row_codes": _triton("provide.rows_rounded", "row_codes") + _portable(lambda x, rounding: packed(rounding, x)),
    "sum_ranks": _triton("provide.ranks", "sum_ranks") + _portable(ranks.sum_ranks),
    "topk": _triton("provide.router", "topk", traced="topk_traced") + _portable(topk_reference),
}


_FIRST = {op: order[0] for op, order in PROVIDERS.items()}
_NATIVE = {"infer": ("experts",), "train": ("experts_forward", "experts_backward")}
"""The ops that each C++ kernel takes over on the CPU."""


def register(op: str, provider: Provider) -> None:
    """Put ``provider`` first in the order of ``op`` (a provider of the same name is replaced).

    Raises:
        ValueError: no such op.
    """
    if op not in PROVIDERS:
        raise ValueError(f"no op {op!r} to provide; ops: {', '.join(PROVIDERS)}")
    _replace(op, [provider, *(p for p in PROVIDERS[op] if p.name != provider.name)])


def unregister(op: str, name: str) -> None:
    """Remove a registered provider; the portable one stays."""
    _replace(op, [p for p in PROVIDERS[op] if p.name != name or p.supports is _everything])


def _replace(op: str, order: list[Provider]) -> None:
    PROVIDERS[op][:] = order
    if (player := _player()) is not None:
        player.configure()
        player.forget()  # what it launches without asking here
    unit = next((unit for unit, ops in _NATIVE.items() if op in ops), None)
    if unit is not None:
        free = all(p.device not in (None, "cpu") or p.supports is _everything for name in _NATIVE[unit] for p in PROVIDERS[name])
        native.configure(free, unit=unit)


def _player() -> Any:
    return sys.modules.get("moefuse.kernels.triton.launch.player")


def recorder() -> Any:
    """Who records this thread's call, so that C++ plays it from then on; None if nobody does."""
    record: Any = sys.modules.get("moefuse.kernels.triton.launch.record")
    return None if record is None else record.active()


def is_ours(op: str) -> bool:
    """Whether calls of an op go to a provider of moefuse first, so that a record may stand for what it does."""
    op = op.removesuffix("_compiled").removesuffix("_infer").removeprefix("ep_")
    return op not in PROVIDERS or PROVIDERS[op][0] is _FIRST[op]


def forget_records() -> None:
    """Plan and record every call anew, so that it takes a configuration that was measured since.

    CUDA graphs recorded before stay as they are: a graph holds the launches, and Triton keeps the kernels that it launches.
    """
    if (player := _player()) is not None:
        player.forget()


def select(op: str, *args: Any) -> Provider:
    """The provider that runs this call."""
    for provider in PROVIDERS[op]:
        if provider.supports(*args) is None:
            return provider
    raise AssertionError(f"no provider for moefuse::{op}: the portable one is missing")


def explain(op: str, *args: Any) -> dict[str, str | None]:
    """Each provider's answer for this call: None when it can run it, else its reason."""
    return {p.name: p.supports(*args) for p in PROVIDERS[op]}


def run(op: str, *args: Any) -> Any:
    """Run one op's call on the first provider that supports it."""
    while True:
        try:
            return select(op, *args).run(*args)
        except slow_paths.LostError:
            continue  # what was lost is no longer chosen
