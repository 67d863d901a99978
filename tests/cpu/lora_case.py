"""Arguments of ``moefuse::experts_extended``, and the same experts with weights that have the terms added."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops import experts_reference

SCALES = [2.0, 0.5, -1.5]


class Sizes(NamedTuple):
    """Of one call: T tokens, E experts of which the last one gets none, K of them for each token, H features in and out, I inner."""

    tokens: int = 9
    experts: int = 5
    top_k: int = 2
    hidden: int = 12
    inner: int = 10


SMALL = Sizes()


def arguments(
    gating: str, dtype: torch.dtype, of: torch.dtype, rank: int = 3, stacked: bool = True, bias: bool = True, sizes: Sizes = SMALL
) -> list[Any]:
    """Arguments in the order of the schema; no token chooses the last expert, and one id is of none."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int, of: torch.dtype = dtype) -> list[Tensor]:
        value = torch.randn(sizes.experts, *shape, generator=generator, dtype=torch.float64) * (1.4 / shape[-1] ** 0.5)
        return [t.detach().clone().requires_grad_() for t in ([value.to(of)] if stacked else value.to(of))]

    hidden, inner = sizes.hidden, sizes.inner
    width = 2 * inner if gating in ("merged", "interleaved") else inner
    split = gating == "separate"
    x = torch.randn(sizes.tokens, hidden, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.rand(sizes.tokens, sizes.experts - 1, generator=generator).topk(sizes.top_k).indices
    ids[:1, 0] = sizes.experts
    weights = torch.rand(sizes.tokens, sizes.top_k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    w = [weight(width, hidden), weight(width, hidden) if split else [], weight(hidden, inner)]
    b = [weight(width), weight(width) if split else [], weight(hidden)] if bias else [[], [], []]
    up = [weight(rank, hidden, of=of), weight(width, rank, of=of)] if split else [[], []]
    factors = [weight(rank, hidden, of=of), weight(width, rank, of=of), *up, weight(rank, inner, of=of), weight(hidden, rank, of=of)]
    return [x, ids, weights, *w, *b, *factors, []]


def merged(args: list[Any], **options: Any) -> Tensor:
    """The same by weights that have the terms added, as differentiable torch code."""
    whole = []
    for i, scale in enumerate(SCALES):
        w, a, b = args[3 + i], args[9 + 2 * i], args[10 + 2 * i]
        whole.append([m + scale * (n @ o) for m, n, o in zip(w, b, a, strict=True)] if a else w)
    return experts_reference(*args[:3], *whole, *args[6:9], **options)


def ours(args: list[Any], **options: Any) -> Tensor:
    """The op."""
    found: Tensor = torch.ops.moefuse.experts_extended(*args, scales=SCALES, **options)
    return found


def tensors(args: list[Any]) -> list[Tensor]:
    """What can be differentiated."""
    return [args[0], args[2], *(t for part in args[3:] for t in part)]


def results(args: list[Any], function: Any, **options: Any) -> list[Tensor]:
    """The output, and the gradients of everything that wants one."""
    out = function(args, **options)
    seed = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)
    wanted = [t for t in tensors(args) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, seed, materialize_grads=True)]


def moved(args: list[Any], dtype: torch.dtype | None = None, device: str = "cpu") -> list[Any]:
    """The same values in another dtype (floats; None: as they are) or on another device."""

    def one(t: Tensor) -> Tensor:
        return t.detach().to(device, dtype if t.is_floating_point() else None).requires_grad_(t.requires_grad)

    return [one(a) if isinstance(a, Tensor) else [one(t) for t in a] for a in args]


def check(args: list[Any], tolerance: float, **options: Any) -> None:
    """Errors as norms, relative to the exact results."""
    exact = results(moved(args, torch.float64, args[0].device.type), merged, **options)
    for i, (got, true) in enumerate(zip(results(args, ours, **options), exact, strict=True)):
        assert got.isfinite().all(), i
        error = float((got.double() - true).norm())
        assert error <= tolerance * max(float(true.norm()), 1e-3), f"result {i}: {error:.3g} of {float(true.norm()):.3g}"
