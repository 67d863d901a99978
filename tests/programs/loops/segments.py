"""Loops over slots sorted by expert, cut where one expert's slots end and the next one's begin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.loops.base import E, H, I, K, Layer, positive


class Ordered(Layer):
    """What the loops below have in common: slots sorted by expert, and how many each expert has."""

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(permutation [S], tokens of the sorted slots [S])."""
        perm = ids.flatten().argsort(stable=True)
        return perm, perm // K

    def counts(self, ids: Tensor) -> Tensor:
        """Slots of each expert [E]."""
        return F.one_hot(ids.flatten(), num_classes=E).sum(0)

    def unsorted(self, rows: Tensor, perm: Tensor, weights: Tensor) -> Tensor:
        """Sorted rows [S, H] back in the order of slots, weighted and summed."""
        out = torch.empty_like(rows)
        out[perm] = rows
        return (out.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


# --- counts as Python numbers, and split ------------------------------------------------------------------------------------------


class Parallel(nn.Module):
    """A product for each expert of rows that are sorted by expert."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, outer, inner) / 3)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        pieces = x.split(sizes, dim=0)
        out = [F.linear(pieces[e], self.weight[e]) for e in range(E)]
        return torch.cat(out, dim=0)


@positive
class SplitTwice(Ordered):
    """GraniteMoe and JetMoe of transformers 4.57: both projections split, multiply and join; sizes from a scattered table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Parallel(H, 2 * I), Parallel(I, H)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        top, ids = logits.float().topk(K, dim=1)
        gates = torch.softmax(top, dim=1).type_as(x)
        zeros = torch.zeros([gates.size(0), E], dtype=gates.dtype, device=gates.device)
        sizes = zeros.scatter(1, ids, 1).long().sum(0).tolist()
        _, perm = ids.flatten().sort(0)
        token = perm.div(K, rounding_mode="trunc")
        gate, up = self.first(x[token], sizes).chunk(2, dim=-1)
        y = self.second(F.silu(gate) * up, sizes) * gates.flatten()[perm][:, None]
        return torch.zeros((x.size(0), H), dtype=y.dtype, device=y.device).index_add(0, token, y)


@positive
class SplitOnce(Ordered):
    """``torch.split`` of the sorted tokens; whole experts run on the pieces."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        pieces = torch.split(x[token], self.counts(ids).tolist())
        rows = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        return self.unsorted(rows, perm, weights)


@positive
class SplitOfTokens(Ordered):
    """The token numbers are split, and each expert gathers and adds for itself."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        sizes = torch.bincount(ids.flatten(), minlength=E).tolist()
        scale = weights.flatten()[perm].split(sizes)
        out = torch.zeros_like(x)
        for e, tok in enumerate(token.split(sizes)):
            out.index_add_(0, tok, self.expert(e, x[tok]) * scale[e][:, None])
        return out


# --- counts as Python numbers, and slices -----------------------------------------------------------------------------------------


@positive
class RunningSlicesSkipped(Ordered):
    """The same with ``if n == 0: continue``, and an accumulator."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        scale = weights.flatten()[perm]
        out, start = torch.zeros_like(x), 0
        for e, n in enumerate(self.counts(ids).tolist()):
            if n == 0:
                continue
            end = start + n
            tok = token[start:end]
            out.index_add_(0, tok, self.expert(e, x[tok]) * scale[start:end, None])
            start = end
        return out


@positive
class FilledByCumsum(Ordered):
    """Aria of transformers 4.57: offsets with a zero in front, 0-d tensors as bounds, and a result that is filled slice by slice."""

    def product(self, x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], w.shape[-1], dtype=x.dtype, device=x.device)
        ends = torch.cumsum(counts, dim=0)
        ends = torch.cat((torch.zeros(1, dtype=torch.long, device=ends.device), ends))
        for e in range(w.shape[0]):
            start, end = ends[e], ends[e + 1]
            out[start:end] = torch.matmul(x[start:end], w[e])
        return out

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        top, ids = torch.topk(logits, k=K, dim=1)
        scores = F.softmax(top, dim=-1)
        counts = torch.histc(ids.flatten().to(torch.float32), bins=E, min=0, max=E - 1).to(ids.dtype)
        perm = torch.argsort(ids.view(-1))
        rows = x.index_select(0, perm // K)
        first, gate = torch.chunk(self.product(rows, self.w_in.transpose(1, 2), counts.cpu()), 2, dim=-1)
        y = self.product(F.silu(first) * gate, self.w_out.transpose(1, 2), counts.cpu())
        out = torch.zeros((x.shape[0] * K, H), dtype=y.dtype, device=y.device)
        out.index_copy_(0, perm, y)
        return (out.view(-1, K, H) * scores.unsqueeze(-1)).sum(dim=1)


# --- counts in numpy, or as a tensor that is iterated over -------------------------------------------------------------------------


@positive
class EnumeratedTensor(Ordered):
    """DeepSeek-V2 of transformers 4.57: 0-d tensors, a list that grows only if there is something to add."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        counts = ids.new_zeros((ids.shape[0], len(self.experts)))
        counts.scatter_(1, ids, 1)
        perm = ids.view(-1).argsort()
        rows, outputs, start = x[perm // ids.shape[1]], [], 0
        for i, n in enumerate(counts.sum(dim=0)):
            if n == 0:
                continue
            end = start + n
            outputs.append(self.experts[i + 0](rows[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if outputs else rows.new_empty(0)
        new = torch.empty_like(outs)
        new[perm] = outs
        return new.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(new.dtype)


@positive
class Numpy(Ordered):
    """DeepSeek's own code: ``.cpu().numpy()``, ``len(outputs)``."""

    @torch.no_grad()
    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        counts = ids.new_zeros((ids.shape[0], len(self.experts)))
        counts.scatter_(1, ids, 1)
        per_expert = counts.sum(dim=0)
        perm = ids.view(-1).argsort()
        rows = x[perm // ids.shape[1]]
        per_expert = per_expert.cpu().numpy()
        outputs, start = [], 0
        for i, n in enumerate(per_expert):
            end = start + n
            if n == 0:
                continue
            outputs.append(self.experts[i](rows[start:end]))
            start = end
        outs = torch.cat(outputs, dim=0) if len(outputs) else rows.new_empty(0)
        new = torch.empty_like(outs)
        new[perm] = outs
        return new.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(new.dtype)
