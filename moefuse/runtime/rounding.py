"""What products are rounded to. Of float32 users may give leave to round more, by ``torch.set_float32_matmul_precision`` and its like."""

from __future__ import annotations

import torch

_LEAVE = {"tf32": 2.0**-10, "bf16": 2.0**-7}


def tf32_allowed() -> bool:
    """Whether CUDA's products of float32 may be rounded to tf32. (``allow_tf32``, the older name, raises where this one was set.)"""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def eps_of(dtype: torch.dtype, device: str) -> float:
    """The relative rounding of a product of numbers of a dtype on a type of device, as the process is set now."""
    own = float(torch.finfo(dtype).eps)
    if dtype != torch.float32:
        return own
    library = torch.backends.mkldnn if device == "cpu" else torch.backends.cuda
    return max(own, _LEAVE.get(library.matmul.fp32_precision, 0.0))


__all__ = ["eps_of", "tf32_allowed"]
