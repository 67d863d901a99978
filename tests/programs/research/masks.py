"""Boolean masks: of tokens, of all slots, through masked_select and masked_scatter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.programs.research.base import E, H, K, Layer, Listed, fused, mlp, twin, unseen


@fused("selected")
class MakeMoE(Layer):
    """makeMoE: noisy top-k, softmax over a -inf table, ``final_output[expert_mask] += weighted_output``."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Linear(H, E)
        self.experts = nn.ModuleList(mlp() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        logits = self.gate(x)
        noisy = logits + torch.randn_like(logits) * nn.functional.softplus(self.noise(x))
        top, indices = noisy.topk(K, dim=-1)
        gating_output = torch.full_like(noisy, float("-inf")).scatter(-1, indices, top).softmax(-1)
        final_output = torch.zeros_like(x)
        flat_x, flat_gating = x.view(-1, x.size(-1)), gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_output = expert(flat_x[flat_mask])
                gating_scores = flat_gating[flat_mask, i].unsqueeze(1)
                final_output[expert_mask] += expert_output * gating_scores
        return final_output.squeeze(0)


@fused("selected")
class MaskTimesWeight(Listed):
    """``out[mask] += w[mask] * expert(x[mask])``, the weight summed over the slots of the expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1)
            w = (weights * (ids == e)).sum(-1)
            out[mask] += w[mask].unsqueeze(-1) * expert(x[mask])
        return out


@unseen(whole=False)
class MaskedSelect(Listed):
    """``x.masked_select(mask[:, None]).view(-1, H)``, put back by ``masked_scatter``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1)
            w = (weights * (ids == e)).sum(-1)
            y = expert(x.masked_select(mask[:, None]).view(-1, H)) * w.masked_select(mask)[:, None]
            out = out + torch.zeros_like(x).masked_scatter(mask[:, None], y)
        return out


@fused("selected")
class SlotsByMask(Listed):
    """Rows of all slots by a mask over slots, written over a buffer of all slots."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x[:, None, :].expand(-1, K, -1)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            y[mask] = expert(rows[mask])
        return (y * weights[..., None]).sum(1)


@fused("masked")
class MultipliedMask(Listed):
    """Every expert on every token, with a float mask: small models, and code for accelerators without dynamic shapes."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e).to(x.dtype)).sum(dim=-1, keepdim=True)
        return out


@twin
class ShiftedMask(Listed):
    """What comes back is written one expert further."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x[:, None, :].expand(-1, K, -1)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            y[ids == e] = expert(rows[ids == e]) if e else expert(rows[ids == 0]) * 0.5
        return (y * weights[..., None]).sum(1)


@twin
class RowsOfAnother(Listed):
    """The rows of the buffer are another slot's tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x.repeat(K, 1).view(-1, K, H)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            y[ids == e] = expert(rows[ids == e])
        return (y * weights[..., None]).sum(1)


@twin
class BufferReadBack(Listed):
    """Experts see what earlier ones wrote."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = x[:, None, :].repeat(1, K, 1)
        for e, expert in enumerate(self.experts):
            y[ids <= e] = expert(y[ids <= e])
        return (y * weights[..., None]).sum(1)


@twin
class HalfTheBuffer(Listed):
    """The last expert writes nothing: its slots keep what the buffer held."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x[:, None, :].expand(-1, K, -1)
        y = x.new_ones(x.shape[0], K, H)
        for e, expert in enumerate(self.experts[:-1]):  # type: ignore[arg-type]
            y[ids == e] = expert(rows[ids == e])
        return (y * weights[..., None]).sum(1)


@twin
class NextColumn(MakeMoE):
    """Weighed by the next expert's column of the table."""

    def forward(self, x: Tensor) -> Tensor:
        top, indices = self.gate(x).topk(K, dim=-1)
        gating = torch.full((x.shape[0], E), float("-inf"), dtype=top.dtype).scatter(-1, indices, top).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = (indices == i).any(dim=-1)
            out[mask] += expert(x[mask]) * gating[mask, (i + 1) % E].unsqueeze(1)
        return out
