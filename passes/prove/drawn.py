"""Values like those that a tensor holds, but never neutral: zeros, ones, an identity and equal rows hide a misread program.

A bias of zeros may be added anywhere, a scale of ones may be left out, and equal experts may be swapped, without a difference. What the
program means for other values is not less a part of it: the next step of an optimizer brings them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NARROW = 0.1  # a range of values, as a part of their size, within which they are all but one value
_FEW = 8  # elements of each dimension that are looked at


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal values on the host, where one generator gives the same for every device."""
    return torch.randn(tuple(shape), generator=generator)


def like(value: Tensor, generator: torch.Generator) -> Tensor:
    """New values of the same sign and size; the tensor itself where it holds no plain floats, or some that are not finite."""
    real = value.detach()
    if real.dtype not in _PLAIN or not real.numel():
        return real
    if real.dtype == torch.float64 and not real.dim():
        return _number(real, generator)
    low, high = (float(v) for v in torch.aminmax(real))
    if not math.isfinite(low) or not math.isfinite(high):
        return real
    size = max(abs(low), abs(high))
    if size == 0:
        drawn = normal(real.shape, generator)
    else:
        if high - low < _NARROW * size:
            middle = (low + high) / 2
            low, high = sorted((0.5 * middle, 1.5 * middle))
        drawn = low + (high - low) * torch.rand(tuple(real.shape), generator=generator)
    return drawn.to(device=real.device, dtype=real.dtype)


def _number(real: Tensor, generator: torch.Generator) -> Tensor:
    """A float of Python's, an exponent perhaps: as it is, unless it is 0 or 1."""
    if float(real) not in (0.0, 1.0):
        return real
    return (float(real) + 0.25 + 0.5 * torch.rand((), generator=generator, dtype=real.dtype)).to(real.device)


def perturbed(value: Tensor, generator: torch.Generator) -> Tensor:
    """A copy with noise as large as what it holds, or as large as a layer's weights are where that is nothing."""
    real = value.detach()
    seen = sample(real).double()
    size = float(seen.square().mean().sqrt()) if seen.numel() else 0.0
    if not math.isfinite(size):
        return real
    size = size or 1 / math.sqrt(max(real.shape[-1], 1) if real.dim() else 1)
    noise = size * normal(real.shape, generator)
    if real.dtype.itemsize == 1:  # float8: no arithmetic of its own, and NaN behind its largest number
        largest = torch.finfo(real.dtype).max
        return (real.float() + noise.to(real.device)).clamp(-largest, largest).to(real.dtype)
    return real + noise.to(device=real.device, dtype=real.dtype)


def jittered(value: Tensor, generator: torch.Generator) -> Tensor:
    """A copy that is a tenth of its size away, with the same signs where it has but one; what is not finite, or as good as, stays."""
    real = value.detach()
    if real.dtype not in _PLAIN or not real.numel() or (real.dtype == torch.float64 and not real.dim()):
        return real.clone()
    low, high = (float(v) for v in torch.aminmax(real))
    size = float(sample(real).double().square().mean().sqrt())
    if not max(abs(low), abs(high), size) < torch.finfo(real.dtype).max / 16:
        return real.clone()
    moved = real + (0.1 * (size or 0.2) * normal(real.shape, generator)).to(device=real.device, dtype=real.dtype)
    if size and low >= 0:
        return moved.abs()
    return -moved.abs() if size and high <= 0 else moved


def sample(value: Tensor) -> Tensor:
    """A few elements of a tensor, from all over it."""
    return value[tuple(slice(None, None, max(1, -(-n // _FEW))) for n in value.shape)] if value.dim() else value


def neutral(experts: Sequence[Tensor]) -> bool:
    """Whether weights may hide a misreading, by a sample: two different numbers at most in all of them, or all experts equal."""
    seen = [sample(v).reshape(-1) for v in experts[:: max(1, -(-len(experts) // _FEW))]]
    if not seen or seen[0].dtype not in _PLAIN or not seen[0].numel() or any(v.shape != seen[0].shape for v in seen):
        return False
    rows = torch.stack([v.to(seen[0].device) for v in seen]).float().cpu()
    return len(rows.unique()) <= 2 or (len(rows) > 1 and bool((rows == rows[0]).all()))
