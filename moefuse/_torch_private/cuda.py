"""Devices of CUDA, without the layers above them."""

from __future__ import annotations

import torch


def current_device() -> int:
    """The current CUDA device, which some CUDA tensor exists on."""
    return int(torch._C._cuda_getDevice())
