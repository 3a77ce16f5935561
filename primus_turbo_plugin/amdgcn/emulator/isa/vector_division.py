"""Division helpers: the instructions a correctly rounded quotient is made of.

The compiler divides as `div_fixup(div_fmas(Newton steps on div_scale'd operands), b, a)`. Source: CDNA, RDNA4 "VOP3B", with two
corrections, because the guides' pseudo code contradicts itself: `div_fmas` undoes exactly the power of two `div_scale` applied
(the guides say 2**32 for a scaling by 2**64), and a huge denominator of a denormal quotient is scaled down, not up (it would
overflow). With these the sequence gives the IEEE quotient, which the tests check.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from primus_turbo_plugin.amdgcn.emulator.isa.alu import vector
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array

_op = partial(vector, family="vector float", source="CDNA, RDNA4: VOP3B, corrected")
F16, F32, F64 = np.float16, np.float32, np.float64


def _is_single(a: Array) -> bool:
    return a.dtype == F32


def _exponent(a: Array) -> Array:
    """Biased exponent."""
    if _is_single(a):
        return ((np.ascontiguousarray(a).view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int32)
    return ((np.ascontiguousarray(a).view(np.uint64) >> np.uint64(52)) & np.uint64(0x7FF)).astype(np.int32)


def _denormal(a: Array, least: int) -> Array:
    """Not zero, but smaller in magnitude than 2 ** least."""
    return (np.abs(a) < np.ldexp(np.longdouble(1), least)) & (a != 0)


def _div_scale(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Scale numerator or denominator (whichever `value` is) where the steps would leave the range; the flag asks `div_fmas`
    to undo it."""
    value, denominator, numerator = np.broadcast_arrays(value, denominator, numerator)
    power, far, tiny, least = (64, 96, 23, -126) if _is_single(value) else (128, 768, 53, -1022)
    wide = np.longdouble
    up, down = (np.ldexp(value.astype(wide), e).astype(value.dtype) for e in (power, -power))
    is_denominator, is_numerator = value == denominator, value == numerator
    huge_denominator = _denormal(1 / denominator.astype(wide), least)
    small_quotient = _denormal(numerator.astype(wide) / denominator.astype(wide), least)
    cases = [  # condition, scaled value, flag; the first that holds counts
        ((numerator == 0) | (denominator == 0), np.full(value.shape, np.nan, value.dtype), False),
        (_exponent(numerator) - _exponent(denominator) >= far, np.where(is_denominator, up, value), True),
        (_denormal(denominator, least), up, False),
        (huge_denominator & small_quotient, np.where(is_denominator, down, value), True),
        (huge_denominator, down, False),
        (small_quotient, np.where(is_numerator, up, value), True),
        (_exponent(numerator) <= tiny, up, False),
    ]
    conditions = [case[0] for case in cases]
    flag = np.select(conditions, [np.full(value.shape, case[2]) for case in cases], False)
    return np.select(conditions, [case[1] for case in cases], value), flag


def _div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """fma(a, b, c), times the power of two that undoes `div_scale`."""
    wide, power, bias = (F64, 64, 127) if _is_single(a) else (np.longdouble, 128, 1023)
    value = a.astype(wide) * b.astype(wide) + c.astype(wide)
    undo = np.where(_exponent(c) > bias, power, -power)
    return np.where(scaled, np.ldexp(value, undo), value).astype(a.dtype)


def _div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The exact special cases (NaN, infinities, zeros) and the sign around a computed quotient."""
    quotient, denominator, numerator = np.broadcast_arrays(quotient, denominator, numerator)
    dtype = quotient.dtype.type
    sign = np.where(np.signbit(denominator) ^ np.signbit(numerator), dtype(-1), dtype(1))
    result = np.abs(quotient) * sign
    result = np.where(np.isnan(quotient), sign * dtype(np.inf), result)  # the steps overflowed
    underflow = _exponent(numerator) - _exponent(denominator) < (-150 if _is_single(quotient) else -1075)
    result = np.where(underflow | np.isinf(denominator) | (numerator == 0), sign * dtype(0), result)
    result = np.where((denominator == 0) | np.isinf(numerator), sign * dtype(np.inf), result)
    undefined = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    return np.where(undefined | np.isnan(denominator) | np.isnan(numerator), dtype(np.nan), result)


for _kind in ("f32", "f64"):
    _op(f"v_div_scale_{_kind}", f"{_kind} mask = {_kind} {_kind} {_kind}", _div_scale,
        "D = S0 scaled for the division S2 / S1; mask = rescale later")  # fmt: skip
    _op(f"v_div_fmas_{_kind}", f"{_kind} = {_kind} {_kind} {_kind} vcc", _div_fmas,
        "D = fma(S0, S1, S2), rescaled where VCC")  # fmt: skip
    _op(
        f"v_div_fixup_{_kind}",
        f"{_kind} = {_kind} {_kind} {_kind}",
        _div_fixup,
        "D = quotient S0 of S2 / S1 with special cases",
    )
_op("v_div_fixup_f16", "f16 = f16 f16 f16", lambda q, b, a: (a.astype(F64) / b).astype(F16), "D = S2 / S1")
