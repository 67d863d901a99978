"""Programs that change between calls: modes, sizes, flags, hooks. What a report says of a call is what ran in it.

A program is a model of a few layers and a list of changes. Behind each of them the model is called twice: the first call compiles what it
needs and has to say what it does not fuse; the second one shows which of moefuse's ops run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from moefuse import _torch_private
from moefuse.capture.dynamo import module_calls
from moefuse.diagnosis import missed_layers
from moefuse.pipeline import publish
from moefuse.report import history
from moefuse.report.compilations import is_in
from moefuse.report.report import FusionReport
from tests.programs.effects.broken import Broken

H, E, K = 8, 4, 2
MEANWHILE = {"seen": 0}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 6), nn.Linear(6, H)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Plain(nn.Module):
    """A loop over experts. ``odd``: whether a subclass does in this call what no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList(Expert() for _ in range(E))
        self.register_buffer("bias", torch.zeros(E))
        self.flag = False

    def odd(self) -> bool:
        return self.flag

    def experts_of(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        out, usage = torch.zeros_like(x), torch.zeros(E, dtype=x.dtype)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            usage[e] = (ids == e).sum().to(x.dtype)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out, usage

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return self.experts_of(x, weights, ids)[0]


class Helped(Plain):
    """Numbers are compared behind the loop, in another loop: Dynamo leaves the function, and not the one with the experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out, usage = self.experts_of(x, weights, ids)
        if self.odd():
            for e in range(E):
                if usage[e] > usage.mean():
                    self.bias.data[e] -= 0.001
        return out


class Balanced(Plain):
    """Numbers are compared between the experts: Dynamo leaves the function."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out, usage = torch.zeros_like(x), torch.zeros(E, dtype=x.dtype)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            usage[e] = (ids == e).sum().to(x.dtype)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            if self.odd() and usage[e] > usage.mean():
                self.bias.data[e] -= 0.001
        return out


class Trained(Balanced):
    def odd(self) -> bool:
        return self.training


class Graded(Balanced):
    def odd(self) -> bool:
        return torch.is_grad_enabled()


class Sized(Balanced):
    def forward(self, x: Tensor) -> Tensor:
        self.flag = len(x) == 3
        return super().forward(x)


class Asking(Balanced):
    """Asks a global."""

    def odd(self) -> bool:
        return MEANWHILE["seen"] > 0


class Stopping(Plain):
    """The graph breaks in front of the experts and between them."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.odd():
                torch._dynamo.graph_break()
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Noisy(Plain):
    """Told with a reason."""

    def odd(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            rows = expert(x[token])
            if self.odd():
                rows = rows + 0.0 * torch.rand_like(rows)
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


KINDS: dict[str, type[Plain]] = {kind.__name__: kind for kind in (Plain, Helped, Balanced, Trained, Graded, Sized, Asking, Stopping, Noisy)}


class Model(nn.Module):
    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KINDS[kind]() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != H:
            raise ValueError("another width")
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass
class _State:
    """What the next call is made with."""

    model: Model
    grad: bool = False
    tokens: int = 7
    hooks: list[Any] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    hooked: bool = False
    """Whether there was ever a hook."""

    def taken(self) -> list[Tensor]:
        """What hooks have seen since this was asked last."""
        seen, self.seen = self.seen, []
        return seen


def _hooks(where: Callable[[Model], list[nn.Module]], scale: float | None = None) -> Callable[[_State], None]:
    """Hooks that collect what modules give, as those of transformers for the routers' scores; with ``scale`` they give something else."""

    def install(state: _State) -> None:
        def see(_module: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
            state.seen.append(out.detach().norm())
            return None if scale is None else out * scale

        state.hooks += [module.register_forward_hook(see) for module in where(state.model)]
        state.hooked = True

    return install


def _unhook(state: _State) -> None:
    for handle in state.hooks:
        handle.remove()
    state.hooks.clear()


def _raises(state: _State) -> None:
    MEANWHILE["raises"] = 1


def _flag(value: bool) -> Callable[[_State], None]:
    def change(state: _State) -> None:
        state.model.layers[-1].flag = value

    return change


def _set(**values: Any) -> Callable[[_State], None]:
    return lambda state: vars(state).update(values)


CHANGES: dict[str, Callable[[_State], Any]] = {
    "train": lambda state: state.model.train(),
    "eval": lambda state: state.model.eval(),
    "grad": _set(grad=True),
    "no_grad": _set(grad=False),
    "3 tokens": _set(tokens=3),
    "7 tokens": _set(tokens=7),
    "flag": _flag(True),
    "no flag": _flag(False),
    "hooks on experts": _hooks(lambda model: list(model.layers[0].experts)),
    "hook on scores": _hooks(lambda model: [layer.router for layer in model.layers]),
    "hook on a layer": _hooks(lambda model: [model.layers[-1]]),
    "hook inside of an expert": _hooks(lambda model: [model.layers[-1].experts[0].up]),
    "hook that scales scores": _hooks(lambda model: [model.layers[-1].router], 1.5),
    "hook that scales an expert": _hooks(lambda model: [model.layers[0].experts[0]], 3.0),
    "no hook": _unhook,
    "global": lambda state: MEANWHILE.update(seen=1),
    "no global": lambda state: MEANWHILE.update(seen=0),
    "raises": _raises,
}


@dataclass(frozen=True)
class Changing:
    """A program: kinds of layers, changes in front of each pair of calls, torch's limit of graphs for one code, and what is compiled."""

    kinds: tuple[str, ...]
    changes: tuple[tuple[str, ...], ...]
    limit: int = 8
    layers: bool = False
    """Each layer by itself (``compile_layers``)."""


def draw(seed: int) -> Changing:
    """A program out of a number."""
    rng = random.Random(seed)
    kinds = tuple(rng.choice(list(KINDS)) for _ in range(rng.choice((1, 1, 2))))
    changes = [tuple(rng.sample(list(CHANGES), rng.choice((1, 1, 2)))) for _ in range(rng.randint(2, 4))]
    layers = rng.choice((False, True))
    return Changing(kinds, ((), *changes), 8 if layers else rng.choice((8, 8, 8, 2)), layers)


def wrong(p: Changing) -> list[str]:
    """What is untrue in the reports of a program, or other than in eager."""
    MEANWHILE.clear()
    MEANWHILE["seen"] = 0
    torch._dynamo.reset()
    torch.manual_seed(0)
    with _light(), torch._dynamo.config.patch(recompile_limit=p.limit):
        state = _State(Model(p.kinds).eval())
        compiled = _compiled(state.model, p.layers)
        for number, changes in enumerate(p.changes):
            for name in changes:
                CHANGES[name](state)
            found = _pair(state, compiled, number)
            if found:
                return [f"behind {number} {changes}: {text}" for text in found]
    return []


def _compiled(model: Model, layers: bool) -> Callable[..., Tensor]:
    if not layers:
        return torch.compile(model, backend="moefuse", options={"verify": "off"})
    moefuse.compile_layers(model, modules=r"layers\.\d+", options={"verify": "off"})
    return model


def _pair(state: _State, compiled: Callable[..., Tensor], number: int) -> list[str]:
    x = torch.randn(state.tokens, H, generator=torch.Generator().manual_seed(number))
    with torch.set_grad_enabled(state.grad):
        if MEANWHILE.pop("raises", 0):
            with suppress(ValueError):
                compiled(x[:, 1:])
        state.taken()
        out = compiled(x)
        first, seen = moefuse.last_report(), state.taken()
        with torch.profiler.profile() as profile:
            compiled(x)
        second, again = moefuse.last_report(), state.taken()
        bias = [layer.bias.clone() for layer in state.model.layers]
        with torch.compiler.set_stance("force_eager"):
            expected, wanted = state.model(x), state.taken()
        for layer, before in zip(state.model.layers, bias, strict=True):
            layer.bias.copy_(before)
    ran = sum(e.count for e in profile.key_averages() if e.key.startswith("moefuse::experts") and "backward" not in e.key)
    found = [] if torch.allclose(out, expected, atol=1e-5) else ["another result"]
    for name, some in (("first", seen), ("second", again)):
        if len(some) != len(wanted) or not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(some, wanted, strict=True)):
            found.append(f"{name} call: hooks saw {some} instead of {wanted}")
    if state.hooked and ran < len(state.model.layers):
        found.clear()  # Dynamo guards no hooks, so that torch loses them in graphs without fused experts.
    for name, report in (("first", first), ("second", second)):
        found += [f"{name} call: {text}" for text in _untrue(report, ran, len(state.model.layers))]
    return found


def _untrue(report: FusionReport | None, ran: int, layers: int) -> list[str]:
    """What a report says of a call in which so many layers ran fused."""
    if report is None:
        return ["no report"]
    names = [f"layers.{at}" for at in range(layers)]
    refused = {name for name in names for s in report.skipped if is_in(s.module, name) or is_in(name, s.module)}
    found = []
    if report.layers[1] != layers:
        found.append(f"{report.layers[1]} layers, there are {layers}")
    if ran == layers and report.layers[0] != layers:
        found.append(f"{report.layers[0]} fused, all {layers} ran")
    if layers - ran > len(refused):
        found.append(f"{ran} of {layers} ran, and refused is {sorted(refused)}")
    return [f"{text}\n{report}" for text in found]


@contextmanager
def _light() -> Iterator[None]:
    """Without Inductor's code, without messages, and nothing said before."""
    from torch._dynamo.backends.debugging import aot_eager

    log = logging.getLogger("moefuse")
    level = log.level
    log.setLevel(logging.CRITICAL)
    logging.getLogger("torch._dynamo").setLevel(logging.CRITICAL)
    try:
        with (
            mock.patch.object(_torch_private, "compile_fx", lambda gm, inputs, *_: aot_eager(gm, inputs)),
            mock.patch.object(publish, "_warned", set()),
        ):
            yield
    finally:
        log.setLevel(level)


# --- the fault -------------------------------------------------------------------------------------------------------------------


def _spoken_ever(report: FusionReport, here: FusionReport, found: Any, shards: Any, start: int) -> bool:
    return missed_layers._spoken_of(report, found, shards)


FAULTS: dict[str, Broken] = {
    "fused in any mode is fused in this": (
        (history, "lost", lambda report, owner: None),
        (missed_layers, "_fine", _spoken_ever),
    ),
    "hooks that come later are not seen": ((module_calls, "watch", lambda *_: None),),
}
"""Root causes, as what stands in their place when moefuse is broken."""

SHOWN: dict[str, Changing] = {
    "fused in any mode is fused in this": Changing(("Trained",), ((), ("train", "grad"))),
    "hooks that come later are not seen": Changing(("Plain", "Plain"), ((), ("hook on scores",))),
}
"""For each fault the smallest program known to show it."""
