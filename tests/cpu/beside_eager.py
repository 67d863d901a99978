"""A layer compiled and as it is, over two calls between which its values may change: everything that a user can see is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefuse import Options
from tests.cpu.capture_case import Seen, capturing

H, I, E, K = 16, 12, 6, 2  # noqa: E741  (the letters of moefuse.spec)


class MoE(nn.Module):
    """A router and experts; subclasses write the loop."""

    def __init__(self, experts: int = E) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, H)) for _ in range(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        return weights, ids

    def add_experts(self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Every expert's rows are added to ``out``."""
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


def check(
    make: Callable[[], nn.Module],
    change: Callable[[nn.Module], object] = lambda model: None,
    tokens: int = 13,
    options: Options | None = None,
    behind: str = "eager",
) -> Seen:
    """Outputs, parameters, buffers, and gradients of two calls; ``change`` is done to the model between them.

    ``behind``: torch's backend that compiles the rewritten graph.
    """
    torch.manual_seed(0)
    model, seen = make(), Seen()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=capturing(seen, options, behind))
    for turn in range(2):
        x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(turn))
        results = [_call(run, owner, x) for run, owner in ((twin, twin), (compiled, model))]
        _same(f"call {turn}", *results)
        for owner in (twin, model):
            with torch.no_grad():
                change(owner)
    return seen


def _same(when: str, wanted: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        where = f"{name}, {when}: "
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, where=where: where + m)  # type: ignore[misc]


def _call(run: Callable[[Tensor], Tensor], owner: nn.Module, x: Tensor) -> dict[str, Tensor]:
    owner.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    out = run(leaf * 1)
    out.square().sum().backward()
    found = {"output": out.detach(), "gradient of x": leaf.grad}
    for name, p in owner.named_parameters():
        # An expert without tokens has no gradient in eager and a zero one behind a fused op.
        found |= {name: p.detach().clone(), f"gradient of {name}": torch.zeros_like(p) if p.grad is None else p.grad}
    return found | {name: b.clone() for name, b in owner.named_buffers()}
