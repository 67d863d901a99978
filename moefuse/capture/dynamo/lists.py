"""Lists of the traced program that capture has to watch: who looks into them, and what is appended."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from moefuse.capture.dynamo import values

CALLS = frozenset(("CALL", "CALL_KW", "CALL_FUNCTION_EX"))
_ALWAYS_NAMED = sys.version_info >= (3, 14)
"""``f(*args)`` has a place for keywords on the stack, with or without any."""

_looked: dict[int, tuple[Any, Callable[[], None]]] = {}


def appends(translator: Any, inst: Any) -> tuple[Any, Any] | None:
    """(list, value) if the instruction calls ``list.append(value)``."""
    if inst.opname != "CALL" or inst.arg != 1 or len(translator.stack) < 3:
        return None
    from torch._dynamo.variables.lists import ListVariable

    found = method(translator, inst, "append")
    return (found, translator.stack[-1]) if isinstance(found, ListVariable) else None


def method(translator: Any, inst: Any, name: str) -> Any:
    """What an instruction calls a method of; None where it calls something else."""
    for variable in _called(translator, inst):
        # GetAttrVariable; from torch 2.15 on a CallMethodVariable
        if hasattr(variable, "obj") and name in (getattr(variable, "name", None), getattr(variable, "method_name", None)):
            return values.plain(variable.obj)
    return None


def _called(translator: Any, inst: Any) -> list[Any]:
    """Two values of the stack, of which one is what an instruction calls and the other may be NULL, or the object of a method."""
    begin = len(translator.stack) - inst.arg - (inst.opname == "CALL_KW")  # the names of keywords are the last value
    return list(map(values.realized, translator.stack[begin - 2 : begin]))


def call(translator: Any, inst: Any) -> tuple[Any, list[Any]]:
    """(what an instruction calls, what that is given), with the items of lists and tuples, and the object of a method."""
    # What is spread is looked into by the call as well.
    parts = list(map(values.realized if inst.opname == "CALL_FUNCTION_EX" else values.plain, _parts(translator, inst)))
    if not parts:
        return None, []
    others = [parts[0].obj] if hasattr(parts[0], "obj") else []
    return parts[0], [w for v in [*others, *parts[1:]] for w in (values.plain(v), *_inside(v))]


def called(translator: Any, inst: Any) -> Any:
    """What an instruction calls."""
    return next(_parts(translator, inst), None)


def _parts(translator: Any, inst: Any) -> Iterator[Any]:
    spread = inst.opname == "CALL_FUNCTION_EX"
    named = inst.opname == "CALL_KW" or (spread and (_ALWAYS_NAMED or (inst.arg or 0) & 1))
    count = 2 + (1 if spread else inst.arg or 0) + bool(named)
    return (v for v in translator.stack[-count:] if v is not None and type(v).__name__ != "NullVariable")


def _inside(variable: Any) -> list[Any]:
    items = vars(variable).get("items")
    return [values.plain(v) for v in items] if isinstance(items, list) else []


def callee(translator: Any, inst: Any) -> Any:
    """The function that an instruction calls, if Dynamo does not trace into it; None for any other instruction."""
    if not inst.opname.startswith("CALL") or inst.arg is None or "EX" in inst.opname:
        return None
    for variable in _called(translator, inst):
        found = (
            getattr(variable, "value", None) if type(variable).__name__ == "TorchInGraphFunctionVariable" else getattr(variable, "fn", None)
        )
        if callable(found):
            return found
    return None


def calls_iter(translator: Any, inst: Any) -> bool:
    """Whether an instruction calls ``iter``, for which Dynamo has a class from torch 2.13 on."""
    variable = values.realized(called(translator, inst))
    return getattr(variable, "fn", None) is iter or type(variable).__name__ == "IterBuiltinVariable"


def watch(variable: Any, looked: Callable[[], None]) -> None:
    """Call ``looked`` before anything reads the items of a list from here on."""
    if id(variable) in _looked and _looked[id(variable)][0]() is variable:
        return
    _looked[id(variable)] = weakref.ref(variable, functools.partial(_forget, id(variable))), looked
    variable.__class__ = _watched()


def watches(variable: Any) -> bool:
    """Whether a list is watched."""
    return id(variable) in _looked and _looked[id(variable)][0]() is variable


@functools.cache
def _watched() -> type:
    from torch._dynamo.variables.lists import ListVariable

    class WatchedList(ListVariable):
        """A list whose items are looked at through :func:`watch`. They lie where they always do, for whoever walks over all attributes."""

        @property
        def items(self) -> Any:
            known = _looked.get(id(self))
            if known is not None and known[0]() is self:
                known[1]()
            return self.__dict__["items"]

        @items.setter
        def items(self, new: Any) -> None:
            self.__dict__["items"] = new

    return WatchedList


def _forget(key: int, dead: Any) -> None:
    if _looked.get(key, (None, None))[0] is dead:
        del _looked[key]
