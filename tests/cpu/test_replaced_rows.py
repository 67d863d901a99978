"""Top-1 experts whose rows stand in place of the tokens' own: ``out = x.clone(); out[ids == e] = expert(x[ids == e])``.

Tokens that no expert takes (ids out of range, over capacity) keep what stood there. The shares are not a sum with the old rows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse.config import Options
from tests.programs.check import Outcome, check_exact

E, H, WIDTH = 4, 12, 20
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda x: x.clone(),
    "scaled": lambda x: x * 0.5,
    "zeros": torch.zeros_like,
}


class Replaced(nn.Module):
    def __init__(self, base: Callable[[Tensor], Tensor], first: int = 0) -> None:
        super().__init__()
        self.base, self.first = base, first
        self.router = nn.Linear(H, E + first)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def write(self, out: Tensor, mask: Tensor, rows: Tensor) -> None:
        out[mask] = rows

    def forward(self, x: Tensor) -> Tensor:
        ids = self.router(x).argmax(-1) - self.first  # below zero: nobody's
        out = self.base(x)
        for e, expert in enumerate(self.experts):
            self.write(out, ids == e, expert(x[ids == e]))
        return out


class Added(Replaced):
    """The other idiom: the old rows stay, and the experts add to them."""

    def write(self, out: Tensor, mask: Tensor, rows: Tensor) -> None:
        out.index_add_(0, torch.where(mask)[0], rows)


class Both(Replaced):
    """The near miss: one expert replaces, the next one adds."""

    def write(self, out: Tensor, mask: Tensor, rows: Tensor) -> None:
        self.turn = not getattr(self, "turn", False)
        if self.turn:
            out[mask] = rows
        else:
            out.index_add_(0, torch.where(mask)[0], rows)


def check(model: nn.Module, options: Options | None = None) -> Outcome:
    inputs = (torch.randn(9, H, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return check_exact(model, *((x,) for x in inputs), options=options)


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("verify", ["probe", "off"])
def test_rows_in_place_of_others(base: Callable[[Tensor], Tensor], verify: str) -> None:
    """Without verification, too: what stood there must not be taken for something to add to."""
    outcome = check(Replaced(base), Options(verify=verify))  # type: ignore[arg-type]
    assert [(s.code, s.message) for s in outcome.skipped] == []
    assert len(outcome.fused) == 1


@pytest.mark.parametrize("verify", ["probe", "off"])
def test_tokens_without_expert_keep_their_rows(verify: str) -> None:
    assert len(check(Replaced(BASES["clone"], first=2), Options(verify=verify)).fused) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", ["probe", "off"])
def test_experts_that_add_to_a_clone(verify: str) -> None:
    assert len(check(Added(BASES["clone"]), Options(verify=verify)).fused) == 1  # type: ignore[arg-type]


class Copies(Replaced):
    """What an expert changes in a copy of the sum, nobody reads."""

    read = False

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
            copy = out.clone()
            copy += rows
            out = out + (rows + 0.1 * copy if self.read else rows)
        return out


class ReadCopies(Copies):
    read = True


class Counts(Replaced):
    """A number in place of an expert's rows."""

    def write(self, out: Tensor, mask: Tensor, rows: Tensor) -> None:
        out[mask] += 1


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["probe", "off"])
@pytest.mark.parametrize(("kind", "fused"), [(Copies, 1), (ReadCopies, 0), (Counts, 0)])
def test_copies_of_the_sum(kind: type[Replaced], fused: int, verify: str) -> None:
    outcome = check(kind(BASES["clone"]), Options(verify=verify))  # type: ignore[arg-type]
    assert (len(outcome.fused), "internal-error" in [s.code for s in outcome.skipped]) == (fused, False), outcome


@pytest.mark.parametrize("verify", ["probe", "off"])
def test_now_one_and_now_the_other_is_no_layer_of_four(verify: str) -> None:
    outcome = check(Both(BASES["clone"]), Options(verify=verify))  # type: ignore[arg-type]
    assert outcome.fused == [], outcome
    assert {"replace what stood at their tokens here, and others' are added" in s.message for s in outcome.skipped} == {True}, outcome
