"""Words of 32 bits to weights in bfloat16, in the registers where tensor cores read them.

Each function makes of words [..., 4] the weights [..., 4, 8] or [..., 4, 4] of their codes, from the lowest bits on, with the bits of
``encoding.dequantise``: each step of the program's arithmetic is one instruction that rounds as it does. Packed instructions make two
bfloat16 at once; a permutation of bytes (prmt) is a table of eight entries, and puts bytes beside constants that make numbers of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _each(instruction: str) -> str:
    """An instruction for each of the four pairs."""
    return "".join(instruction.replace("PAIR", pair) for pair in "abcd")


def _nibbles(zeros: str) -> str:
    return (
        """{
        .reg .b32 t, a, b, c, d, one, no;
        mov.b32 one, 0x3f803f80;
        mov.b32 no, 0x80008000;
        and.b32 t, $8, 0x0f0f0f0f;
        prmt.b32 a, t, 0x43434343, 0x4140;
        prmt.b32 b, t, 0x43434343, 0x4342;
        shr.u32 t, $8, 4;
        and.b32 t, t, 0x0f0f0f0f;
        prmt.b32 c, t, 0x43434343, 0x4140;
        prmt.b32 d, t, 0x43434343, 0x4342;
        """
        + _each("fma.rn.bf16x2 PAIR, PAIR, one, $9; ")
        + zeros
        + _each("fma.rn.bf16x2 PAIR, PAIR, $10, no; ")
        + """
        mov.b32 {$0, $2}, a;
        mov.b32 {$4, $6}, b;
        mov.b32 {$1, $3}, c;
        mov.b32 {$5, $7}, d;
        }"""
    )


NIBBLES: gl.constexpr = gl.constexpr(_nibbles(""))
"""Codes are the last bits of 128 + code; $9 is -128 and what codes count from, $10 the scale, both as pairs."""
NIBBLES_ZERO: gl.constexpr = gl.constexpr(_nibbles(_each("fma.rn.bf16x2 PAIR, PAIR, one, $11; ")))
"""The same; $11: the zero, negative, as a pair."""
WIDE_NIBBLES: gl.constexpr = gl.constexpr(
    """{
        .reg .b32 t, u, p;
        .reg .f32 a, b;
        and.b32 t, $8, 0x0f0f0f0f;
        shr.u32 u, $8, 4;
        and.b32 u, u, 0x0f0f0f0f;
        """
    + "".join(
        f"""
        prmt.b32 p, t, 0x4b000000, 0x754{i};
        mov.b32 a, p;
        prmt.b32 p, u, 0x4b000000, 0x754{i};
        mov.b32 b, p;
        sub.f32 a, a, $9;
        sub.f32 b, b, $9;
        sub.f32 a, a, $11;
        sub.f32 b, b, $11;
        mul.f32 a, a, $10;
        mul.f32 b, b, $10;
        cvt.rn.bf16x2.f32 p, b, a;
        mov.b32 {{${2 * i}, ${2 * i + 1}}}, p;
        """
        for i in range(4)
    )
    + "}"
)
"""In float32: codes are the last bits of 2^23 + code, $9 is 2^23 less what codes count from, $10 the scale, $11 the zero."""


def _e2m1(factors: str) -> str:
    halves = "".join(
        f"""
        prmt.b32 p, $8, 0, 0x{bytes_};
        shl.b32 t, p, 6;
        and.b32 a, t, 0x01c001c0;
        shl.b32 t, p, 4;
        and.b32 t, t, 0x80008000;
        or.b32 a, a, t;
        shl.b32 t, p, 2;
        and.b32 b, t, 0x01c001c0;
        and.b32 t, p, 0x80008000;
        or.b32 b, b, t;
        fma.rn.bf16x2 a, a, large, no;
        fma.rn.bf16x2 b, b, large, no;
        {factors}
        mov.b32 {{${4 * i}, ${4 * i + 2}}}, a;
        mov.b32 {{${4 * i + 1}, ${4 * i + 3}}}, b;
        """
        for i, bytes_ in enumerate(("1100", "3322"))
    )
    return "{ .reg .b32 t, p, a, b, no, large; mov.b32 no, 0x80008000; mov.b32 large, 0x7e807e80;" + halves + "}"


_BY = "fma.rn.bf16x2 a, a, $9, no; fma.rn.bf16x2 b, b, $9, no;"
E2M1: gl.constexpr = gl.constexpr(_e2m1(_BY))
E2M1_TWICE: gl.constexpr = gl.constexpr(_e2m1("fma.rn.bf16x2 a, a, $10, no; fma.rn.bf16x2 b, b, $10, no; " + _BY))
"""The bits of a code are the last of a bfloat16's exponent and the first of its fraction: a number 2^126 too small. $9, $10: scales."""
E4M3: gl.constexpr = gl.constexpr("""{
        .reg .b16 l, h;
        .reg .b32 p, q;
        .reg .f32 a, b, c, d;
        mov.b32 {l, h}, $4;
        cvt.rn.f16x2.e4m3x2 p, l;
        cvt.rn.f16x2.e4m3x2 q, h;
        mov.b32 {l, h}, p;
        cvt.f32.f16 a, l;
        cvt.f32.f16 b, h;
        mov.b32 {l, h}, q;
        cvt.f32.f16 c, l;
        cvt.f32.f16 d, h;
        mul.f32 a, a, $5;
        mul.f32 b, b, $5;
        mul.f32 c, c, $5;
        mul.f32 d, d, $5;
        cvt.rn.bf16x2.f32 p, b, a;
        cvt.rn.bf16x2.f32 q, d, c;
        mov.b32 {$0, $1}, p;
        mov.b32 {$2, $3}, q;
        }""")
S8: gl.constexpr = gl.constexpr("""{
        .reg .b32 w, p, q;
        .reg .f32 a, b, c, d;
        xor.b32 w, $4, 0x80808080;
        prmt.b32 p, w, 0x4b000000, 0x7540;
        mov.b32 a, p;
        prmt.b32 p, w, 0x4b000000, 0x7541;
        mov.b32 b, p;
        prmt.b32 p, w, 0x4b000000, 0x7542;
        mov.b32 c, p;
        prmt.b32 p, w, 0x4b000000, 0x7543;
        mov.b32 d, p;
        sub.f32 a, a, 0f4b000080;
        sub.f32 b, b, 0f4b000080;
        sub.f32 c, c, 0f4b000080;
        sub.f32 d, d, 0f4b000080;
        mul.f32 a, a, $5;
        mul.f32 b, b, $5;
        mul.f32 c, c, $5;
        mul.f32 d, d, $5;
        cvt.rn.bf16x2.f32 p, b, a;
        cvt.rn.bf16x2.f32 q, d, c;
        mov.b32 {$0, $1}, p;
        mov.b32 {$2, $3}, q;
        }""")
"""2^23 + (b + 128) is a float32 whose last byte is b + 128."""
EIGHT_POWER: gl.constexpr = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
EIGHT: gl.constexpr = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r")
EIGHT_ZERO: gl.constexpr = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r")
EIGHT_WIDE: gl.constexpr = gl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f")
FOUR: gl.constexpr = gl.constexpr("=h,=h,=h,=h,r,f")


@gluon.jit
def twice(v):
    """bfloat16 numbers as pairs of themselves, int32."""
    bits = v.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def power(byte, coding: gl.constexpr):
    """2^(b - 127) of bytes, float32; of 255 what ``encoding`` says."""
    b = byte.to(gl.int32)
    v = gl.where(b == 0, 1 << 22, b << 23).to(gl.float32, bitcast=True)
    if coding.SCALE == "e8m0":
        v = gl.where(b == 255, float("nan"), v)
    return v


@gluon.jit
def four(a, b, c, d):
    """Tensors of bits side by side along two new dimensions, bfloat16."""
    return gl.join(gl.join(a, c), gl.join(b, d)).to(gl.bfloat16, bitcast=True)


@gluon.jit
def eight(a, b, c, d, e, f, g, h):
    """Eight tensors of bits side by side along three new dimensions, bfloat16."""
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    return gl.join(even, odd).to(gl.bfloat16, bitcast=True)


@gluon.jit
def as_number(s, coding: gl.constexpr):
    """Scales as they are held, float32."""
    if coding.SCALE == "":
        v = s.to(gl.float32)
    else:
        v = power(s, coding)
    return v


@gluon.jit
def scale_of(s, coding: gl.constexpr):
    """Scales as they are held, float32, in the arithmetic of the program."""
    if coding.SCALE == "":
        v = s.to(coding.ARITH).to(gl.float32)
    else:
        v = power(s, coding).to(coding.ARITH).to(gl.float32)
    return v


@gluon.jit
def eight_of(ASM: gl.constexpr, FORM: gl.constexpr, args):
    """Eight numbers of 16 bits by instructions written out. (Types in a constant of their own are no types to Triton 3.8.)"""
    return gl.inline_asm_elementwise(
        ASM, FORM, args, dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1
    )


@gluon.jit
def four_of(ASM: gl.constexpr, FORM: gl.constexpr, args):
    """The same of four."""
    return gl.inline_asm_elementwise(ASM, FORM, args, dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1)


@gluon.jit
def unpacked(v, s, z, coding: gl.constexpr, CROSSED: gl.constexpr = False):
    """Weights [..., 4, 2, 2, 2] or [..., 4, 2, 2] of words v [..., 4], with scales and zeros s, z [..., 1] as they are held.

    CROSSED: eight in the order 0, 2, 1, 3, 4, 6, 5, 7, where a code is beside that of the next byte, as packed instructions have them.
    """
    KIND: gl.constexpr = coding.KIND
    if KIND == "e2m1":
        by = twice(power(s, coding))  # [..., 1]
        if coding.SCALE == "ldexp":  # the largest power is no number of its own
            by = twice(power(gl.minimum(s.to(gl.int32), 254), coding))
            more = twice(gl.where(s.to(gl.int32) == 255, 2.0, 1.0))
            a, b, c, d, e, f, g, h = eight_of(E2M1_TWICE, EIGHT, (v, by, more))
        else:
            a, b, c, d, e, f, g, h = eight_of(E2M1, EIGHT_POWER, (v, by))
    elif KIND == "range" and coding.WIDE:
        by = scale_of(s, coding)  # [..., 1]
        base = gl.zeros_like(by) + (8388608.0 - coding.FIRST)
        less = z.to(gl.float32) if coding.ZERO else gl.zeros_like(by)
        a, b, c, d, e, f, g, h = eight_of(WIDE_NIBBLES, EIGHT_WIDE, (v, base, by, less))
    elif KIND == "range":
        by = twice(scale_of(s, coding))  # [..., 1]
        first = twice(gl.zeros_like(scale_of(s, coding)) + (coding.FIRST - 128.0))
        if coding.ZERO:
            less = twice(z) ^ (0x80008000 - (1 << 32))
            a, b, c, d, e, f, g, h = eight_of(NIBBLES_ZERO, EIGHT_ZERO, (v, first, by, less))
        else:
            a, b, c, d, e, f, g, h = eight_of(NIBBLES, EIGHT, (v, first, by))
    elif KIND == "e4m3":
        a, b, c, d = four_of(E4M3, FOUR, (v, scale_of(s, coding)))
    else:
        gl.static_assert(KIND == "s8")
        a, b, c, d = four_of(S8, FOUR, (v, scale_of(s, coding)))
    if coding.PER == 4:
        w = four(a, b, c, d)  # [..., 4, 2, 2]
    elif CROSSED and coding.HIGH_FIRST:
        w = eight(b, d, a, c, f, h, e, g)
    elif CROSSED:
        w = eight(a, c, b, d, e, g, f, h)
    elif coding.HIGH_FIRST:
        w = eight(b, a, d, c, f, e, h, g)
    else:
        w = eight(a, b, c, d, e, f, g, h)  # [..., 4, 2, 2, 2]
    return w
