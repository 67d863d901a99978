"""What kernels take in one piece: named tuples, one per thing.

Arrays and descriptors stay parameters of their own: they change from call to call, while a launch keeps all else. Triton specialises every
number of a tuple as it would by itself, None costs nothing, and a parameter ``tl.constexpr`` takes its tuple as one constant. A number that
must not be specialised cannot be in a tuple.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Elements from row to row and from column to column of a matrix."""

    row: int
    col: int


class Experts(NamedTuple):
    """Where the weights [N, K] and the biases [N] of each expert are, in elements from expert, output and input to the next one.

    Attributes:
        rows: rows of a descriptor from one expert to the next.
        first: the output of the stored weight that is output 0 of the product.
    """

    stride_e: int
    stride_n: int
    stride_k: int
    bias_e: int | None = None
    bias_n: int | None = None
    rows: int | None = None
    first: int | None = None


class Weights(NamedTuple):
    """Weights of all experts in a kernel: an array or a descriptor with the steps of ``operands.steps_table``, biases, :class:`Experts`."""

    w: Any
    b: Any
    steps: Any
    at: Any


class Stored(NamedTuple):
    """How weights of experts are stored. TABLE: as addresses; ALIGNED: all of these at 16 bytes; WIDE: offsets take 64 bits.

    BIAS: they have biases (of ``b``: the up projection's own); BIAS_TABLE: those as addresses. DESC: the form of their descriptor.
    HELD: weights and biases are in float32, and rounded to the dtype of the rows as they are read; their gradients are not rounded.
    """

    TABLE: bool
    ALIGNED: bool
    WIDE: bool
    BIAS: bool = False
    BIAS_B: bool = False
    BIAS_TABLE: bool = False
    DESC: str = ""
    HELD: bool = False


class Tiling(NamedTuple):
    """How a product of rows [S, K] into [S, N] is cut into tiles BM x BN, in steps of BK inputs (``problem.Tiles``).

    EVEN_N, EVEN_K: whole blocks. ROWS_DESC: rows come through a descriptor. STORE: they leave through one, in so many blocks of columns.
    BR: inputs of a low-rank term in one step.
    """

    BM: int
    BN: int
    BK: int
    GROUP: int
    EVEN_N: bool
    EVEN_K: bool
    PRECISION: str
    SWAP: bool = False
    ROWS_DESC: bool = False
    TAIL: bool = False
    PERSISTENT: bool = False
    FLATTEN: bool = False
    STORE: int = 0
    PDL: bool = False
    BR: int = 16


class Form(NamedTuple):
    """What a first projection computes, in the words of the schema of ``moefuse::experts``.

    GATING "halves": gate and up are apart, in one tensor or in two. SCALE: routing weights multiply the tokens. JOIN: both halves of one
    tensor make one product, through one descriptor.
    """

    ACT: str
    GATING: str
    UP_FIRST: bool
    SCALE: bool
    JOIN: bool = False


class Blocks(NamedTuple):
    """How matrix-vector products are cut into blocks of BN outputs and BK inputs (``problem.Vectors``); AT: slots of a token at a time."""

    BN: int
    BK: int
    STAGES: int
    EVEN_N: bool
    EVEN_K: bool
    PDL: bool
    AT: int = 1


class Factor(NamedTuple):
    """A low-rank term of vectors: RANK of it, 0 for none; its columns begin at COL of u [S, ROW].

    OF: the dtype of its factor, which is TABLE (addresses) or stacked. BR: ranks of one step.
    """

    RANK: int = 0
    COL: int = 0
    ROW: int = 0
    TABLE: bool = False
    OF: Any = None
    BR: int = 16


class Halves(NamedTuple):
    """Where the features of gate and up are in a row of the pre-activation, and the activation with its constants.

    LIMITS_PASS: a value that is exactly a clamp's limit has a gradient.
    """

    GATE: int
    UP: int
    STEP: int
    PLAIN: bool
    ACT: str
    ARG0: float
    ARG1: float
    LIMITS_PASS: bool


class Wanted(NamedTuple):
    """Which results of ``backward.activate_grads`` are written."""

    H: bool
    A: bool
    WEIGHTS: bool
