"""What ranks say to each other: words, checksums, and which layer a table of experts belongs to. One process."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, strategies as st

from moefuse import ParallelError, PeerError
from moefuse.parallel.table import Table
from moefuse.runtime import groups
from moefuse.runtime.debug import checksum
from moefuse.runtime.groups import Terms
from moefuse.runtime.layers import layer_of
from moefuse.runtime.peers import peers
from moefuse.runtime.words import LEFT, REFUSED, Call, number_of

TERMS = Terms("nobody's")


@given(st.integers(0, 2**31))
def test_a_word_holds_its_number(number: int) -> None:
    """And is an int64, whatever is said."""
    call = Call(TERMS, "first", "ep_dispatch")
    for said in (number, REFUSED, LEFT):
        assert number_of(call.word(said)) == said
        assert 0 <= call.word(said) < 2**63


def test_stamps() -> None:
    """Everything that ranks have to agree on changes the word, and nothing that they need not."""
    rows = torch.zeros(3, 8)
    word = Call(TERMS, "first", "ep_dispatch", [rows]).word(3)
    assert Call(TERMS, "of a shared graph", "ep_dispatch", [rows + 1]).word(3) == word
    others = (
        Call(TERMS, "first", "ep_combine", [rows]),
        Call(TERMS, "first", "ep_dispatch", [rows.double()]),
        Call(TERMS, "first", "ep_dispatch", [rows[:, 1:]]),
        Call(TERMS, "first", "ep_dispatch", [rows, rows]),
        Call(Terms("nobody's", "all_to_all"), "first", "ep_dispatch", [rows]),
    )
    assert len({word, *(call.word(3) for call in others)}) == 1 + len(others)


def test_layers_by_their_tables() -> None:
    """One on each device, as long as anybody has it."""
    first, second = Table([0, 1], "first"), Table([0, 1], "second")
    cpu = torch.device("cpu")
    assert layer_of(first.on(cpu)) == ""
    first.ready(cpu)
    second.ready(cpu)
    assert (layer_of(first.on(cpu)), layer_of(second.on(cpu)), layer_of(None), layer_of(torch.arange(2))) == ("first", "second", "", "")
    table = second.on(cpu)
    del second
    assert layer_of(table) == ""


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.bool, torch.int8, torch.float8_e4m3fn]
)
def test_checksums(dtype: torch.dtype) -> None:
    """One bit, or two elements in each other's place."""
    numbers = torch.arange(40).reshape(5, 8) % 2 if dtype == torch.bool else torch.arange(40.0).reshape(5, 8)
    tensor = numbers.to(dtype)
    other, swapped = tensor.clone(), tensor.clone()
    other.view(-1).view(torch.uint8)[-1] ^= 1
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    assert len({checksum(tensor), checksum(other), checksum(swapped)}) == 3
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(tensor[:0]) == 0


def test_who_has_left_stays_out() -> None:
    """Whatever was raised in the middle of a call; what all ranks raise alike leaves nobody behind."""
    known = groups.register("nobody's", (0,), 0, None, None)
    terms = Terms("nobody's", most=4)
    try:
        with pytest.raises(ParallelError), peers(terms, "first", "ep_send"):
            raise ParallelError("said by all")
        with pytest.raises(ZeroDivisionError), peers(terms, "first", "ep_send"):
            raise ZeroDivisionError("one of them")
        text = (
            'second: this rank and the others of the mesh "nobody\'s" are not in step any more since an earlier error (one of them): '
            "start all processes again"
        )
        with pytest.raises(PeerError, match=re.escape(text)), peers(terms, "second", "ep_send"):
            pass
    finally:
        del groups._groups[known.name]
