"""What the warp-specialised kernels take as constants, the layouts of what they copy, and the shared memory that it needs."""

from __future__ import annotations

from typing import Any, NamedTuple

from moefuse.tuning.problem import Tiles


class Form(NamedTuple):
    """What a product computes.

    HALVES: 2 where a block is made of features of the gate and of the up projection. DESC: the form of the weights' descriptors
    (``operands.Operand.form``). BIAS: there are biases (BIAS_B: of the up projection where it is apart); BIAS_TABLE: as addresses. ACT: the
    activation, "" for none; GATING, UP_FIRST as of ``structs.Form``. PACK: inputs in an element of the weights' storage.
    """

    HALVES: int
    DESC: str
    BIAS: bool = False
    BIAS_B: bool = False
    BIAS_TABLE: bool = False
    ACT: str = ""
    GATING: str = "plain"
    UP_FIRST: bool = False
    PACK: int = 1


class Cut(NamedTuple):
    """How a product is cut (``problem.Tiles``).

    BN: columns of the sum, of both projections together. PIECES: of a tile's rows, which are copied one by one. PARTS: blocks of columns in
    which a group stores, through BUFFERS buffers of its own. REGISTERS, SPARE: of a thread that multiplies, that loads.
    """

    FORM: str
    BM: int
    BN: int
    BK: int
    GROUP: int
    STAGES: int
    PARTS: int
    PIECES: int = 1
    BUFFERS: int = 1
    REGISTERS: int = 232
    SPARE: int = 40
    PDL: bool = False

    @property
    def piece(self) -> int:
        """Rows of a piece."""
        return self.BM // self.PIECES

    @property
    def rows(self) -> int:
        """Rows that one group multiplies and stores."""
        return self.BM if self.FORM == "pingpong" else self.piece


class PackedCut(NamedTuple):
    """How a product with quantised weights is cut (``hopper/packed.py``); what has the names of :class:`Cut` is the same.

    BN: rows of weights of a tile, 64 for each of GROUPS. BK: 64 or 128. APART: whether a pair of inputs in a product are neighbours but
    one, as words of four bits come apart; OUT_APART: the same of what the outputs are multiplied with.
    """

    BM: int
    BN: int
    GROUPS: int
    STAGES: int
    PIECES: int
    BK: int
    APART: bool
    OUT_APART: bool
    GROUP: int = 8
    REGISTERS: int = 232
    SPARE: int = 40
    PDL: bool = False
    FORM: str = "shared"

    @property
    def piece(self) -> int:
        """Rows of a piece."""
        return self.BM // self.PIECES


PIECE = 64
"""Rows of a piece: of one instruction that multiplies."""


def rows_layout(columns: int, rank: int = 2) -> Any:
    """Layout in shared memory of blocks of 16-bit numbers, so many columns wide."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=rank)


def cut_of(part: Tiles, bm: int, halves: int, pdl: bool, biased: bool = False) -> Cut:
    """How the tiles of a configuration cut a product; ``halves``: of a block of the sum per block of features."""
    parts = parts_of(part.store or 1, biased)
    return Cut(part.specialised, bm, halves * part.bn, part.bk, part.group, part.stages, parts, bm // PIECE, PDL=pdl)


def parts_of(parts: int, biased: bool) -> int:
    """Blocks of columns in which a tile is stored: with biases at least four, whose registers the sums leave free."""
    return max(parts, 4) if biased else parts
