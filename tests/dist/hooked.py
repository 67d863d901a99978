"""Experts with hooks, in loops that read of them what their tokens want: all ranks make the same collectives, whatever they call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.dist import layers, scenes

E = 5


class Skipping(layers.Listed):
    """Passes over experts without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if not len(token):
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Hit(layers.Listed):
    """A loop over the experts that some token wants; what it gives is a tuple."""

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
        for e in (mask.sum((-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[int(e)])
            out.index_add_(0, token, self.experts[int(e)](x[token]) * weights[token, slot, None])
        return out, weights

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)[0]


class Stacks(layers.Stacked):
    """Stacked weights of the experts that some token wants, whose number is read as well."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in torch.unique(ids.clamp(max=len(self.gate_up) - 1)).tolist():
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


KINDS: dict[str, type[nn.Module]] = {
    "all": layers.Listed,
    "distinct": layers.Distinct,
    "skipping": Skipping,
    "hit": Hit,
    "stacks": Stacks,
}
SEEN: list[Tensor] = []


def _records(module: nn.Module, args: Any, out: Tensor) -> None:
    SEEN.append(out.detach())


def _doubles(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def _halves(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def _seen(module: nn.Module, *_: Any) -> None:
    return None


HOOKS: dict[str, Callable[[Any], object]] = {
    "none": lambda expert: None,
    "records": lambda expert: expert.register_forward_hook(_records),
    "doubles": lambda expert: expert.register_forward_hook(_doubles),
    "before": lambda expert: expert.register_forward_pre_hook(_halves),
    "always": lambda expert: expert.register_forward_hook(_seen, always_call=True),
    "backward": lambda expert: expert.register_full_backward_hook(_seen),
    "inside": lambda expert: expert[2].register_forward_hook(_doubles),
}


def hooked(
    rank: int, kind: str, hook: str, counts: tuple[int, ...], train: bool = True, alone: bool = False, again: bool = False, **how: Any
) -> float:
    """The largest error of outputs, and of gradients of experts, in two steps against one process.

    Args:
        alone: only rank 0 has the hook.
        again: all is computed again for backward.
    """
    model, single = scenes.both(KINDS[kind], E, **how)
    for each in (model, single):
        if rank == 0 or not alone:
            HOOKS[hook](each.first.experts[1] if hasattr(each.first, "experts") else each.first)  # type: ignore[index]
    run: Any = functools.partial(checkpoint, model, use_reentrant=False) if again else model
    off = [0.0]
    for step in range(2):
        every = [torch.randn(n, layers.H, generator=torch.Generator().manual_seed(r + 7 * step)) for r, n in enumerate(counts)]
        with torch.set_grad_enabled(train):
            out, wanted = run(every[rank]), [single(x) for x in every]
        off.append((out - wanted[rank]).abs().sum().item())
        if train:
            model.zero_grad()
            single.zero_grad()
            out.square().sum().backward()
            sum((w.square().sum() for w in wanted), torch.zeros(())).div(len(counts)).backward()
            off += [0.0] if alone else _gradients(model.second, single.second)
    return max(off)


def _gradients(spread: Any, single: Any) -> list[float]:
    theirs, off = dict(single.named_parameters()), []
    for name, parameter in spread.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        path = name.removeprefix("experts.stacked_").replace("_", ".")
        keys = [name] if name in theirs else [f"experts.{e}.{path}" for e in range(E)]
        wanted = [theirs[key].grad if theirs[key].grad is not None else torch.zeros_like(theirs[key]) for key in keys]
        grad: Any = parameter.grad
        off.append((grad.full_tensor() - (wanted[0] if name in theirs else torch.stack(wanted))).abs().max().item())  # type: ignore[arg-type]
    return off


def nothing_behind(rank: int) -> list[str]:
    """What a call gives is what the layer gave where its weights are behind it anyway, and changes nothing that has no gradient."""
    model, _ = scenes.both(Hit, E)
    layer: Any = model.first
    x = torch.randn(64 if rank == 0 else 0, layers.H)
    out = layer(x)
    names = [type(out.grad_fn).__name__]
    with torch.no_grad():
        names.append(str(layer(x).requires_grad))
    out += 1  # no view: who gets it may write to it
    out.sum().backward()
    return names
