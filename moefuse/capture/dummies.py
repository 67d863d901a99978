"""A pass of an expert without tokens, as data parallel training wants it: ``else: out = out + 0.0 * expert(x[:1]).sum()``.

It is traced in front of the other way of the branch, to see that it adds zero times something and does nothing else. Then Python's state is
put back, and nothing of it stays in the graph: an expert that nobody chose adds nothing to a fused op, and has gradients of zero.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.assumptions import DUMMY
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.op_classes import SHAPED
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.graph.values import tensors_in


def adds_nothing(nodes: Collection[Node], others: Collection[Node], carried: Collection[tuple[Any, Any]], size: Any = None) -> bool:
    """Whether ``nodes`` leave nothing but locals that hold what they held, plus zero times something, or plus a size that is zero.

    Args:
        nodes: what was recorded.
        others: the rest of the graph.
        carried: locals that hold another tensor or number now: before, and now.
        size: the symbol that is zero in such a pass, or (end, start) of two that are equal.
    """
    from moefuse.passes.match.liveness import is_pure

    keys = {_torch_private.storage_key(t) for n in others for t in tensors_in(fake(n))}
    sizes = {s for n in others for s in unbacked_in(fake(n))}
    for node in nodes:
        call = call_of(node)
        if unbacked_in(fake(node)) - sizes:
            return False
        if call is None or not call.inplace:
            if node.op != "get_attr" and not is_pure(call, node):
                return False
            continue
        older = any(_torch_private.storage_key(t) in keys for target in call.targets for t in tensors_in(fake(target)))
        if older and not _sum_with_zero(node, call.args[0]) and not _put_back(call, nodes):
            return False
    return all(
        _same_number(old, new, size) or (isinstance(old, Node) and isinstance(new, Node) and _sum_with_zero(new, old))
        for old, new in carried
    )


def _same_number(old: Any, new: Any, size: Any) -> bool:
    """Whether a number is an older one where a size is zero: ``offset += count`` of a count that is none."""

    before, after = (fake(n) if isinstance(n, Node) else n for n in (old, new))
    if size is None or not isinstance(after, torch.SymInt) or not (type(before) is int or isinstance(before, torch.SymInt)):
        return False
    end, start = size if isinstance(size, tuple) else (size, 0)
    known = before.node.expr if isinstance(before, torch.SymInt) else before
    return bool((after.node.expr.subs(end, start) - known).expand() == 0)


def gives_no_gradients(nodes: Collection[Node]) -> bool:
    """Whether everything that such a pass gives a gradient of zeros is read by the rest of the graph, too."""
    leaves = {i for n in nodes for i in n.all_input_nodes if i.op in ("placeholder", "get_attr")}
    return all(any(not u.meta.get(DUMMY) for u in leaf.users) for leaf in leaves)


def _sum_with_zero(node: Node, old: Node) -> bool:
    """Whether a value is an older one of the same shape and dtype, plus zero times something."""

    if node is old:
        return True
    call, mine, theirs = call_of(node), tensor(node), tensor(old)
    if call is None or mine is None or theirs is None or (mine.dtype, mine.device) != (theirs.dtype, theirs.device):
        return False
    if call.name == "index_add" and len(call.args) == 4 and not call.kwargs and isinstance(call.args[0], Node):
        return _sum_with_zero(call.args[0], old) and _zero(call.args[3])
    terms = (*call.args, *call.kwargs.values())
    if call.name == "sub" and len(call.args) == 2 and not call.kwargs and _same_shape(mine, theirs):
        return isinstance(terms[0], Node) and _sum_with_zero(terms[0], old) and _zero(terms[1])
    if call.name != "add" or set(call.kwargs) - {"other"} or len(terms) != 2 or not _same_shape(mine, theirs):
        return False
    return any(isinstance(a, Node) and _sum_with_zero(a, old) and _zero(b) for a, b in (terms, terms[::-1]))


def _put_back(call: Any, nodes: Collection[Node]) -> bool:
    """``out[0] = out[0] + zero``, and how ``out[0] += zero`` ends: a part is put where this pass has read it. (No write changes it.)"""

    if call.name != "setitem" or len(call.args) != 3 or not isinstance(call.args[2], Node):
        return False
    target, where, value = call.args
    taken = [n for n in nodes if (c := call_of(n)) is not None and c.name == "getitem" and c.args[0] is target and c.args[1:] == (where,)]
    return any(_sum_with_zero(value, part) for part in taken)


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    from moefuse.passes.graph.sizes import same_shape, shape_of  # it loads SymPy

    return same_shape(shape_of(a), shape_of(b))


def _zero(value: Any) -> bool:
    """Whether a value is zero wherever what it is computed from is finite: zero times something, or a sum of such."""

    if not isinstance(value, Node):
        return isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    call = call_of(value)
    if call is None or call.kwargs.get("alpha", 1) != 1:
        return False
    terms = (*call.args, *(v for k, v in call.kwargs.items() if k == "other"))
    if call.name == "mul":
        return any(map(_zero, terms))
    if call.name == "add":
        return all(map(_zero, terms))
    return bool(terms) and call.name in SHAPED | {"sum", "mean", "to", "neg", "squeeze", "unsqueeze"} and _zero(terms[0])


__all__ = ["adds_nothing", "gives_no_gradients"]
