"""Where a view of a matrix is in the slice that a rank holds, against slices that are really cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from moefuse.passes.graph.slices import NotLocalError, View, in_slice
from moefuse.runtime.transports.weights import slice_of


def of(tensor: torch.Tensor, whole: torch.Tensor) -> View:
    return View(tuple(whole.shape), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def read(view: View, held: torch.Tensor) -> torch.Tensor:
    """Both ways to take a view of what a rank holds."""
    by_strides = torch.as_strided(held, view.sizes, view.strides, view.start)
    found = view.as_slices()
    assert found is not None
    cut, axes = found
    by_slices = held[cut].permute(axes).reshape(view.sizes)
    assert torch.equal(by_strides, by_slices)
    return by_slices


@given(world=st.integers(1, 5), part=st.integers(1, 4), other=st.integers(1, 5), axis=st.integers(0, 1), turned=st.booleans())
def test_plain(world: int, part: int, other: int, axis: int, turned: bool) -> None:
    """[N, H] or [H, N], and either transposed: each rank has its rows, in order."""
    shape = (world * part, other) if axis == 0 else (other, world * part)
    whole = torch.arange(world * part * other).view(shape)
    seen = whole.t() if turned else whole
    if world * part == 1:
        return  # a dimension of one unit is no dimension of a view
    view, dim = in_slice(of(seen, whole), axis, 1, world, 1)
    assert dim == (1 - axis if turned else axis)
    for rank in range(world):
        held = slice_of(whole, axis, 1, rank, world)
        wanted = seen.chunk(world, dim)[rank]
        assert torch.equal(read(view, held), wanted)


@given(world=st.integers(1, 4), part=st.integers(1, 4), other=st.integers(2, 5), which=st.sampled_from(["both", "gate", "up"]))
def test_gate_and_up(world: int, part: int, other: int, which: str) -> None:
    """[2N, H], gate projection first: a rank has its part of both, whether they are read together or one by one."""
    units = world * part
    whole = torch.arange(2 * units * other).view(2 * units, other)
    seen = {"both": whole, "gate": whole[:units], "up": whole[units:]}[which]
    if seen.shape[0] == 1:
        return
    view, dim = in_slice(of(seen, whole), 0, 2, world, 2 if which == "both" else 1)
    assert dim == 0
    for rank in range(world):
        halves = [half.chunk(world)[rank] for half in seen.chunk(2 if which == "both" else 1)]
        assert torch.equal(read(view, slice_of(whole, 0, 2, rank, world)), torch.cat(halves))


@given(world=st.integers(1, 4), part=st.integers(1, 4), odd=st.booleans())
def test_row_by_row(world: int, part: int, odd: bool) -> None:
    """[2N, H], gate and up projection row by row."""
    whole = torch.arange(2 * world * part * 3).view(2 * world * part, 3)
    seen = whole[int(odd) :: 2]
    if seen.shape[0] == 1:
        return
    view, _ = in_slice(of(seen, whole), 0, 1, world, 1)
    for rank in range(world):
        assert torch.equal(read(view, slice_of(whole, 0, 1, rank, world)), seen.chunk(world)[rank])


@pytest.mark.parametrize(
    ("seen", "blocks", "groups", "text"),
    [
        # The same matrix read in another way than it was cut: ranks would multiply one unit's gate by another one's up projection.
        (lambda w: w, 1, 2, "ranks hold other hidden units"),
        (lambda w: w, 2, 1, "ranks hold other hidden units"),
        (lambda w: w[::2], 2, 1, "ranks hold other hidden units"),
        (lambda w: w[2:], 1, 1, "ranks hold other hidden units"),
        (lambda w: w[:3], 1, 1, "do not divide by 2 ranks"),
        (lambda w: w[3], 1, 1, "it reads one hidden unit"),
        (lambda w: w.flatten(), 1, 1, "it reads one hidden unit"),
    ],
)
def test_what_is_cut_otherwise(seen: object, blocks: int, groups: int, text: str) -> None:
    whole = torch.arange(24).view(8, 3)
    with pytest.raises(NotLocalError, match=text):
        in_slice(of(seen(whole), whole), 0, blocks, 2, groups)  # type: ignore[operator]
