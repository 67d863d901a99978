"""Aliases and writes, held against torch itself: every method that gives a view, and every one that writes, is tried on real tensors."""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from moefuse.passes.graph.storage import Memory
from moefuse.passes.graph.values import tensors_in
from moefuse.passes.graph.writes import written
from tests.null.rules_case import assign, call, trace

ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (0,), (1,), (-1,), (2,), (0, 1), (0, 0), (0, 0, 2), (0, 1, 2), ((6, 4),), ((24,),), (-1, 6), ((4, 6),), (2, 1), ([2, 2],), ((0,),),
    ((2, 3), (1, 2)), (1, (2, 3)), (torch.float32,), (torch.int32,), ("cpu",), (0.5,), (0, [0, 1]), ([0],), (0, 0, 1, 1),
)  # fmt: skip
"""Arguments to try a method with, on a [4, 6] tensor."""

_OUTSIDE = frozenset(("backward", "data_ptr", "share_memory", "numpy", "module_load", "to_sparse", "type"))
"""Methods that are no operations of a graph."""


def attempts(names: list[str], like: Callable[[], Tensor]) -> Iterator[tuple[str, tuple[Any, ...], Tensor, Any]]:
    """(method, arguments, tensor, result) of every method of a tensor that takes some of :data:`ARGUMENTS`."""
    for name, args in itertools.product(names, ARGUMENTS):
        x = like()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = getattr(x, name)(*args)
        except Exception:  # not this method's arguments
            continue
        yield name, args, x, result


def methods(*, inplace: bool) -> list[str]:
    """Public methods of a tensor by the underscore at the end of their names."""
    names = [n for n in dir(torch.Tensor) if not n.startswith("_") and n.endswith("_") == inplace]
    return [n for n in names if n not in _OUTSIDE and callable(getattr(torch.Tensor, n, None))]


def aliased(memory: Memory, graph: fx.Graph) -> bool:
    """Whether the result of a graph shares storage with its one input."""
    (source,), (result,) = ([n for n in graph.nodes if n.op == op] for op in ("placeholder", "output"))
    return bool(set(memory.storages(source)) & {name for n in result.all_input_nodes for name in memory.storages(n)})


def test_every_view_of_a_tensor_is_an_alias() -> None:
    """Fake tensors share storage exactly where real ones do, whatever the method is called."""
    seen, wrong = set(), []
    for name, args, x, result in attempts(methods(inplace=False), lambda: torch.arange(24.0).reshape(4, 6)):
        found = [t for t in tensors_in(result) if t.layout == torch.strided]
        if not found or any(t.numel() == 0 for t in found):
            continue
        shares = any(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in found)
        try:
            traced = trace_method(name, args)
        except Exception:  # no fake implementation: not an operation of a graph
            continue
        if aliased(traced.ctx.memory, traced.graph) != shares:
            wrong.append((name, args, shares))
        seen |= {name} if shares else set()
    assert not wrong
    assert len(seen) > 45, sorted(seen)


def trace_method(name: str, args: tuple[Any, ...]) -> Any:
    return trace(lambda grid: getattr(grid, name)(*args))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.data,
        lambda x: x.detach(),
        lambda x: x.T,
        lambda x: x.mT,
        lambda x: x.real,
        lambda x: x[1:, None],
        lambda x: x[..., 0],
        lambda x: torch.as_strided(x, (2, 2), (1, 3)),
        lambda x: torch.broadcast_to(x, (2, 4, 6)),
        lambda x: torch.atleast_3d(x),
        lambda x: torch.ops.aten.alias.default(x),
        lambda x: torch.ops.aten.split.Tensor(x, 2)[1],
        lambda x: torch.unbind(x)[2],
    ],
)  # fmt: skip
def test_chains_of_views_are_aliases(view: Callable[[Any], Any]) -> None:
    """A view of a view of a view; the last link has no name of its own in any list."""
    traced = trace(lambda grid: view(grid.view(4, 6).positive()))
    assert aliased(traced.ctx.memory, traced.graph)


def test_parts_of_a_tuple_are_told_apart() -> None:
    """The two results of a top-k are two storages, the pieces of a split one."""
    pair = trace(lambda x: (x.topk(2)[0], x.topk(2)[1])).ctx.memory
    pieces = trace(lambda x: x.chunk(2)).ctx.memory
    assert len(set(pair.aliases)) >= 5
    assert len(set(pieces.aliases)) == 2  # the output has a name of its own


def test_every_write_of_a_method_is_seen() -> None:
    """A method that changes its tensor is a write to it, by its schema."""
    seen, missed = set(), []
    for name, args, x, _ in attempts(methods(inplace=True), lambda: torch.arange(24.0).reshape(4, 6)):
        if torch.equal(x, torch.arange(24.0).reshape(4, 6)) if x.shape == (4, 6) else False:
            continue
        graph = fx.Graph()
        given = graph.placeholder("grid")
        node = graph.call_method(name, (given, *args))
        missed += [] if written(node) == (given,) else [(name, args)]
        seen.add(name)
    assert not missed
    assert len(seen) > 60, sorted(seen)


def test_every_foreach_writes_to_its_list() -> None:
    """``torch._foreach_add_(tensors, 1)`` writes to each of the list."""
    names = [n for n in dir(torch) if n.startswith("_foreach") and n.endswith("_")]
    assert len(names) > 20
    for name in names:
        graph = fx.Graph()
        a, b, c = (graph.placeholder(n) for n in "abc")
        assert set(written(graph.call_function(getattr(torch, name), ([a, b], [c, c])))) >= {a, b}, name


def last_write(function: Callable[..., Any]) -> tuple[str, ...]:
    """What the last operation of a function writes to."""
    traced = trace(function)
    node = [n for n in traced.graph.nodes if n.op.startswith("call")][-1]
    return tuple(n.name for n in written(node))


SPELLINGS: list[tuple[Callable[..., Any], tuple[str, ...]]] = [
    (lambda x: call(operator.iadd, x, x, 1), ("x",)),
    (lambda x: call(operator.imul, x, x, 2), ("x",)),
    (lambda x: assign(x, 0, 1.0), ("x",)),
    (lambda x, x2: torch.add(x, 1, out=x2), ("x2",)),
    (lambda x: F.relu(x, True), ("x",)),
    (lambda x: F.relu(x, inplace=True), ("x",)),
    (lambda x: F.relu(x), ()),
    (lambda x: F.silu(x, inplace=True), ("x",)),
    (lambda x, vector: F.batch_norm(x, vector, vector, training=True), ("vector", "vector")),
    (lambda x, vector: F.batch_norm(x, vector, vector), ()),
    (lambda x, vector: torch.batch_norm(x, None, None, vector, vector, True, 0.1, 1e-5, False), ("vector", "vector")),
    (lambda ids, one: F.embedding(ids, one, max_norm=1.0), ("one",)),
    (lambda ids, one: F.embedding(ids, one), ()),
    (lambda x: torch.ops.aten.add_.Tensor(x, 1), ("x",)),
    (lambda x: torch.ops.aten.add_(x, 1), ("x",)),
    (lambda x: x.neg(), ()),
    (lambda ids: ids & 3, ()),  # ``operator.and_`` has its name from Python's grammar
    (lambda ids: call(operator.iand, ids, ids, 3), ("ids",)),
    (lambda x: x.sort(0), ()),  # lists of scripts have methods of this name that write
    (lambda x, x2: call(lambda a, b: a, x, x, x2), ("x", "x2")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), SPELLINGS)
def test_what_an_operation_writes_to(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """Every way to say it: operators, ``out=``, ``inplace=``, statistics, renormalised tables; a stranger's function may write to all."""
    assert set(last_write(function)) == set(expected)


def test_each_reader_finds_its_version() -> None:
    """A read before, between and behind two writes through views."""

    def program(x: Any) -> Any:
        y = x * 1
        first = y.sum()
        y.view(-1).add_(1)
        second = y.sum()
        y.detach().mul_(2)
        return first, second, y.sum()

    traced = trace(program)
    memory = traced.ctx.memory
    sums = [n for n in traced.graph.nodes if n.target == "sum"]
    (name,) = {name for n in sums for name in memory.read(n)}
    versions = [memory.version(name, n) for n in sums]
    assert [None if v is None else v.target for v in versions] == [None, "add_", "mul_"]


def test_sizes_that_change_in_place_say_nothing() -> None:
    """What torch recorded of a tensor whose sizes change is true of its last version only: no fact is built on it."""
    traced = trace(lambda x: (x.t_(), x)[1])
    assert traced.ctx.memory.reshaped
    assert traced.ctx.view(traced.returned) is None
