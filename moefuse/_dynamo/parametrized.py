"""Parametrisations (``torch.nn.utils.parametrize``) that a call registers and removes again, traced without registering anything.

torch registers by giving the module another class, with a property in place of the Parameter, which Dynamo cannot trace. Where that lasts
no longer than the call, nobody outside can tell. So in frames of ours these functions do not touch the module: the frame remembers what
is registered, and the module's variable answers as the other class would. Its value is traced each time that the program reads it, or once
within ``parametrize.cached()``, as in eager. torch's check at registration is traced, too: a parametrisation may count its calls.

What a registered module can be asked for and has no answer here (its dictionaries, its class), a registration that is still there where a
graph ends, and everything that :func:`_supported` leaves out, is left to Dynamo, which breaks the graph there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn.utils import parametrize

from moefuse._dynamo import parametrize_traced as traced
from moefuse._dynamo import values

_STATE = "moefuse_parametrized"
_HIDDEN = ("_parameters", "_buffers", "_modules", "__dict__")
"""What shows a registration, and is not modelled."""


@dataclass
class _Module:
    """What is registered on a module. ``made``: name -> the variable of its ``ParametrizationList``; ``all``: of the dictionary of these."""

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
        inside: modules whose dictionaries Dynamo itself is reading.
        used: whether there was ever anything.
    """

    modules: dict[int, _Module] = field(default_factory=dict)
    caching: int = 0
    cache: dict[tuple[int, str], tuple[Any, Any]] = field(default_factory=dict)
    bound: set[tuple[int, str]] = field(default_factory=set)
    inside: list[int] = field(default_factory=list)
    used: bool = False


class LeftError(Exception):
    """A registration of which not everything can be modelled; the text says why."""


def available() -> bool:
    """Whether this torch has what the hooks below need; without it parametrisations break the graph, as ever."""
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    methods = ("var_getattr", "call_obj_hasattr", "manually_trace_nn_module_getattr")
    has = all(hasattr(UnspecializedNNModuleVariable, name) for name in methods) and hasattr(OutputGraph, "compile_subgraph")
    names = ("_cache_enabled", "_cache", "_register_parameter_or_buffer")
    return has and hasattr(UserFunctionVariable, "call_function") and all(hasattr(parametrize, name) for name in names)


def state_of(output: Any) -> State | None:
    """What the frame that is traced has registered; None if it never had anything."""
    return vars(output).get(_STATE)


def active(output: Any) -> bool:
    """Whether something is registered here."""
    state = state_of(output)
    return state is not None and bool(state.modules)


def used(output: Any) -> bool:
    """Whether the graph is whole only because a registration was modelled."""
    state = state_of(output)
    return state is not None and state.used


def handler(function: Any) -> Callable[[Any, list[Any], dict[str, Any]], Any] | None:
    """What answers a call of a function: called with a translator and the arguments; it returns None for a call that is not its own."""
    try:
        return _HANDLERS.get(function)
    except TypeError:
        return None


# --- the functions ---


def _register(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = _bound(parametrize.register_parametrization, args, kwargs)
    if given is None or not _supported(given):
        return None
    module, parametrization, name = given["module"], given["parametrization"], given["tensor_name"].as_python_constant()
    unsafe = bool(given["unsafe"].as_python_constant()) if "unsafe" in given else False
    state = vars(translator.output).setdefault(_STATE, State())
    known = state.modules.get(id(module.value))
    if known is not None and name in known.made:
        raise LeftError("a second parametrisation of the same tensor")
    caches = _call(translator, traced.caches)
    if not values.is_constant(caches) or caches.as_python_constant():
        return None
    original = module.var_getattr(translator, name)
    made = _call(translator, traced.register, module, given["tensor_name"], parametrization, values.constant(unsafe))
    if not unsafe:
        _call(translator, traced.check, made, original)
    if known is None:
        known = state.modules[id(module.value)] = _Module(_call(translator, traced.new_dict))
    known.made[name] = made
    _call(translator, traced.put, known.all, given["tensor_name"], made)
    state.used = True
    return module


def _remove(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = _bound(parametrize.remove_parametrizations, args, kwargs)
    state = state_of(translator.output)
    module = values.realized(given["module"]) if given is not None else None
    known = state.modules.get(id(getattr(module, "value", None))) if state is not None else None
    if state is None or known is None or given is None:
        return None
    name, leave = given["tensor_name"], given.get("leave_parametrized")
    if not values.is_constant(name) or name.as_python_constant() not in known.made:
        raise LeftError("it removes what is not registered")
    if leave is None or not values.is_constant(leave) or leave.as_python_constant():
        raise LeftError("it removes a parametrisation and leaves the tensor parametrised")
    _call(translator, traced.drop, known.all, name)
    del known.made[name.as_python_constant()]
    if not known.made:
        del state.modules[id(module.value)]
    return module


def _cached(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _call(translator, traced.cached) if active(translator.output) and not args and not kwargs else None


def _opened(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    state = vars(translator.output).setdefault(_STATE, State())
    state.caching += 1
    return values.constant(None)


def _closed(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    state = vars(translator.output).setdefault(_STATE, State())
    state.caching -= 1
    if not state.caching:
        state.cache.clear()
        state.bound.clear()
    return values.constant(None)


_HANDLERS: dict[Any, Callable[[Any, list[Any], dict[str, Any]], Any]] = {
    parametrize.register_parametrization: _register,
    parametrize.remove_parametrizations: _remove,
    parametrize.cached: _cached,
    traced.opened: _opened,
    traced.closed: _closed,
}


def _bound(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError:  # an error of the program's
        return None
    return {name: values.realized(value) for name, value in found.items()}


def _supported(given: dict[str, Any]) -> bool:
    """Whether a registration is one that can be modelled: of a module from outside, whose class says nothing of its own about attributes."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    module, parametrization, name = given["module"], given["parametrization"], given["tensor_name"]
    modules = isinstance(module, UnspecializedNNModuleVariable) and isinstance(parametrization, UnspecializedNNModuleVariable)
    if not modules or module.source is None or module.is_state_mutated or not values.is_constant(name):
        return False
    if "unsafe" in given and not values.is_constant(given["unsafe"]):
        return False
    value, kind, tensor = module.value, type(module.value), name.as_python_constant()
    standard = all(getattr(kind, n) is getattr(nn.Module, n) for n in ("__getattr__", "__setattr__", "__delattr__", "register_parameter"))
    if not standard or kind.__getattribute__ is not object.__getattribute__ or hasattr(value, "parametrizations"):
        return False
    known = {**value._parameters, **value._buffers}
    if not isinstance(known.get(tensor), torch.Tensor) or hasattr(kind, tensor) or tensor in vars(value):
        return False
    return not hasattr(type(parametrization.value), "right_inverse") and not _has(parametrization, "right_inverse")


def _has(variable: Any, name: str) -> bool:
    """Whether an object has an attribute of its own of this name, before the call or by now."""
    return name in vars(variable.value) or variable.source is None and name in getattr(variable, "attrs", ())


def _call(translator: Any, function: Any, *args: Any) -> Any:
    """Trace a call."""
    from torch._dynamo.variables.builder import SourcelessBuilder

    return SourcelessBuilder.create(translator, function).call_function(translator, list(args), {})


# --- the module ---


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
    if name in _HIDDEN and id(value) not in state.inside:
        raise LeftError(f"it reads `{name}` of a module with a parametrisation")
    return None


def answers(output: Any, variable: Any, name: str) -> bool:
    """Whether a module has an attribute because something is registered on it."""
    state = state_of(output)
    known = None if state is None else state.modules.get(id(getattr(variable, "value", None)))
    return known is not None and (name == "parametrizations" or name in known.made)


def _value(translator: Any, state: State, key: tuple[int, str], made: Any, computed: Callable[[Any, Collection[Node]], bool]) -> Any:
    if not state.caching:
        return _call(translator, traced.value_of, made)
    tracer, known = state.cache.get(key, (None, None))
    if tracer is None or not _reaches(translator.output.current_tracer, tracer):
        before = set(values.graph_of(translator).nodes)
        known = _call(translator, traced.value_of, made)
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
        raise LeftError(f"it sets `{name}` of a module with a parametrisation")


def asks(translator: Any, inst: Any, callee: Any) -> None:
    """An instruction is about to run while something is registered: it must not ask for the class of such a module."""
    state = state_of(translator.output)
    if state is None or not translator.stack:
        return
    asked = inst.opname == "LOAD_ATTR" and inst.argval == "__class__" or callee is type
    variable = values.plain(translator.stack[-1])
    if asked and id(getattr(variable, "value", None)) in state.modules:
        raise LeftError("it asks for the class of a module with a parametrisation")


def registered(output: Any) -> tuple[object, ...]:
    """What is registered, to compare."""
    state = state_of(output)
    if state is None:
        return ()
    return state.caching, frozenset((m, name) for m, known in state.modules.items() for name in known.made), frozenset(state.bound)


def reads_property(output: Any, code: Any) -> bool:
    """Whether code is that of a property of a parametrisation that is there for good, in a block that was opened here to keep values."""
    state = state_of(output)
    return state is not None and state.caching > 0 and code.co_name == "get_parametrized" and code.co_filename == parametrize.__file__
