"""Device functions: rounding to E2M1 and packing eight codes into a 32-bit word, counted in instructions (Triton).

Math      c = sign(y) 2^max(exponent(y), 0);  r = 2^22 c + y: one fp32 addition whose last bit is E2M1's step in y's binade, so it
          rounds to nearest even. r's bits hold the number of steps k (bits 0-2) and the exponent (bits 23-24), and the code is
          k + 2 exponent, below the sign: r (2^28 + 2^6 + 1) + 2^29 brings exactly sign and code into the top four bits
          (bf16 pairs: 2^6 c, bits 0-2 and 7-8, and the same product for both halves of a word)
Cost      per element: maximum, and, fma, multiply-add, funnel shift; for bf16 pairs half of that (two elements an instruction)
Numerics  |y| < 7 unless the scale rule is FLOOR (EVEN: amax < 1.75 * 2^(emax + 1)), so nothing rounds past 6; FLOOR clamps
Limits    y must be finite; the caller zeroes blocks that hold NaN. TARGET: "sm90" uses PTX for packed bf16, "gfx950" the hardware
          conversion, "generic" plain Triton; all give the same bits
"""

from __future__ import annotations

import triton
import triton.language as tl


def _pack8_asm(clamp: bool) -> str:
    """PTX of `pack8_bf16`: `_top_nibble` on pairs. bf16 has 8 significant bits, so r = 2^6 c + y.

    Operands: $1-$4 words of two bf16, $5 the inverse scale in both halves, $6 what to keep of the result. Pairs (0,4) (1,5) (2,6)
    (3,7): the low halves give the low four nibbles. The addend lacks 2^25 in the upper half, to make room for the low half's
    product, which spills into the upper one's low 12 bits.
    """
    pairs = range(4)
    lines = [".reg .b32 y0, y1, y2, y3, t0, t1, t2, t3, one, shift, limit;"]
    lines += ["mov.b32 one, 0x3F803F80;", "mov.b32 shift, 0x42804280;", "mov.b32 limit, 0x40C040C0;"]
    lines += ["prmt.b32 y0, $1, $3, 0x5410;", "prmt.b32 y1, $1, $3, 0x7632;"]
    lines += ["prmt.b32 y2, $2, $4, 0x5410;", "prmt.b32 y3, $2, $4, 0x7632;"]
    lines += [f"mul.rn.bf16x2 y{i}, y{i}, $5;" for i in pairs]
    lines += [f"min.xorsign.abs.bf16x2 y{i}, y{i}, limit;" for i in pairs if clamp]
    lines += [f"max.xorsign.abs.bf16x2 t{i}, y{i}, one;" for i in pairs]
    lines += [f"and.b32 t{i}, t{i}, 0xFF80FF80;" for i in pairs]
    lines += [f"fma.rn.bf16x2 y{i}, t{i}, shift, y{i};" for i in pairs]
    lines += [f"mad.lo.u32 y{i}, y{i}, 0x1041, 0x1E002000;" for i in pairs]
    for i in (1, 2, 3):  # (y0 >> 4 & mask) | (yi & ~mask)
        lines += ["shr.u32 y0, y0, 4;", f"lop3.b32 y0, y0, y{i}, 0x0FFF0FFF, 0xE4;"]
    return "{\n" + "\n".join([*lines, "and.b32 $0, y0, $6;"]) + "\n}"


_PACK8 = tl.constexpr(_pack8_asm(clamp=False))
_PACK8_CLAMPED = tl.constexpr(_pack8_asm(clamp=True))


@triton.jit
def _max_magnitude_f32(y):
    """sign(y) * max(|y|, 1), as bits."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.f32 $0, $1, 0f3F800000;", "=r,r", [y.to(tl.int32, bitcast=True)],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _top_nibble(y, CLAMP: tl.constexpr, TARGET: tl.constexpr):
    """int32 whose top four bits are the E2M1 code of y."""
    if CLAMP:
        y = tl.minimum(tl.maximum(y, -6.0), 6.0)
    if TARGET == "sm90":
        anchor = _max_magnitude_f32(y) & -8388608  # sign and exponent
    else:
        magnitude = tl.maximum(tl.abs(y), 1.0).to(tl.int32, bitcast=True)
        anchor = (magnitude & 0x7F800000) | (y.to(tl.int32, bitcast=True) & -2147483648)
    r = tl.fma(anchor.to(tl.float32, bitcast=True), 4194304.0, y).to(tl.int32, bitcast=True)
    if TARGET == "sm90":
        return r * 0x10000041 + 0x20000000
    return (r << 28) + (r << 6) + r + 0x20000000


@triton.jit
def _convert_gfx950(y):
    """Eight scaled values to a word by the hardware conversion (it saturates and rounds to nearest even)."""
    return tl.inline_asm_elementwise(
        """v_cvt_scalef32_pk_fp4_f32 $0, $1, $2, 1.0
        v_cvt_scalef32_pk_fp4_f32 $0, $3, $4, 1.0 op_sel:[0,0,1,0]
        v_cvt_scalef32_pk_fp4_f32 $0, $5, $6, 1.0 op_sel:[0,0,0,1]
        v_cvt_scalef32_pk_fp4_f32 $0, $7, $8, 1.0 op_sel:[0,0,1,1]""",
        "=&v,v,v,v,v,v,v,v,v", [y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7]],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pack8_f32(y, CLAMP: tl.constexpr, TARGET: tl.constexpr):
    """A tuple of eight fp32 tensors, already divided by the scale, to an int32 word of codes; element 0 in the lowest nibble."""
    if TARGET == "gfx950":
        word = _convert_gfx950(y)
    else:
        word = (_top_nibble(y[7], CLAMP, TARGET) >> 28) & 0xF
        for i in tl.static_range(1, 8):
            word = (word << 4) | ((_top_nibble(y[7 - i], CLAMP, TARGET) >> 28) & 0xF)
    return word


@triton.jit
def low_half(word):
    """The even element of a word of two bf16, as fp32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(word):
    """The odd element of a word of two bf16, as fp32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def max_of_halves(a, b):
    """Largest magnitude of each half of two words of two bf16, sign bits undefined; NaN wins (PTX, sm_90)."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def scale_of_amax(amax, ROUND_UP: tl.constexpr, TARGET: tl.constexpr):
    """(inverse scale as bf16 bits in both halves, mask: all ones for numbers and 0 for Inf or NaN, E8M0 byte), all int32.

    Args:
        amax: bf16 bits of the block's amax, in both halves; NaN is above Inf above every number.
        ROUND_UP: What the scale rule adds to the amax's bf16 bits.
        TARGET: See the module.
    """
    # E, the exponent field of the rounded amax: the byte is E - 2, at least 0; the inverse scale has the field 254 - byte.
    both: tl.constexpr = ROUND_UP * 0x00010001
    inverse = -2147450880 - ((amax + both) & 0x7F807F80)  # 0x80008000
    if TARGET == "sm90":
        inverse = tl.inline_asm_elementwise(
            "{ .reg .b32 top; mov.b32 top, 0x7F007F00; min.u16x2 $0, $1, top; }", "=r,r", [inverse],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        inverse = tl.minimum(inverse & 0xFFFF, 0x7F00) * 0x00010001
    is_number = (amax & 0x7FFF) < 0x7F80
    byte = tl.where(is_number, 254 - ((inverse >> 7) & 0xFF), 0xFF)
    return inverse, tl.where(is_number, -1, 0), byte


@triton.jit
def pack8_bf16(w0, w1, w2, w3, inverse, keep, CLAMP: tl.constexpr, TARGET: tl.constexpr):
    """Four words of two bf16 to a word of eight codes.

    Args:
        w0: Elements 0 and 1; w1, w2, w3 follow.
        inverse: As `scale_of_amax`.
        keep: As `scale_of_amax`: the codes of a block that holds Inf or NaN are 0.
        CLAMP: The scale rule lets values reach past 6.
        TARGET: See the module.
    """
    if TARGET == "sm90":
        asm: tl.constexpr = _PACK8_CLAMPED if CLAMP else _PACK8
        codes = tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r,r,r", [w0, w1, w2, w3, inverse, keep], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        s = low_half(inverse)
        y = (
            low_half(w0) * s, high_half(w0) * s, low_half(w1) * s, high_half(w1) * s,
            low_half(w2) * s, high_half(w2) * s, low_half(w3) * s, high_half(w3) * s,
        )  # fmt: skip
        codes = pack8_f32(y, CLAMP, TARGET) & keep
    return codes
