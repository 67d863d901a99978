"""Experts without any projection that a rule knows: a layer is there, and the user reads which operation hides it."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.cone import read_back
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import extent
from moefuse.passes.ir.expr import Expr, Token, has_linear, walk
from moefuse.passes.ir.facts import Lost, Table, View
from moefuse.passes.ir.regions import Refused
from moefuse.passes.rules import rule_of


def unread(ctx: Context, exprs: list[Expr], *, selected: bool = False) -> Lost | None:
    """The operation that gives the first of several experts a value of its own; None where all read the same tensors.

    ``selected``: the rows of an expert are taken from the tensor that it reads.
    """
    if len(exprs) < 2:
        return None
    own, *others = ({e.source: e.node for e in walk(expr) if isinstance(e, Token)} for expr in exprs)
    computed = (n for n in set(own).difference(*others) if ctx.calls[n] is not None and ctx.calls[ctx.storage[n]] is not None)
    hidden = min(computed, key=ctx.position.__getitem__, default=None)
    call = None if hidden is None else ctx.calls[hidden]
    if hidden is None or call is None:
        return None
    taken = ctx.calls.get(own[hidden]) if selected and rule_of(call.name) is not None else None
    return Lost("no-rule", hidden, {"op": call.name}) if taken is None else Lost("no-rule", own[hidden], {"op": taken.name, "behind": True})


def unread_stacks(ctx: Context) -> Iterator[Refused]:
    """Outputs of experts beside each other that a whole routing table weighs, none of them understood."""
    for node, call in ctx.calls.items():
        outputs = _outputs(ctx, node, call)
        table = _weighed_by(ctx, node, len(outputs)) if outputs else None
        if table is None:
            continue
        exprs = [read_back(ctx, node, value) for value in outputs]
        lost = None if any(map(has_linear, exprs)) else unread(ctx, exprs)
        if lost is not None:
            yield Refused(lost, table.routing)


def _outputs(ctx: Context, node: Node, call: Call | None) -> list[Node]:
    """The tensors of a stack that is plain itself."""
    items = call.args[0] if call is not None and call.name in ("stack", "cat") and call.args else ()
    plain = isinstance(ctx.facts.get(node), View | None) and isinstance(items, tuple | list)
    return list(items) if plain and len(items) > 1 and all(isinstance(i, Node) for i in items) else []


def _weighed_by(ctx: Context, node: Node, count: int) -> Table | None:
    """The table of so many experts that an operation reads together with a view of ``node``."""
    readers = (user for alias in ctx.aliases[ctx.storage[node]] for user in alias.users)
    beside = (ctx.facts.get(other) for user in readers for other in user.all_input_nodes)
    return next((t for t in beside if isinstance(t, Table) and t.expert is None and same(_experts(t), count)), None)


def _experts(table: Table) -> object:
    return extent(next((axis for axis in table.axes if any(a.kind == "e" for a in axis)), ()))
