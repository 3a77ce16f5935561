"""Device functions: from fp32 values to the codes of a small float, and from an amax to a scale (Triton).

Math      With e the exponent of max(|v|, smallest normal) and m the element's mantissa bits, 2^(e + 23 - m) + |v| has its last
          bit at the element's step in v's binade, so that one fp32 addition rounds to nearest even at the right place,
          subnormals included. Its low bits are the number of steps k; the code is k + (e - emin) * 2^m.
Numerics  Exact: every multiplication is by a power of two, the only rounding is that addition. Same bits as kernels/reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

_EXPONENT = tl.constexpr(0x7F800000)
_NAN_BYTE = tl.constexpr(0xFF)


@triton.jit
def abs_bits(v):
    """Bits of |v| as int32: ordered like |v|, with NaN above Inf above every number."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def mx_scale_byte(amax_bits, META: tl.constexpr):
    """E8M0 byte (int32) of a block from the bits of its amax; 0xFF where the amax is Inf or NaN."""
    if META.rceil:
        ratio = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), META.max_value).to(tl.int32, bitcast=True)
        # A subnormal ratio has exponent field 0 for both 2^-127 and 2^-126: up to 2^-127 the byte is 0.
        byte = tl.where(ratio <= 0x400000, 0, (ratio + 0x7FFFFF) >> 23)
    else:
        byte = ((amax_bits + META.round_up) >> 23) - META.emax
    byte = tl.minimum(tl.maximum(byte, 0), 254)
    return tl.where(amax_bits >= _EXPONENT, _NAN_BYTE, byte)


@triton.jit
def mx_reciprocal(byte):
    """2^(127 - byte) as fp32; 0 for a NaN byte."""
    return (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_block_scale(amax_bits, META: tl.constexpr):
    """fp32 scale amax / max: 1 for amax 0, at least 2^-126, NaN where the amax is Inf or NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, META.max_value), 1.1754943508222875e-38)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    return tl.where(amax_bits >= _EXPONENT, float("nan"), scale)


@triton.jit
def divide(v, divisor, reciprocal):
    """v / divisor, rounded to nearest even, from the correctly rounded reciprocal: one step of Markstein's correction.

    Correct for every v of 8 significant bits (a bf16 number), found by trying all 2^30 pairs of significands, as long as no term
    underflows. So written, it keeps the sign of a zero: the residual of -0 is +0, and +0 * -reciprocal + -0 is -0. (Times -1 is a
    negation; a minus sign is 0 - x to Triton, which turns +0 into +0.)
    """
    quotient = v * reciprocal
    return tl.fma(tl.fma(quotient, divisor, v * -1.0), reciprocal * -1.0, quotient)


@triton.jit
def philox(counter, k0, k1, c2, c3):
    """Philox4x32-10 of (lo(counter), hi(counter), c2, c3): four uint32 tensors.

    Products as 64-bit integers: one wide multiplication where `tl.philox_impl` has a high and a low one.
    """
    x0 = (counter & 0xFFFFFFFF).to(tl.uint32)
    x1 = (counter >> 32).to(tl.uint32)
    zero = x0 & 0
    x2 = zero + c2.to(tl.uint32)
    x3 = zero + c3.to(tl.uint32)
    key0 = k0.to(tl.uint32)
    key1 = k1.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = x0.to(tl.uint64) * 0xD2511F53
        p1 = x2.to(tl.uint64) * 0xCD9E8D57
        x0 = (p1 >> 32).to(tl.uint32) ^ x1 ^ key0
        x1 = p1.to(tl.uint32)
        x2 = (p0 >> 32).to(tl.uint32) ^ x3 ^ key1
        x3 = p0.to(tl.uint32)
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def philox_words4(counter, k0, k1, c2, c3):
    """Words of elements 4 c, 4 c + 1, 4 c + 2, 4 c + 3 for each counter c (int64): uint32, a last axis of 4 is added."""
    w0, w1, w2, w3 = philox(counter, k0, k1, c2, c3)
    pairs = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(pairs, counter.shape + [4])  # noqa: RUF005


_ADD_ANCHOR = tl.constexpr({m: f"fma.rz.f32 $0, $1, 0f{0x3F800000 + (23 - m << 23):08X}, $2;" for m in (1, 2, 3)})
"""binade * 2^(23 - m) + magnitude, toward zero (PTX), by mantissa bits m."""


@triton.jit
def round_stochastic(y, words, META: tl.constexpr, TARGET: tl.constexpr):
    """y rounded to a number of the format, by random bits: `round_codes`'s value, without conversions between fp32 and integers.

    Adding 2^(e + 23 - m), which has y's sign, leaves the multiple of the step in the low bits; toward zero that is the lower
    neighbour. The rest is compared with chance * step: all exact.

    Args:
        y: fp32, without NaN.
        words: Random bits (uint32) of each element.
        META: The copy's `CopyMeta`.
        TARGET: "sm90" has an addition that rounds toward zero.
    """
    magnitude = tl.minimum(tl.abs(y), META.max_value)
    smallest: tl.constexpr = META.emin << 23
    binade = tl.maximum(magnitude.to(tl.int32, bitcast=True), smallest) & 0x7F800000
    binade = binade.to(tl.float32, bitcast=True)
    anchor: tl.constexpr = 2.0 ** (23 - META.mantissa)
    unit: tl.constexpr = 2.0**-META.mantissa
    if TARGET == "sm90":
        asm: tl.constexpr = _ADD_ANCHOR[META.mantissa]
        shifted = tl.inline_asm_elementwise(asm, "=f,f,f", [binade, magnitude], dtype=tl.float32, is_pure=True, pack=1)
        lower = tl.fma(binade, -anchor, shifted)
    else:
        lower = tl.fma(binade, -anchor, tl.fma(binade, anchor, magnitude))
        lower = tl.where(lower > magnitude, tl.fma(binade, -unit, lower), lower)
    chance = (words >> 8).to(tl.int32).to(tl.float32) * (binade * (unit * 5.9604644775390625e-08))
    value = tl.where(chance < magnitude - lower, tl.fma(binade, unit, lower), lower)
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def round_codes(v, words, META: tl.constexpr):
    """Codes (int32) of v, sign included; saturates.

    Args:
        v: fp32, without NaN.
        words: Random bits (uint32) of each element, or None to round to nearest even.
        META: The copy's `CopyMeta`.
    """
    bits = v.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(v), META.max_value)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, META.emin)
    if words is None:
        anchor = ((exponent + (23 - META.mantissa)) << 23).to(tl.float32, bitcast=True)
        steps = (anchor + magnitude).to(tl.int32, bitcast=True) & ((4 << META.mantissa) - 1)
    else:
        scaled = magnitude * ((254 + META.mantissa - exponent) << 23).to(tl.float32, bitcast=True)
        floor = tl.floor(scaled)
        chance = (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        steps = floor.to(tl.int32) + tl.where(chance < scaled - floor, 1, 0)
    sign = (bits >> 31) & (8 if META.codes_per_byte == 2 else 128)
    return (steps + ((exponent - META.emin) << META.mantissa)) | sign
