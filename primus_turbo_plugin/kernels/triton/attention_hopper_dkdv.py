"""Gradients of keys and values for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_bwd.py
Layout    a program: 128 keys of one group, 64 for each of two warpgroups, through the queries of the group's heads (or of its
          share of them) that see any; one more warp copies blocks of q, dout, lse and delta into a ring. Scores are computed
          transposed, so that P and dS go from one product's registers into the next's; S of the next block is under way before
          this one is done
Cost      8 * D FLOPs a visible score on the matrix units, 1 exponential
Numerics  as attention_bwd.py: fixed order of every sum
Limits    as attention_hopper_fwd.py; queries in multiples of 4 (descriptors read lse and delta)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from primus_turbo_plugin.kernels.triton.attention_hopper_fwd import ROWS, barriers, load_tile, tile_2d, visible


@gluon.jit
def query_blocks(
    first, keys, position, q_len, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK: gl.constexpr
):
    """(low, full_low, full_high, high): blocks of queries low ... high - 1 see any of the keys first ... first + keys - 1, those
    in full_low ... full_high - 1 all of them."""
    low = 0
    full_low = 0
    high = (q_len + BLOCK - 1) // BLOCK
    full_high = q_len // BLOCK
    if RIGHT:
        low = gl.maximum(first - right - position, 0) // BLOCK
        full_low = (gl.maximum(first + keys - 1 - right - position, 0) + BLOCK - 1) // BLOCK
    if LEFT:
        last = gl.minimum(q_len, first + keys + left - position)
        high = (gl.maximum(last, 0) + BLOCK - 1) // BLOCK
        full_high = gl.maximum(gl.minimum(q_len, first + left - position + 1), 0) // BLOCK
    if first + keys > k_len:
        full_high = 0
    return low, full_low, full_high, gl.maximum(high, low)


@gluon.jit
def _differentiate(
    HALF: gl.constexpr, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
    dk, dv, first, low, full_low, full_high, high, heads_each, q_len, k_len, left, right, scale, grad_scale,
    dim, v_dim, stride_dks, stride_dvs, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys through all blocks of queries."""
    DTYPE: gl.constexpr = q_ring.dtype
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    D: gl.constexpr = q_ring.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    keys = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    k_half = tile_2d(k_tile, DTYPE, 2 * ROWS, D).slice(HALF * ROWS, ROWS, dim=0)
    v_half = tile_2d(v_tile, DTYPE, 2 * ROWS, D).slice(HALF * ROWS, ROWS, dim=0)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    acc_k = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    acc_v = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    each = high - low
    number = each * heads_each
    mbarrier.wait(kv_full, 0)
    scores = zero
    if number > 0:
        mbarrier.wait(q_full.index(0), 0)
        q = tile_2d(q_ring.index(0), DTYPE, BLOCK_M, D)
        scores = warpgroup_mma(k_half, q.permute((1, 0)), zero, use_acc=False, is_async=False)
    for j in range(number):
        slot, following = j % SLOTS, (j + 1) % SLOTS
        block = low + j % each
        q = tile_2d(q_ring.index(slot), DTYPE, BLOCK_M, D)
        g = tile_2d(g_ring.index(slot), DTYPE, BLOCK_M, D)
        mbarrier.wait(g_full.index(slot), (j // SLOTS) & 1)
        dp_token = warpgroup_mma(v_half, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = gl.exp2(scores * scale - lse_ring.index(slot).load(S_LAYOUT))  # [1, BLOCK_M], the same for all keys
        if (block < full_low) | (block >= full_high):
            rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
            ok = visible(rows[None, :], keys[:, None], k_len, left, right, LEFT, RIGHT)
            p = gl.where(ok & (rows < q_len)[None, :], p, 0.0)
        v_token = warpgroup_mma(gl.convert_layout(p.to(DTYPE), OPERAND), g, acc_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        ds = (p * (dp - delta_ring.index(slot).load(S_LAYOUT))).to(DTYPE)
        k_token = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, acc_k, is_async=True)
        mbarrier.wait(q_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
        q = tile_2d(q_ring.index(following), DTYPE, BLOCK_M, D)
        # Behind the last block this multiplies what the slot held before, for nothing.
        scores_token = warpgroup_mma(k_half, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        acc_v, acc_k = warpgroup_mma_wait(1, deps=[v_token, k_token])
        mbarrier.arrive(g_empty.index(slot), count=1)
        mbarrier.arrive(q_empty.index(slot), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    inside = (rows < k_len)[:, None]
    wide = rows[:, None].to(gl.int64)
    acc_k = (acc_k * grad_scale).to(dk.dtype.element_ty)
    gl.store(dk + wide * stride_dks + cols[None, :], acc_k, mask=inside & (cols < dim)[None, :])
    gl.store(
        dv + wide * stride_dvs + cols[None, :], acc_v.to(dv.dtype.element_ty), mask=inside & (cols < v_dim)[None, :]
    )


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring,
    kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, first, low, high, heads_each,
):  # fmt: skip
    """The warp that keeps the ring full."""
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    D: gl.constexpr = q_ring.shape[4]
    mbarrier.expect(kv_full, 2 * 2 * ROWS * D * 2)
    load_tile(k_desc, [batch, first, group, 0], kv_full, k_tile)
    load_tile(v_desc, [batch, first, group, 0], kv_full, v_tile)
    each = high - low
    for j in range(each * heads_each):
        slot = j % SLOTS
        phase = ((j // SLOTS) & 1) ^ 1
        row = (low + j % each) * BLOCK_M
        head = first_head + j // each
        mbarrier.wait(q_empty.index(slot), phase)
        mbarrier.expect(q_full.index(slot), BLOCK_M * D * 2)
        load_tile(q_desc, [batch, row, head, 0], q_full.index(slot), q_ring.index(slot))
        mbarrier.wait(g_empty.index(slot), phase)
        full = g_full.index(slot)
        mbarrier.expect(full, BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
        load_tile(g_desc, [batch, row, head, 0], full, g_ring.index(slot))
        load_tile(lse_desc, [batch * heads + head, row], full, lse_ring.index(slot))
        load_tile(delta_desc, [batch * heads + head, row], full, delta_ring.index(slot))


@gluon.jit
def attention_hopper_dkdv_kernel(
    q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc, dk, dv, heads, groups, q_len, k_len, tiles, splits,
    left, right, scale, grad_scale, dim, v_dim,
    stride_dkp, stride_dkb, stride_dks, stride_dkh, stride_dvp, stride_dvb, stride_dvs, stride_dvh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Programs: batch * groups * splits * tiles of 128 keys; splits as `attention_dkdv_kernel` has them."""
    program = gl.program_id(0)
    tile = program % tiles
    lane = program // tiles
    split = lane % splits
    group = (lane // splits) % groups
    batch = lane // splits // groups
    heads_each = heads // groups // splits
    first_head = group * (heads // groups) + split * heads_each
    first = tile * (2 * ROWS)
    position = k_len - q_len
    low, full_low, full_high, high = query_blocks(
        first, 2 * ROWS, position, q_len, k_len, left, right, LEFT, RIGHT, BLOCK_M
    )
    left, right = left - position, right + position  # from here on counted from a query's own number
    dk += split.to(gl.int64) * stride_dkp + batch.to(gl.int64) * stride_dkb + group.to(gl.int64) * stride_dkh
    dv += split.to(gl.int64) * stride_dvp + batch.to(gl.int64) * stride_dvb + group.to(gl.int64) * stride_dvh
    k_tile = gl.allocate_shared_memory(k_desc.dtype, [1, 2 * ROWS, 1, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [1, 2 * ROWS, 1, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, BLOCK_M, 1, D], q_desc.layout)
    g_ring = gl.allocate_shared_memory(g_desc.dtype, [SLOTS, 1, BLOCK_M, 1, D], g_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], delta_desc.layout)
    kv_full = barriers(1, 1).index(0)
    q_full, q_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    g_full, g_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
                dk, dv, first, low, full_low, full_high, high, heads_each, q_len, k_len, left, right,
                scale, grad_scale, dim, v_dim, stride_dks, stride_dvs, LEFT, RIGHT,
            )),
            (_differentiate, (
                1, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
                dk, dv, first, low, full_low, full_high, high, heads_each, q_len, k_len, left, right,
                scale, grad_scale, dim, v_dim, stride_dks, stride_dvs, LEFT, RIGHT,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, g_desc, lse_desc, delta_desc, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring,
                kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, first, low, high, heads_each,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
