"""What happens to sorted rows between the GEMMs of training: the activation, its gradient, and the products with routing weights.

Rounding is where ``moefuse/runtime/backward.py`` has it. With y = a W_out^T + b_out, the gradient of a routing weight <dout, y> is computed
as <dout W_out, a> + <dout, b_out>, so y is not needed (SonicMoE's and ScatterMoE's papers; the code is our own).
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import at_least, at_most, expert_base, gated, logistic, pointwise, relu, tanh, tanh_softplus
from moefuse.kernels.triton.device.rows import expert_of


@triton.jit
def pointwise_grad(d, h, ACT: tl.constexpr, FAST: tl.constexpr):
    """d times the derivative of ``functions.pointwise`` at h."""
    if ACT == "silu":
        s = logistic(h, FAST)
        r = d * s * (1.0 + h * (1.0 - s))
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        r = d * (cdf + h * tl.exp(-0.5 * h * h) * 0.3989422804014327)
    elif ACT == "gelu_tanh":
        # With s = sigmoid(2u): 0.5 (1 + tanh(u)) = s, and its derivative by u is 2 s (1 - s).
        s = logistic(1.5957691216057308 * (h + 0.044715 * h * h * h), FAST)
        r = d * (s + h * 2.0 * s * (1.0 - s) * 0.7978845608028654 * (1.0 + 0.134145 * h * h))
    elif ACT == "relu":
        r = tl.where(h <= 0, 0.0, d).to(d.dtype)
    elif ACT == "relu2":
        r = tl.where(h <= 0, 0.0, d * 2.0 * relu(h)).to(d.dtype)
    elif ACT == "sigmoid":
        s = logistic(h, FAST)
        r = d * s * (1.0 - s)
    elif ACT == "tanh":
        t = tanh(h)
        r = d * (1.0 - t * t)
    elif ACT == "mish":
        t = tanh_softplus(h)
        r = d * (t + h * (1.0 - t * t) * logistic(h, FAST))
    else:
        tl.static_assert(ACT == "identity", "activation without a derivative here")
        r = d
    return r


@triton.jit
def passed(d, mask):
    """A gradient where a clamp lets it through, and zero elsewhere, also in place of one that is not finite."""
    return tl.where(mask, d, 0.0).to(d.dtype)


@triton.jit
def inside(x, limit, LIMITS_PASS: tl.constexpr):
    return x <= limit if LIMITS_PASS else x < limit


@triton.jit
def gated_grads(d, gate, up, halves: tl.constexpr, FAST: tl.constexpr):
    """(gradient of gate, gradient of up) of ``functions.gated``; LIMITS_PASS: a clamp lets its limits through."""
    PASS: tl.constexpr = halves.LIMITS_PASS
    ACT: tl.constexpr = halves.ACT
    ARG0: tl.constexpr = halves.ARG0
    ARG1: tl.constexpr = halves.ARG1
    if ACT == "swiglu_oai":
        g = at_most(gate, ARG1)
        u = at_least(at_most(up, ARG1), -ARG1)
        s = logistic(g * ARG0, FAST)
        d_gate = passed(d * (u + 1.0) * s * (1.0 + ARG0 * g * (1.0 - s)), inside(gate, ARG1, PASS))
        d_up = passed(d * g * s, inside(up, ARG1, PASS) & inside(-up, ARG1, PASS))
    elif ACT == "silu_clamp":
        g = at_most(gate, ARG0)
        u = at_least(at_most(up, ARG0), -ARG0)
        d_gate = passed(pointwise_grad(d * u, g, "silu", FAST), inside(gate, ARG0, PASS))
        d_up = passed(d * pointwise(g, "silu", FAST), inside(up, ARG0, PASS) & inside(-up, ARG0, PASS))
    else:
        d_gate = pointwise_grad(d * up, gate, ACT, FAST)
        d_up = d * pointwise(gate, ACT, FAST)
    return d_gate, d_up


@triton.jit
def activated(gate, up, halves: tl.constexpr, FAST: tl.constexpr):
    """The activation of either kind of expert."""
    ACT: tl.constexpr = halves.ACT
    if halves.PLAIN:
        r = pointwise(gate, ACT, FAST)
    else:
        ARG0: tl.constexpr = halves.ARG0
        ARG1: tl.constexpr = halves.ARG1
        r = gated(gate, up, ARG0, ARG1, ACT, FAST)
    return r


@triton.jit(do_not_specialize=["S"])
def activate(h, offsets, a, S, E, I, stride_hr, halves: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """a [S, I], rounded to storage, from the pre-activation h [S, width]. Dead rows are not written."""
    dtype: tl.constexpr = h.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (row < tl.load(offsets + E))[:, None] & (n < I)[None, :]  # []
    from_h = h + row.to(tl.int64)[:, None] * stride_hr + n[None, :] * halves.STEP
    gate = tl.load(from_h + halves.GATE, mask=mask, other=0.0).to(wide)  # [BR, BN]
    up = gate if halves.PLAIN else tl.load(from_h + halves.UP, mask=mask, other=0.0).to(wide)  # [BR, BN]
    out = activated(gate, up, halves, dtype.primitive_bitwidth == 16)
    tl.store(a + row.to(tl.int64)[:, None] * I + n[None, :], out.to(dtype), mask=mask)  # [BR, BN]


@triton.jit
def row_products(a, b, live, N, stride_a, stride_b, dtype: tl.constexpr, wide: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """Inner products [BR] of rows of N elements, given the addresses of their first ones; those of b are rounded to ``dtype``."""
    total = tl.zeros([BR], wide)
    for n0 in range(0, N, BN):
        n = (n0 + tl.arange(0, BN)).to(tl.int64)
        mask = live[:, None] & (n < N)[None, :]
        v = tl.load(a[:, None] + n[None, :] * stride_a, mask=mask, other=0.0).to(wide)  # [BR, BN]
        w = tl.load(b[:, None] + n[None, :] * stride_b, mask=mask, other=0.0).to(dtype).to(wide)  # [BR, BN]
        total += tl.sum(v * w, 1)
    return total


@triton.jit(do_not_specialize=["S"])
def activate_grads(
    h, d_a, grad, b, weights, order, offsets, d_h, a, d_weights, S, top_k, E, I, N, stride_hr, at_grad, at_b, at_weights,
    halves: tl.constexpr, SCALE: tl.constexpr, want: tl.constexpr, bias: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """From h [S, width] and d_a [S, I], the gradient of the activation's result before the routing weight, whatever is wanted of:

    d_h [S, width] (contiguous), the gradient of h; a [S, I], the activation times its routing weight, rounded to storage; d_weights [S]
    in slot order, the gradient of the routing weights, zeros for dead rows. a may be d_a. SCALE: the routing weight multiplies the
    expert's output. bias: (whether there is one, whether as addresses, whether in float32 where h has 16 bits).
    """
    dtype: tl.constexpr = h.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    ACT: tl.constexpr = halves.ACT
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    live = row < tl.load(offsets + E)  # []
    slot = tl.load(order + row, mask=row < S, other=0).to(tl.int64)  # [BR]
    token = slot // top_k
    if SCALE:
        from_weights = weights + token * at_weights.row + slot % top_k * at_weights.col
        scale = tl.load(from_weights, mask=live, other=0.0).to(wide)[:, None]  # [BR]
    at_row = row.to(tl.int64)[:, None]
    total = tl.zeros([BR], wide)
    for n0 in range(0, I, BN):
        n = n0 + tl.arange(0, BN)
        mask = live[:, None] & (n < I)[None, :]
        at_h = at_row * stride_hr + n[None, :] * halves.STEP
        gate = tl.load(h + at_h + halves.GATE, mask=mask, other=0.0).to(wide)  # [BR, BN]
        up = gate if halves.PLAIN else tl.load(h + at_h + halves.UP, mask=mask, other=0.0).to(wide)  # [BR, BN]
        if want.A or want.WEIGHTS:
            value = activated(gate, up, halves, FAST)
        if want.H or want.WEIGHTS:
            d = tl.load(d_a + at_row * I + n[None, :], mask=mask, other=0.0).to(wide)  # [BR, BN]
        if want.A:
            tl.debug_barrier()  # every thread has loaded: a may be d_a
            tl.store(a + at_row * I + n[None, :], (value * scale if SCALE else value).to(dtype), mask=mask)  # [BR, BN]
        if want.WEIGHTS:
            total += tl.sum(tl.where(mask, d * value, 0.0), 1)
        if want.H:
            if SCALE:
                d = d * scale
            if halves.PLAIN:
                d_gate = pointwise_grad(d, gate, ACT, FAST)
            else:
                d_gate, d_up = gated_grads(d, gate, up, halves, FAST)
                tl.store(d_h + at_h + halves.UP, d_up.to(dtype), mask=mask)  # [BR, BN]
            tl.store(d_h + at_h + halves.GATE, d_gate.to(dtype), mask=mask)  # [BR, BN]
    if want.WEIGHTS:
        if bias[0]:
            e = tl.where(live, expert_of(row, offsets, E, BE), 0)
            held: tl.constexpr = tl.float32 if bias[2] else dtype
            base = expert_base(b, e, at_b.row, held, bias[1], False)
            total += row_products(grad + token * at_grad.row, base, live, N, at_grad.col, at_b.col, dtype, wide, BR, BN)
        tl.store(d_weights + slot, total.to(d_weights.dtype.element_ty), mask=row < S)  # [BR]


@triton.jit(do_not_specialize=["S"])
def pair_rows(
    tokens, rows, weights, order, offsets, out, d_weights, S, top_k, E, N, at_tokens, at_rows, at_weights,
    FROM_ROWS: tl.constexpr, SCALE: tl.constexpr, WANT_OUT: tl.constexpr, WANT_WEIGHTS: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """For each sorted row, whatever is wanted of: out [S, N], the row (FROM_ROWS) or its token times the routing weight; d_weights [S] in
    slot order, the inner product of the row and its token. Both are zero for dead rows. out may be ``rows``.
    """
    wide: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    live = row < tl.load(offsets + E)  # []
    slot = tl.load(order + row, mask=row < S, other=0).to(tl.int64)  # [BR]
    token = slot // top_k
    if SCALE:
        from_weights = weights + token * at_weights.row + slot % top_k * at_weights.col
        scale = tl.load(from_weights, mask=live, other=0.0).to(wide)[:, None]  # [BR]
    at_row = row.to(tl.int64)[:, None]
    total = tl.zeros([BR], wide)
    for n0 in range(0, N, BN):
        n = (n0 + tl.arange(0, BN)).to(tl.int64)[None, :]
        mask = live[:, None] & (n < N)
        if WANT_WEIGHTS or not FROM_ROWS:
            t = tl.load(tokens + token[:, None] * at_tokens.row + n * at_tokens.col, mask=mask, other=0.0).to(wide)  # [BR, BN]
        if WANT_WEIGHTS or FROM_ROWS:
            s = tl.load(rows + at_row * at_rows.row + n * at_rows.col, mask=mask, other=0.0).to(wide)  # [BR, BN]
        if WANT_WEIGHTS:
            total += tl.sum(t * s, 1)
        if WANT_OUT:
            value = s if FROM_ROWS else t
            if SCALE:
                value = value * scale
            tl.store(out + at_row * N + n, value.to(out.dtype.element_ty), mask=(row < S)[:, None] & (n < N))  # [BR, BN]
    if WANT_WEIGHTS:
        tl.store(d_weights + slot, total.to(d_weights.dtype.element_ty), mask=row < S)  # [BR]
