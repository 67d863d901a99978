"""How a model sees experts that are sharded: attributes that are the full logical weights, so that its code stays as it is.

A module gets a subclass of its class with a property for each sharded Parameter. What a class has is the same for all layers of a kind, so
that these share what is compiled; what is a layer's own is in the module (:class:`Ways`). Read in a program that is compiled, the property
is one call of ``moefuse::gathered``, which the passes take out again where they understand the experts. In eager mode it gathers once for
each call of the layer, and not each time that it is read.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.capture.dynamo import in_step, parametrized
from moefuse.capture.dynamo.registering import ORIGINAL as ORIGINAL
from moefuse.errors import ParallelError
from moefuse.parallel.hottest import Hottest
from moefuse.parallel.read_only import read_only
from moefuse.parallel.table import Table

PLACE = "_moefuse_place"
"""The attribute that is the table [E] of where each expert is."""


@dataclass
class Reads:
    """What a call of a layer reads in eager mode. Its first read gathers all of the layer's weights, so that no other one gathers any.

    Attributes:
        every: gathers all of the layer's weights.
        known: weights that are gathered.
    """

    every: Callable[[], list[Tensor]]
    known: dict[int, Tensor]
    weights: list[Tensor] | None = None
    grads: bool = field(default_factory=torch.is_grad_enabled)

    def begin(self) -> list[Tensor]:
        """All of the layer's weights, gathered now or before."""
        if self.weights is None:
            self.weights = []  # they are read to be gathered
            with torch.set_grad_enabled(self.grads):
                self.weights = self.every()
        return self.weights


_reads: contextvars.ContextVar[Reads | None] = contextvars.ContextVar("moefuse_reads", default=None)


Of = tuple[tuple[Table, str, str] | None, tuple[str, str, str] | None, int]
"""How a Parameter is gathered: (table, slots, terms) of its experts, (axis, blocks, terms) of their slices; dimensions of the mesh.

Numbers are text: with ``dynamic=True`` Dynamo makes a symbol of each number that a module under FSDP has, another one for each weight.
"""

WAYS, AWAY = "_moefuse_ways", "_moefuse_away"
"""The attributes of a module that have its :class:`Ways`, and what :func:`away` gives."""


class Ways:
    """How the Parameters of a module are gathered, by their names in it, and copies of experts. A copy of the module has the same."""

    def __init__(self, of: Mapping[str, Of], hottest: Hottest) -> None:
        self.of, self.hottest = dict(of), hottest

    def __deepcopy__(self, memo: dict[int, Any]) -> Ways:
        return self


def full(holder: nn.Module, name: str, ours: bool = False) -> Tensor:
    """[E, ...]: all of a sharded Parameter of ``holder``; ``ours``: for inference in a frame of ours (``capture/dynamo/in_step.py``).

    While FSDP holds shards of this rank's part, which are over a mesh of one more dimension, the attribute is that Parameter, as it is
    of any module under FSDP; between its hooks it is the part again.
    """
    if ours and (found := _by_part(getattr(holder, PARTS), name)) is not None:
        return found
    parameter: Any = holder._parameters.get(name)
    of: Of = getattr(holder, WAYS).of[name]
    if not isinstance(parameter, DTensor):
        _gone(holder, name)
    if len(parameter.placements) > of[2]:
        return parameter
    if torch.compiler.is_compiling():
        differs = torch.is_grad_enabled() and parameter.requires_grad
        return gather(parameter.to_local() if differs else _torch_private.local_part(parameter), of)
    gathered: Tensor = _in_eager(holder, parameter, name, of, _torch_private.in_compiled_call())
    return gathered


parametrized.READERS.add(full.__code__)

PARTS = "_moefuse_parts"
"""The attribute of a module that has for each Parameter what :func:`_by_part` reads, and tables by their devices: dictionaries of plain
tensors and text, and nothing else, so that guards on it are cheap. It is there once a frame of ours has read it."""


def _by_part(parts: dict[str, Any], name: str) -> Tensor | None:
    """What :func:`gather` gives, from what a module keeps; None where the Parameter itself has to be asked."""
    held = parts[name]
    out: Tensor | None = held["part"]
    if out is None:
        return None
    if "axis" in held:
        out = torch.ops.moefuse.gathered_slices.default(out, int(held["axis"]), int(held["blocks"]), held["of slices"])
    if "slots" in held:
        out = torch.ops.moefuse.gathered.default(out, parts[held["table"]], int(held["slots"]), held["of experts"])
    return out


def _in_step(holder: Any) -> None:
    """Have ``PARTS`` of a module say what its Parameters are."""
    if PARTS not in vars(holder):
        object.__setattr__(holder, PARTS, {})
    parts, ways = getattr(holder, PARTS), getattr(holder, WAYS)
    room = ways.hottest.current()
    for name, of in ways.of.items():
        parameter = holder._parameters.get(name)
        is_part = isinstance(parameter, DTensor) and len(parameter.placements) <= of[2]
        part = _torch_private.local_part(parameter) if is_part else None
        rows = None if room is None or part is None else room.rows(part)
        if rows is not None:
            part, of = rows, (room.of(of[0][2]), *of[1:])
        if name not in parts or parts[name]["part"] is not part:
            parts[name] = _kept(holder, name, part, of)


in_step.read_by(full, PARTS, _in_step)


def _kept(holder: Any, name: str, part: Tensor | None, of: Of) -> dict[str, Any]:
    experts, slices, _ = of
    kept: dict[str, Any] = {"part": part}
    if part is None:
        return kept
    _torch_private.static_sizes(part)  # as those of a Parameter are
    if slices is not None:
        kept |= dict(zip(("axis", "blocks", "of slices"), slices, strict=True))
    if experts is not None:
        table, slots, terms = experts
        table.ready(part.device)
        kept |= {"table": str(part.device), "slots": slots, "of experts": terms}
        getattr(holder, PARTS)[str(part.device)] = table.on(part.device)
    return kept | {"while": weakref.ref(holder._parameters[name], functools.partial(_end, weakref.ref(holder), name))}


def _end(holder: weakref.ref[nn.Module], name: str, parameter: weakref.ref[Any]) -> None:
    """A Parameter is gone: nothing keeps the memory of its part."""
    module = holder()
    parts = {} if module is None else vars(module).get(PARTS, {})
    if parts.get(name, {}).get("while") is parameter:
        del parts[name]


def _gone(holder: nn.Module, name: str) -> NoReturn:
    if name in away(holder) and away(holder)[name][0] is in_call():
        raise AttributeError(f"{name} of {type(holder).__name__} is parametrised")
    raise ParallelError(
        f"{name} of {type(holder).__name__} is no DTensor any more: something has put another tensor in its place since "
        "moefuse.parallelize, as a parametrization that stays, torch.func.functional_call with full weights, or "
        "DistributedDataParallel(device_mesh=...), which has to be called without it"
    )


def away(holder: nn.Module) -> dict[str, tuple[Reads, nn.Parameter]]:
    """Parameters that are parametrised, by name, and in which call (``away.py``)."""
    return vars(holder).get(AWAY, {})  # type: ignore[no-any-return]


def in_call() -> Reads | None:
    """The call of a layer with spread experts that runs as it is written."""
    return _reads.get()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _in_eager(holder: nn.Module, parameter: Any, name: str, of: Of, between_graphs: bool) -> Tensor:
    """The same where a program runs as it is written: no frame for Dynamo, which would compile it for every expert."""
    getattr(holder, WAYS).hottest.is_captured()
    if of[0] is not None:
        of[0][0].ready(_torch_private.local_part(parameter).device)
    reads = _reads.get()
    if reads is not None:
        reads.begin()
        if id(parameter) in reads.known:
            return reads.known[id(parameter)]
    found = _gathered(holder, parameter, of)
    if not between_graphs:  # what goes into the next one has to be a plain tensor
        found = read_only(found, f"{type(holder).__name__}.{name}", alone=reads is None)
    if reads is not None:
        reads.known[id(parameter)] = found
    return found


def _gathered(holder: nn.Module, parameter: Any, of: Of) -> Tensor:
    try:
        return gather(parameter.to_local(), of)
    except RuntimeError as error:
        if transform := _torch_private.transform():
            raise ParallelError(
                f"torch.func ({transform}) runs {type(holder).__name__}, whose experts are spread: torch has no such rules for "
                "DTensors. Transform the model before moefuse.parallelize, or use torch.autograd"
            ) from error
        raise


def gather(local: Tensor, of: Of) -> Tensor:
    """All of a Parameter [E, ...], of which this rank has ``local``: its experts [L, ...], its slices of them, or both."""
    experts, slices, _ = of
    out = local
    if slices is not None:
        axis, blocks, terms = slices
        out = torch.ops.moefuse.gathered_slices.default(out, int(axis), int(blocks), terms)
    if experts is not None:
        table, slots, terms = experts
        out = torch.ops.moefuse.gathered.default(out, table.on(out.device), int(slots), terms)
    return out


@contextlib.contextmanager
def call(every: Callable[[], list[Tensor]]) -> Iterator[Reads]:
    """In this block, a call of a layer: each Parameter is gathered once."""
    around = _reads.get()
    reads = Reads(every, {} if around is None else around.known)
    token = _reads.set(reads)
    try:
        yield reads
    finally:
        _reads.reset(token)


def with_properties(
    module: nn.Module,
    properties: Mapping[str, Callable[[Any], Tensor]],
    body: Mapping[str, Any],
    key: Hashable = None,
    refuse: Callable[[Any, str], NoReturn] | None = None,
) -> None:
    """Give a module a class of the name that its class has, with these attributes that are computed, and others in ``body``.

    Args:
        refuse: called with a module and the name of such an attribute that is set.
    """
    for read in (*properties.values(), full):
        _torch_private.inlined_only(read)
    module.__class__ = subclass(
        type(module), {**{name: property(read, _setter(name, refuse)) for name, read in properties.items()}, **body}, key
    )


def _setter(name: str, refuse: Callable[[Any, str], NoReturn] | None) -> Callable[[Any, Any], None] | None:
    return None if refuse is None else lambda module, _: refuse(module, name)


ONCE = "_moefuse_gathers_once"
"""Of the class of a layer that gathers each weight once in a call (``calls.py``)."""


_shared: WeakValueDictionary[Hashable, type[nn.Module]] = WeakValueDictionary()


def subclass(kind: type[nn.Module], body: dict[str, Any], key: Hashable = None) -> type[nn.Module]:
    """A class of the same name, which ``moefuse.unparallelize`` takes back.

    Args:
        key: what ``body`` is made of: the class that was made of the same is taken again. None: a class of one module.
    """
    found = _shared.get((kind, key)) if key is not None else None
    if found is None:
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, ORIGINAL: getattr(kind, ORIGINAL, kind)}
        found = type(kind.__name__, (kind,), {**body, **named})
        if key is not None:
            _shared[kind, key] = found
    return found


def original(module: nn.Module) -> type[nn.Module]:
    """The class that the user gave a module."""
    return getattr(type(module), ORIGINAL, type(module))


def is_ours(module: nn.Module) -> bool:
    """Whether the class of a module is one that was made here, and not one that somebody has derived from it since."""
    return ORIGINAL in vars(type(module))


def is_spread(module: nn.Module) -> bool:
    """Whether a layer's class is one that ``calls.gathering_once`` has made."""
    return hasattr(type(module), ONCE)
