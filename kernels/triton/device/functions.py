"""Device functions that the kernels share: activations, the gated epilogue, expert pointers, tile order.

Everything here runs in the accumulation dtype; rounding to the storage dtype is written out where ``ops/meaning/reference.py`` has it.
"""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:

    def on_nvidia() -> bool:
        """Under the interpreter no machine code can be written out."""
        return False
else:

    @tl.core.builtin
    def on_nvidia(_semantic=None):  # type: ignore[no-untyped-def]
        """True where the code is compiled for an NVIDIA GPU, so PTX may be written out."""
        return tl.constexpr(getattr(_semantic.builder.options, "backend_name", "") == "cuda")


BFLOAT16_PAIR: tl.constexpr = tl.constexpr("""{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""")
FLOAT16_PAIR: tl.constexpr = tl.constexpr("""{
            .reg .b32 both;
            .reg .b16 low, high;
            cvt.rn.f16x2.f32 both, $3, $2;
            mov.b32 {low, high}, both;
            cvt.f32.f16 $0, low;
            cvt.f32.f16 $1, high;
            }""")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Values rounded to ``dtype``, in the dtype of x.

    A conversion to 16 bits and back, written as such, becomes one slow instruction per value (F2F, on the unit of the exponentials); a
    packed conversion makes two at once on the ordinary units.
    """
    if on_nvidia() and ((dtype == tl.bfloat16 or dtype == tl.float16) and x.dtype == tl.float32):
        PAIR: tl.constexpr = BFLOAT16_PAIR if dtype == tl.bfloat16 else FLOAT16_PAIR
        r = tl.inline_asm_elementwise(PAIR, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        r = x.to(dtype).to(x.dtype)
    return r


@triton.jit
def logistic(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)). FAST (16-bit storage): to some 2^-21, and 0 for what is below 1e-38."""
    if FAST and on_nvidia():
        r = tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        r = tl.sigmoid(x)
    return r


@triton.jit
def tanh(x):
    """tanh without libdevice: the interpreter and every backend have exp and log."""
    a = tl.abs(x)
    if x.dtype == tl.float64:
        # expm1 by Kahan's quotient: the rounding error of exp cancels in (u - 1) / log(u).
        z = tl.minimum(2.0 * a, 60.0)
        u = tl.exp(z)
        m = tl.where(u == 1.0, z, (u - 1.0) * z / tl.log(tl.where(u == 1.0, 2.0, u)))
        t = m / (m + 2.0)
    else:
        s = x * x
        series = a * (1.0 + s * (-0.33333333333 + s * (0.13333333333 + s * (-0.05396825397 + s * 0.02186948854))))
        t = tl.where(a < 0.25, series, 2.0 / (1.0 + tl.exp(-2.0 * a)) - 1.0)
    t = tl.where(x < 0, -t, t)
    return tl.where(x != x, x, t)


@triton.jit
def relu(x):
    """NaN stays NaN, as in torch."""
    return tl.where(x < 0, 0.0, x).to(x.dtype)


@triton.jit
def at_most(x, limit):
    """torch.clamp(max=limit): NaN stays NaN."""
    return tl.where(x > limit, limit, x).to(x.dtype)


@triton.jit
def at_least(x, limit):
    """torch.clamp(min=limit): NaN stays NaN."""
    return tl.where(x < limit, limit, x).to(x.dtype)


@triton.jit
def tanh_softplus(h):
    """tanh(log(1 + n)) with n = exp(h), without a difference of near equals; past 40 it is 1 in any dtype."""
    n = tl.exp(at_most(h, 40.0))
    w = n * (n + 2.0)
    return w / (w + 2.0)


@triton.jit
def pointwise(h, ACT: tl.constexpr, FAST: tl.constexpr):
    """The function of one value behind an activation. FAST: see ``logistic``."""
    if ACT == "silu":
        r = h * logistic(h, FAST)
    elif ACT == "gelu":
        r = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u)
        r = h * logistic(1.5957691216057308 * (h + 0.044715 * h * h * h), FAST)
    elif ACT == "relu":
        r = relu(h)
    elif ACT == "relu2":
        r = relu(h) * relu(h)
    elif ACT == "sigmoid":
        r = logistic(h, FAST)
    elif ACT == "tanh":
        r = tanh(h)
    elif ACT == "mish":
        r = h * tanh_softplus(h)
    else:
        tl.static_assert(ACT == "identity", "activation without a formula here")
        r = h
    return r


@triton.jit
def gated(gate, up, arg0, arg1, ACT: tl.constexpr, FAST: tl.constexpr):
    """act(gate, up) of ``ops/meaning/activations.py``."""
    if ACT == "swiglu_oai":
        g = at_most(gate, arg1)
        u = at_least(at_most(up, arg1), -arg1)
        r = g * logistic(g * arg0, FAST) * (u + 1.0)
    elif ACT == "silu_clamp":
        g = at_most(gate, arg0)
        u = at_least(at_most(up, arg0), -arg0)
        r = g * logistic(g, FAST) * u
    else:
        r = pointwise(gate, ACT, FAST) * up
    return r


@triton.jit
def expert_base(w, e, stride_e, dtype: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer(s) to the first element of expert(s) e; ``w`` is the stacked tensor, or with TABLE int64 addresses [E].

    ``dtype`` is the element type; ALIGNED promises that the addresses of a table are multiples of 16 bytes.
    """
    if TABLE:
        base = tl.load(w + e).to(tl.pointer_type(dtype))  # as e
        if ALIGNED:
            base = tl.multiple_of(base, 16)
    else:
        base = w + e.to(tl.int64) * stride_e
    return base


@triton.jit
def index(i, WIDE: tl.constexpr):
    """An index along a strided dimension; 64 bits wide when some offset in one expert needs it."""
    if WIDE:
        i = i + tl.zeros((), tl.int64)  # a size of 1 arrives as a Python number
    return i


@triton.jit
def tile_order(pid, num_tiles, num_blocks, GROUP: tl.constexpr):
    """(row tile, column block) of program ``pid``: GROUP row tiles share a column block before the next one, so weights stay in L2."""
    width = GROUP * num_blocks
    first = pid // width * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    inside = pid % width
    return first + inside % size, inside // size


@triton.jit
def expert_order(i, tile, before, count, blocks, GROUP: tl.constexpr):
    """(row tile, column block) of entry i = tile * blocks + ... of a list in which tiles of one expert share weights.

    GROUP row tiles of an expert at most, and groups of one expert are about equal, take a column block one after the other, so its weights
    come from memory once for all of them. ``tile`` has ``before`` tiles of its expert in front of it, of ``count``.
    """
    size = tl.cdiv(count, tl.cdiv(count, GROUP))
    first = before // size * size
    size = tl.minimum(size, count - first)
    first += tile - before
    inside = i - first * blocks
    return first + inside % size, inside // size


@triton.jit
def after_previous(PDL: tl.constexpr):
    """With programmatic dependent launch: the previous kernel's results are visible from here on."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch: the next kernel's programs may be scheduled."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


FAR_ROW: tl.constexpr = tl.constexpr(1 << 30)
"""What :func:`store_rows` counts rows up to."""


@triton.jit
def load_rows(rows_of, start, rows, col, BM: tl.constexpr, BN: tl.constexpr):
    """[BM, BN] from row ``start`` and column ``col``, zeros behind the first ``rows``, through a descriptor as of :func:`store_rows`."""
    v = rows_of.load([FAR_ROW, start + rows, FAR_ROW - rows, col])  # [1, 1, BM, BN]
    return tl.reshape(v, [BM, BN])


@triton.jit
def store_rows(rows_of, v, start, rows, col, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """Store the first ``rows`` of v [BM, BN] at row ``start`` from column ``col`` through a descriptor of ``layout.rows_descriptor``.

    The hardware clips rows at a fixed one, so row r of the tile is shown as row FAR_ROW - rows + r: what is behind ``rows`` falls off. The
    second coordinate puts the rows where they belong, the first takes away what is too much (idea of ragged_tma.py in Triton's tools). In
    PARTS blocks of columns, each of which waits in shared memory only for itself.
    """
    at = start + rows
    row = FAR_ROW - rows
    if PARTS == 1:
        rows_of.store([FAR_ROW, at, row, col], tl.reshape(v, [1, 1, BM, BN]))
    else:
        left, right = tl.split(tl.permute(tl.reshape(v, [BM, 2, BN // 2]), (0, 2, 1)))
        store_rows(rows_of, left, start, rows, col, BM, BN // 2, PARTS // 2)
        store_rows(rows_of, right, start, rows, col + BN // 2, BM, BN // 2, PARTS // 2)
