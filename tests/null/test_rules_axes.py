"""Axes against numpy: whatever an axis says an element is, the element is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sympy
import torch
from hypothesis import given, strategies as st

from moefuse.passes.graph.sizes import same
from moefuse.passes.ir.axes import Atom, Axes, align, atoms, extent, fresh, in_order, permute, reshape
from moefuse.passes.ir.facts import View
from tests.null.rules_case import INPUTS, T, trace

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def elements(axes: Axes, root: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Which element of a root tensor (as a row-major number) stands at each index, by what the axes say."""
    strides = {i: math.prod(root[i + 1 :]) for i in range(len(root))}
    total = np.zeros((), dtype=np.int64)
    for axis in axes:
        sizes = [int(a.size) for a in axis]
        along = np.zeros(math.prod(sizes), dtype=np.int64)
        places = np.unravel_index(np.arange(along.size), sizes) if sizes else ()
        for atom, place in zip(axis, places, strict=True):
            along = along + place * (strides[atom.index] if atom.kind == "d" else 0)
        total = total[..., None] + along
    return total


@st.composite
def regrouped(draw: st.DrawFn, sizes: list[int]) -> list[int]:
    """The product of neighbours, with ones put between."""
    out: list[int] = []
    rest = list(sizes)
    while rest:
        count = draw(st.integers(1, len(rest)))
        out.append(math.prod(rest[:count]))
        rest = rest[count:]
        if draw(st.booleans()):
            out.append(1)
    return out


@given(st.data(), SIZES)
def test_merging_neighbours_is_always_understood(data: st.DataObject, sizes: list[int]) -> None:
    """Flattening never cuts an atom."""
    wanted = data.draw(regrouped(sizes))
    found = reshape(fresh(sizes), wanted)
    assert found is not None
    assert [extent(a) for a in found] == wanted
    assert atoms(found) == atoms(fresh(sizes))


@given(st.data(), SIZES)
def test_reshape_there_and_back(data: st.DataObject, sizes: list[int]) -> None:
    """What was flattened is found again: each dimension with more than one index has its atom."""
    there = reshape(fresh(sizes), data.draw(regrouped(sizes)))
    back = reshape(there, sizes) if there is not None else None
    assert back is not None
    for axis, own in zip(back, fresh(sizes), strict=True):
        if not same(extent(own), 1):
            assert [a for a in axis if a.size != 1] == list(own)


@given(st.data(), SIZES)
def test_permuted_reshape_agrees_with_numpy(data: st.DataObject, sizes: list[int]) -> None:
    """Either None, or exactly the elements that numpy puts there."""
    dims = data.draw(st.permutations(range(len(sizes))))
    moved = [sizes[d] for d in dims]
    wanted = data.draw(regrouped(moved))
    found = reshape(permute(fresh(sizes), dims), wanted)
    assert found is not None
    array = np.arange(math.prod(sizes)).reshape(sizes).transpose(dims).reshape(wanted)
    np.testing.assert_array_equal(elements(found, tuple(sizes)), array)


@given(st.data(), SIZES)
def test_what_is_in_order_is_what_torch_need_not_copy(data: st.DataObject, sizes: list[int]) -> None:
    dims = data.draw(st.permutations(range(len(sizes))))
    wanted = data.draw(regrouped([sizes[d] for d in dims]))
    found = reshape(permute(fresh(sizes), dims), wanted)
    assert found is not None
    real = torch.zeros(sizes)
    assert in_order(found) == (real.permute(dims).reshape(wanted).data_ptr() == real.data_ptr())


def test_a_cut_through_an_atom_is_not_understood() -> None:
    """[6] as [2, 3] is fine for numpy and means nothing for an index variable."""
    assert reshape(fresh([6]), [2, 3]) is None
    assert reshape(fresh([4, 3]), [2, 6]) is None


def test_one_token_keeps_its_own_dimension() -> None:
    """Size-one atoms are ambiguous: [1 token, 2 slots] flattened and viewed again as [1, 2] is tokens and slots."""
    token, slot = Atom("t", 0, 1), Atom("k", 0, 2)
    assert reshape(((token, slot),), [1, 2]) == ((token,), (slot,))
    assert reshape(((token,), (slot,)), [2]) == ((token, slot),)


@given(st.data(), SIZES, SIZES)
def test_a_dimension_without_elements_has_what_those_around_it_leave(data: st.DataObject, before: list[int], behind: list[int]) -> None:
    """No tokens: [0, K] is [0] slots, and [0] slots are [0, K] again. Any product is zero there, and says nothing."""
    axes = fresh([*before, 0, *behind])
    left, right = data.draw(regrouped(before)), data.draw(regrouped(behind))
    first, last = data.draw(st.integers(0, len(left))), data.draw(st.integers(0, len(right)))
    found = reshape(axes, [*left[:first], 0, *right[last:]])
    assert found is not None
    assert [extent(a) for a in found] == [*left[:first], 0, *right[last:]]
    assert atoms(found) == atoms(axes)
    again = reshape(found, [*before, 0, *behind])
    assert again is not None
    assert [extent(a) for a in again] == [*before, 0, *behind]


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    """No pass may ask for the value of a symbol: that would be a guard."""
    s = sympy.Symbol("s0", positive=True, integer=True)
    axes = fresh([s, 2, 5])
    assert reshape(axes, [s * 2, 5]) == ((*axes[0], *axes[1]), axes[2])
    assert reshape(reshape(axes, [2 * s, 5]) or (), [s, 2, 5]) == axes
    assert reshape(axes, [s + 1, 2, 5]) is None


@given(st.data(), SIZES)
def test_align_cuts_into_the_shortest_runs(data: st.DataObject, sizes: list[int]) -> None:
    """Two groupings of the same extent: nothing is lost, every pair has one extent, no pair could be cut again."""
    row = tuple(Atom("t", i, s) for i, s in enumerate(sizes))
    other = tuple(Atom("d", i, s) for i, s in enumerate(data.draw(regrouped(sizes))))
    runs = align(row, other)
    assert runs is not None
    assert [a for left, _ in runs for a in left if a.size != 1] == [a for a in row if a.size != 1]
    assert [a for _, right in runs for a in right if a.size != 1] == [a for a in other if a.size != 1]
    for left, right in runs:
        assert extent(left) == extent(right)
        inner = {math.prod(a.size for a in left[:n]) for n in range(1, len(left))} - {1, extent(left)}
        assert not inner & {math.prod(a.size for a in right[:n]) for n in range(1, len(right))}


@given(SIZES, SIZES)
def test_align_of_different_extents_is_none(a: list[int], b: list[int]) -> None:
    row, other = (tuple(Atom("d", i, s) for i, s in enumerate(sizes)) for sizes in (a, b))
    if math.prod(a) != math.prod(b):
        assert align(row, other) is None


VIEWS: tuple[Any, ...] = (
    lambda x, d, n: x.unsqueeze(d),
    lambda x, d, n: x.squeeze(d),
    lambda x, d, n: x.transpose(d, n),
    lambda x, d, n: x.movedim(d, n),
    lambda x, d, n: x.reshape(-1),
    lambda x, d, n: x.flatten(min(d, n), max(d, n)),
    lambda x, d, n: x.reshape(*x.shape[:d], 1, *x.shape[d:]),
    lambda x, d, n: x.permute(*range(1, x.dim()), 0),
    lambda x, d, n: x.contiguous(),
    lambda x, d, n: x[None],
    lambda x, d, n: x[..., None],
)


@given(st.lists(st.tuples(st.sampled_from(range(len(VIEWS))), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5))
def test_chains_of_views_agree_with_torch(steps: list[tuple[int, int, int]]) -> None:
    """The rules for view operations, on real functions: the fact's axes name the very elements that torch shows."""
    shape = INPUTS["w_in"][0]
    real = torch.arange(math.prod(shape)).reshape(shape)
    shapes: list[tuple[int, ...]] = []
    for which, d, n in steps:
        shapes.append(tuple(real.shape))
        real = VIEWS[which](real, d % real.dim(), n % real.dim())

    def chain(w_in: Any) -> Any:
        value = w_in
        for (which, d, n), before in zip(steps, shapes, strict=True):
            value = VIEWS[which](_Shaped(value, before), d % len(before), n % len(before))
        return value

    found = trace(chain)
    fact = found.ctx.fact(found.returned)
    assert isinstance(fact, View)
    # A reshape that copied is a root of its own, whose dimensions may be several of the atoms.
    own = atoms(fact.axes if fact.root.op == "placeholder" else found.ctx.facts[fact.root].axes)
    sizes = shape if fact.root.op == "placeholder" else tuple(int(a.size) for a in sorted(own, key=lambda a: a.index))
    values = {"w_in": torch.arange(math.prod(shape)).reshape(shape)}
    for node in found.graph.nodes:
        if node.op in ("call_function", "call_method"):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            values[node.name] = getattr(args[0], node.target)(*args[1:], **kwargs) if node.op == "call_method" else node.target(*args)
    np.testing.assert_array_equal(values[fact.root.name].reshape(-1).numpy()[elements(fact.axes, sizes)], real.numpy())


class _Shaped:
    """A traced value that knows its shape, which fx's proxies do not."""

    def __init__(self, value: Any, shape: tuple[int, ...]) -> None:
        self.value, self.shape = value, shape

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


def test_a_view_of_the_tokens_is_one_view() -> None:
    """`x.view(T, H)` written again reads the same root."""
    fact = trace(lambda x: x.reshape(1, T, -1)[0]).fact
    assert isinstance(fact, View)
    assert fact.root.name == "x"
