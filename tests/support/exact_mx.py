"""MX quantisation in exact rational arithmetic, one element at a time: slow, obvious, and sharing no code with the package.

Written from the definitions (OCP MX v1.0 and the scale rules' meaning), not from their bit tricks. A value is a Python float that
holds an fp32 number exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

# Non-negative values in code order.
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    (1 + Fraction(m, 8)) * Fraction(2) ** e for e in range(-6, 9) for m in range(8)
]
E4M3 = E4M3[:-1]  # the last code of E4M3 is NaN
E5M2 = [Fraction(m, 65536) for m in range(4)] + [
    (1 + Fraction(m, 4)) * Fraction(2) ** e for e in range(-14, 16) for m in range(4)
]
VALUES = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}
MANTISSA_BITS = {"e2m1": 1, "e4m3": 3, "e5m2": 2}
SIGN = {"e2m1": 8, "e4m3": 128, "e5m2": 128}


def floor_log2(value: Fraction) -> int:
    assert value > 0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def ceil_log2(value: Fraction) -> int:
    exponent = floor_log2(value)
    return exponent if Fraction(2) ** exponent == value else exponent + 1


def to_fp32(value: Fraction) -> Fraction:
    """Nearest fp32, ties to even."""
    if value == 0:
        return value
    ulp = Fraction(2) ** (max(floor_log2(value), -126) - 23)
    return Fraction(round(value / ulp)) * ulp  # Fraction rounds half to even


def scale_byte(amax: float, rule: str, element: str) -> int:
    """E8M0 byte of a block whose largest magnitude is amax."""
    if math.isnan(amax) or math.isinf(amax):
        return 255
    if amax == 0:
        return 0
    value, largest = Fraction(amax), VALUES[element][-1]
    emax = floor_log2(largest)
    if rule == "floor":
        exponent = floor_log2(value) - emax
    elif rule == "even":  # amax rounded, halves up, to the element's significant bits
        step = Fraction(2) ** (floor_log2(value) - MANTISSA_BITS[element])
        exponent = floor_log2(math.floor(value / step + Fraction(1, 2)) * step) - emax
    elif rule == "ceil":
        exponent = ceil_log2(value) - emax
    else:
        ratio = to_fp32(value / largest)
        exponent = ceil_log2(ratio) if ratio else -127
    return min(max(exponent + 127, 0), 254)


def code(value: Fraction, negative: bool, element: str) -> int:
    """Nearest code, ties to the even one, saturating."""
    values = VALUES[element]
    magnitude = min(abs(value), values[-1])
    high = bisect_left(values, magnitude)
    if values[high] != magnitude:
        below, above = magnitude - values[high - 1], values[high] - magnitude
        if below < above or (below == above and high % 2 == 1):
            high -= 1
    return high | (SIGN[element] if negative else 0)


def quantize_block(block: list[float], rule: str, element: str) -> tuple[int, list[int]]:
    """(scale byte, codes) of one block."""
    amax = math.nan if any(math.isnan(v) for v in block) else max(abs(v) for v in block)
    byte = scale_byte(amax, rule, element)
    if byte == 255:
        return byte, [0] * len(block)
    scale = Fraction(2) ** (byte - 127)
    return byte, [code(Fraction(v) / scale, math.copysign(1, v) < 0, element) for v in block]
