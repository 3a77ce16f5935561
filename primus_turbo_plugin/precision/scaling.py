"""From a block's amax to its scale: the four E8M0 rules of the MX formats, and the fp32 scale of the FP8 formats.

With b the fp32 bits of amax, E its exponent field and emax the element's largest exponent, the biased E8M0 byte is

    floor   E - emax                                             OCP MX v1.0, section 6.3
    even    exponent(b + half an element ulp) - emax             rounds amax to the element's mantissa first
    ceil    exponent(b + 0x7FFFFF) - emax                        no element saturates
    rceil   smallest power of two >= fp32(amax / max_value)      the MXFP8 training rule

clamped to [0, 254]. An all-zero block gets byte 0. NaN or Inf anywhere in a block gives 0xFF (NaN): a training run must
see it, not hide it.
"""

from __future__ import annotations

import torch

from primus_turbo_plugin.precision.formats import E8M0_MAX, E8M0_NAN, ElementType, ScaleRule

_MANTISSA_BITS = 23
_MANTISSA_MASK = 0x7FFFFF
_INF_BITS = 0x7F800000
_HALF_OF_MIN_NORMAL_BITS = 0x400000
"""fp32 bits of 2^-127, a subnormal."""
_MIN_NORMAL = 2.0**-126


def e8m0_scale(amax: torch.Tensor, rule: ScaleRule, element: ElementType) -> torch.Tensor:
    """E8M0 byte of each block.

    Args:
        amax: fp32, any shape, >= 0 or NaN: the largest magnitude of each block.
        rule: Scale rule.
        element: Element type the block is rounded to.

    Returns:
        int32, the shape of `amax`, values in [0, 254] or 255 where amax is Inf or NaN.
    """
    bits = amax.view(torch.int32)
    if rule is ScaleRule.RCEIL:
        ratio = _over_max_value(amax, element).view(torch.int32)
        byte = (ratio + _MANTISSA_MASK) >> _MANTISSA_BITS
        # A subnormal ratio has exponent field 0 for both 2^-127 and 2^-126: up to 2^-127 the byte is 0.
        byte.masked_fill_(ratio <= _HALF_OF_MIN_NORMAL_BITS, 0)
    else:
        round_up = {
            ScaleRule.FLOOR: 0,
            ScaleRule.EVEN: 1 << (_MANTISSA_BITS - 1 - element.mantissa_bits),
            ScaleRule.CEIL: _MANTISSA_MASK,
        }[rule]
        byte = ((bits + round_up) >> _MANTISSA_BITS) - element.emax
    byte.clamp_(0, E8M0_MAX)
    return byte.masked_fill_(bits >= _INF_BITS, E8M0_NAN)


def e8m0_reciprocal(byte: torch.Tensor) -> torch.Tensor:
    """2^(127 - byte) as fp32: multiplying by it divides by the scale, exactly. 0 for a NaN byte.

    No rule yields byte 254 for our element types (emax >= 2), so the result is never an fp32 subnormal.
    """
    return ((2 * 127 - byte).clamp_min_(0) << _MANTISSA_BITS).view(torch.float32)


def fp8_scale(amax: torch.Tensor, element: ElementType) -> torch.Tensor:
    """Dequantisation scale of an FP8 block: fp32(amax / max_value).

    1 where amax is 0; at least 2^-126 (an fp32 subnormal would lose bits of the scale); NaN where amax is Inf or NaN.

    Args:
        amax: fp32, any shape.
        element: Element type of the block.

    Returns:
        fp32, the shape of `amax`.
    """
    scale = _over_max_value(amax, element).clamp_min(_MIN_NORMAL)  # clamp keeps NaN
    scale.masked_fill_(amax == 0, 1.0)
    return scale.masked_fill_(amax.isinf(), float("nan"))


def _over_max_value(amax: torch.Tensor, element: ElementType) -> torch.Tensor:
    """fp32(amax / max_value), correctly rounded on every device.

    The divisor is a tensor on amax's device: by a Python number, torch on a GPU multiplies with the rounded reciprocal, and
    about half of all FP8 scales came out one ulp off (H200, torch 2.11). Near a power of two that can also move rceil's byte.
    """
    return amax / amax.new_full((), element.max_value)
