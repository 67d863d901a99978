"""Expert loops that depend on data, as people write them, and loops that only look like one.

Every layer takes ``x [T, H]`` and router ``logits [T, E]``, so that a test decides which experts get no token at all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, I = 4, 2, 8, 6  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    """A gated expert with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Stacked weights, a ModuleList of experts, and top-k routing; subclasses write the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(E, 2 * I, H) / 3)
        self.w_out = nn.Parameter(torch.randn(E, H, I) / 3)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.calls = 0
        self.seen: list[int] = []

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(logits.softmax(-1), K, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(mask [E, K, T], which experts have tokens [E])."""
        mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        return mask, torch.greater(mask.sum(dim=(-1, -2)), 0)


POSITIVE: dict[str, type[Layer]] = {}
NEAR_MISS: dict[str, type[Layer]] = {}


def positive(cls: type[Layer]) -> type[Layer]:
    POSITIVE[cls.__name__] = cls
    return cls


def near_miss(cls: type[Layer]) -> type[Layer]:
    NEAR_MISS[cls.__name__] = cls
    return cls


# --- loops over the experts that were hit -----------------------------------------------------------------------------------------


@positive
class RowsOfNonzero(Layer):
    """transformers 5: rows of shape [1], a sentinel expert, stacked weights."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for row in hit:
            row = row[0]
            if row == E:
                continue
            slot, tok = torch.where(mask[row])
            y = self.expert(row, x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, y.to(out.dtype))
        return out


@positive
class ModuleListByRow(Layer):
    """transformers 4.57: ``self.experts[row]`` and ``mask[row].squeeze(0)``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros((x.shape[0], H), dtype=x.dtype, device=x.device)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            expert = self.experts[row]
            slot, tok = torch.where(mask[row].squeeze(0))
            current = x[None, tok].reshape(-1, H)
            out.index_add_(0, tok, expert(current) * weights[tok, slot, None])
        return out


@positive
class ListOfHits(Layer):
    """``.flatten().tolist()``: Python numbers."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for e in hit.nonzero().flatten().tolist():
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@positive
class NamedListOfHits(Layer):
    """The list has a name before it is looped over."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        present = torch.where(hit)[0].tolist()
        for e in present:
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class SqueezedHits(Layer):
    """Scalars, from ``where``, ``squeeze`` and counts."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        counts = F.one_hot(ids, num_classes=E).sum(dim=(0, 1))
        for e in (counts != 0).nonzero().squeeze(-1):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class ArgwhereSliced(Layer):
    """GPT-OSS: ``hit[:]``, and grad mode switched in the body."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in torch.argwhere(hit)[:]:
            with torch.no_grad():
                slot, tok = torch.where(mask[row[0]])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@positive
class OutOfPlace(Layer):
    """The accumulator is a new tensor after every expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            out = torch.index_add(out, 0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


# --- branches on the number of tokens ---------------------------------------------------------------------------------------------


@positive
class IfNumel(Layer):
    """DeepSeek-V3 in transformers 4."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x, dtype=weights.dtype)
        mask = F.one_hot(ids, num_classes=E).permute(2, 0, 1)
        for e in range(len(self.experts)):
            tok, slot = torch.where(mask[e])
            if tok.numel() > 0:
                weighted = self.experts[e](x[tok]) * weights[tok, slot].unsqueeze(-1)
                out.index_add_(0, tok, weighted)
        return out.type(x.dtype)


@positive
class ContinueWhenEmpty(Layer):
    """``if len(idx) == 0: continue``, then ``out[tok] +=``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if len(tok) == 0:
                continue
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


@positive
class ShapeIsZero(Layer):
    """``idx.shape[0]`` compared, out of place."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.shape[0] == 0:
                continue
            out = out.index_add(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class NotAny(Layer):
    """A boolean mask, skipped when it is all false."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(dim=-1)
            if not mask.any():
                continue
            w = (weights * (ids == e)).sum(-1)
            out[mask] += self.expert(e, x[mask]) * w[mask].unsqueeze(-1)
        return out


@positive
class IfMaskSum(Layer):
    """``if mask.sum() > 0``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = ids == e
            if mask.sum() > 0:
                tok, slot = mask.nonzero(as_tuple=True)
                out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@positive
class IfCount(Layer):
    """``if counts[e] == 0: continue``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        counts = F.one_hot(ids, num_classes=E).sum(dim=(0, 1))
        for e in range(E):
            if counts[e] == 0:
                continue
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class NestedConditions(Layer):
    """A loop over hits, and a branch in it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            if tok.numel() > 0 and self.calls == 0:
                out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@positive
class InAFunction(Layer):
    """The loop is in a function that the layer calls, with a residual around it."""

    def combine(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return x + self.combine(x, *self.route(logits)) * 0.5


@positive
class ViewInTheLoop(Layer):
    """Each iteration takes the same view of the input again."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                rows = x.view(-1, H)[tok]
                out.index_add_(0, tok, self.expert(e, rows) * weights[tok, slot, None])
        return out


@positive
class LoopsInTheBody(Layer):
    """Iterators that the body makes for itself are its own business."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            y = x[tok]
            for _ in range(2):
                y = F.silu(y)
            for scale in (s * 2.0 for s in (0.25, 0.5)):
                y = y * scale
            out.index_add_(0, tok, self.expert(row[0], y) * weights[tok, slot, None])
        return out


# --- what only looks like one of these --------------------------------------------------------------------------------------------


class Hits(Layer):
    """A loop over hits with one statement that makes a difference; subclasses fill it in."""

    def mask(self, ids: Tensor) -> Tensor:
        return self.hits(ids)[1]

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out


@near_miss
class CountsIterations(Hits):
    """A Python number that is used afterwards."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, count = torch.zeros_like(x), 0
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            count += 1
        return out / count


@near_miss
class CountsOnTensor(Hits):
    """A tensor that counts, without any data from the experts."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(())
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            total = total + 1
        return out + total


@near_miss
class CountsInPlace(Hits):
    """The same in place."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(1)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            total += 1
        return out + total


@near_miss
class CountsOnModule(Hits):
    """An attribute of the module."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        self.calls += 1


@near_miss
class AppendsToList(Hits):
    """A list whose length is read."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, done = torch.zeros_like(x), []
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            done.append(1)
        return out * len(done)


@near_miss
class FillsDict(Hits):
    """A dict of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, int] = {"n": 0}

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        self.stats["n"] += 1


@near_miss
class NonlocalCounter(Hits):
    """A cell that a nested function writes to."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, count = torch.zeros_like(x), 0

        def note() -> None:
            nonlocal count
            count += 1

        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            note()
        return out * count


@near_miss
class BreaksEarly(Hits):
    """Only the first expert that was hit."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            break
        return out


@near_miss
class ReturnsEarly(Hits):
    """The first expert that was hit decides."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        for row in self.mask(ids).nonzero():
            tok, slot = torch.where(ids == row[0])
            return torch.zeros_like(x).index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return x


@near_miss
class BreaksInAnOuterLoop(Hits):
    """The same statement is reached again by a loop around it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for _ in range(2):
            for row in self.mask(ids).nonzero():
                self.body(row[0], out, x, ids, weights)
                break
        return out


@near_miss
class Enumerates(Hits):
    """The number of the iteration, not of the expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for i, row in enumerate(self.mask(ids).nonzero()):
            tok, slot = torch.where(ids == row[0])
            out.index_add_(0, tok, self.expert(i, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class Comprehension(Hits):
    """A list of results, one for each hit."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        parts = [self.expert(row[0], x).mean() for row in self.mask(ids).nonzero()]
        return x * len(parts) + sum(parts)


@near_miss
class ReadsTheLastRow(Hits):
    """The loop variable after the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        row = torch.zeros(1, dtype=torch.int64)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out + row


@near_miss
class ReadsTheLastList(Hits):
    """A Python number from the list, after the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, e = torch.zeros_like(x), 0
        for e in self.mask(ids).nonzero().flatten().tolist():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + e


@near_miss
class ListReadTwice(Hits):
    """The list of hits has a length."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        hits = self.mask(ids).nonzero().flatten().tolist()
        for e in hits:
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out * len(hits)


@near_miss
class ReadsTokenCount(Hits):
    """Each expert's rows are divided by how many there are: the same for each row, but not a function of the row."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None] / tok.shape[0])


@near_miss
class BatchStatistics(Hits):
    """Rows minus the mean over the expert's rows."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        y = self.expert(row, x[tok])
        out.index_add_(0, tok, (y - y.mean(0)) * weights[tok, slot, None])


@near_miss
class MutatesInput(Hits):
    """The next expert sees what this one changed."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            x.mul_(0.5)
        return out


@near_miss
class DropsSmallExperts(Hits):
    """Experts with one token are left out: the loop does not ask whether there is any."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) > 1


@near_miss
class OtherMask(Hits):
    """The mask comes from other data."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in (logits.sum(0) > 0).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out


@near_miss
class OtherRouting(Hits):
    """The mask speaks of the best expert only, the body of both."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids[:, :1].contiguous(), num_classes=E).sum(dim=(0, 1)) > 0


@near_miss
class ShiftedRow(Hits):
    """Expert ``e + 1`` runs when expert ``e`` was hit."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body((row + 1) % E, out, x, ids, weights)


@near_miss
class Misses(Hits):
    """A loop over the experts that nobody chose."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) == 0

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        out += self.expert(row, x)


@near_miss
class FirstExpertsWeight(Hits):
    """The second projection is that of expert 0 for all: a representative of expert 0 looks the same."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[0])


@near_miss
class ScalesByItsNumber(Hits):
    """The number of the expert is a factor."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None] * row)


@near_miss
class ColumnOfExpertZero(Hits):
    """Weighted by what the router gives expert 0."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        table = torch.zeros_like(logits).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            tok, _ = torch.where(ids == row[0])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * table[tok, 0, None])
        return out


@near_miss
class TokensOfExpertZero(Hits):
    """Every expert works on the tokens of expert 0."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == 0)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])


@near_miss
class OneOddRow(Hits):
    """A condition on the number: two ways through the body, and they differ."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        y = self.expert(row, x[tok]) * weights[tok, slot, None]
        if row == 2:
            y = y * 3
        out.index_add_(0, tok, y)


class Counted(Layer):
    """A loop over all experts with a branch on the number of tokens; subclasses change one thing."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if self.some(e, ids, tok):
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out

    def some(self, e: int, ids: Tensor, tok: Tensor) -> bool:
        raise NotImplementedError


@near_miss
class MoreThanOne(Counted):
    """Not none from some, but one from many."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 1:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class AsksTheNeighbour(Counted):
    """The branch asks about another expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            other = torch.where(ids == (e + 1) % E)[0]
            if other.numel() > 0:
                tok, slot = torch.where(ids == e)
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class ElseBranch(Counted):
    """An expert without tokens does something too."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
            else:
                out = out + self.expert(e, x) * 0.1
        return out


@near_miss
class FlagAfterwards(Counted):
    """A flag that the branch sets."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, last = torch.zeros_like(x), False
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                last = e == E - 1
        return out + 1 if last else out


@near_miss
class KeepsATensor(Counted):
    """A tensor from the branch is read behind it; without the branch it would be the one before."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, last = torch.zeros_like(x), x[:1]
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                last = self.expert(e, x[:1])
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + last


@near_miss
class RebindsAnOldTensor(Counted):
    """The same with a tensor that is older than the branch, so that no operation shows it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, scale, other = torch.zeros_like(x), x.mean(), x.std()
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                scale = other
        return out * scale


@near_miss
class ReturnsWhenEmpty(Counted):
    """An expert without tokens ends the layer."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                return out
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class BreaksWhenEmpty(Counted):
    """An expert without tokens ends the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                break
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class OnlyPython(Layer):
    """Nothing but Python depends on the branch, so that there may be no graph at all."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        if torch.where(ids == 0)[0].numel() > 0:
            return x
        return -x


@near_miss
class Ternary(Layer):
    """The value of a conditional expression."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok, _slot = torch.where(ids == 0)
        factor = 2.0 if tok.numel() > 0 else 3.0
        return x * factor


@near_miss
class OrDefault(Layer):
    """``a or b`` as a value."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok = torch.where(ids == 0)[0]
        some = tok.numel() > 0 or None
        return x if some else -x


@near_miss
class WhileSome(Layer):
    """A loop that the branch itself keeps going."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok = torch.where(ids == 0)[0]
        while tok.numel() > 0:
            x = x + 1
            tok = tok[1:]
        return x


@near_miss
class RandomInTheBranch(Counted):
    """Random numbers are drawn for experts with tokens only, and then thrown away."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                torch.rand(3)
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + torch.rand_like(x)


@near_miss
class Prints(Hits):
    """Output for every expert that was hit."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        print("expert", int(row))  # noqa: T201


@near_miss
class OddExpert(Layer):
    """One expert of the list differs in one attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0, 1.0, 2.0, 1.0]

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in self.hits(ids)[1].nonzero().flatten().tolist():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None] * self.scale[e])
        return out


@near_miss
class CachesSizes(Counted):
    """Sizes are summed up."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), 0
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                total += tok.numel()
        return out * total


def logits_for(kind: str, tokens: int) -> Tensor:
    """Router logits: ``random``; ``skewed`` (the last two experts get nothing); ``one`` (the first two do not either)."""
    out = torch.randn(tokens, E)
    if kind == "skewed":
        out[:, 2:] -= 100
    elif kind == "upper":
        out[:, :2] -= 100
    return out


KINDS = ("random", "skewed", "upper")
Make = Callable[[], Layer]


@near_miss
class AccumulatesIntoItsInput(Hits):
    """The next expert reads what this one added."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        for row in self.mask(ids).nonzero():
            self.body(row[0], x, x, ids, weights)
        return x


@near_miss
class ReadsTheAccumulator(Hits):
    """The next expert reads the sum so far, which is zero for the first."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok] + out[tok]) * weights[tok, slot, None])


@near_miss
class OverwritesTheWeights(Hits):
    """The next expert finds other routing weights."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        weights.mul_(2.0)


@near_miss
class ScalesTheSum(Hits):
    """Every further expert scales what is there."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        out.mul_(0.5)


@near_miss
class NextFromAnIterator(Hits):
    """The scale of an expert depends on how many came before."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = iter(range(1, E + 1))
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out


@near_miss
class CarriesTheInput(Hits):
    """A local, and not a tensor that is written to, goes from one expert to the next."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            x = x * 0.5
        return out


@near_miss
class NextFromAGenerator(Hits):
    """The same with a generator, which is started by the first expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = (float(i) for i in range(1, E + 1))
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out


@near_miss
class NextFromADict(Hits):
    """The same with the keys of a dict."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = iter(dict.fromkeys(range(1, E + 1)).keys())
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out
