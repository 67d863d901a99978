"""What happens to a spread model in any order: calls in every mode, moves and copies of experts, writes of every kind, states; beside one
process that does the same, after each step."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import moefuse
from tests.dist import layers, scenes
from tests.dist.copied import load_of

E = 4
KINDS = (layers.Stacked, layers.Listed, layers.Transposed, layers.ByProjection, layers.Buffers)
HOWS: tuple[dict[str, Any], ...] = (
    {},
    {"max_tokens": 12},
    {"transport": "all_to_all", "placement": "round_robin"},
    {"tokens": "replicated"},
    {"debug": True},
)


class History:
    """Two models, and what has been done to both; every rank draws the same."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.draw, self.done = rank, random.Random(seed), list[str]()
        torch._dynamo.reset()
        torch.manual_seed(seed)
        self.how = self.draw.choice(HOWS)
        self.single = layers.Model(self.draw.choice(KINDS), E).eval()
        self.model = copy.deepcopy(self.single)
        self.plan = moefuse.parallelize(self.model, scenes.mesh(), **self.how)
        self.run = scenes.compiled(self.model)
        self.states: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    # -- what is looked at

    def looks(self) -> float:
        """How far a call is off, in a mode that is drawn."""
        mode = self.draw.choice((torch.no_grad, torch.no_grad, torch.inference_mode, torch.enable_grad))
        call = self.draw.choice((*[self.run] * 4, self.model))
        with mode():
            return self._off(call)

    def _off(self, call: Any) -> float:
        x = self._tokens()[self.rank]
        found, wanted = call(x).detach(), self.single(x).detach()
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)) if len(x) else 0.0

    def _tokens(self) -> list[Tensor]:
        counts = [self.draw.choice((0, 1, 5, 9)) for _ in range(dist.get_world_size())]
        seed = self.draw.randrange(10**6)
        if self.how.get("tokens") == "replicated":
            return [torch.randn(7, layers.H, generator=torch.Generator().manual_seed(seed)) for _ in counts]
        return [torch.randn(n, layers.H, generator=torch.Generator().manual_seed(seed + r)) for r, n in enumerate(counts)]

    # -- what is done

    def balances(self) -> None:
        hot = tuple(self.draw.sample(range(E), self.draw.choice((1, 1, 1, 3))))
        load = load_of(self.plan, hot)
        copies = 0 if self.how.get("tokens") == "replicated" else self.draw.choice((0, 1, 1, 2))
        with self.draw.choice((torch.no_grad, torch.inference_mode))():
            self.plan = self.plan.balance(load, copies=copies, layers=self.draw.choice((None, None, None, 1)))

    def refreshes(self) -> None:
        self.plan.refresh()

    def writes(self) -> None:
        """In place, through Parameters, the parts of all ranks, or past torch's versions."""
        way = self.draw.choice(("parameters", "parts", "data", "init"))
        by = self.draw.choice((0.5, 1.5))
        with torch.no_grad():
            for name, p in self.single.named_parameters():
                if self._is_experts(name):
                    p.mul_(by) if way != "init" else p.fill_(by / 10)
            for p in self.plan.parameters:
                local: Any = p.to_local()  # type: ignore[operator]
                {
                    "parameters": lambda p=p: p.mul_(by),
                    "parts": lambda local=local: local.mul_(by),
                    "data": lambda local=local: local.data.mul_(by),
                    "init": lambda p=p: nn.init.constant_(p, by / 10),
                }[way]()
        if way == "data":
            self.plan.refresh()

    @staticmethod
    def _is_experts(name: str) -> bool:
        return not {"router", "norm"} & set(name.split("."))

    def steps(self) -> None:
        """A step of training, by an optimizer that is gone afterwards."""
        kind, how = self.draw.choice(
            [(torch.optim.SGD, {"foreach": False}), *((torch.optim.AdamW, how) for how in ({"fused": True}, {"foreach": True}, {}))]
        )
        every, call = self._tokens(), self.draw.choice((self.run, self.model))
        if not all(map(len, every)):
            return
        call(every[self.rank]).square().mean().backward()
        torch.stack([self.single(x).square().mean() for x in every]).mean().backward()
        scenes.average(self.model)
        groups: tuple[Any, Any] = self.plan.param_groups(self.model), [{"params": list(self.single.parameters())}]
        for given in groups:
            optimizer = kind(given, lr=1e-2, **how, **({"eps": 1e-2} if kind is torch.optim.AdamW else {}))  # else noise has a sign
            optimizer.step()
            optimizer.zero_grad()
        del optimizer

    def loads(self) -> None:
        """Other values, of the whole model."""
        seed = self.draw.randrange(10**6)
        generator = torch.Generator().manual_seed(seed)
        other = {key: 0.3 * torch.randn(value.shape, generator=generator) for key, value in self.single.state_dict().items()}
        for each in (self.model, self.single):
            each.load_state_dict(other)

    def keeps(self) -> None:
        """A state for later; not in the model's memory, which may be another by then."""
        self.states.append((copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.single.state_dict())))

    def goes_back(self) -> None:
        """To a state that was kept; a rank's rows of a list, where other experts are now, are an error."""
        if not self.states:
            return
        mine, wanted = self.states.pop()
        now = copy.deepcopy(self.single.state_dict())
        failed = torch.zeros(())
        try:
            self.model.load_state_dict(mine)
        except (moefuse.ParallelError, RuntimeError):
            failed += 1
        dist.all_reduce(failed)
        if failed:
            self.model.load_state_dict(now)
        else:
            self.single.load_state_dict(wanted)

    def starts_again(self) -> None:
        moefuse.unparallelize(self.model)
        self.plan = moefuse.parallelize(self.model, scenes.mesh(), **self.how)
        self.run = scenes.compiled(self.model)
        self.states.clear()

    def is_whole(self) -> float:
        found, wanted = moefuse.full_state_dict(self.model), self.single.state_dict()
        return max(float((found[key] - wanted[key]).abs().max()) for key in wanted) if self.rank == 0 else 0.0


ACTIONS: tuple[Callable[[History], float | None], ...] = (
    History.looks, *[History.balances] * 5, History.refreshes, *[History.writes] * 3, History.steps, History.loads,
    History.keeps, History.goes_back, History.starts_again, History.is_whole,
)  # fmt: skip


def run(rank: int, seed: int, length: int) -> tuple[list[str], float]:
    """(What was done until something was off, how far)."""
    # Each mode, number of tokens and room for copies is a graph: which rank comes to torch's limit first would be drawn.
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = History(rank, seed)
        for _ in range(length):
            action = history.draw.choice(ACTIONS)
            history.done.append(action.__name__)
            off = max(action(history) or 0.0, history.looks())
            worst = torch.tensor(off)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            if not worst <= 2e-5:
                return [str(history.how), type(history.single.first).__name__, *history.done], worst.item()
    return [], 0.0
