"""Loops that select a module with their row, ``self.experts[row]``: when the trace of two rows speaks for all.

Rows e and f are traced. Then the body's other rows are what row e is, with row e's weights replaced by theirs, because

* the modules are isomorphic (``siblings.different``), and guards like those on row e's keep them so; against hooks and methods that change
  later, which Dynamo does not guard, stands ``moefuse/capture/dynamo/module_calls.py``,
* the row's number selects the module and nothing else that Python sees (``selects``),
* the body cannot tell one module from another: it compares no identities and uses no module as a key (``tells_apart``),
* a weight that row e reads through the list is at the same place in row f the one that row f reads through it; one that the body has from
  elsewhere (``self.experts[0].weight``) is the same in both, and is not replaced. See ``passes/match/representative.py``.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import torch

from moefuse.capture.dynamo import lists as calls, modules as lists, values
from moefuse.capture.replay import replay
from moefuse.passes.graph import siblings, symbols

log = logging.getLogger("moefuse.capture")

_HARMLESS = frozenset((isinstance, getattr, hasattr, type, callable, super, len, bool))
_COMPARES = {"IS_OP": 2, "CONTAINS_OP": 2, "COMPARE_OP": 2, "BINARY_SUBSCR": 2, "STORE_SUBSCR": 3, "DELETE_SUBSCR": 2, "BINARY_OP": 2}
_BUILDS = ("BUILD_LIST", "BUILD_TUPLE", "BUILD_SET", "BUILD_MAP", "BUILD_CONST_KEY_MAP")
_ADDS = ("LIST_APPEND", "SET_ADD", "MAP_ADD", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE", "STORE_GLOBAL")


def selects(tx: Any, loop: Any, node: Any) -> bool:
    """Whether a row is read as the index of a list of isomorphic modules, one for each row; remembers the list."""
    found = lists.list_of(tx)
    if found is None or not lists.in_root(tx):
        return False
    experts, name = found
    if name in loop.lists:
        return loop.lists[name] is experts and is_row(loop, node)
    if len(experts) != loop.count or not is_row(loop, node):
        return False
    problem = siblings.different(list(experts))
    if problem is not None:
        log.debug("the modules of %s differ: %s", name, problem)
        return False
    loop.lists[name] = experts
    return True


def is_row(loop: Any, node: Any) -> bool:
    """Whether a number is the row itself, for every row."""
    start = loop.handed[-1][1]
    try:
        shape, dtype = tuple(loop.like.shape[1:]), loop.like.dtype
        return all(int(replay(node, start, torch.full(shape, row, dtype=dtype))) == row for row in range(loop.count))
    except Exception:  # whatever the user's operations raise on plain tensors
        return False


def reads_index(tx: Any, inst: Any) -> None:
    """``operator.index(row)`` of a list's own code, at which torch 2.11 breaks the graph: later releases read the number, as here."""
    if "index" not in tx.f_code.co_names or calls.callee(tx, inst) is not operator.index:
        return
    row = values.plain(tx.stack[-1])
    node = values.tensor_node(row)
    if node is not None and symbols.known_tensor(node.meta.get("example_value")) is not None:
        tx.stack[-1] = row.call_method(tx, "item", [], {})


def witness_wanted(loop: Any, classes: dict[Any, list[int]]) -> int | None:
    """A second row to trace for a class of rows that has only one yet, where the body selects modules."""
    if not loop.lists:
        return None
    handed = {row for row, _ in loop.handed}
    for members in classes.values():
        if len(members) > 1 and len(handed & set(members)) == 1:
            return next(m for m in members if m not in handed)
    return None


def bind(tx: Any, loop: Any) -> str | None:
    """Bring the siblings' weights into the graph, and guard the siblings. What is in the way, or None."""
    handed = {row for row, _ in loop.handed}
    made: list[Any] = []
    try:
        for assumption in loop.assumptions:
            witness = next((m for m in assumption.members if m != assumption.row and m in handed), None)
            if witness is None:
                continue
            assumption.witness, assumption.witness_node = witness, dict(loop.handed)[witness]
            others = [m for m in assumption.members if m != assumption.row]
            assumption.members = tuple(m for m in assumption.members if m != witness)
            for name in loop.lists:
                for node in lists.weights(tx, name, assumption.row).values():
                    variables = {m: lists.input_like(tx, node, name, assumption.row, m) for m in others}
                    assumption.siblings[node] = {assumption.row: node} | {m: values.tensor_node(v) for m, v in variables.items()}
                    made += variables.values()
                lists.copy_guards(tx, name, assumption.row, others)
    except lists.UnknownError as error:
        return str(error)
    if made:
        lists.keep(tx, siblings.keep, made)
    return None


def tells_apart(tx: Any, loop: Any, inst: Any) -> bool:
    """Whether an instruction may find out which module of a list it has: by identity, or as a key. Loops themselves are not touched."""
    name = inst.opname
    if name in _COMPARES:
        return _compares(name, tx.stack[-_COMPARES[name] :], loop)
    if name in _BUILDS:
        count = (inst.arg or 0) * (2 if name == "BUILD_MAP" else 1)
        return any(_one_of(v, loop) for v in (tx.stack[-count:] if count else ()))
    if name in _ADDS:
        return any(_one_of(v, loop) for v in tx.stack[-2:])
    return name.startswith("CALL") and _calls(tx, inst, loop)


def _compares(name: str, operands: list[Any], loop: Any) -> bool:
    if any(values.is_constant(values.plain(v)) for v in operands[:2]) and name != "STORE_SUBSCR":
        return False
    kind: Callable[[Any, Any], bool] = _from_list if name in ("IS_OP", "CONTAINS_OP") else _one_of
    return any(kind(v, loop) for v in operands)


def _calls(tx: Any, inst: Any, loop: Any) -> bool:
    callee, given = calls.call(tx, inst)
    functions = [lists.builtin(v) for v in (callee, *given)]
    if any(f in (id, hash) for f in functions if f is not None):
        return True
    if callee is None or lists.inlines(callee) or lists.builtin(callee) in _HARMLESS:
        return False
    return any(_one_of(v, loop) for v in given)


def _from_list(variable: Any, loop: Any) -> bool:
    """Whether an object comes from an element of a list."""
    name = lists.name_of(variable)
    return any(f"{prefix}._modules['" in name for prefix in loop.lists)


def _one_of(variable: Any, loop: Any) -> bool:
    """Whether it is such an object, and neither a tensor nor a constant."""
    variable = values.plain(variable)
    return _from_list(variable, loop) and not values.is_constant(variable) and values.tensor_node(variable) is None
