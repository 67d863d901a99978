"""A region taken out of its graph, before and after, so that both can be run again elsewhere and their times compared.

What it read becomes inputs, described but not kept: the model's own tensors by weak references, activations by their shapes. Sizes that the
graph has as symbols stay symbols, so a program that was compiled for any number of tokens can be run with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of, fake
from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Gate, SlotWeight, Token, walk
from moefuse.passes.ir.regions import Region
from moefuse.tuning.weak_tensor import WeakTensor, weak_view

Role = Literal["ids", "table", "turned table", "positive", "normal", "existing", "size"]
_VIEWS = 8
"""Longest chain of views from a weight to the user's own tensor."""


class NotComparableError(ValueError):
    """A program that cannot be run by itself; the text says why."""


@dataclass(frozen=True)
class Input:
    """One thing that a region reads.

    Attributes:
        role: "ids" (K different experts per token), "table" (routing weights [tokens, E], zero where not chosen), "turned table"
            ([E, tokens]), "positive" (routing weights of slots), "normal" (activations, and weights that the graph computes), "existing"
            (the user's own tensor) or "size" (a number).
        shape: sizes as integers or symbolic expressions.
        value: the number of a "size".
    """

    role: Role
    shape: tuple[Any, ...] = ()
    stride: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    weak: WeakTensor | None = None
    value: Any = None


@dataclass(frozen=True, eq=False)
class Program:
    """A region before and after its replacement, as functions of ``inputs``.

    Attributes:
        name: :func:`name_of` the region.
        before, after: graphs whose placeholders are the inputs with these numbers.
        tokens: leading sizes of the ids; their product is T.
    """

    name: str
    before: GraphModule
    after: GraphModule
    reads: tuple[tuple[int, ...], tuple[int, ...]]
    inputs: tuple[Input, ...]
    tokens: tuple[Any, ...]
    top_k: int
    experts: int
    device: torch.device


def name_of(region: Region) -> str:
    """``domain:hash`` of the operations on tensors of a region: equal for one spelling in every process, whatever the sizes.

    Operations on sizes do not count: a graph for any number of tokens has them, one for a fixed number has not.
    """
    nodes = [n for n in region.anchor.graph.nodes if n in region.nodes and not _is_size(fake(n))]
    names = "\n".join(_target(n.target) for n in nodes)
    return f"{region.domain}:{hashlib.sha256(names.encode()).hexdigest()[:12]}"


def _is_size(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_size(v) for v in value)
    return isinstance(value, int | float | torch.SymInt | torch.SymBool | torch.SymFloat)


def _target(target: Any) -> str:
    if isinstance(target, str | _torch_private.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', getattr(target, '__name__', type(target).__name__))}"


def take_out(
    ctx: Context, region: Region, new: Sequence[Node], result: Node, known: dict[Node, Any], assumptions: Sequence[Assumption] = ()
) -> Program:
    """The region (still in its graph) and its replacement as a :class:`Program`.

    Raises:
        NotComparableError: it is not a program that runs as it stands.
    """
    if any(a.nodes & region.nodes for a in assumptions):
        raise NotComparableError("the loop depends on data: its graph is not a program that runs by itself")
    if not region.routing.whole:
        raise NotComparableError("its slots may have no expert")
    if region.routing.shared or region.by_slot:
        raise NotComparableError("a row of ids is not one token's")
    before = [n for n in region.anchor.graph.nodes if n in region.nodes and n.op != "get_attr"]
    call = call_of(region.anchor)
    last = region.anchor.args[0] if call is not None and call.name == "setitem" else region.anchor
    order: dict[Node, int] = {}
    old, old_reads = _extract(before, last, ctx, order)
    fresh, new_reads = _extract(new, result, ctx, order)
    roles = {ctx.now(n): role for n, role in _roles(region).items()}
    return Program(
        name_of(region),
        old,
        fresh,
        (old_reads, new_reads),
        tuple(_input(n, roles, known) for n in order),
        tuple(_size(s) for s in region.routing.tokens),
        region.routing.top_k,
        region.all_experts,
        fake(region.value).device,
    )


def _extract(nodes: Sequence[Node], result: Any, ctx: Context, order: dict[Node, int]) -> tuple[GraphModule, tuple[int, ...]]:
    """Nodes as a graph of their own; what they read becomes a placeholder, and gets a number in ``order``."""
    graph, inside, copied = Graph(), set(nodes), {}
    outside = dict.fromkeys(ctx.now(a) for n in nodes for a in n.all_input_nodes if a not in inside)
    for node in outside:
        order.setdefault(node, len(order))
        copied[node] = graph.placeholder(f"input_{order[node]}")
    for node in nodes:
        made = graph.node_copy(node, lambda a: copied[a if a in copied else ctx.now(a)])
        made.meta.clear()
        copied[node] = made
    graph.output(copied[result if result in copied else ctx.now(result)])
    return GraphModule(torch.nn.Module(), graph), tuple(order[n] for n in outside)


def _roles(region: Region) -> dict[Node, Role]:
    """What the leaves of a region are filled with, as :mod:`moefuse.passes.prove.verify` fills them."""
    roles: dict[Node, Role] = {region.routing.node: "ids"}
    for e in walk(region.expr):
        if isinstance(e, Gate) and not e.ones and not e.slots:
            roles[e.source] = "turned table" if e.turned else "table"
        elif isinstance(e, SlotWeight) or (isinstance(e, Gate) and e.slots):
            roles[e.source] = "positive"
        elif isinstance(e, Token):
            roles.setdefault(e.source, "normal")
    if region.base is not None:
        roles[region.base] = "normal"
    return roles


def _input(node: Node, roles: dict[Node, Role], known: dict[Node, Any]) -> Input:
    value = fake(node)
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, int | float | bool | torch.SymInt):
            raise NotComparableError(f"it reads {named(node)}, a {type(value).__name__}")
        return Input("size", value=_size(value))
    shape, stride = (tuple(_size(s) for s in sizes) for sizes in (value.shape, value.stride()))
    if node in roles:
        return Input(roles[node], shape, stride, value.dtype)
    weak = weak_tensor_of(node, known)
    if weak is not None:
        return Input("existing", shape, stride, value.dtype, weak)
    if value.dtype.is_floating_point:
        return Input("normal", shape, stride, value.dtype)
    raise NotComparableError(f"it reads {named(node)}, integers that the rest of the program computes")


def origin(node: Node, known: dict[Node, Any]) -> Node:
    """What a weight is made from first, going back along first arguments."""
    for _ in range(_VIEWS):
        if node in known or not node.all_input_nodes:
            break
        node = node.all_input_nodes[0]
    return node


def weak_tensor_of(node: Node, known: dict[Node, Any]) -> WeakTensor | None:
    """The user's own tensor that a node is, or is a view of."""
    root, value = origin(node, known), fake(node)
    owner, base = known.get(root), fake(root)
    if not isinstance(owner, torch.Tensor) or not isinstance(base, torch.Tensor) or not isinstance(value, torch.Tensor):
        return None
    return weak_view(owner, value, base) if root is node or _torch_private.same_storage(value, base) else None


def _size(size: Any) -> Any:
    """A size as a number or as an expression that holds nothing of the graph."""
    node = getattr(size, "node", None)
    return size if node is None else node.expr
