"""What ranks say to each other on the host: one word each, which is how many tokens they have and which call they make.

A word is 63 bits of an int64: ``stamp << 32 | number + 2``. The stamp is a checksum of the call's text, so ranks that run other programs,
whose collectives might fit each other by chance, are found before a row travels.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.errors import PeerError
from moefuse.runtime.collectives import all_gather
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.layers import layer_of, mark_of

REFUSED, LEFT = -1, -2
"""In place of a number: this rank raised before anything of this call travelled; in the middle of an earlier one."""
_LEAST = 2
_BITS = 32
_TEXT = 1024
"""Bytes of a text."""

_because: contextvars.ContextVar[str] = contextvars.ContextVar("moefuse_because", default="")


@contextlib.contextmanager
def because(why: str) -> Iterator[None]:
    """In this block, what tells ranks what this one runs says why it runs that."""
    token = _because.set(why)
    try:
        yield
    finally:
        _because.reset(token)


def why() -> str:
    """What :func:`because` was told, behind what this rank runs."""
    told = _because.get()
    return f", for {told}," if told else ""


@dataclass
class Call:
    """One call of an op that communicates.

    Attributes:
        layer: as the graph names it.
        place: the table of experts, where the op has it.
        rows: tensors that travel, whose first sizes may differ.
        said: whether this rank has said its word.
        agreed: whether all ranks know that this call goes no further: they are in step afterwards.
    """

    terms: Terms
    layer: str
    op: str
    rows: Sequence[Tensor] = ()
    place: Tensor | None = None
    said: bool = False
    agreed: bool = False

    @functools.cached_property
    def _mark(self) -> str:
        return mark_of(self.place)

    @property
    def name(self) -> str:
        """Of the layer, for people."""
        return layer_of(self.place) or self.layer

    @property
    def _form(self) -> tuple[Any, ...]:
        """(dtype, features) of each: what ranks have to agree on."""
        return tuple((r.dtype, *r.shape[1:]) for r in self.rows)

    @property
    def text(self) -> str:
        """For people."""
        return _text(self.terms.text, self._mark or self.layer, self.op, self._form)

    def word(self, number: int) -> int:
        """What this rank says: ``number``, :data:`REFUSED` or :data:`LEFT`."""
        return _stamp(self.terms.text, self._mark, self.op, self._form) << _BITS | number + _LEAST

    def heard(self, words: Sequence[int]) -> list[int]:
        """[P]: the number of each rank, given their words.

        Raises:
            PeerError: another one has raised, or makes another call.
        """
        group, numbers = self.terms.group, [number_of(word) for word in words]
        if LEFT in numbers:
            raise PeerError(f"rank {group.ranks[numbers.index(LEFT)]} failed in the middle of an earlier call; its own error says why")
        if REFUSED in numbers:
            self.agreed = True
            if numbers[group.rank] == REFUSED:
                return numbers
            raise PeerError(f"rank {group.ranks[numbers.index(REFUSED)]} raised before it sent its tokens; its own error says why")
        stamps = [word >> _BITS for word in words]
        if len(set(stamps)) > 1:
            self.agreed = True
            self.differ(texts(group, f"{self.text}{why()}"))
        return numbers

    def differ(self, said: Sequence[str]) -> None:
        """Raises a PeerError that names two ranks and what they run."""
        ranks = self.terms.group.ranks
        other = next((i for i, text in enumerate(said) if text != said[0]), 0)
        gathers = {text.startswith("gathered") for text in said}
        hint = " (a rank that gathers is in eager mode, or its report says why)" if len(gathers) > 1 else ""
        raise PeerError(
            f"rank {ranks[other]} runs {said[other]}, where rank {ranks[0]} runs {said[0]}{hint}: all ranks have to run the same layers in "
            "the same order, with the same numbers in their experts, and all compiled or all in eager mode"
        )


def number_of(word: int) -> int:
    """The number in a word."""
    return (word & (1 << _BITS) - 1) - _LEAST


def numbers_of(words: Tensor) -> Tensor:
    """The number in each word."""
    return (words & (1 << _BITS) - 1) - _LEAST


def say(group: Group, word: int) -> list[int]:
    """[P]: the word of each rank."""
    if group.size == 1:
        return [word]
    every = torch.full((group.size,), word, dtype=torch.int64, device="cpu")
    all_gather(every, torch.tensor([word], dtype=torch.int64, device="cpu"), group.host)
    found: list[int] = every.tolist()
    return found


def texts(group: Group, text: str) -> list[str]:
    """[P]: what each rank says at length."""
    mine = text.encode()[:_TEXT].ljust(_TEXT)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    every = sent.repeat(group.size)
    all_gather(every, sent, group.host)
    return [bytes(said.tolist()).decode(errors="replace").rstrip() for said in every.view(group.size, _TEXT)]


@functools.lru_cache(maxsize=4096)
def _text(terms: str, layer: str, op: str, form: tuple[Any, ...]) -> str:
    rows = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(sizes)}" for dtype, *sizes in form)
    return f"{op} of {layer} with {rows or 'nothing'} ({terms})"


@functools.lru_cache(maxsize=4096)
def _stamp(terms: str, layer: str, op: str, form: tuple[Any, ...]) -> int:
    return zlib.crc32(_text(terms, layer, op, form).encode()) >> 1
