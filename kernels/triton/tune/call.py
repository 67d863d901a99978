"""Inputs to measure with: several routings over one set of weights, and the same as meta tensors for a process that only compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.host.layout import Device, Lists
from moefuse.kernels.triton.host.plan import Plan
from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.call import Body, ExpertsCall, stacks
from moefuse.tuning.problem import Config, Problem

SETS = ((8, 8), (64, 4), (512, 3))
"""(up to so many tokens, so many routings); two for more. Few tokens hit few experts, so one routing says little."""


@dataclass(frozen=True)
class Kind:
    """What a call of ``moefuse::experts`` is besides its problem. ``biases``: of w_in, w_up, w_out."""

    activation: str = "silu"
    args: tuple[float, float] = (0.0, 0.0)
    up_first: bool = False
    on_input: bool = False
    out_dtype: str = ""
    biases: tuple[bool, bool, bool] = (False, False, False)

    def body(self, p: Problem) -> Body:
        """What an expert computes."""
        return Body(self.activation, self.args[: ACTIVATIONS[self.activation].num_args], p.gating, self.up_first, self.on_input)

    def out(self, p: Problem) -> torch.dtype:
        """The dtype of the result."""
        return getattr(torch, self.out_dtype or p.dtype)  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Kind:
        return Kind(**{**data, "args": tuple(data["args"]), "biases": tuple(data["biases"])})


@dataclass
class Call:
    """Tensors of one problem: ``sets`` of (x [T, H], ids [T, K], weights [T, K]) over the same weight and bias lists."""

    problem: Problem
    kind: Kind
    lists: Lists
    sets: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @property
    def calls(self) -> list[ExpertsCall]:
        """One for each set."""
        return [
            ExpertsCall(*inputs, *stacks(self.lists), self.kind.body(self.problem), self.kind.out(self.problem)) for inputs in self.sets
        ]

    def plan(self, config: Config | None = None, device: Device | None = None) -> Plan:
        """The plan of a call with a configuration (None: the one that it takes by itself); ``device``: for tensors that are on none."""
        return Plan(self.calls[0], config, device)


def make(p: Problem, kind: Kind, device: torch.device | str, lists: Lists | None = None, skew: bool = False) -> Call:
    """A call with random tokens and routing; with random weights too, unless ``lists`` has them.

    Every token has K different experts (as far as there are), drawn uniformly; ``skew``: expert e with weight 1 / (e + 1).
    """
    device = torch.device(device)
    meta = device.type == "meta"
    source = None if meta else torch.Generator(device=device).manual_seed(p.tokens)
    count = 1 if meta else next((n for limit, n in SETS if p.tokens <= limit), 2)
    lists = weights_of(p, kind, device, source) if lists is None else lists
    return Call(p, kind, lists, [_inputs(p, device, source, skew) for _ in range(count)])


def weights_of(p: Problem, kind: Kind, device: torch.device, source: torch.Generator | None) -> Lists:
    """w_in, w_up, w_out, b_in, b_up, b_out with the variance of a usual initialisation, in the problem's storage."""
    dtype = getattr(torch, p.dtype)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        t = torch.empty(shape, dtype=dtype, device=device)
        return t if source is None else t.normal_(std=scale, generator=source)

    def weight(out: int, inputs: int, transposed: bool) -> list[Tensor]:
        shape = (inputs, out) if transposed else (out, inputs)
        lead = () if p.separate else (p.experts,)
        made = [draw(*lead, *shape, scale=max(inputs, 1) ** -0.5) for _ in range(p.experts if p.separate else 1)]
        return [t.transpose(-2, -1) for t in made] if transposed else made

    def bias(out: int, wanted: bool) -> list[Tensor]:
        if not wanted:
            return []
        return [draw(out) for _ in range(p.experts)] if p.separate else [draw(p.experts, out)]

    apart = p.gating == "separate"
    width = p.inter if apart or p.gating == "plain" else 2 * p.inter
    first, second, last = kind.biases
    return (
        weight(width, p.hidden, p.transposed_in),
        weight(p.inter, p.hidden, p.transposed_in) if apart else [],
        weight(p.out, p.inter, p.transposed_out),
        bias(width, first),
        bias(p.inter, second and apart),
        bias(p.out, last),
    )


def _inputs(p: Problem, device: torch.device, source: torch.Generator | None, skew: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = getattr(torch, p.dtype)
    if source is None:
        ids = torch.empty((p.tokens, p.top_k), dtype=torch.int64, device=device)
        return torch.empty((p.tokens, p.hidden), dtype=dtype, device=device), ids, torch.empty(ids.shape, dtype=dtype, device=device)
    scores = torch.rand((p.tokens, max(p.experts, p.top_k)), generator=source, device=device)
    if skew:
        scores = scores.clamp_min(1e-9).log() * torch.arange(1, scores.shape[1] + 1, device=device)
    ids = scores.topk(p.top_k, dim=-1).indices % p.experts
    weights = torch.rand(ids.shape, generator=source, device=device) + 0.1
    x = torch.randn((p.tokens, p.hidden), generator=source, device=device)
    return x.to(dtype), ids, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Every tensor of the lists."""
    return [t for tensors in lists for t in tensors]
