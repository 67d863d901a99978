"""What is traced in place of ``register_parametrization``, ``remove_parametrizations`` and ``cached``; see ``parametrized``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from moefuse.capture.dynamo import parametrize_traced as traced, values
from moefuse.capture.dynamo.parametrized import LeftError, Registered, State, call, own_state, reader, state_of

Handler = Callable[[Any, list[Any], dict[str, Any]], Any]

ORIGINAL = "_moefuse_original"
"""Of a class that was made for a module whose experts other ranks hold, too: the one that it takes the place of."""
_STANDARD = ("__getattr__", "__setattr__", "__delattr__", "__getattribute__", "register_parameter", "register_buffer")


def handler(function: Any) -> Handler | None:
    """What answers a call of a function: called with a translator and the arguments; it returns None for a call that is not its own."""
    try:
        return _HANDLERS.get(function)
    except TypeError:  # it has no hash
        return None


def _register(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = _bound(parametrize.register_parametrization, args, kwargs)
    if given is None or not _supported(translator, given):
        return None
    module, parametrization, name = given["module"], given["parametrization"], given["tensor_name"].as_python_constant()
    unsafe = "unsafe" in given and bool(given["unsafe"].as_python_constant())
    state = own_state(translator.output)
    known = state.modules.get(id(module.value))
    if known is not None and name in known.made:
        raise LeftError("the tensor gets a second one")
    caches = call(translator, traced.caches)
    if not values.is_constant(caches) or caches.as_python_constant():
        return None
    original = getattr(module, reader())(translator, name)
    made = call(translator, traced.register, module, given["tensor_name"], parametrization, values.constant(unsafe))
    if not unsafe:
        call(translator, traced.check, made, original)
    if known is None:
        known = state.modules[id(module.value)] = Registered(call(translator, traced.new_dict))
    known.made[name] = made
    _write(translator, state, traced.put, known.all, given["tensor_name"], made)
    state.used = True
    return module


def _remove(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    given = _bound(parametrize.remove_parametrizations, args, kwargs)
    state = state_of(translator.output)
    if given is None or state is None:
        return None
    module, name, leave = given["module"], given["tensor_name"], given.get("leave_parametrized")
    known = state.modules.get(id(getattr(module, "value", None)))
    if known is None:
        return None
    if not values.is_constant(name) or name.as_python_constant() not in known.made:
        raise LeftError("something else is removed")
    if leave is None or not values.is_constant(leave) or leave.as_python_constant():
        raise LeftError("the tensor stays parametrised when it is removed")
    _write(translator, state, traced.drop, known.all, name)
    del known.made[name.as_python_constant()]
    if not known.made:
        del state.modules[id(module.value)]
    return module


def _write(translator: Any, state: State, function: Any, *args: Any) -> None:
    state.answering = True
    try:
        call(translator, function, *args)
    finally:
        state.answering = False


def _cached(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    state = state_of(translator.output)
    return call(translator, traced.cached) if state is not None and state.modules and not args and not kwargs else None


def _opened(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    own_state(translator.output).caching += 1
    return values.constant(None)


def _closed(translator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    state = own_state(translator.output)
    state.caching -= 1
    if not state.caching:
        state.cache.clear()
        state.bound.clear()
    return values.constant(None)


_HANDLERS: dict[Any, Handler] = {
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


def _supported(translator: Any, given: dict[str, Any]) -> bool:
    """Whether a registration can be modelled: on a module from outside, whose class treats attributes as ``nn.Module`` does."""
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    module, parametrization, name = given["module"], given["parametrization"], given["tensor_name"]
    modules = isinstance(module, UnspecializedNNModuleVariable) and isinstance(parametrization, UnspecializedNNModuleVariable)
    if not modules or module.source is None or module.is_state_mutated or not values.is_constant(name):
        return False
    if "unsafe" in given and not values.is_constant(given["unsafe"]):
        return False
    value, tensor = module.value, name.as_python_constant()
    kind = getattr(type(value), ORIGINAL, type(value))
    if any(getattr(kind, method) is not getattr(nn.Module, method) for method in _STANDARD) or hasattr(value, "parametrizations"):
        return False
    if not isinstance({**value._parameters, **value._buffers}.get(tensor), torch.Tensor) or hasattr(kind, tensor) or tensor in vars(value):
        return False
    return not _has(translator, parametrization, "right_inverse")


def _has(translator: Any, variable: Any, name: str) -> bool:
    """Whether an object has an attribute, of its class, from before the call or by now."""
    return hasattr(variable.value, name) or bool(translator.output.side_effects.has_pending_mutation_of_attr(variable, name))
