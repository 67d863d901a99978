"""Parametrisations (``torch.nn.utils.parametrize``) that a call registers and removes again, traced without registering anything.

torch registers by giving the module another class, with a property in place of the Parameter, which Dynamo cannot trace. Where that lasts
no longer than the call, nobody outside can tell. So in frames of ours these functions do not touch the module: the frame remembers what
is registered, and the module's variable answers as the other class would. Its value is traced each time that the program reads it, or once
within ``parametrize.cached()``, as in eager. torch's check at registration is traced, too: a parametrisation may count its calls.

What a registered module can be asked for and has no answer here (its dictionaries, its class), a registration that is still there where a
graph ends, and everything that ``registering`` leaves out, is left to Dynamo, which breaks the graph there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.nn.utils import parametrize

from moefuse.capture.dynamo import parametrize_traced as traced, values

_STATE = "moefuse_parametrized"
_HIDDEN = ("_parameters", "_buffers", "_modules", "__dict__")
"""What shows a registration, and is not modelled."""
READERS: set[types.CodeType] = set()
"""Code of ours that reads these for a tensor on which nothing is registered."""


@dataclass
class Registered:
    """What is registered on a module.

    Attributes:
        all: the variable of ``module.parametrizations``.
        made: name -> the variable of what ``module.parametrizations`` has under it.
    """

    all: Any
    made: dict[str, Any] = field(default_factory=dict)


@dataclass
class State:
    """What a frame has registered.

    Attributes:
        modules: id of a module -> what is registered on it.
        caching: how many blocks of ``parametrize.cached()`` the program is in.
        cache: (id of a module, name) -> the tracer of the graph in which a value was computed, and its variable.
        bound: those of the cache's values that are only there because of an assumption.
        answering: whether what is traced now is ours, and no program's.
        inside: modules whose dictionaries Dynamo itself is reading.
        used: whether there was ever anything.
    """

    modules: dict[int, Registered] = field(default_factory=dict)
    caching: int = 0
    cache: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    bound: set[tuple[int, str]] = field(default_factory=set)
    answering: bool = False
    inside: list[int] = field(default_factory=list)
    used: bool = False


class LeftError(Exception):
    """A registration of which not everything can be modelled; the text says why."""


@contextmanager
def left(observer: Any, output: Any) -> Iterator[None]:
    """In this block what cannot be modelled has the frame traced again, registered by torch."""
    try:
        yield
    except LeftError as error:
        observer.registers(output.current_tx, str(error))


def reader() -> str:
    """The method of Dynamo's that reads an attribute of a module: from torch 2.14 on it has the name of CPython's slot."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    return "tp_getattro_impl" if hasattr(UnspecializedNNModuleVariable, "tp_getattro_impl") else "var_getattr"


def state_of(output: Any) -> State | None:
    """What the frame that is traced has registered; None if it never had anything."""
    state: State | None = vars(output).get(_STATE)
    return state


def own_state(output: Any) -> State:
    """The same, of a frame that is about to register something."""
    state: State = vars(output).setdefault(_STATE, State())
    return state


def active(output: Any) -> bool:
    """Whether something is registered here."""
    state = state_of(output)
    return state is not None and bool(state.modules)


def registered_on(output: Any, variable: Any) -> bool:
    """Whether something is registered on what a variable stands for."""
    state = state_of(output)
    return state is not None and id(getattr(variable, "value", None)) in state.modules


def used(output: Any) -> bool:
    """Whether the graph is whole only because a registration was modelled."""
    state = state_of(output)
    return state is not None and state.used


def call(translator: Any, function: Any, *args: Any) -> Any:
    """Trace a call."""
    from torch._dynamo.variables.builder import SourcelessBuilder

    return SourcelessBuilder.create(translator, function).call_function(translator, list(args), {})


def attribute(translator: Any, variable: Any, name: str, computed: Callable[[Any, Collection[Node]], bool]) -> Any:
    """What a module that something is registered on answers; None where it answers as ever.

    ``computed`` is told which operations have made a value that is kept, and says whether they might as well stand anywhere else.
    """
    state = state_of(translator.output)
    value = getattr(variable, "value", None)
    known = None if state is None else state.modules.get(id(value))
    if state is None or known is None:
        return None
    if name == "parametrizations":
        return known.all
    if name in known.made:
        return _value(translator, state, (id(value), name), known.made[name], computed)
    if name in _HIDDEN and id(value) not in state.inside and translator.f_code not in READERS:
        raise LeftError(f"`{name}` of the module is read")
    return None


def answers(output: Any, variable: Any, name: str) -> bool:
    """Whether a module has an attribute because something is registered on it."""
    state = state_of(output)
    known = None if state is None else state.modules.get(id(getattr(variable, "value", None)))
    return known is not None and (name == "parametrizations" or name in known.made)


def _value(translator: Any, state: State, key: tuple[int, str], made: Any, computed: Callable[[Any, Collection[Node]], bool]) -> Any:
    if not state.caching:
        return call(translator, traced.value_of, made)
    tracer, known = state.cache.get(key, (None, None))
    if tracer is None or not _reaches(translator.output.current_tracer, tracer):
        before = set(values.graph_of(translator).nodes)
        known = call(translator, traced.value_of, made)
        state.cache[key] = translator.output.current_tracer, known
        if not computed(translator, [n for n in values.graph_of(translator).nodes if n not in before]):
            state.bound.add(key)
    return known


def _reaches(tracer: Any, outer: Any) -> bool:
    """Whether a graph that is being written, or one that it is the body of, is ``outer``: only their values may be used in it."""
    while tracer is not None and tracer is not outer:
        tracer = tracer.parent
    return tracer is outer


@contextmanager
def reading(translator: Any, variable: Any) -> Iterator[None]:
    """In this block Dynamo itself reads a module's dictionaries, for an attribute that is not parametrised."""
    state = state_of(translator.output)
    if state is None:
        yield
        return
    state.inside.append(id(variable.value))
    try:
        yield
    finally:
        state.inside.pop()


def stored(output: Any, variable: Any, name: object) -> None:
    """An attribute of an object is about to change."""
    state = state_of(output)
    known = None if state is None else state.modules.get(id(getattr(variable, "value", None)))
    if known is not None and (name in known.made or name in (*_HIDDEN, "parametrizations", "__class__")):
        raise LeftError(f"`{name}` of the module is set")


def asks(translator: Any, inst: Any, callee: Any) -> None:
    """An instruction is about to run while something is registered: it must not ask for the class of such a module."""
    state = state_of(translator.output)
    if state is None or not translator.stack:
        return
    asked = callee is type or (inst.opname == "LOAD_ATTR" and inst.argval == "__class__")
    variable = values.plain(translator.stack[-1])
    if asked and id(getattr(variable, "value", None)) in state.modules:
        raise LeftError("the module is asked for its class")


def registered(output: Any) -> tuple[object, ...]:
    """What is registered, to compare."""
    state = state_of(output)
    if state is None:
        return ()
    return state.caching, frozenset((m, name) for m, known in state.modules.items() for name in known.made), frozenset(state.bound)


def keeps(output: Any) -> bool:
    """Whether the program is in a block in which values are computed once."""
    state = state_of(output)
    return state is not None and state.caching > 0


def answering(output: Any) -> bool:
    """Whether what is traced is our own, and changes objects that no program sees but through our answers."""
    state = state_of(output)
    return state is not None and state.answering


def reads_property(output: Any, code: Any) -> bool:
    """Whether code is that of a property of a parametrisation that is there for good, in a block that was opened here to keep values."""
    state = state_of(output)
    return state is not None and state.caching > 0 and code.co_name == "get_parametrized" and code.co_filename == parametrize.__file__
