"""What stands between a program and a registered module, in frames of ours: its variable, and those of torch's functions."""

from __future__ import annotations

import functools
from typing import Any

from moefuse.capture.dynamo import lists, observed, parametrized, points, registering, values


def before(observer: observed.Observer, translator: Any) -> None:
    """An instruction is about to run: functions that it calls to register are replaced, and so is what asks a registered module."""
    at = translator.instruction_pointer
    if at is None:
        return
    inst = translator.instructions[at]
    if inst.opname in lists.CALLS and observer.parametrizes and points.has("parametrisations"):
        _replace(lists.called(translator, inst))
    output = translator.output
    if parametrized.state_of(output) is None:
        return
    if parametrized.reads_property(output, translator.f_code):
        observer.registers(translator, "another is there for good, and `cached()` would keep its value")
    if parametrized.active(output):
        with parametrized.left(observer, output):
            parametrized.asks(translator, inst, lists.callee(translator, inst))


def _replace(callee: Any) -> None:
    function = values.realized(getattr(callee, "func", callee))  # behind functools.partial
    if registering.handler(getattr(function, "fn", None)) is not None and type(function) is _classes()[0]:
        function.__class__ = _classes()[1]


@functools.cache
def _classes() -> tuple[type, type]:
    from torch._dynamo.variables.functions import UserFunctionVariable

    class Registers(UserFunctionVariable):
        """A function that registers parametrisations, or takes them back."""

        def call_function(self, translator: Any, args: Any, kwargs: Any) -> Any:
            observer, answer = observed.of(translator.output), registering.handler(self.fn)
            if observer is None or answer is None:
                return super().call_function(translator, args, kwargs)
            with parametrized.left(observer, translator.output):
                found = answer(translator, list(args), dict(kwargs))
            observer.registering = observer.registering or parametrized.used(translator.output)
            if found is None:
                return super().call_function(translator, args, kwargs)
            if parametrized.registered_on(translator.output, found) and not hasattr(found, "moefuse_answers"):
                kind: Any = type(found)
                found.__class__ = _module(kind)
            return found

    return UserFunctionVariable, Registers


@functools.cache
def _module(kind: Any) -> type:
    reader = parametrized.reader()

    class Answers(kind):  # type: ignore[misc]
        """The variable of a module that something is registered on."""

        moefuse_answers = True

        def call_obj_hasattr(self, translator: Any, name: str) -> Any:
            if parametrized.answers(translator.output, self, name):
                return values.constant(True)
            return super().call_obj_hasattr(translator, name)

        def manually_trace_nn_module_getattr(self, translator: Any, name: str) -> Any:
            with parametrized.reading(translator, self):
                return super().manually_trace_nn_module_getattr(translator, name)

    def read(self: Any, translator: Any, name: str) -> Any:
        observer = observed.of(translator.output)
        if observer is None or not parametrized.active(translator.output):
            return getattr(super(Answers, self), reader)(translator, name)
        with parametrized.left(observer, translator.output):
            found = parametrized.attribute(translator, self, name, observer.computed)
        return getattr(super(Answers, self), reader)(translator, name) if found is None else found

    setattr(Answers, reader, read)
    return Answers
