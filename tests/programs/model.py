"""From a description to an ordinary nn.Module with example inputs."""

from __future__ import annotations

import copy
import functools
from types import ModuleType

import torch
from torch import Tensor, nn

from tests.programs import by_order, dense, filled, masked, reference, routing, selected, slots, store
from tests.programs.bodies import rms_norm
from tests.programs.hooks import PLAIN, Hooks
from tests.programs.program import Dense, Filled, Masked, Program, Selected, Slots, Sorted
from tests.programs.style import Style

FAMILY: dict[type, ModuleType] = {Selected: selected, Filled: filled, Masked: masked, Slots: slots, Sorted: by_order, Dense: dense}


class SharedMLP(nn.Module):
    """A shared expert beside the routed ones, optionally gated by one sigmoid per token."""

    def __init__(self, p: Program) -> None:
        super().__init__()
        self.up_proj = nn.Linear(p.hidden, p.inter, bias=False)
        self.down_proj = nn.Linear(p.inter, p.hidden, bias=False)
        self.shared_gate = nn.Linear(p.hidden, 1, bias=False) if p.noise.shared == "gated" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.down_proj(torch.nn.functional.silu(self.up_proj(x)))
        return y if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * y


class MoE(nn.Module):
    """A mixture-of-experts layer: router, experts, the spelling's combine, and whatever noise stands around it."""

    def __init__(self, p: Program, hooks: Hooks = PLAIN) -> None:
        super().__init__()
        self.program = p
        self.router = routing.Router(p)
        self.experts = store.make(p)
        self.mix = FAMILY[type(p.spelling)].make(p, hooks)
        self.flatten, self.layout = Style(p.noise).flatten, Style(p.noise).layout
        self.shared = SharedMLP(p) if p.noise.shared != "none" else None
        self.norm_weight = nn.Parameter(torch.ones(p.hidden)) if p.noise.pre_norm else None

    def prepare(self, x: Tensor) -> Tensor:
        """Hidden states to rows [T, H], normalised where the program says so."""
        x = self.arrange(x)
        x = x if self.norm_weight is None else rms_norm(x, self.norm_weight)
        return self.flatten(x) if x.dim() > 2 else x

    def arrange(self, x: Tensor) -> Tensor:
        """[*tokens, H] from the input's layout, or the other way round."""
        return x.permute(self.layout) if x.dim() > 2 and self.layout != (0, 1, 2) else x

    def forward(self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        p = self.program
        h = self.prepare(x)
        routed = self.router(h) if ids is None or weights is None else routing.Routed(h, weights, ids)
        out = self.mix(self.experts, h, routed)
        if self.shared is not None:
            out = out + self.shared(h)
        out = self.arrange(out.view(self.arrange(x).shape))
        if p.noise.residual:
            out = x + out
        outputs = (out,)
        if p.noise.logits_out:
            outputs += (routed.logits,)
        if p.noise.counts_out:
            outputs += (torch.nn.functional.one_hot(routed.ids.reshape(-1), p.experts).sum(0),)
        return outputs


def build(p: Program, hooks: Hooks = PLAIN) -> MoE:
    """The model of a program, with weights from its seed."""
    torch.manual_seed(p.seed)
    return MoE(p, hooks).to(getattr(torch, p.dtype))


def gold(model: MoE, *, plain: bool) -> MoE:
    """An fp64 copy; with ``plain`` the spelling is replaced by the reference that visits one routed slot at a time."""
    twin = copy.deepcopy(model).double()
    if plain:
        twin.mix = functools.partial(reference.mix, weight_on=model.program.weight_on)
    return twin


def inputs_for(model: MoE, seed: int = 0, autocast: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Example inputs: hidden states (and ids, weights) whose routing does not hang on rounding."""
    p = model.program
    generator = torch.Generator().manual_seed(1000 * p.seed + seed)
    dtype = getattr(torch, p.dtype)
    if p.routing.recipe == "inputs":
        x = torch.randn(*p.tokens, p.hidden, generator=generator).to(dtype)
        rows = x.numel() // p.hidden
        ids = torch.rand(rows, p.experts, generator=generator).argsort(-1)[:, : p.top_k]
        return model.arrange(x).contiguous(), ids, torch.rand(rows, p.top_k, generator=generator).to(dtype)
    router, twin = model, gold(model, plain=True)
    gap = 1e-4 if (autocast or dtype) == torch.float32 else 2e-2
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        rows = torch.randn(p.tokens[0] if len(p.tokens) == 1 else p.tokens[0] * p.tokens[1], p.hidden, generator=generator).to(dtype)
        for _ in range(200):
            bad = near_tie(router, twin, rows, gap)
            if not bad.any():
                break
            rows[bad] = torch.randn(int(bad.sum()), p.hidden, generator=generator).to(dtype)
    return (model.arrange(rows.reshape(*p.tokens, p.hidden)).contiguous(),)


def near_tie(router: MoE, twin: MoE, rows: Tensor, gap: float) -> Tensor:
    """Which rows choose other experts, or nearly do, in another precision."""
    here, there = router.router(router.prepare(rows)), twin.router(twin.prepare(rows.double()))
    scores = there.logits
    if router.program.routing.recipe == "sigmoid_bias":
        scores = scores.sigmoid() + twin.router.correction
    top = scores.sort(-1).values
    near = (top.diff(dim=-1) < gap).any(-1)
    different = here.ids.reshape(rows.shape[0], -1) != there.ids.reshape(rows.shape[0], -1)
    return near | different.any(-1)
