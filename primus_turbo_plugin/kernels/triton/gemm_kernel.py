"""y[M, N] = a[M, K] @ b[N, K].T of plain or quantised operands (Triton kernel).

Math      MX: each code times its power of two, exactly, as bf16;  FP8: each code as bf16, fp32 scales outside their block's sum
Layout    contraction by strides in plain operands (so NT, NN and TN are one kernel), last and packed in quantised ones; a program
          a BLOCK_M x BLOCK_N tile of y, GROUP tiles of M side by side for the L2 cache
Cost      2*M*N*K FLOPs on the bf16 units; decoding adds integer work that a GPU with FP4 or FP8 units would not spend
Numerics  fp32 accumulation, one rounding at the store. MX products are exact: only the order of the additions differs from
          kernels/reference/gemm.py
Limits    an MXFP8 value below 2^-133 (scale byte 0 to 2) is rounded to bf16's subnormals
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mx_scale(byte):
    """E8M0 bytes as bf16; 2^-127 is a subnormal, 0xFF is NaN."""
    bits = byte.to(tl.int32)
    bits = tl.where(bits == 0, 0x0040, tl.where(bits == 0xFF, 0x7FC0, bits << 7))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _e2m1_to_bf16(byte):
    """Two codes a byte `[rows, n]` to bf16 `[rows, 2 n]`.

    A code's exponent and mantissa, put at bf16's, read as the value times 2^-126, subnormals included.
    """
    word = byte.to(tl.int32)
    low = ((word & 0x8) << 12) | ((word & 0x7) << 6)
    high = ((word & 0x80) << 8) | ((word & 0x70) << 2)
    bits = tl.reshape(tl.join(low, high), (byte.shape[0], byte.shape[1] * 2)).to(tl.int16)
    return bits.to(tl.bfloat16, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _load_stored(
    ptr, row, k0, stored, stride_row, stride_k, META: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr
):
    """A tile as it is stored, `[rows, BLOCK_K]` or FP4 `[rows, BLOCK_K / 2]`, zero past the stored contraction."""
    per_byte: tl.constexpr = 2 if META.element == "e2m1" else 1
    item = k0 // per_byte + tl.arange(0, BLOCK_K // per_byte)
    place = ptr + row.to(tl.int64)[:, None] * stride_row + item[None, :].to(tl.int64) * stride_k
    if EVEN_K:
        values = tl.load(place)
    else:
        values = tl.load(place, mask=(item * per_byte < stored)[None, :], other=0)
    return values


@triton.jit
def _decoded(values, META: tl.constexpr):
    """Stored codes or plain values as a 16-bit float."""
    if META.element == "e2m1":
        values = _e2m1_to_bf16(values)
    elif META.element == "e4m3":
        values = values.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    elif META.element == "e5m2":
        values = values.to(tl.float8e5, bitcast=True).to(tl.bfloat16)
    return values


@triton.jit
def _load_mx_scale(scale_ptr, row, k0, stored, META: tl.constexpr, BLOCK_K: tl.constexpr):
    """E8M0 bytes `[rows, BLOCK_K / 32]`."""
    block = k0 // 32 + tl.arange(0, BLOCK_K // 32)
    line = row // META.block_outer
    place = scale_ptr + line.to(tl.int64)[:, None] * (stored // 32) + block[None, :]
    return tl.load(place, mask=(block * 32 < stored)[None, :], other=127)


@triton.jit
def _scaled(values, byte, BLOCK_K: tl.constexpr):
    """MX values: codes times their block's power of two."""
    scale = _mx_scale(byte)
    rows: tl.constexpr = values.shape[0]
    wide = tl.broadcast_to(scale[:, :, None], (rows, BLOCK_K // 32, 32))
    return values * tl.reshape(wide, (rows, BLOCK_K))


@triton.jit
def _load_operand(
    ptr, scale_ptr, row, k0, stored, stride_row, stride_k,
    META: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    values = _decoded(_load_stored(ptr, row, k0, stored, stride_row, stride_k, META, BLOCK_K, EVEN_K), META)
    if META.is_mx:
        values = _scaled(values, _load_mx_scale(scale_ptr, row, k0, stored, META, BLOCK_K), BLOCK_K)
    return values


@triton.jit
def _fp8_scale(scale_ptr, row, k0, stored, META: tl.constexpr):
    """fp32 scale of each row's FP8 block at k0 (blocks of 128) or of the whole row."""
    if META.block_outer == 0:
        line = row * 0
    else:
        line = row // META.block_outer
    if META.block_contraction == 0:
        place = scale_ptr + line
    else:
        place = scale_ptr + line.to(tl.int64) * (stored // META.block_contraction) + k0 // META.block_contraction
    return tl.load(place)


@triton.jit
def _multiply(
    acc, a_ptr, a_scale, row_a, a_stored, stride_am, stride_ak, b_ptr, b_scale, row_b, b_stored, stride_bn, stride_bk, k0,
    A: tl.constexpr, B: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc plus the product of one K tile, on the 16-bit units."""
    a = _load_operand(a_ptr, a_scale, row_a, k0, a_stored, stride_am, stride_ak, A, BLOCK_K, EVEN_K)
    b = _load_operand(b_ptr, b_scale, row_b, k0, b_stored, stride_bn, stride_bk, B, BLOCK_K, EVEN_K)
    if A.scaled_by_block or B.scaled_by_block:
        part = tl.dot(a, tl.trans(b))
        if A.scaled_by_block:
            part *= _fp8_scale(a_scale, row_a, k0, a_stored, A)[:, None]
        if B.scaled_by_block:
            part *= _fp8_scale(b_scale, row_b, k0, b_stored, B)[None, :]
        acc += part
    else:
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def gemm_nt_kernel(
    a_ptr, a_scale, b_ptr, b_scale, bias_ptr, out_ptr,
    M, N, length, a_stored, b_stored,
    stride_am, stride_ak, stride_bn, stride_bk, stride_om, stride_on,
    A: tl.constexpr, B: tl.constexpr, ACCUMULATE: tl.constexpr, EVEN_K: tl.constexpr, NATIVE_MX: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of y. `A` and `B` are `gemm.OperandMeta`; `NATIVE_MX` multiplies two MX operands on scaled matrix units."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + (pid % (GROUP * tiles_n)) % size
    tile_n = (pid % (GROUP * tiles_n)) // size
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_a, row_b = m % M, n % N  # rows past the end repeat valid ones; they are not stored
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, length, BLOCK_K):
        if NATIVE_MX:
            a = _load_stored(a_ptr, row_a, k0, a_stored, stride_am, stride_ak, A, BLOCK_K, EVEN_K)
            b = _load_stored(b_ptr, row_b, k0, b_stored, stride_bn, stride_bk, B, BLOCK_K, EVEN_K)
            scale_a = _load_mx_scale(a_scale, row_a, k0, a_stored, A, BLOCK_K)
            scale_b = _load_mx_scale(b_scale, row_b, k0, b_stored, B, BLOCK_K)
            acc = tl.dot_scaled(a, scale_a, A.element, tl.trans(b), scale_b, B.element, acc)
        else:
            acc = _multiply(
                acc, a_ptr, a_scale, row_a, a_stored, stride_am, stride_ak, b_ptr, b_scale, row_b, b_stored, stride_bn, stride_bk,
                k0, A, B, BLOCK_K, EVEN_K,
            )  # fmt: skip
    if A.scaled_by_row:
        acc *= _fp8_scale(a_scale, row_a, 0, a_stored, A)[:, None]
    if B.scaled_by_row:
        acc *= _fp8_scale(b_scale, row_b, 0, b_stored, B)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row_b).to(tl.float32)[None, :]
    place = out_ptr + m.to(tl.int64)[:, None] * stride_om + n.to(tl.int64)[None, :] * stride_on
    mask = (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(place, mask=mask, other=0.0)
    tl.store(place, acc.to(out_ptr.dtype.element_ty), mask=mask)
