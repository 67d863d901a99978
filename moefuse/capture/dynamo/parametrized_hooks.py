"""The methods of Dynamo that stand between a program and a registered module; each is as it was where nothing is registered."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from torch.fx import Node

from moefuse.capture.dynamo import lists, parametrized, registering, values


class Observer(Protocol):
    """What is asked of a frame of ours, and told."""

    registering: bool

    def registers(self, translator: Any, why: str) -> None: ...
    def computed(self, translator: Any, nodes: Collection[Node]) -> bool: ...

    @property
    def parametrizes(self) -> bool: ...


def install(wrap: Callable[[Any, str, Callable[..., Any]], None], kept: str) -> None:
    """Wrap the methods, if this torch has them all; ``kept``: the attribute of an OutputGraph with its observer."""
    if not parametrized.available():
        return
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    def of(output: Any) -> Observer | None:
        observer: Observer | None = getattr(output, kept, None)
        return observer

    wrap(UserFunctionVariable, "call_function", functools.partial(_on_call, of))
    wrap(UnspecializedNNModuleVariable, parametrized.reader(), functools.partial(_on_attribute, of))
    wrap(UnspecializedNNModuleVariable, "call_obj_hasattr", _on_hasattr)
    wrap(UnspecializedNNModuleVariable, "manually_trace_nn_module_getattr", _on_getattr)
    wrap(OutputGraph, "compile_subgraph", functools.partial(_on_end, of))


_Of = Callable[[Any], Observer | None]


def before(observer: Observer, translator: Any) -> None:
    """An instruction is about to run while something is registered."""
    at = translator.instruction_pointer
    if at is None:
        return
    inst = translator.instructions[at]
    with _left(observer, translator.output):
        parametrized.asks(translator, inst, lists.callee(translator, inst))


@contextlib.contextmanager
def _left(observer: Observer, output: Any) -> Iterator[None]:
    try:
        yield
    except parametrized.LeftError as error:
        observer.registers(output.current_tx, str(error))


def stored(observer: Observer, output: Any, variable: Any, name: object) -> None:
    """An attribute is about to change while something is registered."""
    with _left(observer, output):
        parametrized.stored(output, variable, name)


def _on_call(of: _Of, original: Any, self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    answer = registering.handler(self.fn)
    observer = of(translator.output)
    if observer is None or not observer.parametrizes:
        return original(self, translator, args, kwargs)
    if answer is None:
        if parametrized.reads_property(translator.output, self.get_code()):
            observer.registers(translator, "another is there for good, and `cached()` would keep its value")
        return original(self, translator, args, kwargs)
    with _left(observer, translator.output):
        found = answer(translator, list(args), dict(kwargs))
    observer.registering = observer.registering or parametrized.used(translator.output)
    return original(self, translator, args, kwargs) if found is None else found


def _on_attribute(of: _Of, original: Any, self: Any, translator: Any, name: str) -> Any:
    observer = of(translator.output)
    if observer is None or not parametrized.active(translator.output):
        return original(self, translator, name)
    with _left(observer, translator.output):
        found = parametrized.attribute(translator, self, name, observer.computed)
    return original(self, translator, name) if found is None else found


def _on_hasattr(original: Any, self: Any, translator: Any, name: str) -> Any:
    if parametrized.answers(translator.output, self, name):
        return values.constant(True)
    return original(self, translator, name)


def _on_getattr(original: Any, self: Any, translator: Any, name: str) -> Any:
    with parametrized.reading(translator, self):
        return original(self, translator, name)


def _on_end(of: _Of, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    observer = of(self)
    if observer is not None and (parametrized.active(self) or parametrized.keeps(self)):
        observer.registers(self.current_tx, "it is still there where the graph ends")
    return original(self, *args, **kwargs)
