"""Weights that are sharded over ranks: calls of ``moefuse::gathered`` in a graph, and views of what they return.

A property that is read for every expert leaves as many calls of it; equal ones become one before anything else looks at the graph, in every
graph alike, since each is a collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse import _torch_private
from moefuse.passes.graph.slices import NotLocalError as NotLocalError, View, in_slice
from moefuse.passes.graph.storage import Memory
from moefuse.passes.graph.values import tensor
from moefuse.runtime.groups import Terms

GATHERED = torch.ops.moefuse.gathered.default
SLICES = torch.ops.moefuse.gathered_slices.default
_ALSO = "moefuse_also"
"""In a call's meta: storages of what equal calls returned, whose place it has taken."""


def is_gathered(node: object) -> bool:
    """Whether a node is the full weights of experts that other ranks hold, too."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in (GATHERED, SLICES)


def is_parameter(node: Node) -> bool:
    """Whether a value is a Parameter of the model: of this rank, or of all ranks put together."""
    return isinstance(tensor(node), torch.nn.Parameter) or is_gathered(node)


def gather_of(weights: Iterable[Node], steps: int = 32) -> Node | None:
    """A gather among the few operations that make each of these weights; None if this rank has all of them by itself."""
    return next((call for n in dict.fromkeys(weights) if (call := _gather_behind(n, steps)) is not None), None)


def _gather_behind(node: Node, steps: int) -> Node | None:
    stack, seen = [node], {node}
    while stack and len(seen) < steps:
        here = stack.pop()
        if is_gathered(here):
            return here
        new = [n for n in here.all_input_nodes if n not in seen]
        seen.update(new)
        stack.extend(new)
    return None


def is_root(node: Node) -> bool:
    """Whether a value comes from outside of the graph: from who calls it, or from other ranks."""
    return node.op in ("placeholder", "get_attr") or is_gathered(node)


def merge(graph: Graph) -> None:
    """Let each Parameter be gathered once, where nothing in the graph writes to it."""
    calls = [n for n in graph.nodes if is_gathered(n)]
    if len(calls) < 2:
        return
    memory = Memory(graph)
    first: dict[Hashable, Node] = {}
    for call in calls:
        local = call.args[0]
        if any(memory.writes.get(name) for name in memory.storages(local)):
            continue
        known = first.setdefault((_same(local), *call.args[1:]), call)
        if known is not call:
            value = tensor(call)
            if value is not None:  # its views stay, and share memory with the first call from now on
                known.meta[_ALSO] = (*known.meta.get(_ALSO, ()), _torch_private.storage_key(value))
            call.replace_all_uses_with(known)
            graph.erase_node(call)
            if not local.users and local.op in ("call_function", "call_method"):
                graph.erase_node(local)


def _same(local: Any) -> Any:
    """What the local part of a Parameter is read from; torch makes a function of its own for each time."""
    if isinstance(local, Node) and local.op in ("call_function", "call_method") and len(local.all_input_nodes) == 1 and _unwraps(local):
        return "local", local.all_input_nodes[0]
    return local


def _unwraps(node: Node) -> bool:
    """Whether a node is the local tensor of a distributed one."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return "to_local" in str(name)


def sweep(graph: Graph) -> list[Node]:
    """Take out the calls that nothing reads: no compiler does, since each is a collective. Returns those that are left."""
    left, memory = [], None
    for call in reversed([n for n in graph.nodes if is_gathered(n)]):
        if call.users:
            memory = memory or Memory(graph)
            if not any(memory.writes.get(name) for name in memory.storages(call)):
                _without_views(graph, call)
        if not call.users:
            graph.erase_node(call)
        elif not all(is_gathered(user) for user in call.users):
            left.append(call)
    return left[::-1]


def _without_views(graph: Graph, node: Node) -> None:
    """Take out views that nothing reads."""
    for user in list(node.users):
        value = tensor(user)
        if value is None or not _shares(value, node):
            continue
        _without_views(graph, user)
        if not user.users:
            graph.erase_node(user)


@dataclass(frozen=True)
class Local:
    """What a rank has of a weight: a view of the local part of a Parameter, expert by expert.

    Attributes:
        node: the local part.
        step: from one expert to the next, in elements.
        view: of one expert's part.
    """

    node: Node
    step: int
    view: View

    @property
    def whole(self) -> bool:
        """Whether it is all of the local part, as it is stored."""
        return not self.view.start and self.view.sizes == self.view.whole and self.view.last == math.prod(self.view.whole) - 1


def local_view(sources: list[Node], experts: int, unit: int = 0, groups: int = 1) -> Local:
    """What this rank has of a weight of which ``sources`` is the whole.

    Args:
        sources: one tensor [E, ...], or E tensors, expert by expert.
        unit: which dimension of one expert's tensor the hidden units are; -1 for any.
        groups: as :func:`moefuse.passes.graph.slices.in_slice` takes them.

    Raises:
        NotLocalError: experts are not its first dimension, in their order, or it is not a view; or hidden units are sliced otherwise.
    """
    call, view, step = _of_gathered(sources, experts)
    while is_gathered(call):
        if call.target is SLICES:
            axis, blocks, terms = call.args[1:]
            view, dim = in_slice(view, axis - 1, blocks, Terms.parse(terms).group.size, groups)  # type: ignore[arg-type, operator]
            if unit >= 0 and dim != unit:
                raise NotLocalError("what ranks have slices of are not its hidden units")
            step = math.prod(view.whole)
        call = call.args[0]  # type: ignore[assignment]
    value = tensor(call)
    if value is None or not value.is_contiguous() or (value.storage_offset() and view.as_slices() is None):
        raise NotLocalError("what this rank has of it is not contiguous")
    return Local(call, step, view)


def _of_gathered(sources: list[Node], experts: int) -> tuple[Node, View, int]:
    """Of which gathered weights ``sources`` are a view, and which, for one expert; and how far it is from one to the next."""
    views = [tensor(source) for source in sources]
    call = origin(sources[0])
    whole = None if call is None else tensor(call)
    if call is None or whole is None or any(v is None for v in views):
        raise NotLocalError("it is not read from sharded weights")
    step, first = whole.stride(0), views[0]
    assert first is not None
    stacked = len(sources) == 1
    if stacked and (first.shape[0] != experts or first.stride(0) != step):
        raise NotLocalError("its experts are not those of the sharded weights")
    if not stacked and len(sources) != experts:
        raise NotLocalError(f"it has {len(sources)} of {experts} experts")
    start = first.storage_offset() - whole.storage_offset()
    for number, (source, view) in enumerate(zip(sources, views, strict=True)):
        assert view is not None
        same = view.shape == first.shape and view.stride() == first.stride()
        if origin(source) is not call or not same or view.storage_offset() - whole.storage_offset() != start + number * step:
            raise NotLocalError("its experts are not those of the sharded weights, in their order")
    sizes, strides = (first.shape[1:], first.stride()[1:]) if stacked else (first.shape, first.stride())
    found = View(_ints(whole.shape[1:]), _ints(sizes), _ints(strides), int(start))
    if found.start < 0 or found.last >= step:
        raise NotLocalError("what it reads of an expert is in another one's memory")
    return call, found, int(step)


def _ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in numbers)


def origin(node: Node) -> Node | None:
    """The call that a view is of."""
    return viewed(node, is_gathered)


def viewed(node: Node, wanted: Callable[[Node], bool]) -> Node | None:
    """The first wanted node that a view is of, through operations whose result shares its storage; None if there is none."""
    while not wanted(node):
        value = tensor(node)
        before = [n for n in node.all_input_nodes if tensor(n) is not None]
        if value is None or len(before) != 1 or not _shares(value, before[0]):
            return None
        node = before[0]
    return node


def _shares(value: torch.Tensor, other: Node) -> bool:
    source = tensor(other)
    if source is None:
        return False
    return _torch_private.same_storage(source, value) or _torch_private.storage_key(value) in other.meta.get(_ALSO, ())
