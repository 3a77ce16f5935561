"""Device functions: one block of 32 elements that a thread holds, from bf16 words to codes and scale (Gluon).

Layout    A thread's block is a tuple of tensors, one a word: 16 words along a row (32 columns of one token), or 32 words down the
          tokens (two columns of 32 tokens). Rotation, amax, rounding and packing then move nothing between threads.
Numerics  butterflies in fp32 in the reference's order; same bits as kernels/reference/quantize.py
"""

# Triton's compiler grows tuples by concatenation only:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.triton.fp4_codes import (
    high_half,
    low_half,
    max_of_halves,
    pack8_bf16,
    pack8_f32,
    scale_of_amax,
)
from primus_turbo_plugin.kernels.triton.fp8_codes import pack4_f32
from primus_turbo_plugin.kernels.triton.rotation import rotate_stages
from primus_turbo_plugin.kernels.triton.rounding import abs_bits, divide, mx_scale_byte, philox, round_stochastic


@gluon.jit
def split_last(t, LOG: gl.constexpr):
    """`[a, b, 2^LOG]`, the last axis within a thread, to a tuple of 2^LOG tensors `[a, b]`."""
    parts = (t,)
    for k in gl.static_range(LOG):
        out = ()
        for i in gl.static_range(1 << k):
            p = parts[i]
            p = gl.reshape(p, (p.shape[0], p.shape[1], 2, p.shape[2] // 2))
            low, high = gl.split(gl.permute(p, (0, 1, 3, 2)))
            out = out + (low, high)
        parts = out
    out = ()
    for i in gl.static_range(1 << LOG):
        out = out + (gl.reshape(parts[i], (parts[i].shape[0], parts[i].shape[1])),)
    return out


@gluon.jit
def join_last(parts, LOG: gl.constexpr):
    """Inverse of `split_last`: `[a, b, 2^LOG]`."""
    for k in gl.static_range(LOG):
        out = ()
        for i in gl.static_range(1 << (LOG - k - 1)):
            out = out + (gl.join(parts[i], parts[i + (1 << (LOG - k - 1))]),)
        parts = out
    return gl.reshape(parts[0], (parts[0].shape[0], parts[0].shape[1], 1 << LOG))


@gluon.jit
def row_values(words):
    """16 words along a row to 32 fp32 values."""
    values = ()
    for i in gl.static_range(16):
        values = values + (low_half(words[i]), high_half(words[i]))
    return values


@gluon.jit
def column_values(words, HIGH: gl.constexpr):
    """The lower or the upper column of 32 words down the tokens, fp32."""
    values = ()
    for i in gl.static_range(32):
        if HIGH:
            values = values + (high_half(words[i]),)
        else:
            values = values + (low_half(words[i]),)
    return values


@gluon.jit
def tree_sum(values):
    """Sum of 32 tensors by pairs of neighbours. The butterflies of a rotation without signs compute it anyway."""
    for stage in gl.static_range(5):
        out = ()
        for i in gl.static_range(16 >> stage):
            out = out + (values[2 * i] + values[2 * i + 1],)
        values = out
    return values[0]


@gluon.jit
def amax_of_words(words, TARGET: gl.constexpr):
    """bf16 bits of the largest magnitude of each half of a tuple of words; NaN above Inf above every number."""
    N: gl.constexpr = len(words)
    if TARGET == "sm90":
        amax = words[0]
        for i in gl.static_range(1, N):
            amax = max_of_halves(amax, words[i])
        amax = amax & 0x7FFF7FFF
    else:
        low = words[0] & 0x7FFF
        high = words[0] & 0x7FFF0000
        for i in gl.static_range(1, N):
            low = gl.maximum(low, words[i] & 0x7FFF)
            high = gl.maximum(high, words[i] & 0x7FFF0000)
        amax = low | high
    return amax


@gluon.jit
def upper(pair):
    """The upper half of a word, as a number."""
    return (pair >> 16) & 0xFFFF


@gluon.jit
def _max_of_all(values, TARGET: gl.constexpr):
    """fp32 bits of the largest magnitude of a tuple; NaN above Inf above every number."""
    N: gl.constexpr = len(values)
    if TARGET == "generic":
        amax = abs_bits(values[0])
        for i in gl.static_range(1, N):
            amax = gl.maximum(amax, abs_bits(values[i]))
    else:  # one instruction has |x| as an operand and keeps NaN
        largest = gl.abs(values[0])
        for i in gl.static_range(1, N):
            largest = gl.maximum(largest, gl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
        amax = abs_bits(largest)
    return amax


@gluon.jit
def rotated(values, signs_ptr, META: gl.constexpr, TARGET: gl.constexpr):
    """(32 fp32 values of a block, rotated; bits of their amax). H16 without its factor 1/4: `codes_of_values` applies it.

    The last butterfly makes a + b and a - b, the larger of which in magnitude is |a| + |b|, rounded alike: the amax of two values
    takes one addition and one maximum.
    """
    if META.random_signs:
        signed = ()
        for i in gl.static_range(32):
            signed = signed + (values[i] * gl.load(signs_ptr + i % META.hadamard),)
        values = signed
    SIZE: gl.constexpr = META.hadamard
    sums = ()
    out = ()
    for run in gl.static_range(32 // SIZE):
        half = rotate_stages(values[run * SIZE : (run + 1) * SIZE], META.log2_hadamard - 1)
        for i in gl.static_range(SIZE // 2):
            sums = sums + (gl.abs(half[i]) + gl.abs(half[i + SIZE // 2]),)
        for i in gl.static_range(SIZE // 2):
            out = out + (half[i] + half[i + SIZE // 2],)
        for i in gl.static_range(SIZE // 2):
            out = out + (half[i] - half[i + SIZE // 2],)
    amax = abs_bits(_max_of_all(sums, TARGET).to(gl.float32, bitcast=True) * META.rotation_factor)
    if SIZE == 32:
        scaled = ()
        for i in gl.static_range(32):
            scaled = scaled + (out[i] * META.rotation_factor,)
        out = scaled
    return out, amax


@gluon.jit
def bf16_scale_byte(amax, META: gl.constexpr):
    """E8M0 byte (int32) of a block from the bits of its bf16 amax; 0xFF where it is Inf or NaN."""
    byte = gl.minimum(gl.maximum(((amax + META.bf16_round_up) >> 7) - META.emax, 0), 254)
    return gl.where(amax >= 0x7F80, 0xFF, byte)


@gluon.jit
def _scaled(values, scale, META: gl.constexpr):
    """(32 values divided by the scale, whether they are numbers). `scale` is an E8M0 byte (int32) or fp32."""
    out = ()
    if META.is_mx:
        inverse = (gl.maximum(254 - scale, 0) << 23).to(gl.float32, bitcast=True)
        if META.hadamard == 16:
            # A power of two, and a sum of bf16 values is a multiple of 2^-133: exact here as well as before.
            inverse = inverse * META.rotation_factor
        for i in gl.static_range(32):
            out = out + (values[i] * inverse,)
        is_number = scale != 255
    else:
        # Small scales and their values are multiplied by 2^64, so that no term of the division underflows.
        lift = gl.where(scale < 8.6736174e-19, 1.8446744073709552e19, 1.0)  # 2^-60, 2^64
        divisor = scale * lift
        reciprocal = gl.div_rn(1.0, divisor)
        for i in gl.static_range(32):
            out = out + (divide(values[i] * lift, divisor, reciprocal),)
        is_number = scale == scale
    return out, is_number


@gluon.jit
def codes_of_values(values, scale, draw, META: gl.constexpr, TARGET: gl.constexpr):
    """32 values to 4 (FP4) or 8 (FP8) words of codes.

    Args:
        values: fp32, rotated.
        scale: E8M0 byte (int32) or fp32.
        draw: For stochastic rounding (counter of the first four elements, int64; key words k0, k1, c2, c3).
    """
    y, is_number = _scaled(values, scale, META)
    PER_WORD: gl.constexpr = 4 * META.codes_per_byte
    words = ()
    for q in gl.static_range(32 // PER_WORD):
        if META.stochastic:
            part = ()
            for g in gl.static_range(PER_WORD // 4):
                bits = philox(draw[0] + (q * (PER_WORD // 4) + g), draw[1], draw[2], draw[3], draw[4])
                for i in gl.static_range(4):
                    part = part + (round_stochastic(y[q * PER_WORD + g * 4 + i], bits[i], META, TARGET),)
        else:
            part = y[q * PER_WORD : (q + 1) * PER_WORD]
        if META.codes_per_byte == 2:
            word = pack8_f32(part, META.bf16_round_up == 0 and not META.stochastic, TARGET)
        else:
            word = pack4_f32(part, META, TARGET)
        words = words + (gl.where(is_number, word, 0),)
    return words


@gluon.jit
def codes_of_words(words, amax, META: gl.constexpr, TARGET: gl.constexpr):
    """(4 words of FP4 codes, E8M0 byte) of 16 words along a row, by arithmetic on pairs of bf16."""
    inverse, keep, byte = scale_of_amax(amax | (amax << 16), META.bf16_round_up, TARGET)
    codes = ()
    for q in gl.static_range(4):
        word = pack8_bf16(
            words[4 * q], words[4 * q + 1], words[4 * q + 2], words[4 * q + 3], inverse, keep,
            META.bf16_round_up == 0, TARGET,
        )  # fmt: skip
        codes = codes + (word,)
    return codes, byte


@gluon.jit
def scale_of_block(amax, META: gl.constexpr):
    """E8M0 byte of a block from the fp32 bits of its rotated amax."""
    return mx_scale_byte(amax, META)
