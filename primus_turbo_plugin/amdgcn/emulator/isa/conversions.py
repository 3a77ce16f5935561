"""Conversions between integers, float32, float16, bfloat16 and float64.

Source: CDNA "VOP1", "VOP3A"; RDNA4 of the same names. Float to integer truncates and saturates; everything else rounds to
nearest even unless the name says otherwise.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from primus_turbo_plugin.amdgcn.emulator.isa.alu import scalar, vector
from primus_turbo_plugin.amdgcn.emulator.isa.functions import to_integer
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX950, GFX1250
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, f32_to_bf16
from primus_turbo_plugin.amdgcn.emulator.waves import U32

_op = partial(vector, family="vector conversion")
F16, F32, F64 = np.float16, np.float32, np.float64
_I32, _U32, _I16, _U16 = (-(2**31), 2**31 - 1), (0, 2**32 - 1), (-(2**15), 2**15 - 1), (0, 2**16 - 1)


def _to(dtype: type, bounds: tuple[int, int]) -> partial[Array]:
    return partial(to_integer, low=bounds[0], high=bounds[1], dtype=dtype)


# -- integers and float32 ---------------------------------------------------------------------------------------------------
_op("v_cvt_i32_f32", "i32 = f32", _to(np.int32, _I32), "D = int(S0)")
_op("v_cvt_u32_f32", "u32 = f32", _to(np.uint32, _U32), "D = unsigned(S0)")
_op("v_cvt_f32_i32", "f32 = i32", lambda a: a.astype(F32), "D = float(S0)")
_op("v_cvt_f32_u32", "f32 = u32", lambda a: a.astype(F32), "D = float(S0)")
_op(
    "v_cvt_flr_i32_f32 v_cvt_floor_i32_f32",
    "i32 = f32",
    lambda a: _to(np.int32, _I32)(np.floor(a)),
    "D = int(floor(S0))",
)
_op(
    "v_cvt_rpi_i32_f32 v_cvt_nearest_i32_f32", "i32 = f32",
    lambda a: _to(np.int32, _I32)(np.floor(a.astype(F64) + 0.5)), "D = int(floor(S0 + 0.5))",
)  # fmt: skip
for _byte in range(4):
    _op(
        f"v_cvt_f32_ubyte{_byte}", "f32 = u32",
        lambda a, shift=8 * _byte: ((a >> U32(shift)) & U32(255)).astype(F32), f"D = float(byte {_byte} of S0)",
    )  # fmt: skip
scalar("s_cvt_u32_f32", "u32 = f32", _to(np.uint32, _U32), "D = unsigned(S0)", archs=GFX1250)
scalar("s_cvt_i32_f32", "i32 = f32", _to(np.int32, _I32), "D = int(S0)", archs=GFX1250)
scalar("s_cvt_f32_f16", "f32 = f16", lambda a: a.astype(F32), "D = float(S0)", archs=GFX1250)
scalar("s_cvt_f16_f32", "f16 = f32", lambda a: a.astype(F16), "D = half(S0)", archs=GFX1250)

# -- float16 ------------------------------------------------------------------------------------------------------------------
_op("v_cvt_f16_f32", "f16 = f32", lambda a: a.astype(F16), "D = half(S0)")
_op("v_cvt_f32_f16", "f32 = f16", lambda a: a.astype(F32), "D = float(S0)")
_op("v_cvt_f16_u16", "f16 = u16", lambda a: a.astype(F16), "D = half(S0)")
_op("v_cvt_f16_i16", "f16 = i16", lambda a: a.astype(F16), "D = half(S0)")
_op("v_cvt_u16_f16", "u16 = f16", _to(np.uint16, _U16), "D = unsigned(S0)")
_op("v_cvt_i16_f16", "i16 = f16", _to(np.int16, _I16), "D = int(S0)")
_op("v_cvt_u32_u16", "u32 = u16", lambda a: a.astype(np.uint32), "D = zero-extended S0", archs=GFX1250)
_op("v_cvt_i32_i16", "i32 = i16", lambda a: a.astype(np.int32), "D = sign-extended S0", archs=GFX1250)


def _halves(low: Array, high: Array) -> Array:
    """Two 16-bit patterns in one register."""
    return low.astype(U32) | (high.astype(U32) << U32(16))


def _half_bits(a: Array) -> Array:
    return np.ascontiguousarray(a.astype(F16)).view(np.uint16)


def _saturated16(a: Array, least: int, most: int) -> Array:
    """The integer part within 16 bits; 0 for NaN."""
    return np.clip(np.trunc(np.nan_to_num(a.astype(F64))), least, most).astype(np.int64).astype(np.uint16)


def _toward_zero(a: Array) -> Array:
    """float16 bits, rounded toward zero."""
    bits = _half_bits(a)
    magnitude = np.ascontiguousarray(bits & np.uint16(0x7FFF)).view(F16).astype(F64)
    over = (magnitude > np.abs(a.astype(F64))) & ~np.isnan(a)
    return np.where(over, bits - np.uint16(1), bits)


_op("v_cvt_pk_f16_f32", "u32 = f32 f32", lambda a, b: _halves(_half_bits(a), _half_bits(b)), "D = {half(S1), half(S0)}",
    archs=GFX950 | GFX1250)  # fmt: skip
_op("v_cvt_pkrtz_f16_f32 v_cvt_pk_rtz_f16_f32", "u32 = f32 f32",
    lambda a, b: _halves(_toward_zero(a), _toward_zero(b)), "D = {half(S1), half(S0)}, toward zero")  # fmt: skip
_op("v_cvt_pk_i16_i32", "u32 = i32 i32",
    lambda a, b: _halves(np.clip(a, *_I16).astype(np.uint16), np.clip(b, *_I16).astype(np.uint16)),
    "D = {S1, S0} saturated")  # fmt: skip
_op("v_cvt_pk_u16_u32", "u32 = u32 u32", lambda a, b: _halves(np.minimum(a, U32(0xFFFF)), np.minimum(b, U32(0xFFFF))),
    "D = {S1, S0} saturated")  # fmt: skip

_op("v_cvt_pk_i16_f32", "u32 = f32 f32", lambda a, b: _halves(_saturated16(a, *_I16), _saturated16(b, *_I16)),
    "D = {short(S1), short(S0)} saturated, toward zero", archs=GFX1250, source="RDNA4: VOP3")  # fmt: skip
_op("v_cvt_pk_u16_f32", "u32 = f32 f32", lambda a, b: _halves(_saturated16(a, 0, 0xFFFF), _saturated16(b, 0, 0xFFFF)),
    "D = {ushort(S1), ushort(S0)} saturated, toward zero", archs=GFX1250, source="RDNA4: VOP3")  # fmt: skip

# -- bfloat16 -----------------------------------------------------------------------------------------------------------------
_op(
    "v_cvt_f32_bf16",
    "f32 = bf16",
    lambda a: a,
    "D = float(S0)",
    archs=GFX950 | GFX1250,
    source="CDNA4: VOP1; LLVM: gfx1250",
)
_op("v_cvt_pk_bf16_f32", "u32 = f32 f32", lambda a, b: _halves(f32_to_bf16(a), f32_to_bf16(b)),
    "D = {bf16(S1), bf16(S0)}", archs=GFX950 | GFX1250, source="CDNA4: VOP3A; LLVM: gfx1250")  # fmt: skip

# -- float64 ------------------------------------------------------------------------------------------------------------------
_op("v_cvt_f64_f32", "f64 = f32", lambda a: a.astype(F64), "D = double(S0)")
_op("v_cvt_f32_f64", "f32 = f64", lambda a: a.astype(F32), "D = float(S0)")
_op("v_cvt_f64_i32", "f64 = i32", lambda a: a.astype(F64), "D = double(S0)")
_op("v_cvt_f64_u32", "f64 = u32", lambda a: a.astype(F64), "D = double(S0)")
_op("v_cvt_i32_f64", "i32 = f64", _to(np.int32, _I32), "D = int(S0)")
_op("v_cvt_u32_f64", "u32 = f64", _to(np.uint32, _U32), "D = unsigned(S0)")
