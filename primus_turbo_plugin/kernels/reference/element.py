"""Rounding fp32 values to the codes of a small float, and packing the codes (torch reference).

Math      step = 2^(e - m), e = the value's exponent but at least the smallest normal one, m = mantissa bits
          code = round(|v| / step) + (e - e_min) * 2^m,  with the sign bit in front;  |v| is clamped to the largest value first
Layout    FP4: two codes a byte along the contraction axis, the even element in the low nibble
Numerics  nearest: ties to even.  stochastic: up with probability (|v| / step - floor), in units of 2^-24
"""

from __future__ import annotations

import struct

import torch

from primus_turbo_plugin.precision.formats import ElementType

_FP32_MANTISSA_BITS = 23
_MAGNITUDE_MASK = 0x7FFFFFFF
_EXPONENT_MASK = 0x7F800000


def round_to_codes(v: torch.Tensor, element: ElementType, words: torch.Tensor | None = None) -> torch.Tensor:
    """Codes of v. Overwrites v.

    Args:
        v: fp32, contiguous, any shape. Inf and NaN give the largest value.
        element: Element type.
        words: int64, the shape of v, 32 random bits each, for stochastic rounding; None rounds to nearest even.

    Returns:
        uint8, the shape of v, one code a byte.
    """
    shift = _FP32_MANTISSA_BITS - element.mantissa_bits
    smallest_normal = (128 - element.bias) << _FP32_MANTISSA_BITS
    largest = struct.unpack("<i", struct.pack("<f", element.max_value))[0]
    bits = v.view(torch.int32)
    sign = (bits >> (32 - element.bits)).bitwise_and_(1 << (element.bits - 1))
    # Non-negative floats order like their bits, so an integer clamp saturates NaN and Inf too.
    magnitude = bits.bitwise_and_(_MAGNITUDE_MASK).clamp_max_(largest)
    exponent = (magnitude & _EXPONENT_MASK).clamp_min_(smallest_normal)
    if words is None:
        count = _round_nearest(v, exponent, shift)
    else:
        count = _round_stochastic(v, exponent, element.mantissa_bits, words)
    count += exponent.sub_(smallest_normal).bitwise_right_shift_(shift)
    return count.bitwise_or_(sign).to(torch.uint8)


def _round_nearest(magnitude: torch.Tensor, exponent: torch.Tensor, shift: int) -> torch.Tensor:
    """round(magnitude / step), ties to even, int32: after adding 2^shift * 2^e the ulp of an fp32 number is the step."""
    magic = exponent + (shift << _FP32_MANTISSA_BITS)
    return magnitude.add_(magic.view(torch.float32)).view(torch.int32).sub_(magic)


def _round_stochastic(
    magnitude: torch.Tensor, exponent: torch.Tensor, mantissa_bits: int, words: torch.Tensor
) -> torch.Tensor:
    """floor(magnitude / step), plus one with the probability of the fraction, int32."""
    inverse_step = ((254 + mantissa_bits) << _FP32_MANTISSA_BITS) - exponent
    steps = magnitude.mul_(inverse_step.view(torch.float32))
    floor = steps.floor()
    uniform = (words >> 8).to(torch.float32).mul_(2.0**-24)
    return floor.to(torch.int32).add_(uniform < steps.sub_(floor))


def pack_fp4(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Two 4-bit codes a byte along `dim` of a contiguous uint8 `[rows, cols]`; the even element in the low nibble."""
    if dim == 0:
        return codes[0::2] | (codes[1::2] << 4)
    pairs = codes.view(torch.int16)  # little-endian: even + 256 * odd
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """One code a byte: uint8 `[rows, cols / 2]` to `[rows, cols]`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
