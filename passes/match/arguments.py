"""What a rule is given of an operation's arguments: those that it names.

The others are as they are by default, or the rule says that the result shows them (``shown``). One that is neither would go unread: then
the operation has no rule. So no rule has to take what it does not know, and none can pass it over.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.signatures import Form, form_of
from moefuse.passes.rules import EVERYTHING, SHOWN, Rule

GRADIENTS = frozenset(("padding_idx", "scale_grad_by_freq", "sparse", "sparse_grad"))
"""Arguments that change gradients alone: where none are recorded they mean nothing."""


@dataclass(frozen=True)
class Taken:
    """The arguments as a rule takes them; ``unread``: those that it does not know, with their values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unread: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class _Names:
    """The parameters of a rule, behind the context and the node."""

    positional: tuple[str, ...]
    all: frozenset[str]
    any_position: bool
    any_name: bool
    shown: frozenset[str]


def taken(rule: Rule, node: Node, call: Call, grad: bool) -> Taken:
    """The arguments of a call for its rule. ``grad``: whether gradients are recorded there."""
    mine = _names(rule)
    if EVERYTHING in mine.shown:
        return Taken(call.args[:1], {})
    count = len(call.args) if mine.any_position else len(mine.positional)
    if len(call.args) <= count and (mine.any_name or call.kwargs.keys() <= mine.all):
        return Taken(call.args, call.kwargs)
    form = form_of(node, call)
    args, more = list(call.args[:count]), dict(call.kwargs)
    if form is not None:
        more |= zip(form.positional[count : len(call.args)], call.args[count:], strict=True)
        args += _in_place(form, more, len(args), count, mine.all)
    elif len(call.args) > count:
        more |= {f"argument {at}": value for at, value in enumerate(call.args[count:], count + 1)}
    known = {name: value for name, value in more.items() if name in mine.all}
    beyond = ((name, value) for name, value in more.items() if name not in known and name not in mine.shown)
    unread = [(n, v) for n, v in beyond if not (n in GRADIENTS and not grad) and not (form is not None and form.is_default(n, v))]
    return Taken(tuple(args), known, tuple(unread))


def _in_place(form: Form, more: dict[str, Any], at: int, count: int, names: frozenset[str]) -> list[Any]:
    """Arguments by torch's names that a rule takes by their place, under another name; they are no longer among ``more``."""
    found = []
    for name in form.positional[at:count]:
        if name not in more or name in names:
            break
        found.append(more.pop(name))
    return found


@functools.cache
def _names(rule: Rule) -> _Names:
    parameters = list(inspect.signature(rule).parameters.values())[2:]
    kinds = {p.kind for p in parameters}
    plain = [p for p in parameters if p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)]
    return _Names(
        tuple(p.name for p in plain if p.kind is not inspect.Parameter.KEYWORD_ONLY),
        frozenset(p.name for p in plain),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
        SHOWN.get(rule, frozenset()),
    )
