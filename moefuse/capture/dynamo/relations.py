"""A guard on which inputs of a frame lie in one memory, where its graph writes to an input.

Dynamo guards that two inputs are one object, or are not, and nothing else of what they have in common. A compiler takes inputs that were
apart for apart ever after, and reads one of them before or behind a write to the other as it likes. Where torch breaks the graph between
the two, as it does in loops that depend on data, nothing comes of that. Where only capture made it one graph, a call whose inputs lie
otherwise in memory must have code of its own; and so must one whose experts are one op, which reads all its tokens at one place.

What is compared are addresses: NumPy's views of an array are storages of their own to torch.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.capture.dynamo import guards
from moefuse.capture.dynamo.module_calls import source_name

_TEXT = "inputs lie in memory as they did, as far as the graph writes to them"


@dataclass(frozen=True)
class Input:
    """A tensor that a graph is given.

    Attributes:
        node: its placeholder.
        name: the expression in the frame's locals ``L`` and globals ``G`` that it comes from.
        tensor: the one that the graph was traced with.
        static: whether sizes and strides are guarded, and so the same in each call.
        written: whether the graph writes to its memory.
    """

    node: Node
    name: str
    tensor: torch.Tensor
    static: bool
    written: bool


def given(gm: GraphModule, written: Collection[Node]) -> list[Input]:
    """The tensors that a graph of Dynamo's is given; nothing where it writes to none of them, or they are not real ones."""
    out = []
    for node in gm.graph.find_nodes(op="placeholder") if written else ():
        argument = node.meta.get("grapharg")
        # A number that changes is a tensor in the graph, made for each call, and lies nowhere in the frame.
        value = None if argument is None or argument.pass_arg_as_tensor else argument.example
        if isinstance(value, torch._subclasses.FakeTensor):
            return []
        if isinstance(value, torch.Tensor):
            out.append(Input(node, source_name(argument.source), value, _is_static(node.meta.get("example_value")), node in written))
    return out


def _is_static(fake: object) -> bool:
    return isinstance(fake, torch.Tensor) and fake.layout == torch.strided and all(type(n) is int for n in (*fake.shape, *fake.stride()))


def unseen(inputs: Sequence[Input]) -> tuple[Node, Node] | None:
    """(an input that the graph writes to, one that lies in the same memory) where torch takes them for apart."""
    spans = [(one.tensor.data_ptr(), extent(one.tensor)) if _torch_private.storages_of(one.tensor) else (0, 0) for one in inputs]
    for pair in meetings([(low, low + size) for low, size in spans], [one.written for one in inputs]):
        first, second = sorted((inputs[at] for at in pair), key=lambda one: not one.written)
        if not _torch_private.same_storage(first.tensor, second.tensor):
            return first.node, second.node
    return None


def watch(output: Any, inputs: Sequence[Input], exact: bool = True) -> str | None:
    """Add the guard to a frame; ``exact``: for a graph in which it matters how they overlap, and not only whether.

    Returns why it cannot be had, or None.
    """
    try:
        check = Check(inputs, output.global_scope, exact)
    except Exception as error:  # an input that comes out of no expression
        return f"{type(error).__name__}: {error}"
    if not check(output.local_scope):
        return "what they come from cannot be looked at"
    guards.ask(output, check, _TEXT)
    return None


class Check:
    """Whether inputs lie in memory as they did when the frame was traced. Called with each call of the frame."""

    def __init__(self, inputs: Sequence[Input], f_globals: dict[str, Any], exact: bool = True) -> None:
        self._values, self._globals = reader([one.name for one in inputs]), f_globals
        self._whole = all(_is_whole(one.tensor) for one in inputs)
        self._written = [one.written for one in inputs]
        self._bytes = [extent(one.tensor) if one.static and self._whole else None for one in inputs]
        self._changing = [at for at, size in enumerate(self._bytes) if size is None]
        self._last: tuple[int, ...] | None = None
        self._exact = exact
        self.expected = relation([one.tensor for one in inputs], self._written)

    def __call__(self, f_locals: Mapping[str, Any]) -> bool:
        """The guard. Never raises: what cannot be looked at lies otherwise."""
        try:
            values = self._values(f_locals, self._globals)
            if not self._whole:
                return self._same(values)
            key = (*map(torch.Tensor.data_ptr, values), *(extent(values[at]) for at in self._changing))
            if key == self._last:
                return True
            sizes = [extent(value) if size is None else size for value, size in zip(values, self._bytes, strict=True)]
            if self.expected or not apart(key[: len(sizes)], sizes):
                return self._same(values)
            self._last = key
            return True
        except Exception:
            return False

    def _same(self, values: Sequence[torch.Tensor]) -> bool:
        found = relation(values, self._written)
        return found == self.expected if self._exact else bool(found) == bool(self.expected)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what lies in memory, and not made of others, as a DTensor is."""
    parts = _torch_private.in_memory(tensor)
    return len(parts) == 1 and parts[0] is tensor


def relation(values: Sequence[torch.Tensor], written: Sequence[bool]) -> list[Any]:
    """Which tensors lie in memory that is written to, and where: as far apart as this, in a storage and a base of these sizes."""
    parts = [(at, part) for at, value in enumerate(values) for part in _torch_private.in_memory(value)]
    spans = [(low := part.data_ptr(), low + extent(part)) for _, part in parts]
    found = meetings(spans, [written[at] for at, _ in parts])
    return [(first, second, spans[second][0] - spans[first][0], *(_where(parts[i][1]) for i in (first, second))) for first, second in found]


def _where(t: torch.Tensor) -> tuple[Any, ...]:
    """What AOTAutograd writes into code for tensors that overlap: it takes views of a base, or of the storage."""
    base = t._base
    return t.storage_offset(), t.untyped_storage().nbytes(), None if base is None else (tuple(base.shape), base.stride())


def extent(t: torch.Tensor) -> int:
    """How many bytes behind its first element the last one of a tensor ends."""
    if not t.numel():
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def apart(lows: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether no two spans of memory have anything in common; the quick question for what is nearly always so."""
    ends = sorted(map(operator.add, lows, sizes))
    return all(map(operator.le, ends, sorted(lows)[1:]))


def meetings(spans: Sequence[tuple[int, int]], written: Sequence[bool]) -> list[tuple[int, int]]:
    """Pairs of spans of memory that have something in common, at least one of which is written to."""
    found: list[tuple[int, int]] = []
    open_: list[tuple[int, int]] = []
    end = 0
    for low, high, at in sorted((low, high, at) for at, (low, high) in enumerate(spans) if low < high):
        if low < end:
            open_ = [one for one in open_ if low < one[0]]
            found += [(min(at, other), max(at, other)) for _, other in open_ if written[at] or written[other]]
        else:
            open_ = []
        open_.append((high, at))
        end = max(end, high)
    return sorted(found)


def reader(names: Sequence[str]) -> Callable[[Mapping[str, Any], Mapping[str, Any]], tuple[torch.Tensor, ...]]:
    """A function of ``L`` and ``G`` that gives the values of expressions. What they begin with in common is looked up once."""
    known: dict[str, str] = {}
    lines: list[str] = []

    def variable(node: ast.expr) -> str:
        text = ast.unparse(node)
        if isinstance(node, ast.Name):
            return text
        if text not in known:
            if isinstance(node, ast.Attribute):
                line = f"{variable(node.value)}.{node.attr}"
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                line = f"{variable(node.value)}[{node.slice.value!r}]"
            else:
                line = text
            known[text] = f"v{len(known)}"
            lines.append(f"    {known[text]} = {line}\n")
        return known[text]

    results = [variable(ast.parse(name, mode="eval").body) for name in names]
    space = dict(_torch_private.guard_names())
    exec(f"def read(L, G):\n{''.join(lines)}    return ({''.join(f'{name}, ' for name in results)})\n", space)
    read: Callable[..., tuple[torch.Tensor, ...]] = space["read"]
    return read


__all__ = ["Check", "Input", "given", "unseen", "watch"]
