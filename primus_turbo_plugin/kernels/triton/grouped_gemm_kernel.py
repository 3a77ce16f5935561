"""Grouped GEMMs of experts, plain or quantised, tiles read through pointers (Triton kernel; every GPU).

Math      rows:  y[rows of g] = a[rows of g] @ b[g].T          a [T, K], b [groups, N, K], y [T, N]
          depth: out[g] (+)= a[:, rows of g] @ b[:, rows of g].T   a [M, T], b [N, T], out [groups, M, N]
Layout    offsets [groups + 1] on the device: a program finds the group of its tile in them, so nothing is read on the host.
          The rest as in gemm_kernel.py, whose device functions these are
Cost      2*T*N*K FLOPs, and up to a tile's rows more for every group
Numerics  as gemm_kernel.py's. Elements past the end of a stretch read as zero, their scales as one: an Inf or NaN of one expert
          never reaches another
Limits    T below 2^31. Oracle: kernels/reference/grouped_gemm.py
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
from primus_turbo_plugin.kernels.triton.gemm_kernel import load_stored, store_tile
from primus_turbo_plugin.kernels.triton.gemm_order import chiplet_order, tile_of


@triton.jit
def ends_of_groups(offsets_ptr, GROUPS: tl.constexpr, SEARCH: tl.constexpr, BLOCK_M: tl.constexpr):
    """The number of tiles of rows up to the end of every group, int32 `[SEARCH]`."""
    group = tl.arange(0, SEARCH)
    start = tl.load(offsets_ptr + group, mask=group < GROUPS, other=0).to(tl.int32)
    stop = tl.load(offsets_ptr + group + 1, mask=group < GROUPS, other=0).to(tl.int32)
    return tl.cumsum((stop - start + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def find_group(row_tile, ends, offsets_ptr):
    """(group, first row, rows, first tile of rows) of the group that a tile of rows belongs to."""
    before = ends <= row_tile
    group = tl.sum(before.to(tl.int32), 0)
    start = tl.load(offsets_ptr + group).to(tl.int32)
    stop = tl.load(offsets_ptr + group + 1).to(tl.int32)
    return group, start, stop - start, tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def scales_a_row(stored, META: tl.constexpr):
    """Scales that one row of an operand has."""
    count = 1
    if META.is_mx:
        count = stored // 32
    elif META.scaled_by_block:
        count = stored // META.block_contraction
    return count


@triton.jit
def _multiply(
    a_ptr, a_scale, b_ptr, b_scale, m0, n0, rows, N, begin, end, a_stored, b_stored,
    stride_am, stride_ak, stride_bn, stride_bk,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """fp32 sums of a tile over the elements begin ... end - 1 of the contraction."""
    row_a = tl.minimum(m0 + tl.arange(0, BLOCK_M), rows - 1)
    row_b = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1)
    turned: tl.constexpr = B.element == "plain" or UNITS == "fp8"
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(begin, end, BLOCK_K):
        a = load_stored(
            a_ptr, m0, rows, k0, end, stride_am, stride_ak, A, BLOCK_M, BLOCK_K, False, EVEN_K, A_OUTER, False, WIDE
        )
        b = load_stored(
            b_ptr, n0, N, k0, end, stride_bn, stride_bk, B, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, B_OUTER, turned, WIDE
        )
        if UNITS == "half":
            a, b = decoded(a, A), decoded(b, B)
            if A.is_mx:
                a = scaled(a, load_mx_scale(a_scale, row_a, k0, a_stored, A, BLOCK_K, end), BLOCK_K)
            if B.is_mx:
                b = scaled(b, load_mx_scale(b_scale, row_b, k0, b_stored, B, BLOCK_K, end), BLOCK_K)
        if not turned:
            b = tl.trans(b)
        if UNITS == "mx":
            byte_a = load_mx_scale(a_scale, row_a, k0, a_stored, A, BLOCK_K, end)
            byte_b = load_mx_scale(b_scale, row_b, k0, b_stored, B, BLOCK_K, end)
            a_format: tl.constexpr = A.element
            b_format: tl.constexpr = B.element
            acc = tl.dot_scaled(a, byte_a, a_format, b, byte_b, b_format, acc)
        elif A.scaled_by_block or B.scaled_by_block:
            left, right = block_scales(
                a_scale, b_scale, m0, n0, rows, N, k0, a_stored, b_stored, A, B, BLOCK_M, BLOCK_N
            )
            acc += tl.dot(a, b) * left * right
        elif UNITS == "fp8":
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a, b, acc)
    if FNUZ:
        acc *= 4.0
    return acc


@triton.jit
def times_expert_scales(
    acc, a_scale, b_scale, m0, n0, M, N, begin, end, a_stored, b_stored, A: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """Finished sums of a stretch times scales that all of its blocks share; zero for an empty one, whatever lies there."""
    if A.scaled_by_row or B.scaled_by_row:
        place = tl.where(end > begin, begin, 0)
        acc = times_row_scales(acc, a_scale, b_scale, m0, n0, M, N, a_stored, b_stored, A, B, place)
        acc = tl.where(end > begin, acc, 0.0)
    return acc


@triton.jit
def grouped_rows_kernel(
    a_ptr, a_scale, b_ptr, b_scale, out_ptr, offsets_ptr,
    N, length, a_stored, b_stored,
    stride_am, stride_ak, stride_bg, stride_bn, stride_bk, stride_om, stride_bsg,
    GROUPS: tl.constexpr, SEARCH: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
    PARTS: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """Tiles of y, a fixed number of programs walking over them. Constants as in `gemm_nt_kernel`.

    stride_bg, stride_bsg: From one expert's weight, and its scales, to the next one's. GROUPS: Experts; SEARCH: a power of two.
    """
    ends = ends_of_groups(offsets_ptr, GROUPS, SEARCH, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    total = tl.max(ends, 0) * tiles_n
    for work in range(tl.program_id(0), total, tl.num_programs(0)):
        index = chiplet_order(work, total, XCDS)
        group, first_row, rows, first_tile = find_group(index // tiles_n, ends, offsets_ptr)
        tile_m, tile_n = tile_of(index - first_tile * tiles_n, rows, N, BLOCK_M, BLOCK_N, GROUP, 1)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        left, right = a_scale, b_scale
        if left is not None:
            left += first_row.to(tl.int64) * scales_a_row(a_stored, A)
        if right is not None:
            right += group.to(tl.int64) * stride_bsg
        acc = _multiply(
            a_ptr + first_row.to(tl.int64) * stride_am, left, b_ptr + group.to(tl.int64) * stride_bg, right,
            m0, n0, rows, N, 0, length, a_stored, b_stored, stride_am, stride_ak, stride_bn, stride_bk,
            A, B, A_OUTER, B_OUTER, UNITS, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K, FNUZ,
        )  # fmt: skip
        acc = times_row_scales(acc, left, right, m0, n0, rows, N, a_stored, b_stored, A, B)
        base = out_ptr + (first_row + m0).to(tl.int64) * stride_om
        store_tile(acc, base, n0, rows - m0, N, stride_om, 1, PARTS, False, WIDE)


@triton.jit
def grouped_depth_kernel(
    a_ptr, a_scale, b_ptr, b_scale, out_ptr, offsets_ptr,
    M, N, a_stored, b_stored,
    stride_am, stride_ak, stride_bn, stride_bk, stride_og, stride_om,
    GROUPS: tl.constexpr, MULTIPLE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
    PARTS: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """Tiles of every out[g]. Constants as in `gemm_nt_kernel`; MULTIPLE: what all offsets are multiples of."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for work in range(tl.program_id(0), tiles * GROUPS, tl.num_programs(0)):
        index = chiplet_order(work, tiles * GROUPS, XCDS)
        group = index // tiles
        begin = tl.multiple_of(tl.load(offsets_ptr + group).to(tl.int32), MULTIPLE)
        end = tl.multiple_of(tl.load(offsets_ptr + group + 1).to(tl.int32), MULTIPLE)
        if end > begin or not ACCUMULATE:
            tile_m, tile_n = tile_of(index % tiles, M, N, BLOCK_M, BLOCK_N, GROUP, 1)
            m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
            acc = _multiply(
                a_ptr, a_scale, b_ptr, b_scale, m0, n0, M, N, begin, end, a_stored, b_stored,
                stride_am, stride_ak, stride_bn, stride_bk, A, B, A_OUTER, B_OUTER, UNITS, EVEN_N, EVEN_K, WIDE,
                BLOCK_M, BLOCK_N, BLOCK_K, FNUZ,
            )  # fmt: skip
            acc = times_expert_scales(acc, a_scale, b_scale, m0, n0, M, N, begin, end, a_stored, b_stored, A, B)
            base = out_ptr + group.to(tl.int64) * stride_og + m0.to(tl.int64) * stride_om
            store_tile(acc, base, n0, M - m0, N, stride_om, 1, PARTS, ACCUMULATE, WIDE)
