"""``torch.bincount(ids, minlength=E)`` where no id is E or more: as long as it says, and so traced as a sum into E zeros.

Dynamo breaks the graph at ``bincount``, whose length depends on data; on a GPU eager waits there for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture import guess
from moefuse.capture.dynamo import values


def traced(translator: Any, ids: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The variable of ``bincount(ids, *args, **named)``; None where its length is not known, and for what torch may raise for.

    Args:
        ids: the variable of the numbers that are counted [n].
    """
    given = dict(zip(("weights", "minlength"), args, strict=False)) | dict(named)
    if len(given) != len(args) + len(named) or not given.keys() <= {"weights", "minlength"}:
        return None
    node, size = values.tensor_node(values.realized(ids)), values.known(given.get("minlength"))
    if node is None or type(size) is not int or _value(node).dim() != 1 or not _below(translator, node, size):
        return None
    weights = values.realized(given["weights"]) if "weights" in given else None
    if weights is None or values.is_constant(weights):
        return _sum(translator, node, size) if weights is None or weights.as_python_constant() is None else None
    added = values.tensor_node(weights)
    return _sum(translator, node, size, added) if added is not None and _plain(_value(added), _value(node)) else None


def numbers(translator: Any, ids: Node, size: int) -> Node | None:
    """How often ids (of any shape) are each of ``range(size)`` [size]; None where others may be among them."""
    if not _below(translator, ids, size):
        return None
    flat = values.call(translator, "flatten", ids).as_proxy().node
    return _sum(translator, flat, size).as_proxy().node  # type: ignore[no-any-return]


def _value(node: Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def _plain(weights: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether weights are added up as they are. (Of those with gradients torch says that the sum has some, too, and raises in backward.)"""
    from moefuse.passes.graph.sizes import same_shape, shape_of  # here: importing moefuse must stay cheap

    grads = weights.requires_grad and torch.is_grad_enabled()
    return not grads and not weights.is_complex() and weights.device == ids.device and same_shape(shape_of(weights), shape_of(ids))


def _below(translator: Any, ids: Node, size: int) -> bool:
    """Whether each number of a tensor is one of ``range(size)``: places among that many scores, which nobody has written to."""
    from moefuse.passes.infer.ranges import holds

    count = guess.choices(ids)
    if count is None or not 0 < count <= size:
        return False
    held = [value for node in _behind(ids) for value in _integers(node)]
    if not all(holds(value.dtype, (0, count - 1)) for value in held):
        return False
    memory = {value.untyped_storage()._cdata for value in held}
    nodes = {*values.whole_graph_of(translator).nodes, *values.graph_of(translator).nodes}
    seen = (value for node in nodes for value in _integers(node))
    return not any(value._version for value in seen if value.untyped_storage()._cdata in memory)


def _behind(node: Any) -> Iterator[Node]:
    """What a tensor is computed from by way of first arguments, as :func:`guess.choices` follows them."""
    while isinstance(node, Node):
        yield node
        node = node.args[0] if node.args else None


def _integers(node: Node) -> list[torch.Tensor]:
    """The tensors of integers that a node gives."""
    value = node.meta.get("example_value")
    given = [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)]
    return [t for t in given if not (t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool)]


def _sum(translator: Any, ids: Node, size: int, weights: Node | None = None) -> Any:
    """``zeros(size).scatter_add(0, ids, ones)``, or the weights: 32 bits stay, all others become 64."""

    def call(target: Any, *args: Any, **named: Any) -> Node:
        return values.call(translator, target, *args, **named).as_proxy().node  # type: ignore[no-any-return]

    value, index = _value(ids), ids
    if weights is None:
        added = call(torch.ones_like, index, dtype=torch.int64)
    else:
        added = call("to", weights, torch.float32 if _value(weights).dtype == torch.float32 else torch.float64)
    index = index if value.dtype == torch.int64 else call("to", index, torch.int64)
    zeros = call(torch.zeros, size, dtype=_value(added).dtype, device=value.device)
    return values.call(translator, "scatter_add", zeros, 0, index, added)
