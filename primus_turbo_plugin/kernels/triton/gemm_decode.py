"""Stored codes as the values that the matrix units multiply (Triton), and kernels that decode a whole operand.

Math      MX: code times its block's power of two, exact in bf16;  FP8: the code alone, its fp32 scales stay outside the sum
Layout    codes [outer, contraction], FP4 two a byte, the even one in the low nibble;  E8M0 [outer / block, contraction / 32]
Cost      decode_kernel: reads 1/2 + 1/32 (FP4) or 1 + 1/32 (FP8) bytes an element, writes 2; memory-bound
Limits    an MXFP8 value below 2^-133 (scale byte 0 to 2) is rounded to bf16's subnormals
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.gemm_key import Operand
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


class OperandMeta(NamedTuple):
    """Compile-time description of one operand.

    Attributes:
        element: `plain`, `e2m1`, `e4m3` or `e5m2`.
        is_mx: E8M0 scales, applied to the values.
        block_outer: Rows that share a scale, 0 for all.
        block_contraction: Elements that share a scale, 0 for all.
        scaled_by_block: fp32 scales of blocks along K, applied to partial sums.
        scaled_by_row: fp32 scales that cover a row, applied at the end.
    """

    element: str
    is_mx: bool
    block_outer: int
    block_contraction: int
    scaled_by_block: bool
    scaled_by_row: bool

    @classmethod
    def of(cls, operand: Operand) -> OperandMeta:
        """The description of a tensor."""
        if not isinstance(operand, QuantizedTensor):
            return PLAIN
        spec = operand.spec
        outer, contraction = spec.block_shape
        fp8 = not spec.is_mx
        return cls(
            spec.element_type.name, spec.is_mx, outer, contraction, fp8 and contraction > 0, fp8 and contraction == 0
        )

    def decoded(self) -> OperandMeta:
        """The description of its scratch copy: MX scales are in the values, a row's fp32 scale is still to come."""
        return self._replace(element="plain", is_mx=False) if self.element != "plain" else self

    def scaled_once(self) -> OperandMeta:
        """The description where every block that is summed has the same scale: it is applied at the end."""
        return self._replace(scaled_by_block=False, scaled_by_row=True) if self.scaled_by_block else self


PLAIN = OperandMeta("plain", False, 1, 0, False, False)


@triton.jit
def mx_scale(byte):
    """E8M0 bytes as bf16; 2^-127 is a subnormal, 0xFF is NaN."""
    bits = byte.to(tl.int32)
    bits = tl.where(bits == 0, 0x0040, tl.where(bits == 0xFF, 0x7FC0, bits << 7))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_to_bf16(byte):
    """Two codes a byte `[rows, n]` to bf16 `[rows, 2 n]`.

    A code's exponent and mantissa, put at bf16's, read as the value times 2^-126, subnormals included.
    """
    word = byte.to(tl.int32)
    low = ((word & 0x8) << 12) | ((word & 0x7) << 6)
    high = ((word & 0x80) << 8) | ((word & 0x70) << 2)
    bits = tl.reshape(tl.join(low, high), (byte.shape[0], byte.shape[1] * 2)).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def decoded(values, META: tl.constexpr):
    """Stored codes or plain values as a 16-bit float."""
    if META.element == "e2m1":
        values = e2m1_to_bf16(values)
    elif META.element == "e4m3":
        values = values.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    elif META.element == "e5m2":
        values = values.to(tl.float8e5, bitcast=True).to(tl.bfloat16)
    return values


@triton.jit
def load_mx_scale(scale_ptr, row, k0, stored, META: tl.constexpr, BLOCK_K: tl.constexpr, end=None):
    """E8M0 bytes `[rows, BLOCK_K / 32]`; 1 from element `end` on, None for `stored`."""
    block = k0 // 32 + tl.arange(0, BLOCK_K // 32)
    line = row // META.block_outer
    place = scale_ptr + line.to(tl.int64)[:, None] * (stored // 32) + block[None, :]
    last = stored if end is None else end
    return tl.load(place, mask=(block * 32 < last)[None, :], other=127)


@triton.jit
def scaled(values, byte, BLOCK_K: tl.constexpr):
    """MX values: codes times their block's power of two."""
    scale = mx_scale(byte)
    rows: tl.constexpr = values.shape[0]
    wide = tl.broadcast_to(scale[:, :, None], (rows, BLOCK_K // 32, 32))
    return values * tl.reshape(wide, (rows, BLOCK_K))


@triton.jit
def fp8_scale(scale_ptr, row0, rows, k0, stored, META: tl.constexpr, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """fp32 scales of one operand's rows row0 ... row0 + BLOCK - 1, to multiply sums whose AXIS these rows are.

    They are those of the blocks that hold element k0, or of whole rows; one number where all rows share it.
    """
    place = scale_ptr
    blocks = 1
    if META.block_contraction > 0:
        blocks = stored // META.block_contraction
        place += k0 // META.block_contraction
    if META.block_outer == 0:
        scale = tl.load(place)
    elif META.block_outer % BLOCK == 0:
        scale = tl.load(place + (row0 // META.block_outer).to(tl.int64) * blocks)
    else:
        line = tl.minimum(row0 + tl.arange(0, BLOCK), rows - 1) // META.block_outer
        scale = tl.expand_dims(tl.load(place + line.to(tl.int64) * blocks), 1 - AXIS)
    return scale


@triton.jit
def block_scales(
    a_scale, b_scale, m0, n0, M, N, k0, a_stored, b_stored,
    A: tl.constexpr, B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Two factors of a step's sums: both operands' scales of the blocks that hold element k0."""
    left, right = 1.0, 1.0
    if A.scaled_by_block:
        left = fp8_scale(a_scale, m0, M, k0, a_stored, A, BLOCK_M, 0)
    if B.scaled_by_block:
        right = fp8_scale(b_scale, n0, N, k0, b_stored, B, BLOCK_N, 1)
        if B.block_outer % BLOCK_N == 0:  # one number: one multiplication a sum less
            left *= right
            right = 1.0
    return left, right


@triton.jit
def times_row_scales(
    acc, a_scale, b_scale, m0, n0, M, N, a_stored, b_stored, A: tl.constexpr, B: tl.constexpr, k0=0
):  # fmt: skip
    """Finished sums times the fp32 scales that cover whole rows, or all of a row's blocks that were summed, from element k0."""
    if A.scaled_by_row:
        acc *= fp8_scale(a_scale, m0, M, k0, a_stored, A, acc.shape[0], 0)
    if B.scaled_by_row:
        acc *= fp8_scale(b_scale, n0, N, k0, b_stored, B, acc.shape[1], 1)
    return acc


@triton.jit
def fnuz_kernel(data_ptr, out_ptr, size, FIRST_NAN: tl.constexpr, BLOCK: tl.constexpr):
    """OCP FP8 codes as FNUZ codes of half the value, exactly: -0 becomes 0, codes of magnitude FIRST_NAN and above NaN.

    FNUZ has another bias, one NaN (0x80), no Inf and no -0; the same bits mean half as much otherwise.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(data_ptr + place, mask=place < size, other=0)
    code = tl.where(code == 0x80, 0, code)
    code = tl.where((code & 0x7F) >= FIRST_NAN, 0x80, code)
    tl.store(out_ptr + place, code.to(tl.uint8), mask=place < size)


@triton.jit
def decode_kernel(
    data_ptr, scale_ptr, out_ptr,
    rows, length, stored, stride_row, stride_out,
    META: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row, k] as bf16: MX values with their scales, FP8 codes without."""
    per_byte: tl.constexpr = 2 if META.element == "e2m1" else 1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k0 = tl.program_id(0) * BLOCK_K
    row_in = tl.minimum(row, rows - 1)
    item = k0 // per_byte + tl.arange(0, BLOCK_K // per_byte)
    place = data_ptr + row_in.to(tl.int64)[:, None] * stride_row + item[None, :]
    values = decoded(tl.load(place, mask=(item * per_byte < stored)[None, :], other=0), META)
    if META.is_mx:
        values = scaled(values, load_mx_scale(scale_ptr, row_in, k0, stored, META, BLOCK_K), BLOCK_K)
    k = k0 + tl.arange(0, BLOCK_K)
    place = out_ptr + row.to(tl.int64)[:, None] * stride_out + k[None, :]
    tl.store(place, values, mask=(row < rows)[:, None] & (k < length)[None, :])
