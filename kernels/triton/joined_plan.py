"""Calls of ``moefuse::experts_and_shared`` for few tokens as the two launches of ``joined.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton import joined
from moefuse.kernels.triton.config import Config, choose, power_of_two, problem_of
from moefuse.kernels.triton.launch import INTERPRETED, Launch, stream_of
from moefuse.kernels.triton.layout import DTYPES, device_of
from moefuse.ops.body import decode, unpack

_PLANS: dict[Any, JoinedPlan | None] = {}
_MAX_PLANS = 4096


@dataclass(frozen=True)
class Part:
    """Weights of one expert or of all: gate and up [.., I, H], down [.., H, I]; first features of gate and up in their tensors."""

    gate: Tensor
    up: Tensor
    down: Tensor
    firsts: tuple[int, int]

    @property
    def inter(self) -> int:
        return self.down.shape[-1]


def part_of(lists: Sequence[Sequence[Tensor]], options: dict[str, Any]) -> Part | None:
    """The weights of a body that the kernels take: gated, no biases, inputs side by side, weight on the output."""
    w_in, w_up, w_out, *biases = lists
    if any(biases) or any(len(part) > 1 for part in lists) or options["weight_on_input"] or options["gating"] not in ("merged", "separate"):
        return None
    if any(t.stride(-1) != 1 for part in lists for t in part):
        return None
    if options["gating"] == "separate":
        return Part(w_in[0], w_up[0], w_out[0], (0, 0))
    half = w_out[0].shape[-1]
    return Part(w_in[0], w_in[0], w_out[0], (half, 0) if options["up_first"] else (0, half))


class JoinedPlan:
    """All calls with the same shapes, strides, dtypes, alignments and options."""

    def __init__(self, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None, routed: Part, shared: Part, body: Any, config: Config,
                 out_dtype: torch.dtype) -> None:  # fmt: skip
        self.tokens, hidden = x.shape
        self.out, self.out_dtype = routed.down.shape[-2], out_dtype
        top_k, experts, inter = ids.shape[1], routed.gate.shape[0], routed.inter
        pieces = -(-shared.inter // inter)
        self.h = (self.tokens, top_k + pieces, inter)
        up, down, pdl = config.up, config.down, config.pdl and not INTERPRETED
        even = shared.inter % inter == 0
        tensors = (routed.gate, routed.up, shared.gate, shared.up, routed.down, shared.down)
        aligned = not any(t.data_ptr() % 16 for t in tensors)
        wide = max(t.stride(-2) * t.shape[-2] for t in tensors) >= 1 << 31 or abs(x.stride(1)) * hidden >= 1 << 31
        sizes = (top_k, pieces, experts)
        self.up = Launch(
            joined.up_joined,
            (self.tokens * (top_k + pieces), -(-inter // up.bn)),
            (
                *(*sizes, hidden, inter, shared.inter, *body["arguments"], *x.stride(), *ids.stride()),
                *(routed.gate.stride(0), routed.up.stride(0), routed.gate.stride(-2), *routed.firsts, *shared.firsts),
                *(body["activation"], aligned, wide, even and inter % up.bn == 0, hidden % up.bk == 0, up.bn, up.bk, up.stages, pdl),
            ),
            **self._options(up, pdl),
        )
        at = power_of_two(top_k + pieces) if top_k + pieces <= 8 else max(down.at, 1)
        gate_stride = gate.stride(0) if gate is not None else 0
        self.down = Launch(
            joined.down_joined,
            (self.tokens, -(-self.out // down.bn)),
            (
                *(*sizes, inter, shared.inter, self.out, *ids.stride(), *weights.stride(), gate_stride),
                *(routed.down.stride(0), routed.down.stride(-2), shared.down.stride(-2)),
                *(gate is not None, aligned, wide, self.out % down.bn == 0, even and inter % down.bk == 0),
                *(at, down.bn, down.bk, down.stages, pdl),
            ),
            **self._options(down, pdl),
        )

    def _options(self, part: Any, pdl: bool) -> dict[str, Any]:
        return {"num_warps": part.warps, "num_stages": max(part.stages, 1), **({"launch_pdl": True} if pdl else {})}

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None, routed: Part, shared: Part) -> Tensor:
        """[T, N]."""
        out = torch.empty((self.tokens, self.out), dtype=self.out_dtype, device=x.device)
        h = torch.empty(self.h, dtype=x.dtype, device=x.device)
        up = (x, ids, routed.gate, routed.up, shared.gate, shared.up, h)
        down = (h, ids, weights, weights if gate is None else gate, routed.down, shared.down, out)
        if self.up.compiled is None or self.down.compiled is None:
            self.up.first(up)
            self.down.first(down)
            return out
        stream = stream_of(x.device)
        self.up.again(stream, [t.data_ptr() for t in up])
        self.down.again(stream, [t.data_ptr() for t in down])
        return out


def run(
    tensors: Sequence[Tensor], counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype,
    shared: Sequence[Tensor], shared_counts: Sequence[int], shared_body: int, shared_arg0: float, shared_arg1: float,
) -> Tensor | None:  # fmt: skip
    """``moefuse::experts_and_shared`` in two launches; None where these kernels are not for it."""
    x, ids, weights, *lists = unpack(tensors, counts)
    own, gates, *own_lists = unpack(shared, shared_counts)
    if x.data_ptr() != own.data_ptr() or x.shape != own.shape or x.stride() != own.stride() or not x.shape[0] or x.dtype not in DTYPES:
        return None
    routed, beside = decode(body, arg0, arg1), decode(shared_body, shared_arg0, shared_arg1)
    if (routed["activation"], routed["activation_args"]) != (beside["activation"], beside["activation_args"]):
        return None
    first, second = part_of(lists, routed), part_of(own_lists, beside)
    if first is None or second is None or first.gate.dim() != 3 or second.gate.dim() != 2:
        return None
    gate = gates[0] if gates else None
    key = (
        body, shared_body, arg0, arg1, out_dtype, x.shape, x.stride(), x.dtype, x.device, ids.shape, ids.stride(), ids.dtype,
        weights.stride(), weights.dtype, None if gate is None else (gate.stride(), gate.dtype),
        tuple([(t.shape, t.stride(), t.data_ptr() & 15) for t in (x, *tensors[3:], *shared[1:])]),
    )  # fmt: skip
    if key not in _PLANS:
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = _plan(x, ids, weights, gate, first, second, routed, (arg0, arg1), out_dtype)
    plan = _PLANS[key]
    return None if plan is None else plan.run(x, ids, weights, gate, first, second)


def _plan(
    x: Tensor, ids: Tensor, weights: Tensor, gate: Tensor | None, routed: Part, shared: Part, options: dict[str, Any],
    arguments: tuple[float, float], out_dtype: torch.dtype,
) -> JoinedPlan | None:  # fmt: skip
    strides = {t.stride(-2) for t in (routed.gate, routed.up, shared.gate, shared.up)}
    config = _vectors(x, ids, routed, options)
    if len(strides) != 1 or config is None or x.dtype != shared.gate.dtype:
        return None
    body = {"activation": options["activation"], "arguments": arguments}
    return JoinedPlan(x, ids, weights, gate, routed, shared, body, config, out_dtype)


def _vectors(x: Tensor, ids: Tensor, routed: Part, options: dict[str, Any]) -> Config | None:
    """The configuration of the routed experts, where they run as vectors and the inputs of a slot are not shared out."""
    device = device_of(x.device)
    problem = problem_of(x, ids, [routed.gate], [routed.down], options["gating"])
    config = choose(problem, device.name, device.hopper, device.shared, x.element_size())
    return config if not config.bm and not config.down.parts else None


def forget() -> None:
    """Make every plan anew at its next call."""
    _PLANS.clear()
