"""Whether warp-specialised kernels can run: on Hopper, with a Triton that compiles their Gluon."""

from __future__ import annotations

from moefuse.kernels.triton.host.layout import Device
from moefuse.kernels.triton.launch import gluon
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.machine import environment

SWITCH = "MOEFUSE_SPECIALISED"
"""Environment variable; 0 leaves all products to the kernels of Triton."""


def available(device: Device) -> bool:
    """Whether they run on this device, in this process."""
    return device.hopper and not INTERPRETED and gluon.unusable() is None and not environment.is_off(SWITCH)
