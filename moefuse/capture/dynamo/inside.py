"""Modules that are compiled for us, traced into a graph of another compiler: nested ``torch.compile`` makes one graph, of the outer one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_KEPT = "moefuse_inside"
_compiled: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()

Tell = Callable[[nn.Module, Any, Any], None]


def compiled(callback: Any, program: Any) -> None:
    """A program is about to be compiled for us; ``callback`` is what Dynamo calls for it."""
    module = getattr(program, "__self__", program)
    if isinstance(module, nn.Module):
        _compiled[module] = callback


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """What is compiled for us in this block is not known to be behind it."""
    before = dict(_compiled)
    try:
        yield
    finally:
        for module in [module for module in _compiled if module not in before]:
            del _compiled[module]
        _compiled.update(before)


def run(original: Callable[[Any], Any], translator: Any, tell: Tell) -> Any:
    """Trace a function of a frame that is another compiler's.

    ``tell`` is called when all of the frame has been traced: with each of our modules in it, what Dynamo calls for that, and the compiler.
    """
    output, compiler = translator.output, translator.output.compiler_fn
    is_root = output.root_tx is translator  # what has been traced knows no longer
    module = getattr(translator.symbolic_locals.get("self"), "value", None) if _compiled else None
    if isinstance(module, nn.Module) and module in _compiled and not is_root:
        vars(output).setdefault(_KEPT, {})[id(module)] = module
    result = original(translator)
    for found in vars(output).pop(_KEPT, {}).values() if is_root else ():
        tell(found, _compiled.get(found), compiler)
    return result
