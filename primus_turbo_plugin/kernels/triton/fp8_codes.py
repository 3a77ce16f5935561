"""Device functions: four fp32 values to a word of FP8 codes (Triton).

Numerics  round to nearest even, saturating: what `rounding.round_codes` gives, bit for bit
Limits    y finite, the caller zeroes blocks that hold NaN. TARGET "sm90" and "gfx950" use their conversions, two elements an
          instruction; elsewhere portable arithmetic
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.rounding import round_codes


@triton.jit
def _convert_e4m3(y0, y1, y2, y3):
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _convert_e5m2(y0, y1, y2, y3):
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,r,r,r,r", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _convert_gfx950(y0, y1, y2, y3, META: tl.constexpr):
    """By `v_cvt_pk_{fp8,bf8}_f32`, nearest even. Whether it saturates depends on a mode, so y is clamped first."""
    top: tl.constexpr = META.max_value
    y0 = tl.minimum(tl.maximum(y0, -top), top)
    y1 = tl.minimum(tl.maximum(y1, -top), top)
    y2 = tl.minimum(tl.maximum(y2, -top), top)
    y3 = tl.minimum(tl.maximum(y3, -top), top)
    if META.mantissa == 3:
        word = tl.inline_asm_elementwise(
            """v_cvt_pk_fp8_f32 $0, $1, $2
            v_cvt_pk_fp8_f32 $0, $3, $4 op_sel:[0,0,1]""",
            "=&v,v,v,v,v", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        word = tl.inline_asm_elementwise(
            """v_cvt_pk_bf8_f32 $0, $1, $2
            v_cvt_pk_bf8_f32 $0, $3, $4 op_sel:[0,0,1]""",
            "=&v,v,v,v,v", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word


@triton.jit
def pack4_f32(y, META: tl.constexpr, TARGET: tl.constexpr):
    """A tuple of four fp32 tensors, already divided by the scale, to an int32 word of codes; element 0 in the lowest byte."""
    if TARGET == "sm90":
        if META.mantissa == 3:
            word = _convert_e4m3(y[0], y[1], y[2], y[3])
        else:
            word = _convert_e5m2(y[0], y[1], y[2], y[3])
    elif TARGET == "gfx950":
        word = _convert_gfx950(y[0], y[1], y[2], y[3], META)
    else:
        word = round_codes(y[0], None, META) | (round_codes(y[1], None, META) << 8)
        word = word | (round_codes(y[2], None, META) << 16) | (round_codes(y[3], None, META) << 24)
    return word
