"""Dropout inside experts that are spread: what a rank's rows are drawn as, beside the same model on one process without draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import Options
from tests.cpu.capture_case import Seen, capturing
from tests.cpu.dropout_case import E, H, Layer, Loop, P
from tests.dist import equal, scenes


class Joined(Layer):
    """Weights of all experts in one Parameter for each projection, as transformers has them."""

    def __init__(self, where: str = "last", top_k: int = 1, p: float = P) -> None:
        super().__init__(where, top_k)
        del self.experts
        self.up, self.down = (nn.Parameter(torch.randn(E, H, H) * 0.2) for _ in range(2))
        self.drop = nn.Dropout(p)

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            y = self.drop(F.linear(F.relu(F.linear(x[token], self.up[e])), self.down[e]))
            out.index_add_(0, token, y * weights[token, slot, None])
        return out


@dataclass(frozen=True)
class Case:
    """``tokens`` and ``seeds`` of each rank; ``how``: arguments of ``parallelize``; ``behind``: None to run it in eager.

    ``spread_in_eval``: ``parallelize`` meets the model as it is without draws, and it is trained later.
    """

    kind: Callable[..., Layer] = Loop
    tokens: tuple[int, int] = (120, 70)
    how: Mapping[str, Any] = field(default_factory=dict)
    where: str = "last"
    p: float = P
    train: bool = True
    top_k: int = 1
    behind: str | None = "aot_eager"
    checkpointed: bool = False
    seeds: tuple[int, int] = (1, 2)
    spread_in_eval: bool = False

    @property
    def same(self) -> bool:
        """Whether all ranks have the same tokens."""
        return bool(self.how.get("tokens") == "replicated")

    def inputs(self) -> list[Tensor]:
        """Tokens of each rank."""
        generator = torch.Generator().manual_seed(3)
        every = [torch.randn(n, H, generator=generator, dtype=torch.float64) for n in self.tokens]
        return every[:1] * 2 if self.same else every


@dataclass(frozen=True)
class Found:
    """What one rank has: errors beside one process, where what this rank has dropped is dropped, too; and ``kept``: [tokens, H]."""

    out: float
    grads: dict[str, float]
    kept: Tensor
    report: Any
    state: Tensor

    @property
    def worst(self) -> float:
        return max([self.out, *self.grads.values()])


def run(rank: int, case: Case) -> Found:
    """With one expert for each token, and a dropout behind its last product, a zero says what was dropped."""
    single, model, call, seen = _made(case)
    x = case.inputs()[rank].requires_grad_()
    torch.manual_seed(case.seeds[rank])
    with torch.set_grad_enabled(case.train):
        out = checkpoint(call, x, use_reentrant=False) if case.checkpointed else call(x)
    state = torch.get_rng_state()
    draws = case.train and case.p > 0
    kept = out.detach() != 0 if draws else torch.ones(out.shape, dtype=torch.bool)
    masks: list[Any] = [None, None]
    dist.all_gather_object(masks, kept)
    inputs = [each.requires_grad_() for each in case.inputs()]
    wanted = [single.eval()(each) * mask / (1 - case.p * draws) for each, mask in zip(inputs, masks, strict=True)]
    grads = _gradients(case, model, single, (x, out), (inputs[rank], wanted)) if case.train else {}
    return Found(equal._apart(out, wanted[rank]), grads, kept, seen.report, state)


def _gradients(
    case: Case, model: nn.Module, single: nn.Module, mine: tuple[Tensor, Tensor], theirs: tuple[Tensor, list[Tensor]]
) -> dict[str, float]:
    """Errors of gradients of the mean over ranks; of one rank's loss where all have the same tokens."""
    ranks = 1 if case.same else 2
    equal._loss(mine[1]).backward()
    total: Any = sum(equal._loss(w) for w in theirs[1][:ranks])
    (total / ranks).backward(inputs=[theirs[0], *single.parameters()])
    grad: Any = mine[0].grad
    return {**equal._gradients(model, single, 1 / ranks, case.same), "x": equal._apart(grad / ranks, theirs[0].grad)}


def step(rank: int, case: Case) -> tuple[float, int]:
    """(how far the change of all outputs along a step is off what the gradients say, layers fused).

    Of what ranks have alike all make the same step, and one of them counts.
    """
    _, model, call, seen = _made(case)
    x = case.inputs()[rank].requires_grad_()

    def total() -> Tensor:
        torch.manual_seed(case.seeds[rank])
        return equal._loss(call(x))

    total().backward()
    said, ways = torch.zeros((), dtype=torch.float64), []
    for place, p in enumerate([x, *model.parameters()]):
        alike = case.same and not isinstance(p, DTensor)
        generator = torch.Generator().manual_seed(place if alike else 100 * (rank + 1) + place)
        value, way = _here(p), torch.randn(_here(p).shape, generator=generator, dtype=torch.float64)
        ways.append((value, way))
        said += (_here(p.grad) * way).sum() / (2 if alike else 1)
    size, values = 1e-6, []
    for sign in (1, -2):
        for value, way in ways:
            value.add_(way, alpha=sign * size)
        values.append(total().detach())
    both = torch.stack([said, (values[0] - values[1]) / (2 * size) / (2 if case.same else 1)])
    dist.all_reduce(both)
    return float((both[0] - both[1]).abs() / both[0].abs()), len(seen.report.fused)


def _here(value: Any) -> Tensor:
    """This rank's part, in place."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _made(case: Case) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor], Seen]:
    """The model on one process and on ranks, how it is called, and what is seen of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = nn.Sequential(case.kind(case.where, top_k=case.top_k, p=case.p)).double().train(case.train)
    model, seen = copy.deepcopy(single), Seen()
    moefuse.parallelize(model.train(case.train and not case.spread_in_eval), scenes.mesh(), **case.how)
    model.train(case.train)
    if case.behind is None:
        return single, model, model, seen
    return single, model, torch.compile(model, backend=capturing(seen, Options(), case.behind)), seen
