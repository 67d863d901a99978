"""Layers of remote code and reference repositories: DeepSeek, Mistral, Mixtral, JetMoE, T5-like."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.research.base import E, H, K, Listed, Stacked, fused, refused, unseen


@fused("selected", train=False, grad=False)
class DeepseekInfer(Listed):
    """DeepSeek-V2 and V3, ``moe_infer``: counts by scatter_, ``.cpu().numpy()``, slices, cat, inverse by assignment."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_ids = self.route(x)
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        idxs = topk_ids.view(-1).argsort()
        sorted_tokens = x[idxs // topk_ids.shape[1]]
        tokens_per_expert = tokens_per_expert.cpu().numpy()
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            expert = self.experts[i]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            expert_out = expert(tokens_for_this_expert)
            outputs.append(expert_out)
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[idxs] = outs
        final_out: Tensor = (
            new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype).mul_(topk_weight.unsqueeze(dim=-1)).sum(dim=1).type(new_x.dtype)
        )
        return final_out


@fused("selected", grad=False)
class DeepseekFirstInfer(Listed):
    """DeepSeekMoE-16B, ``moe_infer``: ``bincount().cpu().numpy().cumsum(0)`` without minlength, scatter_reduce_."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat_expert_indices, flat_expert_weights = ids.view(-1), weights.view(-1, 1)
        expert_cache = torch.zeros_like(x)
        idxs = flat_expert_indices.argsort()
        tokens_per_expert = flat_expert_indices.bincount().cpu().numpy().cumsum(0)
        token_idxs = idxs // K
        for i, end_idx in enumerate(tokens_per_expert):
            start_idx = 0 if i == 0 else tokens_per_expert[i - 1]
            if start_idx == end_idx:
                continue
            expert = self.experts[i]
            exp_token_idx = token_idxs[start_idx:end_idx]
            expert_tokens = x[exp_token_idx]
            expert_out = expert(expert_tokens)
            expert_out.mul_(flat_expert_weights[idxs[start_idx:end_idx]])
            expert_cache.scatter_reduce_(0, exp_token_idx.view(-1, 1).repeat(1, x.shape[-1]), expert_out, reduce="sum")
        return expert_cache


class _TwoTables(Listed):
    """transformers 4's NLLB-MoE: two choices of one expert each, their tables added up, and read as a mask."""

    def table(self, x: Tensor) -> Tensor:
        scores = self.scores(x).to(x.dtype)
        first = F.one_hot(scores.argmax(-1), num_classes=E)
        second = F.one_hot(scores.masked_fill(first.bool(), float("-inf")).argmax(-1), num_classes=E)
        return (scores * first).sum(1, keepdim=True) * first + (scores * second).sum(1, keepdim=True) * second


@refused(
    "tokens-differ",
    "the experts' input rows do not line up with the expert ids: no rule reads whose tokens `token_indices` are",
    whole=False,
)
class NllbOfFour(_TwoTables):
    """Every token for every expert by an einsum, rows of two indices, put back where they were."""

    def forward(self, x: Tensor) -> Tensor:
        router_probs = self.table(x)
        router_mask = router_probs.bool()
        masked = torch.einsum("bm,be->ebm", x, router_mask.to(x.dtype))
        for idx, expert in enumerate(self.experts):
            token_indices = router_mask[:, idx]
            combining_weights = router_probs[token_indices, idx]
            expert_output = expert(masked[idx, token_indices])  # at: NllbOfFour
            masked[idx, token_indices] = torch.einsum("b,be->be", combining_weights, expert_output)
        return masked.sum(dim=0)


@unseen(whole=False)
class ByModality(Listed):
    """Text and image tokens, each with a projection of its own: no experts, nothing to say."""

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, 0] > 0
        out = torch.zeros_like(x)
        out[image] = self.experts[0](x[image])
        out[~image] = self.experts[1](x[~image])
        return out


class UpToTheLast(Listed):
    """Slots sorted by expert, cut where ``bincount`` without ``minlength`` says: the last experts may have no number."""

    def own(self, x: Tensor, tok: Tensor, slots: Tensor, weights: Tensor, e: int) -> Tensor:
        y: Tensor = self.experts[e](x[tok]) * weights.view(-1, 1)[slots]
        return y


@fused("selected")
class CountsInPairs(UpToTheLast):
    """Counts and experts in pairs, up to the last expert that was chosen; slices by a running sum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.view(-1).argsort()
        out, start = torch.zeros_like(x), 0
        for count, expert in zip(ids.view(-1).bincount().cpu().numpy(), self.experts, strict=False):
            end = start + count
            if count == 0:
                continue
            slots = order[start:end]
            out.index_add_(0, slots // K, expert(x[slots // K]) * weights.view(-1, 1)[slots])
            start = end
        return out


@fused("selected")
class EndsAlone(UpToTheLast):
    """The ends alone, as a ``for`` gets them, without asking whether there are any tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order, out, e, start = ids.view(-1).argsort(), torch.zeros_like(x), 0, 0
        ends = ids.view(-1).bincount().cumsum(0).cpu().numpy()
        for e, end in enumerate(ends):
            start = ends[e - 1] if e > 0 else 0
            slots = order[start:end]
            out.index_add_(0, slots // K, self.own(x, slots // K, slots, weights, e))
        return out


@fused("selected")
class DeepseekTrain(Listed):
    """DeepSeekMoE-16B and V2, training: tokens repeated for every slot, ``y[ids == i] = expert(x[ids == i])``, summed at the end."""

    def forward(self, x: Tensor) -> Tensor:
        topk_weight, topk_idx = self.route(x)
        flat_topk_idx = topk_idx.view(-1)
        hidden_states = x.repeat_interleave(K, dim=0)
        y = torch.empty_like(hidden_states)
        for i, expert in enumerate(self.experts):
            y[flat_topk_idx == i] = expert(hidden_states[flat_topk_idx == i])
        return (y.view(*topk_weight.shape, -1) * topk_weight.unsqueeze(-1)).sum(dim=1)


@fused("selected")
class DeepseekReference(Listed):
    """DeepSeek-V3's own ``inference/model.py``: a list of counts that says which experts are left out, ``y[idx] += ...``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=E).tolist()
        for i in range(E):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return y


@fused("selected")
class MistralInference(Listed):
    """mistral-inference and its many copies: ``results[batch_idx] += weights[...] * expert(inputs[batch_idx])``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, selected_experts = self.route(x)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth_expert = torch.where(selected_experts == i)
            results[batch_idx] += weights[batch_idx, nth_expert, None] * expert(x[batch_idx])
        return results


@fused("selected")
class MixtralLists(Listed):
    """The first Mixtral of transformers: row numbers as Python lists, ``if top_x.shape[0] == 0: continue``."""

    def forward(self, x: Tensor) -> Tensor:
        routing_weights, selected_experts = self.route(x)
        final_hidden_states = torch.zeros((x.shape[0], H), dtype=x.dtype, device=x.device)
        expert_mask = F.one_hot(selected_experts, num_classes=E).permute(2, 1, 0)
        for expert_idx in range(E):
            idx, top_x = torch.where(expert_mask[expert_idx])
            if top_x.shape[0] == 0:
                continue
            top_x_list = top_x.tolist()
            idx_list = idx.tolist()
            current_state = x[None, top_x_list].reshape(-1, H)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x_list, idx_list, None]
            final_hidden_states.index_add_(0, top_x, current.to(x.dtype))
        return final_hidden_states


@fused("selected")
class SplitLists(Stacked):
    """JetMoE, ScatterMoE's naive form: ``split(counts.tolist())``, one linear for each piece, ``cat``, ``index_add``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        _, order = ids.flatten().sort(0)
        batch_index = order.div(K, rounding_mode="trunc")
        expert_size = torch.zeros_like(self.scores(x)).scatter(1, ids, 1).long().sum(0).tolist()
        pieces = x[batch_index].split(expert_size, dim=0)
        outs = [F.linear(F.silu(F.linear(p, self.w1[i])) * F.linear(p, self.w3[i]), self.w2[i]) for i, p in enumerate(pieces)]
        y = torch.cat(outs, dim=0) * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, batch_index, y)


@fused("selected", train=False)
class SlotBySlot(Listed):
    """A loop over slots and experts: ``nonzero`` of one column of the ids, ``index_add_``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                rows = (ids[:, k] == e).nonzero().squeeze(-1)
                out.index_add_(0, rows, expert(x.index_select(0, rows)) * weights[rows, k].unsqueeze(-1))
        return out


@fused("selected")
class LlamaMoe(Listed):
    """LLaMA-MoE's calculator: pieces of the sorted tokens, and a list of outputs of those that are not empty."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.route(x)
        _, index_sorted = ids.view(-1).sort(0)
        batch_indices = index_sorted.div(K, rounding_mode="floor")
        sizes = ids.view(-1).bincount(minlength=E).tolist()
        split_x = torch.split(x.index_select(0, batch_indices), sizes, dim=0)
        outputs = [self.experts[i](split_x[i]) for i in range(E) if split_x[i].shape[0] > 0]
        y = torch.cat(outputs, 0) * scores.view(-1).index_select(0, index_sorted).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, batch_indices, y)


@fused("selected")
class AnnotatedSwitch(Listed):
    """labml's annotated Switch: lists of row numbers, outputs assigned, everything scaled at the end."""

    def forward(self, x: Tensor) -> Tensor:
        route_prob_max, routes = torch.max(self.scores(x), dim=-1)
        indexes_list = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(E)]
        final_output = x.new_zeros(x.shape)
        expert_output = [self.experts[i](x[indexes_list[i], :]) for i in range(E)]
        for i in range(E):
            final_output[indexes_list[i], :] = expert_output[i]
        return final_output * route_prob_max.view(-1, 1).to(x.dtype)


@fused("selected")
class BailingTrain(Listed):
    """Ling and others: the mask once, cast back, with leading dimensions folded."""

    def forward(self, x: Tensor) -> Tensor:
        identity, bsz = x.view(1, -1, H), x.shape[0]
        weights, ids = self.route(x)
        flat = ids.view(-1)
        h = identity.view(-1, H).repeat_interleave(K, dim=0)
        y = torch.empty_like(h)
        for i, expert in enumerate(self.experts):
            mask = flat == i
            y[mask] = expert(h[mask]).to(y.dtype)
        out = (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return out.to(x.dtype).view(1, bsz, H).squeeze(0)


@fused("selected")
class BySlotPairs(Listed):
    """Every slot's output kept, by pairs of row numbers: ``y[token, slot] = expert(x[token])``."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = x.new_zeros(x.shape[0], K, H)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            y[tok, slot] = expert(x[tok])
        return torch.einsum("tkh,tk->th", y, weights)


@fused("selected")
class FlatRows(Listed):
    """Row numbers of flat slots, their tokens by division."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y = x.new_zeros(ids.numel(), H)
        for e, expert in enumerate(self.experts):
            rows = torch.nonzero(ids.flatten() == e).squeeze(1)
            y[rows] = expert(x[rows // K])
        return (y.view(-1, K, H) * weights[:, :, None]).sum(1)


@fused("selected")
class SkippedInBuffer(Listed):
    """``if mask.any():`` around what fills the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat, h = ids.view(-1), x.repeat_interleave(K, dim=0)
        y = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            mask = flat == i
            if not mask.any():
                continue
            y[mask] = expert(h[mask])
        return (y.view(-1, K, H) * weights[:, :, None]).sum(1)


SHORT = (
    "this list depends on data, and without `minlength` it is shorter if the last experts have no tokens; "
    "the graph breaks here as it would without moefuse"
)


@refused("not-captured", SHORT, after="tokens-differ", whole=False)
class ShortList(UpToTheLast):
    """The counts as a Python list, of which nobody knows how long it is."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order, out, start = ids.view(-1).argsort(), torch.zeros_like(x), 0
        counts = ids.view(-1).bincount().tolist()  # at: ShortList
        for e in range(len(counts)):
            slots = order[start : start + counts[e]]
            out.index_add_(0, slots // K, self.own(x, slots // K, slots, weights, e))
            start = start + counts[e]
        return out
