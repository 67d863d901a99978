"""What the backward pass of a program's own function unpacks weights by: what its forward pass does, or what no size of a number decides.

Numbers of today, and made-up ones, may all lie on one side of a comparison: a backward pass that leaves small weights out is right on all
that are tried, and wrong once scales have shrunk. So each operation of it is one that forward has, on the same tensors, or is known to be
part of unpacking (``encodings/followed.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Interpreter, Node

from moefuse import _torch_private
from moefuse.passes.encodings.followed import CODES, GRADIENT, ROWS, SCALES, Followed, following
from moefuse.passes.graph.applied import Applied
from moefuse.passes.graph.calls import location


def unread(one: Applied, given: Sequence[Any], result: torch.dtype) -> str:
    """What a backward pass does that is not read, with its place; empty if nothing is.

    Args:
        given: to the function, rows too.
        result: the dtype of what it gives.
    """
    rows = given[one.rows]
    followed = Followed(rows.dtype, result, trusted=_namespaces(one.forward.graph))
    run = _Run(one, followed)
    with following(followed) as start:
        for value in given:
            if isinstance(value, Tensor):
                start(value, CODES if value.dtype.itemsize == 1 or not value.dtype.is_floating_point else SCALES)
        start(rows, ROWS)
        (out,), kept = Interpreter(one.forward).run(*given)
        gradient = torch.zeros_like(out)
        start(gradient, GRADIENT)
        for value in kept:
            _trust(followed, value)
        run.run(gradient, *kept)
    return run.odd


class _Run(Interpreter):
    def __init__(self, one: Applied, followed: Followed) -> None:
        super().__init__(one.backward)
        (out,) = one.forward.graph.find_nodes(op="output")
        (end,) = one.backward.graph.find_nodes(op="output")
        self.followed, self.odd, self.of_rows = followed, "", end.args[0][one.rows]
        forward = _spelled(one.forward.graph, [("given", i) for i in range(len(one.forward.graph.find_nodes(op="placeholder")))])
        kept = [forward.get(node, ("more", i)) for i, node in enumerate(out.args[0][1])]
        self.spelled, self.same = _spelled(one.backward.graph, [("gradient",), *kept]), frozenset(forward.values())

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.op == "placeholder" or n.op == "output":
            return found
        if self.spelled.get(n) in self.same:
            _trust(self.followed, found)
        for value in _torch_private.tree_leaves(found):
            made = self.followed.made(value) if isinstance(value, Tensor) else None
            if made is not None and made.odd and not self.odd and _leads_to(n, self.of_rows):
                place = location(n)
                self.odd = made.odd + (f" at {place}" if place else "")
        return found


def _trust(followed: Followed, value: Any) -> None:
    """What forward has, too."""
    for one in _torch_private.tree_leaves(value):
        if isinstance(one, Tensor):
            followed.trust(one)


def _leads_to(node: Node, end: Any) -> bool:
    seen, open_ = {node}, [node]
    while open_:
        one = open_.pop()
        if one is end:
            return True
        new = [user for user in one.users if user not in seen]
        seen.update(new)
        open_ += new
    return False


def _spelled(graph: Graph, given: Sequence[Any]) -> dict[Node, Any]:
    """What tells values apart that are not computed alike: operations, and which tensors they start from."""
    found: dict[Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), given, strict=False))
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            inputs = [found.get(n, ("other", n)) for n in node.all_input_nodes]
            numbers = {n: f"%{i}" for i, n in enumerate(node.all_input_nodes)}
            args = torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
            found[node] = (str(node.op), str(node.target), str(args), *inputs)
    return found


def _namespaces(graph: Graph) -> frozenset[str]:
    """Of the libraries whose operators a graph calls: what these unpack others of the same library do, too."""
    targets = [n.target for n in graph.nodes if isinstance(n.target, _torch_private.OpOverload | _torch_private.OpOverloadPacket)]
    return frozenset(str(t).partition(".")[0] for t in targets) - frozenset(_torch_private.OF_TORCH)


__all__ = ["unread"]
