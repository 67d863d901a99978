"""All that a router does between its logits and the experts as ``moefuse::route``: read from the graph, then tried against it.

A router is read backwards from its choice (mask of groups, bias, function of the logits) and forwards from the weights (function,
renormalisation, factor, cast). What is not understood stays outside at either end. Then every operation in between must be one of
:data:`_UNDERSTOOD`, nothing but ids and weights may be read elsewhere, and the user's nodes and the op must agree on random logits: inside
a closed set of operations that only move, compare and scale, there are no values that only other inputs would show.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.ops.meaning.recipe import Recipe
from moefuse.passes.block.router_check import Router, agrees
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, call_of, fake, tensor
from moefuse.passes.graph.op_classes import BROADCASTS, KEEPS, RESHAPES
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.graph.storage import Memory
from moefuse.passes.lower.devices import unsupported
from moefuse.passes.lower.layout import same_strides

_GROUPS = RESHAPES | KEEPS | BROADCASTS | frozenset("topk getitem sum max amax scatter zeros_like bitwise_not eq".split())
_UNDERSTOOD = _GROUPS | frozenset("softmax sigmoid add mul div clamp clamp_min gather masked_fill where".split())


def fused(graph: Graph, memory: Memory, node: Node, call: Call, k: int) -> Node | None:
    """Replace the router whose choice is this top-k by one op, if it is one that the op computes. Its logits."""
    try:
        router = _read(node, call, k)
        inside = None if router is None else _inside(graph, router)
        if router is None or inside is None or _written(memory, router, inside) or not agrees(router, inside):
            return None
    except (TypeError, ValueError, IndexError, KeyError, RuntimeError):  # an operation with other arguments than any that is known here
        return None
    return router.logits if _replaced(graph, router, node, inside) else None


# Reading -------------------------------------------------------------------------------------------------------------------------------


def _read(node: Node, call: Call, k: int) -> Router | None:
    recipe = Recipe(k)
    choice = _plain(call.args[0])
    if (masked := call_of(choice)) is not None and masked.name in ("masked_fill", "where"):
        grouped = _groups(masked)
        if grouped is None:
            return None
        choice, recipe = grouped[0], replace(recipe, **grouped[1])
    scores, bias = _without_bias(choice)
    logits, name = _logits(scores)
    recipe = replace(recipe, score=name)
    ids = _item(node, 1)
    source = None if ids is None else _weights(node, ids, scores, choice)
    if ids is None or source is None:
        return None
    weights, recipe = _behind(source[0], replace(recipe, by_choice=source[1]))
    router = Router(logits, bias, ids, weights, recipe)
    if replace(recipe, k=0, by_choice=True) == Recipe(0) and bias is None:
        return None  # a top-k and no more
    return router if _exact(router, choice) and same_shape(shape_of(fake(ids))[:-1], shape_of(fake(logits))[:-1]) else None


def _plain(node: Any) -> Node:
    """The value before views that change neither shape nor dtype."""
    while (call := call_of(node)) is not None and call.name in RESHAPES | KEEPS:
        before, after = tensor(call.args[0]), tensor(node)
        if before is None or after is None or before.dtype != after.dtype or not same_shape(shape_of(before), shape_of(after)):
            break
        node = call.args[0]
    return node  # type: ignore[no-any-return]


def _groups(masked: Call) -> tuple[Node, dict[str, Any]] | None:
    """(the choice before the mask, fields of the recipe) of a choice among the experts of the best groups."""
    if masked.name == "masked_fill":
        choice, mask, fill = masked.args
    else:
        mask, choice, fill = masked.args
    calls = [c for n in _before(mask) if (c := call_of(n)) is not None]
    choices = [c for c in calls if c.name == "topk"]
    rank = tensor(choices[0].args[0]) if choices else None
    if rank is None or fill not in (0.0, -math.inf):
        return None
    groups, kept = rank.shape[-1], _argument(choices[0], 1, "k")
    best = _argument(choices[1], 1, "k") if len(choices) > 1 else 1
    if kept == groups:
        return _plain(choice), {}
    return _plain(choice), {"groups": groups, "kept": kept, "best": best, "lowest": fill != 0.0}


def _before(mask: Node) -> Iterator[Node]:
    """What a mask of groups is made from, nearest first."""
    queue, seen = [mask], set()
    for node in queue:
        call = call_of(node)
        if node not in seen and call is not None and call.name in _GROUPS:
            seen.add(node)
            yield node
            queue += [*_writers(node), *node.all_input_nodes]


def _writers(node: Node) -> list[Node]:
    """Operations that change a tensor in place."""
    return [u for u in node.users if (c := call_of(u)) is not None and node in c.targets]


def _without_bias(choice: Node) -> tuple[Node, Node | None]:
    """(scores, the vector [E] that was added for the choice)."""
    call, whole = call_of(choice), tensor(choice)
    if call is None or call.name != "add" or call.inplace or call.kwargs or whole is None or whole.dtype != torch.float32:
        return choice, None
    for scores, bias in (call.args, call.args[::-1]):
        vector = bias
        while (c := call_of(vector)) is not None and c.name in ("unsqueeze", "view", "reshape"):
            vector = c.args[0]
        value, rows = tensor(vector), tensor(scores)
        if value is not None and rows is not None and shape_of(value) == shape_of(whole)[-1:]:
            return (_plain(scores), vector) if rows.dtype == torch.float32 else (choice, None)
    return choice, None


def _logits(scores: Node) -> tuple[Node, str]:
    """(logits, the function that scores are of them): of float32, along the last dimension."""
    call, value = call_of(scores), tensor(scores)
    if call is None or value is None or call.inplace or value.dtype != torch.float32 or call.name not in ("softmax", "sigmoid"):
        return scores, "identity"
    if call.name == "softmax" and _argument(call, 1, "dim") not in (-1, value.dim() - 1):
        return scores, "identity"
    logits = _plain(call.args[0])
    while (cast := call_of(logits)) is not None and cast.name == "to" and tensor(logits).dtype == torch.float32:  # type: ignore[union-attr]
        before = tensor(cast.args[0])
        if before is None or not before.is_floating_point() or before.dtype == torch.float64:
            break
        logits = _plain(cast.args[0])
    return logits, call.name


def _item(node: Node, index: int) -> Node | None:
    found = [u for u in node.users if u.target is operator.getitem and u.args[1] == index and u.users]
    return found[0] if len(found) == 1 else None


def _weights(node: Node, ids: Node, scores: Node, choice: Node) -> tuple[Node, bool] | None:
    """(the weights of the chosen as they begin, whether they are what the choice was made by)."""
    values = _item(node, 0)
    picked = [u for u in ids.users if (c := call_of(u)) is not None and c.name == "gather"]
    if values is not None or len(picked) != 1:
        return None if values is None or picked else (values, True)
    call = call_of(picked[0])
    assert call is not None
    source, dim = _plain(call.args[0]), _argument(call, 1, "dim")
    if source not in (scores, choice) or dim not in (-1, len(tensor(source).shape) - 1):  # type: ignore[union-attr]
        return None
    return picked[0], source is not scores


def _behind(weights: Node, recipe: Recipe) -> tuple[Node, Recipe]:
    """What is done to the weights of the chosen, as far as it is the recipe's."""
    order, past = ("weight", "renormalise", "scale", "dtype"), 0
    while (found := _step(weights)) is not None:
        after, change = found
        place, value = order.index(next(iter(change))), tensor(weights)
        if place < past or (place in (1, 2) and (value is None or value.dtype != torch.float32)):
            break
        weights, past = after, place + 1
        recipe = replace(recipe, **{k: v for k, v in change.items() if k != "dtype"})
        if tensor(after).dtype != torch.float32:  # type: ignore[union-attr]
            break  # what follows is rounded in between
    return weights, recipe


def _step(weights: Node) -> tuple[Node, dict[str, Any]] | None:
    """(the next node, which fields of the recipe it is)."""
    readers = list(weights.users)
    calls = {u: c for u in readers if (c := call_of(u)) is not None}
    if len(calls) == 2 and {c.name for c in calls.values()} == {"sum", "div"}:
        div = next(u for u, c in calls.items() if c.name == "div")
        sums = _denominator(calls[div].args[1], weights)
        return None if sums is None or calls[div].args[0] is not weights else (div, {"renormalise": True, **sums})
    if len(readers) != 1 or not calls:
        return None
    (call,) = calls.values()
    last = tensor(weights).dim() - 1  # type: ignore[union-attr]
    if call.name == "sigmoid" or (call.name == "softmax" and _argument(call, 1, "dim") in (-1, last)):
        return readers[0], {"weight": call.name}
    if call.name == "mul" and len(call.args) == 2:
        factor = call.args[1] if call.args[0] is weights else call.args[0]
        return (readers[0], {"scale": float(factor)}) if isinstance(factor, int | float) else None
    value = tensor(readers[0])
    return (readers[0], {"dtype": True}) if call.name == "to" and value is not None and value.is_floating_point() else None


def _denominator(node: Any, weights: Node) -> dict[str, float] | None:
    """``eps`` and ``least`` of a sum of the weights, with the slots kept as a dimension."""
    found: dict[str, float] = {}
    while (call := call_of(node)) is not None:
        if call.name == "sum":
            dim, keep = _argument(call, 1, "dim"), _argument(call, 2, "keepdim")
            dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
            return found if call.args[0] is weights and keep is True and dim in (-1, tensor(weights).dim() - 1) else None  # type: ignore[union-attr]
        number = _argument(call, 1, "min" if call.name != "add" else "other")
        name = {"add": "eps", "clamp": "least", "clamp_min": "least"}.get(call.name)
        # The sum plus eps, at least that: backwards the bound comes first.
        if name is None or name in found or "eps" in found or not isinstance(number, int | float) or len(call.args) + len(call.kwargs) > 2:
            return None
        found[name] = float(number)
        node = call.args[0]
    return None


def _argument(call: Call, place: int, name: str) -> Any:
    return call.kwargs.get(name, call.args[place] if len(call.args) > place else None)


def _exact(router: Router, choice: Node) -> bool:
    """Whether float32 is what the user computes in: where logits are used as they are, their own dtype will do."""
    dtypes = [t.dtype for n in (router.logits, choice, router.weights) if (t := tensor(n)) is not None]
    plain = router.bias is None and router.recipe.score == "identity" and not router.recipe.groups
    return len(dtypes) == 3 and torch.float64 not in dtypes and (plain or dtypes[1] == torch.float32)


# Replacing -----------------------------------------------------------------------------------------------------------------------------


def _inside(graph: Graph, router: Router) -> list[Node] | None:
    """The nodes that the op replaces, in order; None if one is not understood, writes to what stays, or is read elsewhere."""
    ends = {router.ids, router.weights}
    found: set[Node] = set()
    stack = list(ends)
    while stack:
        node = stack.pop()
        if node in found or node in (router.logits, router.bias) or not _has_values(node):
            continue  # known before, or a size
        call = call_of(node)
        if call is None or call.name not in _UNDERSTOOD:
            return None
        found.add(node)
        stack += [*_writers(node), *node.all_input_nodes]
    for node in found:
        call = call_of(node)
        if call is not None and any(target not in found for target in call.targets):
            return None
        if node not in ends and any(user not in found and not _idle(user) for user in node.users):
            return None
    return [n for n in graph.nodes if n in found]


def _written(memory: Memory, router: Router, inside: list[Node]) -> bool:
    """Whether something changes the logits or the bias while the router works, or may have."""
    ends = (inside[0], inside[-1], router.logits, *([] if router.bias is None else [router.bias]))
    if any(n not in memory.position for n in ends):
        return True
    return any(memory.written_between(n, inside[0], inside[-1]) is not None for n in ends[2:])


def _idle(node: Node) -> bool:
    """Whether a node is an item that nothing reads."""
    return node.target is operator.getitem and not node.users


def _has_values(node: Node) -> bool:
    """Whether a node is a tensor, or several; not a size."""
    return isinstance(fake(node), torch.Tensor | tuple | list)


def _replaced(graph: Graph, router: Router, before: Node, inside: list[Node]) -> bool:
    value = tensor(router.weights)
    if value is None or value.requires_grad:
        return False
    emit = Emitter(graph, before, before, {})
    emit.mode = getattr(value, "fake_mode", None)
    made = emit(torch.ops.moefuse.route.default, router.logits, router.bias, *router.arguments)
    results = [tensor(node) for node in (router.weights, router.ids)]
    alike = all(b is not None and same_strides(a, b) for a, b in zip(fake(made), results, strict=True))
    if not alike or unsupported([made], False) is not None:
        emit.undo()
        return False
    for i, node in enumerate((router.weights, router.ids)):
        node.replace_all_uses_with(emit(operator.getitem, made, i))
    for node in reversed(inside):
        for user in [u for u in node.users if _idle(u)]:
            graph.erase_node(user)
        graph.erase_node(node)
    return True


__all__ = ["fused"]
