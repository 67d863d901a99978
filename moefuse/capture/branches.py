"""Conditional jumps: known from a row, or assumed, or left to Dynamo."""

from __future__ import annotations

from typing import Any

from torch import SymBool, SymInt
from torch.fx import Node

from moefuse import _torch_private
from moefuse.capture import guess, returns
from moefuse.capture.attempt import Attempt
from moefuse.capture.bytecode import GENERATOR
from moefuse.capture.dynamo import modules as lists, values
from moefuse.capture.opened import RETURN
from moefuse.capture.scopes import Scopes
from moefuse.passes.graph import siblings, symbols
from moefuse.passes.graph.assumptions import Assumption, Kind
from moefuse.program.breaks import code_at, is_the_programs

_NUMBERS = (SymInt, SymBool)


def jump(scopes: Scopes, tx: Any, at: int) -> None:
    """A conditional jump: known, or assumed, or left to Dynamo."""
    attempt = scopes.attempt
    code = attempt.code_of(tx)
    ways = code.ways(at)
    if ways is None:
        return
    top = values.realized(tx.stack[-1])
    known = _known(attempt, top)
    if known is not None:
        tx.stack[-1] = values.constant(known)
        return
    place = attempt.place(tx)
    if tx.f_code.co_flags & GENERATOR:
        return
    holds = code.asserts(at)
    # An error of the graph's is none that the program's own code around it would catch.
    if holds is not None and _torch_private.called_from(is_the_programs, tx.output.root_tx.f_code):
        holds = None
    if holds is not None and values.asserted(tx, top, holds, code_at(attempt.location(tx)) or "assertion error"):
        attempt.asserted = True
        tx.stack[-1] = values.constant(holds)
        return
    found = _assumed(top)
    if found is None:
        attempt.asks_for_rows(tx, values.symbol(top))
        return
    kind, subject, outcome = found
    here, there = ways if outcome else ways[::-1]
    join = code.landing(there)
    # The other way must do nothing before both meet, and this way must not be the way back of a loop.
    if join is None or code.instructions[join].opname in ("RAISE_VARARGS", "RERAISE") or here <= at:
        return
    if kind == "size" and _read_out(values.number_node(top)):
        # Dynamo drops a number that only a condition reads, and with it what the number counts.
        lists.keep(tx, siblings.keep, [top])
    assumption = Assumption(kind, place, attempt.location(tx), subject, outcome=outcome)
    meeting = code.meeting(at)
    dummy = meeting is not None and meeting != join and there > at
    if returns.may(tx, code, there, here) and kind == "size" and not isinstance(subject, tuple):
        dummy = True
        scopes.enter(tx, assumption, RETURN, tx.stack[:-1], then=here)
    elif meeting is not None and dummy:
        scopes.enter(tx, assumption, meeting, tx.stack[:-1], then=here)
    else:
        scopes.enter(tx, assumption, join, tx.stack[:-1])
    tx.stack[-1] = values.constant(outcome != dummy)


def _read_out(node: Node | None) -> bool:
    """Whether a condition is computed from numbers that were read out of tensors."""
    if node is None:
        return False
    return node.target == "item" or any(_read_out(i) for i in node.all_input_nodes if isinstance(i.meta.get("example_value"), _NUMBERS))


def _known(attempt: Attempt, variable: Any) -> bool | None:
    """The truth of a one-element tensor that follows from the row alone."""
    node = values.tensor_node(variable)
    if node is None or not any(s.assumption.kind == "row" for s in attempt.open):
        return None
    known = symbols.known_tensor(node.meta.get("example_value"))
    if known is None:
        return None
    loops = attempt.represented()
    for loop in loops:
        loop.conditions.append((node, loop.handed[-1][1]))
    if len(loops) > 1:
        attempt.unroll("a condition may depend on the rows of two loops")
    return bool(known)


def _assumed(variable: Any) -> tuple[Kind, Any, bool] | None:
    """(kind, what it is about, outcome if an expert has tokens) of a condition; None if capture has no opinion."""
    number = values.symbol(variable)
    if number is not None:
        found = guess.about_size(number)
        return None if found is None else ("size", found[0], found[1])
    node = values.tensor_node(variable)
    outcome = guess.about_value(node) if node is not None else None
    return None if outcome is None else ("value", node, outcome)
