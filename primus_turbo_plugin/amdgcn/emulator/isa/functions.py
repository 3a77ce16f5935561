"""Array functions shared by scalar and vector instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.emulator.isa.values import Array
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64

F32 = np.float32


def add_carry(a: Array, b: Array, carry: Array | int = 0) -> tuple[Array, Array]:
    """Unsigned 32-bit sum with carry in and carry out."""
    total = a.astype(U64) + b + np.asarray(carry, U64)
    return total.astype(U32), total >> U64(32) != 0


def subtract_borrow(a: Array, b: Array, borrow: Array | int = 0) -> tuple[Array, Array]:
    """Unsigned 32-bit difference with borrow in and borrow out."""
    total = a.astype(np.int64) - b - np.asarray(borrow, np.int64)
    return (total & 0xFFFFFFFF).astype(U32), total < 0


def overflow_add(a: Array, b: Array) -> tuple[Array, Array]:
    """Signed sum and whether it overflowed."""
    result = a + b
    return result, ((a ^ result) & (b ^ result)) < 0


def overflow_subtract(a: Array, b: Array) -> tuple[Array, Array]:
    """Signed difference and whether it overflowed."""
    result = a - b
    return result, ((a ^ b) & (a ^ result)) < 0


def multiply_high(a: Array, b: Array) -> Array:
    """Upper half of the 64-bit product, with the signedness of the inputs."""
    wide = np.int64 if a.dtype == np.int32 else U64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def shift(a: Array, amount: Array, left: bool) -> Array:
    """Shift by the amount modulo the width; right shifts follow the signedness of `a`."""
    bits = a.dtype.itemsize * 8
    count = (amount & U32(bits - 1)).astype(a.dtype)
    return a << count if left else a >> count


def bit_field(a: Array, offset: Array, width: Array) -> Array:
    """`width` bits of `a` from bit `offset`, sign-extended for signed types."""
    bits = a.dtype.itemsize * 8
    unsigned = np.dtype(f"u{a.dtype.itemsize}").type
    count = np.minimum(width, U32(bits - 1)).astype(unsigned)
    mask = np.where(width >= bits, unsigned(2**bits - 1), (unsigned(1) << count) - unsigned(1))
    field = (a.view(unsigned) >> (offset & U32(bits - 1)).astype(unsigned)) & mask
    if a.dtype == unsigned:
        return field
    sign = (field >> np.maximum(count, unsigned(1)) - unsigned(1)) & unsigned(1)
    return np.where((sign == 1) & (width > 0), field | ~mask, field).view(a.dtype)


def bit_reverse(a: Array) -> Array:
    """Reverse the order of 32 bits."""
    value = a.astype(U32)
    for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        value = ((value >> U32(step)) & U32(mask)) | ((value & U32(mask)) << U32(step))
    return value


def count_ones(a: Array) -> Array:
    """Population count."""
    octets = np.ascontiguousarray(a)[..., None].view(np.uint8)
    return np.unpackbits(octets, axis=-1).sum(axis=-1).astype(U32)


def count_leading(a: Array) -> NDArray[np.int32]:
    """Leading zeros of 32 bits; -1 for zero."""
    exponent = np.frexp(a.astype(np.float64))[1]  # 2**(e-1) <= a < 2**e
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32)


def count_trailing(a: Array) -> NDArray[np.int32]:
    """Trailing zeros of 32 or 64 bits; -1 for zero."""
    lowest = a & (~a + a.dtype.type(1))
    return np.where(a == 0, -1, np.frexp(lowest.astype(np.float64))[1] - 1).astype(np.int32)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add: the exact product of two floats fits a double, so only the sum is rounded twice."""
    return (a.astype(np.float64) * b + c).astype(F32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add in half precision (exact in double)."""
    return (a.astype(np.float64) * b + c).astype(np.float16)


def to_integer(a: Array, low: int, high: int, dtype: Any) -> Array:
    """Convert to an integer toward zero, saturating; NaN gives 0."""
    value = np.nan_to_num(np.trunc(a.astype(np.float64)), nan=0.0, posinf=float(high), neginf=float(low))
    return np.clip(value, low, high).astype(np.int64).astype(dtype)


def bit_operation(table: int, a: Array, b: Array, c: Array) -> Array:
    """Any function of three bits: bit `4*a + 2*b + c` of the table."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), U32)
    for index in range(8):
        if table >> index & 1:
            result = result | (
                (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            )  # fmt: skip
    return result


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: each selector byte picks a byte of {a, b}; 8-11 spread a sign, 12 is 0x00, 13 and up 0xFF."""
    both = (a.astype(U64) << U64(32)) | b.astype(U64)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), U32)
    for position in range(4):
        code = (selector >> U32(8 * position)) & U32(0xFF)
        picked = (both >> ((code & U32(7)).astype(U64) * U64(8))) & U64(0xFF)
        sign_bit = ((code - U32(8)) * U32(2) + U32(1)).astype(U64) * U64(8) + U64(7)
        sign = (both >> (sign_bit & U64(63))) & U64(1)
        picked = np.where((code >= 8) & (code <= 11), sign * U64(0xFF), picked)
        picked = np.where(code == 12, U64(0), np.where(code >= 13, U64(0xFF), picked))
        result = result | (picked.astype(U32) << U32(8 * position))
    return result
