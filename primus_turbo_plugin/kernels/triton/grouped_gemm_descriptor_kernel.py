"""Grouped GEMMs of experts, tiles copied by Hopper's tensor copy engine (Triton kernel).

Layout    as grouped_gemm_kernel.py. All experts' weights are one matrix to the copy engine; a tile may reach into the next
          expert's rows, whose products are not stored. Along the contraction nothing may reach over: stretches of it that are no
          multiples of BLOCK_K end in a step through pointers
Cost      2*T*N*K FLOPs on the bf16 or FP8 units
Numerics  as gemm_descriptor_kernel.py's
Limits    operands contiguous along one axis, at multiples of 16 bytes along the other. Oracle: kernels/reference/grouped_gemm.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.gemm_decode import block_scales, times_row_scales
from primus_turbo_plugin.kernels.triton.gemm_kernel import load_stored, store_tile
from primus_turbo_plugin.kernels.triton.gemm_order import tile_of
from primus_turbo_plugin.kernels.triton.grouped_gemm_kernel import (
    ends_of_groups,
    find_group,
    scales_a_row,
    times_expert_scales,
)


@triton.jit
def _step(
    acc, a, b, a_scale, b_scale, m0, n0, rows, N, k0, a_stored, b_stored,
    A: tl.constexpr, B: tl.constexpr, UNITS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc plus the products of one step."""
    if A.scaled_by_block or B.scaled_by_block:
        left, right = block_scales(
            a_scale, b_scale, m0, n0, rows, N, k0, a_stored, b_stored, A, B, acc.shape[0], acc.shape[1]
        )
        acc += tl.dot(a, b) * left * right
    elif UNITS == "fp8":
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def grouped_rows_descriptor_kernel(
    a_desc, a_scale, b_desc, b_scale, out_ptr, offsets_ptr,
    N, length, a_stored, b_stored, stride_om, stride_bsg,
    GROUPS: tl.constexpr, SEARCH: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of y, a fixed number of programs walking over them. Constants as in `grouped_rows_kernel`."""
    ends = ends_of_groups(offsets_ptr, GROUPS, SEARCH, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    total = tl.max(ends, 0) * tiles_n
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, rows, first_tile = find_group(index // tiles_n, ends, offsets_ptr)
        tile_m, tile_n = tile_of(index - first_tile * tiles_n, rows, N, BLOCK_M, BLOCK_N, GROUP, 1)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        left, right = a_scale, b_scale
        if left is not None:
            left += first_row.to(tl.int64) * scales_a_row(a_stored, A)
        if right is not None:
            right += group.to(tl.int64) * stride_bsg
        row_a, row_b = first_row + m0, group * (length if B_OUTER else N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, length, BLOCK_K):
            a = a_desc.load([row_a, k0])
            b = b_desc.load([row_b + k0, n0]) if B_OUTER else b_desc.load([row_b + n0, k0]).T
            acc = _step(acc, a, b, left, right, m0, n0, rows, N, k0, a_stored, b_stored, A, B, UNITS, BLOCK_K)
        acc = times_row_scales(acc, left, right, m0, n0, rows, N, a_stored, b_stored, A, B)
        base = out_ptr + row_a.to(tl.int64) * stride_om
        store_tile(acc, base, n0, rows - m0, N, stride_om, 1, PARTS, False, False)


@triton.jit
def grouped_depth_descriptor_kernel(
    a_desc, a_ptr, a_scale, b_desc, b_ptr, b_scale, out_ptr, offsets_ptr,
    M, N, a_stored, b_stored, stride_am, stride_ak, stride_bn, stride_bk, stride_og, stride_om,
    GROUPS: tl.constexpr, MULTIPLE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A tile of one out[g]. Constants as in `grouped_depth_kernel`."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // tiles
    begin = tl.multiple_of(tl.load(offsets_ptr + group).to(tl.int32), MULTIPLE)
    end = tl.multiple_of(tl.load(offsets_ptr + group + 1).to(tl.int32), MULTIPLE)
    if end > begin or not ACCUMULATE:
        tile_m, tile_n = tile_of(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP, 1)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        whole = begin + (end - begin) // BLOCK_K * BLOCK_K
        for k0 in range(begin, whole, BLOCK_K):
            a = a_desc.load([k0, m0]).T if A_OUTER else a_desc.load([m0, k0])
            b = b_desc.load([k0, n0]) if B_OUTER else b_desc.load([n0, k0]).T
            acc = _step(acc, a, b, a_scale, b_scale, m0, n0, M, N, k0, a_stored, b_stored, A, B, UNITS, BLOCK_K)
        if MULTIPLE % BLOCK_K != 0:
            if whole < end:
                a = load_stored(
                    a_ptr,
                    m0,
                    M,
                    whole,
                    end,
                    stride_am,
                    stride_ak,
                    A,
                    BLOCK_M,
                    BLOCK_K,
                    False,
                    False,
                    A_OUTER,
                    False,
                    WIDE,
                )
                b = load_stored(
                    b_ptr,
                    n0,
                    N,
                    whole,
                    end,
                    stride_bn,
                    stride_bk,
                    B,
                    BLOCK_N,
                    BLOCK_K,
                    False,
                    False,
                    B_OUTER,
                    True,
                    WIDE,
                )
                acc = _step(acc, a, b, a_scale, b_scale, m0, n0, M, N, whole, a_stored, b_stored, A, B, UNITS, BLOCK_K)
        acc = times_expert_scales(acc, a_scale, b_scale, m0, n0, M, N, begin, end, a_stored, b_stored, A, B)
        base = out_ptr + group.to(tl.int64) * stride_og + m0.to(tl.int64) * stride_om
        store_tile(acc, base, n0, M - m0, N, stride_om, 1, PARTS, ACCUMULATE, WIDE)
