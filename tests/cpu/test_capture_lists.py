"""Lists that grow behind ``if n == 0: continue``: joining them is fine, and nothing else that looks into them sees a wrong item."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.capture_case import Packed, Seen, call, capturing
from tests.programs.loops import KINDS, H, K, logits_for
from tests.programs.loops.segments import Ordered

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Whole = Callable[[Any, list[Tensor]], Tensor]

FINE: dict[str, Whole] = {
    "keyword": lambda _, outs: torch.cat(tensors=outs, dim=0),
    "if not": lambda _, outs: torch.cat(outs, 0) * (2 if not outs else 3),
    "if len": lambda _, outs: torch.cat(outs) if len(outs) > 0 else torch.zeros(0, H),
}
LOOKS: dict[str, Whole] = {
    "for": lambda _, outs: torch.cat(outs) + sum(y.sum() for y in outs),
    "function": lambda _, outs: torch.cat(outs) * _counted(outs),
    "length": lambda _, outs: torch.cat(outs) * (2 if len(outs) > 3 else 3),
    "or": lambda _, outs: torch.cat(outs) * len(outs or [1]),
    "equal": lambda _, outs: torch.cat(outs) * (2 if outs == [] else 3) * len([*outs]),
    "enumerate": lambda _, outs: torch.cat([y * (i + 1) for i, y in enumerate(outs)]),
    "slice": lambda _, outs: torch.cat(outs[:2] + outs[2:]) * len(outs[:]),
    "index": lambda _, outs: torch.cat(outs) + outs[-1].mean(),
    "attribute": lambda self, outs: _kept(self, outs),
    "sort": lambda _, outs: (outs.sort(key=lambda y: -y.shape[0]), torch.cat(outs))[1],
    "pop": lambda _, outs: torch.cat([outs.pop(0) * 3, *outs]),
    "append": lambda _, outs: (outs.append(torch.zeros(0, H)), torch.cat(outs) * len(outs))[1],
    "clear": lambda _, outs: (torch.cat(outs), outs.clear(), len(outs))[0],
}


class Cut(Ordered):
    """Pieces in a list, put together again; subclasses change one thing."""

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        perm = ids.flatten().argsort(stable=True)
        return perm, perm // K

    def whole(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs, dim=0)

    def piece(self, e: int, h: Tensor, n: int) -> Tensor:
        return self.expert(e, h)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, outs, start = x[token], [], 0
        for e, n in enumerate(self.counts(ids).tolist()):
            if n == 0:
                continue
            end = start + n
            outs.append(self.piece(e, rows[start:end], n))
            start = end
        return self.unsorted(self.whole(outs), perm, weights)


def _counted(items: list[Tensor]) -> int:
    n = 0
    for _ in items:
        n += 1
    return n


def _kept(layer: Any, outs: list[Tensor]) -> Tensor:
    layer.kept = outs
    return torch.cat(outs)


def _run(whole: Whole) -> Seen:
    torch.manual_seed(0)
    model = type("Layer", (Cut,), {"whole": whole})()
    twin, seen = copy.deepcopy(model), Seen()
    compiled = torch.compile(Packed(model), backend=capturing(seen))
    for kind in KINDS:
        x, logits = torch.randn(5, H), logits_for(kind, 5)
        expected = call(twin, twin, x, logits, grad=False).out
        got = call(lambda x, logits: compiled(torch.cat([x, logits], dim=1)), model, x, logits, grad=False).out
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert len(getattr(model, "kept", ())) == len(getattr(twin, "kept", ()))
    return seen


@pytest.mark.parametrize("whole", FINE.values(), ids=FINE)
def test_joining_and_asking_for_emptiness_are_captured(whole: Whole) -> None:
    seen = _run(whole)
    assert (len(seen.graphs), len(seen.report.fused)) == (1, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("whole", LOOKS.values(), ids=LOOKS)
def test_whoever_looks_into_the_list_sees_what_eager_sees(whole: Whole) -> None:
    assert _run(whole).report.fused == []
