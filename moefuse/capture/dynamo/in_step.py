"""What modules keep beside their Parameters for frames of ours, in step with them whenever a frame is traced or called.

A Parameter that is a DTensor is dear to guard: what it is made of are attributes, in Python, and no module around one is skipped for not
having changed since the last call, as torch does on Python 3.12 and later. Plain tensors in a module's dictionaries are no such trouble,
but nothing says that they are still a Parameter's. Here that is brought about, in front of all other guards. Other compilers' frames read
the Parameter.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moefuse.capture.dynamo import guards, module_calls, values

log = logging.getLogger("moefuse.capture")

HOLDER, OURS = "holder", "ours"
"""Names of a reader's arguments: the module, and whether a frame of ours reads where nothing is differentiated."""
Update = Callable[[Any], None]
_readers: dict[types.CodeType, Update] = {}
_updates: dict[str, Update] = {}


def read_by(reader: Any, attribute: str, update: Update) -> None:
    """Let ``reader(holder, .., ours=False)`` read an attribute of a module where it is called with True; gradients are a Parameter's.

    Args:
        update: called with a module, has its attribute in step.
    """
    _readers[reader.__code__] = update
    _updates[attribute] = update


def told(translator: Any) -> None:
    """A function is about to be traced in a frame of ours: a reader learns of it, unless the program has changed the module itself."""
    update = _readers.get(translator.f_code)
    if update is None or torch.is_grad_enabled():
        return
    variable = values.realized(translator.symbolic_locals[HOLDER])
    module, effects = getattr(variable, "value", None), translator.output.side_effects
    if not isinstance(module, nn.Module) or effects.store_attr_mutations.get(variable):
        return
    parameters = effects.id_to_variable.get(id(module._parameters))
    if parameters is not None and effects.is_modified(parameters):
        return
    update(module)
    translator.symbolic_locals[OURS] = values.constant(True)


def watch(output: Any) -> None:
    """Have a frame's guards bring in step what it reads."""
    if not _updates:
        return
    read = {(s.member, module_calls.source_name(s.base)) for guard in output.guards.inner for s in _chain(guard.originating_source)}
    for attribute, update in _updates.items():
        names = sorted(name for member, name in read if member == attribute)
        if names:
            check = Check(names, update, output.root_tx.f_locals, output.root_tx.f_globals)
            guards.ask(output, check, "what modules keep beside Parameters is in step", first=True)


def _chain(source: Any) -> Iterator[Any]:
    """A source and those that it is made of, which are attributes."""
    while source is not None:
        if hasattr(source, "member"):
            yield source
        source = getattr(source, "base", None)


class Check:
    """The guard. False only where a module is not where it was.

    Args:
        names: the modules, as expressions in the frame's locals ``L`` and globals ``G``.
    """

    def __init__(self, names: list[str], update: Update, f_locals: Mapping[str, Any], f_globals: dict[str, Any]) -> None:
        self.update, self.f_globals = update, f_globals
        found = all(module_calls.module_of(name, f_locals, f_globals) is not None for name in names)
        # Without an expression nobody could keep it in step: such a frame is compiled again in each call, until Dynamo leaves it.
        self.modules = eval(f"lambda L, G: ({', '.join(names)},)") if found else None

    def __call__(self, f_locals: Mapping[str, Any]) -> bool:
        if self.modules is None:
            return False
        try:
            for module in self.modules(f_locals, self.f_globals):
                self.update(module)
        except Exception:
            log.debug("a module is not where it was", exc_info=True)
            return False
        return True
