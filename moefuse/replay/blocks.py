"""Whose ``with`` blocks a call is in: those of its thread.

Backward may run in a thread of autograd's own, where the blocks of the thread that called it count: torch carries the variables of that
thread along. Before torch 2.13 it need not; where it does not, all open blocks count in autograd's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moefuse import _torch_private
from moefuse.errors import RoutingError
from moefuse.replay.choices import Choice
from moefuse.replay.words import call_it, count, ordinal
from moefuse.report.reused_code import renamed

Routing = dict[str, list[Tensor]]
"""Layer -> the ids [T, K] of each of its calls, in their order."""


@dataclass(eq=False)
class Context:
    """One ``with`` of the user.

    Attributes:
        names: of the model's Parameters, by the memory that they are in.
        given: for each layer, what each call takes; None where nothing is given. ``in_order``: for each layer in the order they first run.
        record: where to note what was taken; None if that is not asked for.
        highest: the largest id of each given tensor, by its identity.
        ran: calls of each layer so far.
        over: whether the block has ended.
    """

    names: dict[int, str]
    given: Routing | None = None
    in_order: list[list[Tensor]] | None = None
    record: Routing | None = None
    highest: dict[int, int] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)
    over: bool = False

    @property
    def replays(self) -> bool:
        return self.given is not None or self.in_order is not None

    def layer(self, choice: Choice, args: Sequence[Any]) -> str | None:
        """The layer of this model that a call runs; None if it is another model's."""
        if choice.at < 0:
            return choice.module
        name = self.names.get(place(args[choice.at]))
        return None if name is None else renamed(choice.module, choice.parameter, name)

    def wanted(self, layer: str) -> list[Tensor] | None:
        """What each call of a layer takes; None if nothing is given for it."""
        if self.in_order is None:
            return (self.given or {}).get(layer)
        self.ran.setdefault(layer, 0)
        at = list(self.ran).index(layer)
        if at >= len(self.in_order):
            has = count(len(self.in_order), "layer")
            raise RoutingError(f"{call_it(layer)} is the {ordinal(at + 1)} layer that runs, and replay_routing has ids of {has}")
        return self.in_order[at]


_open: ContextVar[tuple[Context, ...]] = ContextVar("moefuse_routing", default=())
_thread: ContextVar[int] = ContextVar("moefuse_thread", default=0)
_every: list[Context] = []


def enter(context: Context) -> None:
    """Open a block in this thread."""
    _every.append(context)
    _open.set((*_open.get(), context))


def leave(context: Context) -> None:
    """End a block, perhaps elsewhere than where it was opened."""
    context.over = True
    _every.remove(context)
    _open.set(tuple(c for c in _open.get() if c is not context))


def here() -> list[Context]:
    """The blocks that count in this call, the innermost last."""
    found = _open.get()
    if not found and _is_autograds():
        carried = _torch_private.variables_of_backward()
        found = tuple(_every) if carried is None else carried.get(_open, ())
    return [c for c in found if not c.over]


def caller() -> int:
    """A number of the thread that this call is made for; 0 where it is not known."""
    if not _is_autograds():
        _thread.set(threading.get_ident())
        return _thread.get()
    carried = _torch_private.variables_of_backward()
    return 0 if carried is None else int(carried.get(_thread, 0))


def _is_autograds() -> bool:
    """Whether this is a thread that autograd made, for a backward pass on a device; Python knows only those that it was told of."""
    return _torch_private.running_backward() >= 0 and isinstance(threading.current_thread(), threading._DummyThread)


def place(parameter: Tensor) -> int:
    """Where a tensor's values are, by which it is known."""
    storages = _torch_private.storages_of(parameter)
    return storages[0].data_ptr() if storages else id(parameter)


def names_of(model: nn.Module) -> dict[int, str]:
    """Names of Parameters by the memory that they are in, without what ``torch.compile`` puts into them."""
    return {place(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters(remove_duplicate=False)}
