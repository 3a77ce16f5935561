"""y[M, N] = a[M, K] @ b[N, K].T, tiles copied by Hopper's tensor copy engine (Triton kernel).

Layout    each operand is read in the order it has in memory, [outer, contraction] or [contraction, outer]; wgmma takes 16-bit
          operands either way, FP8 ones with the contraction last, as quantised operands have it. Programs walk over tiles, so
          that a tile's stores overlap the next one's loads
Cost      2*M*N*K FLOPs on the bf16 or FP8 units
Numerics  bf16: fp32 accumulation. FP8: Hopper's FP8 units keep about 14 bits of a sum, so each BLOCK_K elements' sum is added
          to fp32 accumulators outside of them; scales of blocks multiply those sums. One rounding at the store
Limits    addresses and row distances that are multiples of 16 bytes. Oracle: kernels/reference/gemm.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.gemm_decode import block_scales, times_row_scales
from primus_turbo_plugin.kernels.triton.gemm_order import tile_of


@triton.jit
def _store(acc, desc, m0, n0, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr):
    """Stores a tile in PARTS pieces of its columns."""
    if PARTS == 1:
        if ACCUMULATE:
            acc += desc.load([m0, n0])
        desc.store([m0, n0], acc.to(desc.dtype))
    else:
        rows: tl.constexpr = acc.shape[0]
        half: tl.constexpr = acc.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (rows, 2, half)), (0, 2, 1)))
        _store(left, desc, m0, n0, PARTS // 2, ACCUMULATE)
        _store(right, desc, m0, n0 + half, PARTS // 2, ACCUMULATE)


@triton.jit
def _tile(
    tile, a_desc, a_scale, b_desc, b_scale, bias_ptr, out_desc,
    M, N, length, a_stored, b_stored,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP, 1)
    m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, length, BLOCK_K):
        a = a_desc.load([k0, m0]).T if A_OUTER else a_desc.load([m0, k0])
        b = b_desc.load([k0, n0]) if B_OUTER else b_desc.load([n0, k0]).T
        if A.scaled_by_block or B.scaled_by_block:
            # loaded before the sums are needed, to hide the latency behind them
            left, right = block_scales(a_scale, b_scale, m0, n0, M, N, k0, a_stored, b_stored, A, B, BLOCK_M, BLOCK_N)
            acc += tl.dot(a, b) * left * right
        elif UNITS == "fp8":
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
        else:
            acc = tl.dot(a, b, acc)
    acc = times_row_scales(acc, a_scale, b_scale, m0, n0, M, N, a_stored, b_stored, A, B)
    if bias_ptr is not None:
        n = tl.minimum(n0 + tl.arange(0, BLOCK_N), N - 1)
        acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    _store(acc, out_desc, m0, n0, PARTS, ACCUMULATE)


@triton.jit
def gemm_descriptor_kernel(
    a_desc, a_scale, b_desc, b_scale, bias_ptr, out_desc,
    M, N, length, a_stored, b_stored,
    A: tl.constexpr, B: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, UNITS: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Tiles of y. `A` and `B` are `gemm_decode.OperandMeta`; A_OUTER, B_OUTER and UNITS as in `gemm_nt_kernel`."""
    if PERSISTENT:
        tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            _tile(
                tile, a_desc, a_scale, b_desc, b_scale, bias_ptr, out_desc, M, N, length, a_stored, b_stored, A, B,
                A_OUTER, B_OUTER, UNITS, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PARTS,
            )  # fmt: skip
    else:
        _tile(
            tl.program_id(0), a_desc, a_scale, b_desc, b_scale, bias_ptr, out_desc, M, N, length, a_stored, b_stored, A, B,
            A_OUTER, B_OUTER, UNITS, ACCUMULATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PARTS,
        )  # fmt: skip
