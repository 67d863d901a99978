"""Copies by the device's copy engines, which take no room from kernels: to another GPU's memory, launched or played from a record."""

from __future__ import annotations

from torch import Tensor

from moefuse.kernels.triton.launch.record import active
from moefuse.kernels.triton.launch.steps import COPY, Step


def copy(target: Tensor, source: Tensor) -> None:
    """All of ``source``, both contiguous and of one dtype."""
    if not source.numel():
        return
    recorder = active()
    if recorder is None:
        target.copy_(source)
        return
    with recorder.pause():
        target.copy_(source)
    try:
        places = recorder.place(target), recorder.place(source)
    except LookupError as error:
        recorder.refuse(f"a copy: {error.args[0]}")
    else:
        recorder.steps.append(Step(COPY, (source.numel() * source.element_size(),), (), places))
