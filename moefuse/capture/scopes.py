"""The scopes of assumptions: they open at a branch, close where its two ways meet, and find Python's state as the other way leaves it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture import dummies, functions, returns
from moefuse.capture.attempt import OTHER_WAY, Attempt
from moefuse.capture.dynamo import creation_clock, parametrized, values
from moefuse.capture.opened import RETURN, Loop, Scope
from moefuse.passes.graph.assumptions import DUMMY, TAG, Assumption
from moefuse.passes.graph.calls import call_of

READ_AFTER = "`{name}` is read after it, and has another value if it does not run"


class Scopes:
    """The open scopes of one attempt at a frame, the innermost last."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.open = attempt, attempt.open
        self.anywhere: set[Node] = set()
        self.kept: list[tuple[Assumption, int, Any]] = []
        self._handled: list[tuple[Any, Assumption, str]] = []

    def leave(self, tx: Any, at: int) -> None:
        """Close the scopes that end in front of this instruction."""
        while True:
            ending = next((s for s in reversed(self.open) if s.translator is tx and s.join in (at, returns.here(tx, at))), None)
            if ending is None:
                return
            while self.open[-1] is not ending:
                self.attempt.refuse(self.open[-1].assumption, "a function is left in the middle of it")
            self.open.pop()
            if ending.join == RETURN:
                self._return(tx, ending)
                return
            if ending.then is not None:
                self._put_back(tx, ending, at)
                return
            self._close(tx, ending, at)

    def computed(self, tx: Any, nodes: Collection[Node]) -> bool:
        """A value was computed here because it is first asked for here; whether it is the same wherever that is, and so in no scope.

        It is if nothing changes what it is computed from: Python's objects (:meth:`changed`), or tensors, which are asked about when the
        graph is complete (``Assumption.first``).
        """
        from moefuse.passes.match.liveness import is_pure

        if not self.open:
            return True
        scope, graph = self.open[0], values.graph_of(tx)
        if scope.graph is not graph or any(s.graph is not graph for s in self.open):
            return False
        every = list(graph.nodes)
        begin = 0 if scope.marker is None else every.index(scope.marker) + 1
        older = {*every[:begin], *graph.find_nodes(op="placeholder"), *self.anywhere, *nodes}
        if not all(i in older for n in nodes for i in n.all_input_nodes):
            return False
        names = [getattr(n.target, "__name__", "") for n in nodes]
        paired = names.count("_enter_autocast") == names.count("_exit_autocast")
        switches = ("_enter_autocast", "_exit_autocast")
        if not paired or not all(name in switches or is_pure(call_of(n), n) for n, name in zip(nodes, names, strict=True)):
            return False
        self.anywhere.update(nodes)
        scope.assumption.first.update(nodes)
        self.kept.append((scope.assumption, creation_clock.now(), tx.output))
        return True

    def changed(self, variable: Any) -> None:
        """A Python object is about to change. An iterator, that of the loop for one, can be read by nothing that does not change it."""
        if values.is_iterator(variable):
            return
        for assumption, clock, output in self.kept:
            if parametrized.keeps(output) and not creation_clock.created_inside(variable, clock):
                self.attempt.refuse(
                    assumption, "Python objects change while a value is kept that is computed where an expert first has tokens"
                )

    def enter(
        self, tx: Any, assumption: Assumption, join: int, stack: list[Any], loop: Loop | None = None, *, then: int | None = None
    ) -> None:
        """Everything recorded from here on depends on the assumption, up to instruction ``join`` of ``tx``.

        With ``then`` it is the other way that comes first, which must come to nothing.
        """
        graph = values.graph_of(tx)
        if any(s.translator is tx and s.assumption.place == assumption.place for s in self.open):
            self.attempt.refuse(assumption, "the program comes back to it before its two ways meet")
        assumption.whole = values.whole_graph_of(tx)
        state = _state(tx)
        if then is None:
            self.attempt.assume(tx, assumption)
        else:
            self.attempt.only_outside_of_dummies()
            assumption.graph = graph
        self.open.append(
            Scope(
                assumption,
                tx,
                join,
                list(stack),
                dict(tx.symbolic_locals),
                graph,
                next(iter(reversed(graph.nodes)), None),  # type: ignore[arg-type]
                creation_clock.now(),
                lambda: _state(tx) == state,
                loop,
                then,
            )
        )
        functions.begin(self.open[-1])

    def _return(self, tx: Any, scope: Scope) -> None:
        """The function is about to return, in the way that is not assumed, which then begins; or in both, which must give the same."""
        assumption, found = scope.assumption, returns.value(tx)
        nodes = self._recorded(tx, scope)
        if scope.then is not None:
            others = [n for n in scope.graph.nodes if n not in set(nodes)]
            if found is None or not scope.check() or not dummies.adds_nothing(nodes, others, ()):
                self.attempt.refuse(assumption, OTHER_WAY)
            for node in nodes:
                node.meta[DUMMY] = True
            tx.symbolic_locals.clear()
            tx.symbolic_locals.update(scope.locals)
            tx.stack[:] = scope.stack
            tx.instruction_pointer = scope.then
            functions.forget(scope)
            self.enter(tx, assumption, RETURN, tx.stack)
            self.open[-1].other = found
            return
        if found is None or not scope.check() or not returns.same_without(found, scope.other, assumption.subject):
            self.attempt.refuse(assumption, OTHER_WAY)
        assumption.returned = returns.node(tx)
        for node in nodes:
            if node not in self.anywhere:
                assumption.nodes.add(node)
                node.meta[TAG] = node.meta.get(TAG, 0) + 1

    def _recorded(self, tx: Any, scope: Scope) -> list[Node]:
        """What was recorded in a scope."""
        if values.graph_of(tx) is not scope.graph or (scope.marker is not None and scope.marker._erased):
            self.attempt.refuse(scope.assumption, "Dynamo rewrote the graph in the middle of it")
        every = list(scope.graph.nodes)
        begin = 0 if scope.marker is None else every.index(scope.marker) + 1
        return [n for n in every[begin:] if n.op != "placeholder"]

    def _put_back(self, tx: Any, scope: Scope, at: int) -> None:
        """The other way has come to its end: nothing is left of it, and the way that is assumed begins."""
        graph, assumption = scope.graph, scope.assumption
        if values.graph_of(tx) is not graph or (scope.marker is not None and scope.marker._erased):
            self.attempt.refuse(assumption, OTHER_WAY)
        code, every = self.attempt.code_of(tx), list(graph.nodes)
        begin = 0 if scope.marker is None else every.index(scope.marker) + 1
        nodes = [n for n in every[begin:] if n.op != "placeholder"]
        same_stack = len(tx.stack) == len(scope.stack) and all(_compare(a, b) == "same" for a, b in zip(scope.stack, tx.stack, strict=True))
        live = code.live(at) | code.live(at, handlers=True)
        pairs = [(scope.locals.get(name), tx.symbolic_locals.get(name)) for name in live]
        verdicts = {_compare(*pair) for pair in pairs}
        carried = [(values.known(a), values.known(b)) for a, b in pairs if _compare(a, b) == "carried"]
        others = [n for n in every if n not in nodes]
        size = assumption.subject if assumption.kind == "size" else None
        if not same_stack or not scope.check() or "differs" in verdicts or not dummies.adds_nothing(nodes, others, carried, size):
            self.attempt.refuse(assumption, OTHER_WAY)
        if scope.then is None or code.landing(scope.then) == at:  # nothing would be left to show that this is about experts
            self.attempt.refuse(assumption, OTHER_WAY)
        nodes = [n for n in nodes if not isinstance(n.meta.get("example_value"), torch.SymInt)]  # Dynamo has one node for equal numbers
        if nodes:
            self.attempt.dummies.append((assumption, nodes))
            assumption.dummy = True
        for node in nodes:
            node.meta[DUMMY] = True
        tx.symbolic_locals.clear()
        tx.symbolic_locals.update(scope.locals)
        tx.stack[:] = scope.stack
        tx.instruction_pointer = scope.then
        self.enter(tx, assumption, at, tx.stack)

    def _close(self, tx: Any, scope: Scope, at: int) -> None:
        """What happened in the scope, and whether Python's state is what it was."""
        assumption = scope.assumption
        if values.graph_of(tx) is not scope.graph or (scope.marker is not None and scope.marker._erased):
            self.attempt.refuse(assumption, "Dynamo rewrote the graph in the middle of it")
        for node in reversed(scope.graph.nodes):
            if node is scope.marker:
                break
            if node.op != "placeholder" and node not in self.anywhere:
                assumption.nodes.add(node)
                node.meta[TAG] = node.meta.get(TAG, 0) + 1
        same_stack = len(tx.stack) == len(scope.stack) and all(_compare(a, b) == "same" for a, b in zip(scope.stack, tx.stack, strict=True))
        if not same_stack or not scope.check():
            self.attempt.refuse(assumption, "the program is in another state behind it")
        code = self.attempt.code_of(tx)
        for name in sorted(code.live(at) | code.live(at, handlers=True)):
            before, after = scope.locals.get(name), tx.symbolic_locals.get(name)
            verdict = _compare(before, after)
            if verdict == "same":
                continue
            if name not in code.live(at):
                self._handled.append((tx, assumption, name))
            elif verdict == "differs":
                self.attempt.refuse(assumption, READ_AFTER.format(name=name))
            elif verdict == "carried":
                assumption.carried.append((name, values.known(before), values.known(after)))

    def handler(self, tx: Any) -> None:
        """An exception is handled: what only the handlers read is read after all."""
        for owner, assumption, name in self._handled:
            if owner is tx:
                self.attempt.refuse(assumption, READ_AFTER.format(name=name))


def _state(tx: Any) -> tuple[object, ...]:
    return values.python_state(tx), parametrized.registered(tx.output)


def _compare(before: Any, after: Any) -> str:
    """``same``, ``carried`` (both are tensors, or numbers that the run computes), or ``differs``."""
    if before is after:
        return "same"
    if before is None or after is None:
        return "differs"
    before, after = values.plain(before), values.plain(after)
    if before is after:
        return "same"
    if values.is_constant(before) and values.is_constant(after):
        a, b = before.as_python_constant(), after.as_python_constant()
        return "same" if type(a) is type(b) and a == b else "differs"
    old, new = values.tensor_node(before), values.tensor_node(after)
    if old is not None and new is not None:
        return "same" if old is new else "carried"
    old, new = values.known(before), values.known(after)
    if old is not None and old is new:
        return "same"
    return "carried" if old is not None and isinstance(new, Node) else "differs"
