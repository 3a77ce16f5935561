"""y[M, N] = a[M, K] @ b[N, K].T of plain or quantised operands, tiles read through pointers (Triton kernel; every GPU).

Layout    contraction by strides in plain operands (so NT, NN and TN are one kernel), last and packed in quantised ones; a program
          a BLOCK_M x BLOCK_N tile of y, or with SPLIT_K a share of its contraction
Cost      2*M*N*K FLOPs; where UNITS is `half`, codes are decoded again by every program that reads them
Numerics  fp32 accumulation, one rounding at the store. MX products are exact: only the order of the additions differs from
          kernels/reference/gemm.py. Shares of a contraction are added in their order: the same bits every run
Limits    offsets inside a tile are 32 bits wide, a tile's place 64. Oracle: kernels/reference/gemm.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.gemm_decode import (
    block_scales,
    decoded,
    load_mx_scale,
    scaled,
    times_row_scales,
)
from primus_turbo_plugin.kernels.triton.gemm_order import tile_of


@triton.jit
def load_stored(
    ptr, row0, rows, k0, stored, stride_row, stride_k,
    META: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr,
    OUTER: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile as it is stored, `[BLOCK, BLOCK_K]` (FP4 half as wide) or TURNED; zero past the stored contraction.

    Rows past the end repeat the last one, or, where neighbours are rows (OUTER), read as zero; they are not stored.
    """
    per_byte: tl.constexpr = 2 if META.element == "e2m1" else 1
    base = ptr + row0.to(tl.int64) * stride_row + (k0 // per_byte).to(tl.int64) * stride_k
    row = tl.arange(0, BLOCK)
    item = tl.arange(0, BLOCK_K // per_byte)
    if not EVEN and not OUTER:
        row = tl.minimum(row, rows - row0 - 1)
    row, item = tl.expand_dims(row, 0 if TURNED else 1), tl.expand_dims(item, 1 if TURNED else 0)
    if WIDE:
        place = base + row.to(tl.int64) * stride_row + item.to(tl.int64) * stride_k
    else:
        place = base + row * stride_row + item * stride_k
    in_k = item * per_byte < stored - k0
    in_rows = row < rows - row0
    if EVEN or not OUTER:
        values = tl.load(place) if EVEN_K else tl.load(place, mask=in_k, other=0.0)
    else:
        values = tl.load(place, mask=in_rows, other=0.0) if EVEN_K else tl.load(place, mask=in_k & in_rows, other=0.0)
    return values


@triton.jit
def store_tile(
    acc, base, n0, rows, N, stride_om, stride_on,
    PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Stores a tile in PARTS pieces of its columns: what is added to need not be in registers all at once."""
    if PARTS == 1:
        m, n = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
        base += n0.to(tl.int64) * stride_on
        if WIDE:
            place = base + m.to(tl.int64) * stride_om + n.to(tl.int64) * stride_on
        else:
            place = base + m * stride_om + n * stride_on
        mask = (m < rows) & (n < N - n0)
        if ACCUMULATE:
            acc += tl.load(place, mask=mask, other=0.0)
        tl.store(place, acc.to(base.dtype.element_ty), mask=mask)
    else:
        height: tl.constexpr = acc.shape[0]
        half: tl.constexpr = acc.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (height, 2, half)), (0, 2, 1)))
        store_tile(left, base, n0, rows, N, stride_om, stride_on, PARTS // 2, ACCUMULATE, WIDE)
        store_tile(right, base, n0 + half, rows, N, stride_om, stride_on, PARTS // 2, ACCUMULATE, WIDE)


@triton.jit
def _tile(
    work, a_ptr, a_scale, b_ptr, b_scale, bias_ptr, out_ptr,
    M, N, length, a_stored, b_stored,
    stride_am, stride_ak, stride_bn, stride_bk, stride_om, stride_on,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
    SPLIT_K: tl.constexpr, PARTS: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """Computes and stores one tile of y, or a share of it: the `work`-th piece of work."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_of(work % tiles, M, N, BLOCK_M, BLOCK_N, GROUP, XCDS)
    m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
    share = work // tiles
    begin, end = 0, length
    if SPLIT_K > 1:
        steps = tl.cdiv(tl.cdiv(length, BLOCK_K), SPLIT_K)
        begin = share * steps * BLOCK_K
        end = tl.minimum(begin + steps * BLOCK_K, length)
    row_a = tl.minimum(m0 + tl.arange(0, BLOCK_M), M - 1)
    row_b = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1)
    # what needs no decoding is read the way the matrix units take it: a transposed load costs gfx950 its fast LDS reads
    turned: tl.constexpr = B.element == "plain" or UNITS == "fp8"
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        a = load_stored(
            a_ptr, m0, M, k0, a_stored, stride_am, stride_ak, A, BLOCK_M, BLOCK_K, EVEN_M, EVEN_K, A_OUTER, False, WIDE
        )
        b = load_stored(
            b_ptr, n0, N, k0, b_stored, stride_bn, stride_bk, B, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, B_OUTER, turned, WIDE
        )
        if UNITS == "half":
            a, b = decoded(a, A), decoded(b, B)
            if A.is_mx:
                a = scaled(a, load_mx_scale(a_scale, row_a, k0, a_stored, A, BLOCK_K), BLOCK_K)
            if B.is_mx:
                b = scaled(b, load_mx_scale(b_scale, row_b, k0, b_stored, B, BLOCK_K), BLOCK_K)
        if not turned:
            b = tl.trans(b)
        if UNITS == "mx":
            byte_a = load_mx_scale(a_scale, row_a, k0, a_stored, A, BLOCK_K)
            byte_b = load_mx_scale(b_scale, row_b, k0, b_stored, B, BLOCK_K)
            a_format: tl.constexpr = A.element  # Triton 3.6 takes constexprs only
            b_format: tl.constexpr = B.element
            acc = tl.dot_scaled(a, byte_a, a_format, b, byte_b, b_format, acc)
        elif A.scaled_by_block or B.scaled_by_block:
            # loaded before the sums are needed, to hide the latency behind them
            left, right = block_scales(a_scale, b_scale, m0, n0, M, N, k0, a_stored, b_stored, A, B, BLOCK_M, BLOCK_N)
            acc += tl.dot(a, b) * left * right
        elif UNITS == "fp8":
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)  # see gemm_descriptor_kernel.py; AMD sums in fp32
        else:
            acc = tl.dot(a, b, acc)
    if FNUZ:
        acc *= 4.0
    acc = times_row_scales(acc, a_scale, b_scale, m0, n0, M, N, a_stored, b_stored, A, B)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row_b).to(tl.float32)[None, :]
    base = out_ptr + m0.to(tl.int64) * stride_om
    if SPLIT_K > 1:
        base += share.to(tl.int64) * M * N
    store_tile(acc, base, n0, M - m0, N, stride_om, stride_on, PARTS, ACCUMULATE, WIDE)


@triton.jit
def gemm_nt_kernel(
    a_ptr, a_scale, b_ptr, b_scale, bias_ptr, out_ptr,
    M, N, length, a_stored, b_stored,
    stride_am, stride_ak, stride_bn, stride_bk, stride_om, stride_on,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
    SPLIT_K: tl.constexpr, PARTS: tl.constexpr, FNUZ: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles of y, or its SPLIT_K partial sums `out[share, M, N]`. `A` and `B` are `gemm_decode.OperandMeta`.

    A_OUTER, B_OUTER: neighbours in memory are rows, not elements of the contraction. UNITS: `GemmConfig.units`. WIDE: offsets
    inside a tile need 64 bits. FNUZ: both operands are FP8 codes of half their values (`gemm_decode.fnuz_kernel`).
    """
    if PERSISTENT:
        pieces = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N) * SPLIT_K
        for work in range(tl.program_id(0), pieces, tl.num_programs(0)):
            _tile(
                work, a_ptr, a_scale, b_ptr, b_scale, bias_ptr, out_ptr, M, N, length, a_stored, b_stored,
                stride_am, stride_ak, stride_bn, stride_bk, stride_om, stride_on, A, B, A_OUTER, B_OUTER, UNITS,
                ACCUMULATE, EVEN_M, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, XCDS, SPLIT_K, PARTS, FNUZ,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a_ptr, a_scale, b_ptr, b_scale, bias_ptr, out_ptr, M, N, length, a_stored, b_stored,
            stride_am, stride_ak, stride_bn, stride_bk, stride_om, stride_on, A, B, A_OUTER, B_OUTER, UNITS,
            ACCUMULATE, EVEN_M, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, XCDS, SPLIT_K, PARTS, FNUZ,
        )  # fmt: skip


@triton.jit
def sum_shares_kernel(
    part_ptr, bias_ptr, out_ptr,
    M, N, stride_om, stride_on,
    SPLIT_K: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """y[M, N] from `part[share, M, N]`: shares added in their order, then bias or what y holds, then the only rounding."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (m < M)[:, None] & (n < N)[None, :]
    place = part_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    acc = tl.load(place, mask=mask, other=0.0)
    for share in tl.static_range(1, SPLIT_K):
        acc += tl.load(place + tl.full((), share, tl.int64) * M * N, mask=mask, other=0.0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * stride_om + n.to(tl.int64)[None, :] * stride_on
    if ACCUMULATE:
        acc += tl.load(out, mask=mask, other=0.0)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
