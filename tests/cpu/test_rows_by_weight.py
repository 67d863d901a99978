"""Rows of an expert by its routing weight: ``torch.where((ids == e) & (weights > 0))``, ``gates[:, e] > 0``, ``nonzero(one_hot * weight)``.

Who was chosen and has a weight of zero is in no such list: the op is given a slot without expert, so that nothing has to be known of the
weights. They are cut off at zero here, where some are. Near misses ask something of another tensor, or of unchosen experts, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefuse.passes.rules.routing import slot_masks
from moefuse.passes.rules.rows import by_rows
from tests.programs.check import check_read

E, K, H, WIDTH = 4, 2, 12, 16
Found = tuple[Tensor, Tensor]
"""Tokens of an expert, and their weights."""
ByExpert = Callable[[Tensor, Tensor, Tensor, int], Found]
"""Of the ids [T, K], their weights, these as a table [T, E], and the number of an expert."""


def of_slots(hit: Callable[[Tensor, Tensor, int], Tensor]) -> ByExpert:
    def rows(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
        token, slot = torch.where(hit(ids, weights, e))
        return token, weights[token, slot]

    return rows


def by_table(hit: Callable[[Tensor, int], Tensor]) -> ByExpert:
    def rows(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
        mask = hit(gates, e)
        return torch.where(mask)[0], gates[:, e][mask]

    return rows


def summed(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    share = (weights * (ids == e)).sum(-1)
    token = (share > 0).nonzero(as_tuple=True)[0]
    return token, share[token]


def both(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    share = torch.where(ids == e, weights, 0.0).sum(-1)
    mask = (ids == e).any(-1) & (share > 0)
    return torch.where(mask)[0], share[mask]


def entries(ids: Tensor, weights: Tensor) -> Tensor:
    """A weight for each slot and expert, [T, K, E]: zero where that was not chosen."""
    return F.one_hot(ids, E).to(weights.dtype) * weights[..., None]


def listed(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    chosen = entries(ids, weights)
    token, slot = torch.nonzero(chosen[:, :, e], as_tuple=True)
    return token, chosen[token, slot, e]


def in_front(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    chosen = F.one_hot(ids, E).bool().permute(2, 0, 1) * weights
    token, slot = torch.where(chosen[e] > 0)
    return token, chosen[e, token, slot]


def any_slot(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    column = (F.one_hot(ids, E) * weights[..., None])[..., e]
    token = torch.where(column.any(1))[0]
    return token, column.sum(1)[token]


def slots_of_token(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    chosen = entries(ids, weights)
    token = (chosen[..., e] > 0).any(-1).nonzero().flatten()
    return token, chosen[token, :, e].sum(-1)


def by_mask(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    column = entries(ids, weights)[..., e]
    return torch.where(column != 0)[0], column[column != 0]


def other_expert(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    chosen = entries(ids, weights)
    token, slot = torch.nonzero(chosen[:, :, e], as_tuple=True)
    return token, chosen[token, slot, (e + 1) % E]


def other_slot(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    chosen = entries(ids, weights)
    token, slot = torch.nonzero(chosen[:, :, e], as_tuple=True)
    return token, chosen[token, K - 1 - slot, e]


def unchosen_entries(ids: Tensor, weights: Tensor, gates: Tensor, e: int) -> Found:
    column = entries(ids, weights)[..., e]
    token = torch.where((column >= 0).any(1))[0]
    return token, column.sum(1)[token]


ROWS: dict[str, ByExpert] = {
    "and": of_slots(lambda ids, w, e: (ids == e) & (w > 0)),  # computed again for every expert, and one condition
    "logical_and": of_slots(lambda ids, w, e: torch.logical_and(w != 0, ids == e)),
    "mul": of_slots(lambda ids, w, e: (ids == e) * (w > 0)),
    "threshold": of_slots(lambda ids, w, e: (ids == e) & (w >= 0.1)),
    "product": of_slots(lambda ids, w, e: (w * (ids == e)) > 0),
    "nonzero product": of_slots(lambda ids, w, e: w * (ids == e)),
    "where": of_slots(lambda ids, w, e: torch.where(ids == e, w, 0.0) != 0),
    "column": by_table(lambda gates, e: gates[:, e] > 0),
    "columns": by_table(lambda gates, e: (gates > 0)[:, e]),
    "column above": by_table(lambda gates, e: gates[:, e] > 0.05),
    "summed": summed,
    "both": both,
    "entries": listed,
    "entries, experts in front": in_front,
    "entries of any slot": any_slot,
    "entries of a token": slots_of_token,
    "entries by a mask": by_mask,
}
NEAR: dict[str, ByExpert] = {
    "of unchosen, too": by_table(lambda gates, e: gates[:, e] >= 0),
    "below": by_table(lambda gates, e: gates[:, e] > -0.5),
    "of another expert": by_table(lambda gates, e: gates[:, (e + 1) % E] > 0),
    "other slot's weight": of_slots(lambda ids, w, e: (ids == e) & (w.flip(-1) > 0).flip(0)),
    "or": of_slots(lambda ids, w, e: (ids == e) | (w > 0.5)),
    "entry of another expert": other_expert,
    "entry of another slot": other_slot,
    "entries of unchosen, too": unchosen_entries,
}


class Layer(nn.Module):
    def __init__(self, rows: ByExpert) -> None:
        super().__init__()
        self.router, self.rows = nn.Linear(H, E), rows
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return F.relu(weights - 0.25), ids

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, H)
        weights, ids = self.route(x)
        out, gates = torch.zeros_like(x), torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, weights)
        for e, expert in enumerate(self.experts):
            token, weight = self.rows(ids, weights, gates, e)
            out.index_add_(0, token, weight[:, None] * expert(x[token]))
        return out.reshape(shape)


Twice = Callable[[Tensor, Tensor, int], Found]
LEFT_OUT: dict[str, Twice] = {
    "table": lambda ids, w, e: by_any((ids == e) & (w > 0.2), ((ids == e) * w).sum(-1)),
    "product": lambda ids, w, e: by_any((ids == e) * w > 0.2, ((ids == e) * w).sum(-1)),
    "entries": lambda ids, w, e: by_any(entries(ids, w)[..., e] > 0.2, entries(ids, w)[..., e].sum(-1)),
    "compared again": lambda ids, w, e: again((ids == e) & (w > 0.2), ids, w, e),
    "valid": lambda ids, w, e: by_any((ids == e) & (torch.arange(2 * len(ids)).view(-1, 2) % 3 > 0), ((ids == e) * w).sum(-1)),
}
"""Rows by some of a token's slots of an expert, and the weights of all of them."""


def by_any(hit: Tensor, share: Tensor) -> Found:
    token = torch.where(hit.any(-1))[0]
    return token, share[token]


def again(hit: Tensor, ids: Tensor, weights: Tensor, e: int) -> Found:
    token = torch.where(hit.any(-1))[0]
    return token, (weights[token] * (ids[token] == e)).sum(-1)


class Repeated(Layer):
    """Ids that are not a top-k's: a token may have an expert twice, once above the threshold and once below."""

    def __init__(self, rows: Twice) -> None:
        super().__init__(lambda ids, weights, gates, e: rows(ids, weights, e))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = (x[:, :K] * 3).long().abs() % E, self.router(x).softmax(-1)[:, :K]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, weight = self.rows(ids, weights, weights, e)
            out = out.index_add(0, token, weight[:, None] * expert(x[token]))
        return out


class OneHot(Layer):
    """A one-hot of each slot times its weight, and rows where that is not zero."""

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, H)
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for k in range(K):
            gates = F.one_hot(ids[:, k], E) * self.weight(weights, k)
            for e, expert in enumerate(self.experts):
                token = gates[:, e].nonzero(as_tuple=True)[0]
                out.index_add_(0, token, gates[token, e, None] * expert(x[token]))
        return out.reshape(shape)

    def weight(self, weights: Tensor, k: int) -> Tensor:
        return weights[:, k : k + 1]


class OtherSlot(OneHot):
    def weight(self, weights: Tensor, k: int) -> Tensor:
        return weights[:, K - 1 - k : K - k]


class Changed(Layer):
    """The condition is of weights as they were before they are changed: two of its kind are not one."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        weights, out = weights.clone(), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, _ = torch.where((ids == e) & (weights.detach() > 0.1))
            out.index_add_(0, token, expert(x[token]))
            with torch.no_grad():
                weights.mul_(0.8)
        return out


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize("shape", [(11,), (2, 6)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_by_their_weight(rows: str, shape: tuple[int, ...], verify: str) -> None:
    """With and without the proof: what it draws has weights of zero, and all that is read of one tensor is of one draw."""
    outcome = check_read(Layer(ROWS[rows]), *shape, H, verify=verify)
    assert [s.message for s in outcome.skipped] == []
    assert [(f.spec.num_experts, f.spec.top_k, f.spec.activation) for f in outcome.fused] == [(E, K, "relu")]


@pytest.mark.parametrize("verify", ["off", "probe"])
def test_rows_of_a_one_hot_times_its_weight(verify: str) -> None:
    outcome = check_read(OneHot(ROWS["and"]), 2, 6, H, verify=verify)
    assert [s.message for s in outcome.skipped] == []
    assert [(f.spec.num_experts, f.spec.top_k) for f in outcome.fused] == [(E, K)]


@pytest.mark.parametrize("rows", NEAR)
def test_rows_by_something_else(rows: str) -> None:
    """What is fused has eager's values, which ``check`` compares; these have no routing that could say so."""
    assert check_read(Layer(NEAR[rows]), 11, H).fused == []


@pytest.mark.parametrize("kind", [OtherSlot, Changed])
def test_near_misses(kind: type[Layer]) -> None:
    assert check_read(kind(ROWS["and"]), 11, H).fused == []


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize("rows", LEFT_OUT)
def test_weights_of_slots_that_are_left_out(rows: str, verify: str) -> None:
    assert check_read(Repeated(LEFT_OUT[rows]), 64, H, verify=verify).fused == []


def test_the_probe_has_tokens_with_an_expert_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that overlooked what is left out would not be noticed with ids that differ."""
    monkeypatch.setattr(slot_masks, "same_slots", lambda *_: True)
    monkeypatch.setattr(by_rows.slot_masks, "same_slots", lambda *_: True)
    outcome = check_read(Repeated(LEFT_OUT["table"]), 64, H, verify="probe")
    assert (outcome.fused, [s.code for s in outcome.skipped]) == ([], ["verification-failed"])


@pytest.mark.parametrize("verify", ["off", "probe"])
def test_slots_without_weight_add_nothing(verify: str) -> None:
    """Of a token that has an expert twice, what is left out has a weight of zero; but that weight has a gradient."""
    model = Repeated(lambda ids, w, e: any_slot(ids, w, w, e))
    assert check_read(model, 64, H, verify=verify).fused == []
    assert len(check_read(Repeated(lambda ids, w, e: any_slot(ids, w.detach(), w, e)), 64, H, verify=verify).fused) == 1


class Thresholded(Layer):
    """Any number of experts for a token: there are no slots to be given to an op."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = scores[:, e] > 0.2
            out[mask] += expert(x[mask]) * scores[mask, e, None]
        return out


def test_any_number_of_experts_is_told() -> None:
    outcome = check_read(Thresholded(ROWS["and"]), 11, H)
    (skipped,) = outcome.skipped
    assert (outcome.fused, skipped.code) == ([], "threshold")
    assert skipped.message.startswith("`mask` is of tokens whose score is above a number")
