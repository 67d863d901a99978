"""Streams, devices and memory of CUDA, without the layers above them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def raw_stream(device: int) -> int:
    """The current stream of a CUDA device as the driver knows it."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def current_device() -> int:
    """The current CUDA device, which some CUDA tensor exists on."""
    return int(torch._C._cuda_getDevice())


def _slow_empty_cuda(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


empty_cuda: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = getattr(
    getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", _slow_empty_cuda
)
"""An uninitialised tensor on the current CUDA device, by the function that Inductor's generated code calls."""
