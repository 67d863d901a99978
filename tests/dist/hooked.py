"""Experts with hooks, in loops that read of them what their tokens want: all ranks make the same collectives, whatever they call."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist import faults, layers, scenes

E = 3


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


class Acting(layers.Routed):
    """Experts in a module of their own, which calls an activation for each that some token wants."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = layers.Stacked(experts)
        del self.experts.router
        self.experts.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in torch.unique(ids).tolist():
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.experts.gate_up[e]).chunk(2, -1)
            h: Tensor = self.experts.act(gate) * up  # type: ignore[operator]
            out.index_add_(0, token, F.linear(h, self.experts.down[e]) * weights[token, slot, None])
        return out


class Breaking(layers.Listed):
    """Breaks the graph at each expert that some token wants."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in torch.unique(ids).tolist():
            token, slot = torch.where(ids == e)
            torch._dynamo.graph_break()
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


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
    "acting": Acting,
    "breaking": Breaking,
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
    "all": lambda _: register_module_forward_hook(_seen),
}


def hooked(
    rank: int,
    kind: str,
    hook: str,
    counts: tuple[int, ...],
    train: bool = True,
    alone: bool = False,
    again: bool = False,
    compiled: bool = False,
    **how: Any,
) -> float:
    """The largest error of outputs, and of gradients of experts, in two steps against one process.

    Args:
        alone: only rank 0 has the hook.
        again: all is computed again for backward.
    """
    model, single = scenes.both(KINDS[kind], E, **how)
    with contextlib.ExitStack() as hooks:
        for each in (model, single):
            if rank == 0 or not alone:
                hooks.callback(_put(hook, each))
        run: Any = scenes.compiled(model) if compiled else model
        run = functools.partial(checkpoint, run, use_reentrant=False) if again else run
        off = [0.0]
        for step in range(2):
            # Where ranks hold other rows than a DTensor's placement says, its full tensor is in another order.
            off += _step(rank, run, model, single, counts, step, train, not alone and "placement" not in how, "tokens" in how)
    return max(off)


def _put(hook: str, model: Any) -> Callable[[], Any]:
    """Put a hook on an expert of a model's first layer; what takes it off."""
    found: Any = HOOKS[hook](_expert(model.first))
    return (lambda: None) if found is None else found.remove


def _expert(layer: Any) -> Any:
    if isinstance(layer, Acting):
        return layer.experts.act
    return layer.experts[1] if hasattr(layer, "experts") else layer


def _step(
    rank: int, run: Any, model: Any, single: Any, counts: tuple[int, ...], step: int, train: bool, experts: bool = True, same: bool = False
) -> list[float]:
    """The errors of one step; ``experts``: gradients of experts are compared; ``same``: all ranks have the same tokens."""
    every = [torch.randn(n, layers.H, generator=torch.Generator().manual_seed((0 if same else r) + 7 * step)) for r, n in enumerate(counts)]
    with torch.set_grad_enabled(train):
        out, wanted = run(every[rank]), [single(x) for x in every]
    off = [(out - wanted[rank]).abs().sum().item()]
    if train:
        model.zero_grad()
        single.zero_grad()
        out.square().sum().backward()
        if any(counts):  # where nobody has tokens, experts of one process have no gradients
            sum((w.square().sum() for w in wanted), torch.zeros(())).div(len(counts)).backward()
        for name in ("first", "second") if experts else ():
            off += _gradients(getattr(model, name), getattr(single, name))
    return off


def comes_and_goes(rank: int, counts: tuple[int, ...]) -> tuple[list[float], list[list[str]]]:
    """A model is compiled, gets a hook, and loses it: the error of each step, and what was compiled for it with experts fused."""
    model, single = scenes.both(Skipping, E)
    seen = Seen()
    run = torch.compile(model, backend=capturing(seen, behind=scenes.BEHIND))
    worst, fused = [], []
    for step, hook in enumerate(("none", "doubles", "doubles", "none", "none")):
        taken = [_put(hook, each) for each in (model, single)]
        seen.report.fused.clear()
        worst.append(max(_step(rank, run, model, single, counts, step, train=True)))
        fused.append([f.module for f in seen.report.fused])
        for take in taken:
            take()
    return worst, fused


def other_programs(rank: int, **how: Any) -> tuple[str, float]:
    """The error where rank 0 alone has a hook on an expert, and how many seconds it took to come."""
    begun = time.monotonic()
    try:
        with mock.patch.object(scenes, "mesh", return_value=faults.mesh(60)):
            hooked(rank, "skipping", "records", (5, 5), train=False, alone=True, compiled=True, **how)
    except moefuse.PeerError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


def one_graph(rank: int) -> str:
    """What ``fullgraph=True`` says of a hook."""
    model, _ = scenes.both(Skipping, E)
    _put("records", model)
    run = torch.compile(model, backend=capturing(Seen(), behind=scenes.BEHIND), fullgraph=True)
    try:
        run(torch.randn(5 * rank, layers.H))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return ""


def reported(rank: int) -> list[tuple[str, str, str]]:
    """What a report says of a hook: codes, modules, texts."""
    model, _ = scenes.both(Skipping, E)
    _put("before", model)
    with torch.no_grad(), scenes.as_traced():
        torch.compile(model, backend="moefuse")(torch.randn(5 * rank, layers.H))
    return [(s.code, s.module, s.message) for s in moefuse.last_report().skipped]


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
