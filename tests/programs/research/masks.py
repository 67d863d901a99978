"""Boolean masks: of tokens, of all slots, through masked_select and masked_scatter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.programs.research.base import E, H, K, Layer, Listed, fused, mlp, twin


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


@fused("selected")
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


@fused("selected", grad=False)
class ExpandedMask(Listed):
    """One mask as broad as the tokens, for what is read, for what is skipped, and for what is added in place."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1, keepdim=True).expand_as(x)
            w = (weights * (ids == e)).sum(-1).masked_select(mask[:, 0])
            tokens = x[mask].view(-1, H)
            if tokens.numel() == 0:
                continue
            done = out.masked_select(mask).reshape(-1, H) + expert(tokens) * w.unsqueeze(-1)
            out.masked_scatter_(mask, done)
        return out


@fused("selected")
class ScatteredSlots(Listed):
    """``masked_select`` and ``masked_scatter`` on a buffer of all slots."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = x[:, None, :].expand(-1, K, -1)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).unsqueeze(-1)
            y = y.masked_scatter(mask, expert(rows.masked_select(mask).view(-1, H)))
        return (y * weights[..., None]).sum(1)


@fused("selected")
class AssignedToZeros(Listed):
    """Each expert's rows in a tensor of their own, added up."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask, part = (ids == e).any(dim=-1), torch.zeros_like(x)
            part[mask] = expert(x[mask]) * (weights * (ids == e)).sum(-1)[mask, None]
            out += part
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


class _Scattered(Listed):
    """``masked_select`` there and ``masked_scatter`` back; subclasses do one thing differently."""

    slots = K

    def weigh(self, w: Tensor, mask: Tensor) -> Tensor:
        return w.masked_select(mask)[:, None]

    def take(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_select(mask[:, None]).view(-1, H)

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return out + torch.zeros_like(out).masked_scatter(masks[e][:, None], y)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.scores(x).to(x.dtype).topk(self.slots, dim=-1)
        out, masks = torch.zeros_like(x), [(ids == e).any(dim=-1) for e in range(E)]
        for e, expert in enumerate(self.experts):
            w = (weights * (ids == e)).sum(-1)
            out = self.give(out, expert(self.take(x, masks[e])) * self.weigh(w, masks[e]), masks, e)
        return out


@twin
class PutBackByAnother(_Scattered):
    """The next expert's mask says where the rows go; every expert has as many, so that they fit."""

    slots = E

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return super().give(out, y, [*masks[1:], masks[0]], e)


@twin
class PutBackBelow(_Scattered):
    """Rows go to the token behind theirs."""

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return super().give(out, y, [mask.roll(1) for mask in masks], e)


@twin
class WeighedByAnother(_Scattered):
    """The weights are those of the tokens behind."""

    def weigh(self, w: Tensor, mask: Tensor) -> Tensor:
        return super().weigh(w, mask.roll(1))


@twin
class ScatteredIntoOnes(_Scattered):
    """Where an expert has no tokens, its share is one."""

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return out + torch.ones_like(out).masked_scatter(masks[e][:, None], y)


@twin
class ScatteredOverOthers(_Scattered):
    """Rows of an earlier expert of the same token are written over."""

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return out.masked_scatter(masks[e][:, None], y)


@twin
class ColumnsAsRows(_Scattered):
    """The elements of the rows, put together in another order."""

    def take(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.masked_select(mask[:, None]).view(H, -1).t()


@twin
class TurnedOver(_Scattered):
    """The elements of the results, put back in another order."""

    def give(self, out: Tensor, y: Tensor, masks: list[Tensor], e: int) -> Tensor:
        return super().give(out, y.t(), masks, e)


@twin
class Centred(_Scattered):
    """The mean of all elements is taken away before they are rows."""

    def take(self, x: Tensor, mask: Tensor) -> Tensor:
        flat = x.masked_select(mask[:, None])
        return (flat - flat.sum() / 100).view(-1, H)


@twin
class SkipsOneToken(_Scattered):
    """An expert with a single token does not run: rounded down, half as many rows are none."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1)
            tokens = self.take(x, mask)
            if tokens.numel() // (2 * H) == 0:
                continue
            out = self.give(out, expert(tokens) * self.weigh((weights * (ids == e)).sum(-1), mask), [mask], 0)
        return out


@twin
class AssignedOverOthers(Listed):
    """Two experts' rows assigned to one tensor: the second one's stay where both were chosen."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(0, E, 2):
            part = torch.zeros_like(x)
            for i in (e, e + 1):
                mask = (ids == i).any(dim=-1)
                part[mask] = self.experts[i](x[mask]) * (weights * (ids == i)).sum(-1)[mask, None]
            out = out + part
        return out


@twin
class HalfReplaced(Listed):
    """Top-1: two experts' rows in place of the token, the others' beside it."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.scores(x).to(x.dtype).max(-1)
        first, second = x.clone(), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            (first if e < E // 2 else second)[mask] = expert(x[mask]) * weights[mask, None]
        return first + second
