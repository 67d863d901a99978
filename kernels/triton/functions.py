"""Device functions that the kernels share: activations, the gated epilogue, expert pointers, tile order.

Everything here runs in the accumulation dtype; rounding to the storage dtype is written out where ``moefuse/ops/reference.py`` has it.
"""

import triton
import triton.language as tl


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
def pointwise(h, ACT: tl.constexpr):
    """The function of one value behind an activation."""
    if ACT == "silu":
        r = h * tl.sigmoid(h)
    elif ACT == "gelu":
        r = 0.5 * h * (1.0 + tl.erf(h * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u)
        r = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    elif ACT == "relu":
        r = relu(h)
    elif ACT == "relu2":
        r = relu(h) * relu(h)
    elif ACT == "sigmoid":
        r = tl.sigmoid(h)
    elif ACT == "tanh":
        r = tanh(h)
    else:
        tl.static_assert(ACT == "identity", "activation without a formula here")
        r = h
    return r


@triton.jit
def gated(gate, up, arg0, arg1, ACT: tl.constexpr):
    """act(gate, up) of ``moefuse/ops/activations.py``."""
    if ACT == "swiglu_oai":
        g = at_most(gate, arg1)
        u = at_least(at_most(up, arg1), -arg1)
        r = g * tl.sigmoid(g * arg0) * (u + 1.0)
    elif ACT == "silu_clamp":
        g = at_most(gate, arg0)
        u = at_least(at_most(up, arg0), -arg0)
        r = g * tl.sigmoid(g) * u
    else:
        r = pointwise(gate, ACT) * up
    return r


@triton.jit
def expert_base(w, e, stride_e, dtype: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer(s) to the first element of expert(s) e; ``w`` is the stacked tensor, or with TABLE int64 addresses [E].

    ``dtype`` is the element type; ALIGNED promises that the addresses of a table are multiples of 16 bytes.
    """
    if TABLE:
        base = tl.load(w + e).to(tl.pointer_type(dtype))
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
def after_previous(PDL: tl.constexpr):
    """With programmatic dependent launch: the previous kernel's results are visible from here on."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """With programmatic dependent launch: the next kernel's programs may be scheduled."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
