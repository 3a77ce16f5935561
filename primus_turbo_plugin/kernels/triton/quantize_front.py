"""Device functions: what is computed in front of a quantisation, from loaded words to words of bf16 (Gluon).

Math      rms_norm  y = (x * rstd) * gamma, gamma = weight or 1 + weight
          swiglu    y = silu(gate) * up, gate the first half of x's columns
Numerics  fp32 multiplications and additions one by one (compile with enable_fp_fusion=False), y rounded to bf16 once
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.triton.fp4_codes import high_half, low_half


class FrontMeta(NamedTuple):
    """Compile-time description of a front.

    Attributes:
        kind: `rms_norm` or `swiglu`.
        zero_centered: gamma is 1 + weight.
    """

    kind: str
    zero_centered: bool = False


@gluon.jit
def _round_to_word(low, high, TARGET: gl.constexpr):
    """Two fp32 tensors to words of two bf16."""
    if TARGET == "sm90":
        word = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        even = low.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
        odd = high.to(gl.bfloat16).to(gl.uint16, bitcast=True).to(gl.int32)
        word = even | (odd << 16)
    return word


@gluon.jit
def _silu(g):
    """g / (1 + exp(-g)), the steps of `kernels.reference.fused.silu`: only multiplications, additions and integer arithmetic."""
    t = gl.minimum(gl.maximum(g * -1.4426950408889634, -126.0), 126.0)
    shifted = t + 12582912.0  # 1.5 * 2^23: rounds t to an integer, in the low bits
    f = t - (shifted - 12582912.0)
    p = f * 0.0013266970636323094 + 0.009675459936261177
    p = p * f + 0.05550742521882057
    p = p * f + 0.24022121727466583
    p = p * f + 0.6931469440460205
    p = p * f + 1.0000001192092896
    power = (((shifted.to(gl.int32, bitcast=True) - 0x4B400000) + 127) << 23).to(gl.float32, bitcast=True)
    denominator = p * power + 1.0
    r = (0x7EF311C7 - denominator.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    for _ in gl.static_range(3):
        r = r * (2.0 - denominator * r)
    return g * r


@gluon.jit
def norm_words(x, rstd, even, odd, FRONT: gl.constexpr, TARGET: gl.constexpr):
    """RMS norm of words of bf16, `rstd [tokens, 1]`, weights of the even and odd columns `[1, words]`."""
    if FRONT.zero_centered:
        even = even + 1.0
        odd = odd + 1.0
    return _round_to_word(low_half(x) * rstd * even, high_half(x) * rstd * odd, TARGET)


@gluon.jit
def swiglu_words(gate, up, TARGET: gl.constexpr):
    """silu(gate) * up of words of bf16."""
    return _round_to_word(_silu(low_half(gate)) * low_half(up), _silu(high_half(gate)) * high_half(up), TARGET)
