"""Vector integer arithmetic: additions, multiplications, minima, 16- and 64-bit forms.

Source: CDNA "VOP2", "VOP3A", "VOP3B"; RDNA4 of the same names. gfx9 and gfx1250 names of one operation stand together.
"""

from __future__ import annotations

from functools import partial, reduce

import numpy as np

from primus_turbo_plugin.amdgcn.emulator.isa.alu import vector
from primus_turbo_plugin.amdgcn.emulator.isa.functions import add_carry, multiply_high, subtract_borrow
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX1250
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64

_op = partial(vector, family="vector integer")


def _signed24(a: Array) -> Array:
    return (a.astype(np.int32) << 8) >> 8


def _unsigned24(a: Array) -> Array:
    return a & U32(0xFFFFFF)


# -- 32-bit addition and multiplication -----------------------------------------------------------------------------------
_op("v_add_u32 v_add_nc_u32", "u32 = u32 u32", lambda a, b: a + b, "D = S0 + S1", saturates=True)
_op("v_sub_u32 v_sub_nc_u32", "u32 = u32 u32", lambda a, b: a - b, "D = S0 - S1", saturates=True)
_op("v_subrev_u32 v_subrev_nc_u32", "u32 = u32 u32", lambda a, b: b - a, "D = S1 - S0", saturates=True)
_op("v_add_i32 v_add_nc_i32", "i32 = i32 i32", lambda a, b: a + b, "D = S0 + S1", saturates=True)
_op("v_sub_i32 v_sub_nc_i32", "i32 = i32 i32", lambda a, b: a - b, "D = S0 - S1", saturates=True)
_op("v_add3_u32", "u32 = u32 u32 u32", lambda a, b, c: a + b + c, "D = S0 + S1 + S2")
_op("v_add_lshl_u32", "u32 = u32 u32 u32", lambda a, b, c: (a + b) << (c & U32(31)), "D = (S0 + S1) << S2")
_op("v_lshl_add_u32", "u32 = u32 u32 u32", lambda a, b, c: (a << (b & U32(31))) + c, "D = (S0 << S1) + S2")
_op("v_xad_u32", "u32 = u32 u32 u32", lambda a, b, c: (a ^ b) + c, "D = (S0 ^ S1) + S2")
_op("v_mul_lo_u32", "u32 = u32 u32", lambda a, b: a * b, "D = S0 * S1")
_op("v_mul_hi_u32", "u32 = u32 u32", multiply_high, "D = (S0 * S1) >> 32")
_op("v_mul_hi_i32", "i32 = i32 i32", multiply_high, "D = (S0 * S1) >> 32, signed")
_op("v_mul_u32_u24", "u32 = u32 u32", lambda a, b: _unsigned24(a) * _unsigned24(b), "D = S0[23:0] * S1[23:0]")
_op("v_mul_i32_i24", "i32 = i32 i32", lambda a, b: _signed24(a) * _signed24(b), "D = S0[23:0] * S1[23:0], signed")
_op(
    "v_mad_u32_u24",
    "u32 = u32 u32 u32",
    lambda a, b, c: _unsigned24(a) * _unsigned24(b) + c,
    "D = S0[23:0] * S1[23:0] + S2",
)
_op(
    "v_mad_i32_i24",
    "i32 = i32 i32 i32",
    lambda a, b, c: _signed24(a) * _signed24(b) + c,
    "D = S0[23:0] * S1[23:0] + S2",
)
_op("v_mad_u32", "u32 = u32 u32 u32", lambda a, b, c: a * b + c, "D = S0 * S1 + S2", archs=GFX1250)
_op("v_sad_u32", "u32 = u32 u32 u32", lambda a, b, c: np.where(a > b, a - b, b - a) + c, "D = |S0 - S1| + S2")

# -- carries --------------------------------------------------------------------------------------------------------------
_op("v_add_co_u32", "u32 mask = u32 u32", add_carry, "D = S0 + S1; mask = carry")
_op("v_sub_co_u32", "u32 mask = u32 u32", subtract_borrow, "D = S0 - S1; mask = borrow")
_op("v_subrev_co_u32", "u32 mask = u32 u32", lambda a, b: subtract_borrow(b, a), "D = S1 - S0; mask = borrow")
_op("v_addc_co_u32 v_add_co_ci_u32", "u32 mask = u32 u32 mask", add_carry, "D = S0 + S1 + carry; mask = carry")
_op("v_subb_co_u32 v_sub_co_ci_u32", "u32 mask = u32 u32 mask", subtract_borrow, "D = S0 - S1 - borrow; mask = borrow")
_op(
    "v_subbrev_co_u32 v_subrev_co_ci_u32", "u32 mask = u32 u32 mask",
    lambda a, b, c: subtract_borrow(b, a, c), "D = S1 - S0 - borrow; mask = borrow",
)  # fmt: skip

# -- minima and maxima ----------------------------------------------------------------------------------------------------
for _name, _function in (("min", np.minimum), ("max", np.maximum)):
    for _kind in ("u32", "i32", "u16", "i16"):
        _op(f"v_{_name}_{_kind}", f"{_kind} = {_kind} {_kind}", _function, f"D = {_name}(S0, S1)")
    for _kind in ("u32", "i32", "u16", "i16"):
        _op(
            f"v_{_name}3_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
            lambda *a, f=_function: reduce(f, a), f"D = {_name}(S0, S1, S2)",
        )  # fmt: skip
for _kind in ("u32", "i32", "u16", "i16"):
    _op(
        f"v_med3_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
        lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)), "D = the middle of S0, S1, S2",
    )  # fmt: skip
for _kind in ("u32", "i32"):
    _op(
        f"v_minmax_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
        lambda a, b, c: np.maximum(np.minimum(a, b), c), "D = max(min(S0, S1), S2)", archs=GFX1250,
    )  # fmt: skip
    _op(
        f"v_maxmin_{_kind}", f"{_kind} = {_kind} {_kind} {_kind}",
        lambda a, b, c: np.minimum(np.maximum(a, b), c), "D = min(max(S0, S1), S2)", archs=GFX1250,
    )  # fmt: skip

# -- 16 bits --------------------------------------------------------------------------------------------------------------
_op("v_add_u16 v_add_nc_u16", "u16 = u16 u16", lambda a, b: a + b, "D = S0 + S1", saturates=True)
_op("v_sub_u16 v_sub_nc_u16", "u16 = u16 u16", lambda a, b: a - b, "D = S0 - S1", saturates=True)
_op("v_mul_lo_u16", "u16 = u16 u16", lambda a, b: a * b, "D = S0 * S1")
_op("v_mad_u16 v_mad_legacy_u16", "u16 = u16 u16 u16", lambda a, b, c: a * b + c, "D = S0 * S1 + S2", saturates=True)

# -- 64 bits --------------------------------------------------------------------------------------------------------------
_op(
    "v_lshl_add_u64",
    "u64 = u64 u32 u64",
    lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c,
    "D = (S0 << S1[2:0]) + S2",
)
_op("v_add_nc_u64 v_add_u64", "u64 = u64 u64", lambda a, b: a + b, "D = S0 + S1", archs=GFX1250)
_op("v_sub_nc_u64 v_sub_u64", "u64 = u64 u64", lambda a, b: a - b, "D = S0 - S1", archs=GFX1250)
_op("v_mul_u64", "u64 = u64 u64", lambda a, b: a * b, "D = S0 * S1", archs=GFX1250)
for _name, _function in (("min", np.minimum), ("max", np.maximum)):
    for _kind in ("u64", "i64"):
        _op(f"v_{_name}_{_kind}", f"{_kind} = {_kind} {_kind}", _function, f"D = {_name}(S0, S1)", archs=GFX1250)


def _multiply_add_64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(U64) * b.astype(U64)
    total = product + c
    return total, total < product


def _multiply_add_64_signed(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = a.astype(np.int64) * b.astype(np.int64)
    total = product + c
    return total, (product ^ total) & (c ^ total) < 0


_op("v_mad_u64_u32 v_mad_co_u64_u32", "u64 mask = u32 u32 u64", _multiply_add_64, "D = S0 * S1 + S2; mask = carry")
_op(
    "v_mad_i64_i32 v_mad_co_i64_i32",
    "i64 mask = i32 i32 i64",
    _multiply_add_64_signed,
    "D = S0 * S1 + S2; mask = overflow",
)
_op("v_mad_nc_u64_u32", "u64 = u32 u32 u64", lambda *a: _multiply_add_64(*a)[0], "D = S0 * S1 + S2", archs=GFX1250)
_op(
    "v_mad_nc_i64_i32",
    "i64 = i32 i32 i64",
    lambda *a: _multiply_add_64_signed(*a)[0],
    "D = S0 * S1 + S2",
    archs=GFX1250,
)
