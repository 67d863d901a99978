"""Whether warp-specialised kernels can run: on Hopper, with a Triton whose Gluon they are written for."""

from __future__ import annotations

import functools
import importlib.util

import triton

from moefuse.kernels.triton.host.layout import Device
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.machine import environment

SWITCH = "MOEFUSE_SPECIALISED"
"""Environment variable; 0 leaves all products to the kernels of Triton."""
_KNOWN = ((3, 6), (3, 7))
"""Versions whose Gluon the kernels were compiled with. Its names are experimental: others are not tried."""


@functools.cache
def known() -> bool:
    """Whether this Triton has the Gluon that the kernels are written for."""
    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    return version in _KNOWN and importlib.util.find_spec("triton.experimental.gluon") is not None


def available(device: Device) -> bool:
    """Whether they run on this device, in this process."""
    return device.hopper and not INTERPRETED and known() and not environment.is_off(SWITCH)
