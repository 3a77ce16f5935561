"""Gradients of queries for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_bwd.py
Layout    as attention_hopper_fwd.py: 128 queries a program, their q and dout stay in shared memory, keys and values pass by
Cost      6 * D FLOPs a visible score on the matrix units, 1 exponential
Numerics  as attention_bwd.py: fixed order of every sum
Limits    as attention_hopper_fwd.py
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from primus_turbo_plugin.kernels.triton.attention_hopper_fwd import ROWS, barriers, key_blocks, tile_2d, visible


@gluon.jit
def _differentiate(
    HALF: gl.constexpr, q_buffers, g_buffers, k_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty, dq, lse2, delta,
    first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim, stride_dqs,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries through all their blocks."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_lse = gl.load(lse2 + rows, mask=rows < q_len, other=float("inf"))
    row_delta = gl.load(delta + rows, mask=rows < q_len, other=0.0)
    q = tile_2d(q_buffers.index(HALF), DTYPE, ROWS, D)
    g = tile_2d(g_buffers.index(HALF), DTYPE, ROWS, D)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mbarrier.wait(qg_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    keys = tile_2d(k_ring.index(0), DTYPE, BLOCK_N, D)
    scores = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=False)
    for j in range(number):
        slot, following = j % SLOTS, (j + 1) % SLOTS
        mbarrier.wait(v_full.index(slot), (j // SLOTS) & 1)
        values = tile_2d(v_ring.index(slot), DTYPE, BLOCK_N, D)
        dp_token = warpgroup_mma(g, values.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = gl.exp2(scores * scale - row_lse[:, None])
        if (j < right_masked) | (j >= number - left_masked):
            cols = (top - j) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
            ok = visible(rows[:, None], cols[None, :], k_len, left, right, LEFT, RIGHT)
            p = gl.where(ok, p, 0.0)
        # A branch, so that ptxas does not move the wait below up: see attention_hopper_fwd.py.
        mbarrier.wait(k_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        mbarrier.arrive(v_empty.index(slot), count=1)
        ds = gl.convert_layout((p * (dp - row_delta[:, None])).to(DTYPE), OPERAND)
        acc_token = warpgroup_mma(ds, tile_2d(k_ring.index(slot), DTYPE, BLOCK_N, D), acc, is_async=True)
        # Behind the last block this multiplies what the slot held before, for nothing.
        keys = tile_2d(k_ring.index(following), DTYPE, BLOCK_N, D)
        scores_token = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc_token])
        mbarrier.arrive(k_empty.index(slot), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    places = dq + rows[:, None].to(gl.int64) * stride_dqs + cols[None, :]
    acc = (acc * grad_scale).to(dq.dtype.element_ty)
    gl.store(places, acc, mask=(rows < q_len)[:, None] & (cols < dim)[None, :])


@gluon.jit
def _copy(
    q_desc, g_desc, k_desc, v_desc, q_buffers, g_buffers, k_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty,
    batch, head, group, first, top, number,
):  # fmt: skip
    """The warp that keeps the rings full."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    mbarrier.expect(qg_full, 4 * ROWS * D * 2)
    for half in gl.static_range(2):
        tma.async_copy_global_to_shared(q_desc, [batch, first + half * ROWS, head, 0], qg_full, q_buffers.index(half))
        tma.async_copy_global_to_shared(g_desc, [batch, first + half * ROWS, head, 0], qg_full, g_buffers.index(half))
    for j in range(number):
        slot = j % SLOTS
        phase = ((j // SLOTS) & 1) ^ 1
        first_key = (top - j) * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), BLOCK_N * D * 2)
        tma.async_copy_global_to_shared(k_desc, [batch, first_key, group, 0], k_full.index(slot), k_ring.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), BLOCK_N * D * 2)
        tma.async_copy_global_to_shared(v_desc, [batch, first_key, group, 0], v_full.index(slot), v_ring.index(slot))


@gluon.jit
def attention_hopper_dq_kernel(
    q_desc, g_desc, k_desc, v_desc, dq, lse2, delta, heads, groups, q_len, k_len, tiles, left, right, scale, grad_scale, dim,
    stride_dqb, stride_dqs, stride_dqh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Programs: batch * heads * tiles of 128 queries, the last tiles of a head first."""
    program = gl.program_id(0)
    tile = tiles - 1 - program % tiles
    head_batch = program // tiles
    head = head_batch % heads
    batch = head_batch // heads
    group = head // (heads // groups)
    first = tile * (2 * ROWS)
    position = k_len - q_len
    top, number, right_masked, left_masked = key_blocks(
        first, gl.minimum(2 * ROWS, q_len - first), position, k_len, left, right, LEFT, RIGHT, BLOCK_N
    )
    left, right = left - position, right + position  # from here on counted from a query's own number
    dq += batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh
    lse2 += head_batch.to(gl.int64) * q_len
    delta += head_batch.to(gl.int64) * q_len
    q_buffers = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, D], q_desc.layout)
    g_buffers = gl.allocate_shared_memory(g_desc.dtype, [2, 1, ROWS, 1, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], v_desc.layout)
    qg_full = barriers(1, 1).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, q_buffers, g_buffers, k_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty, dq, lse2, delta,
                first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim,
                stride_dqs, LEFT, RIGHT,
            )),
            (_differentiate, (
                1, q_buffers, g_buffers, k_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty, dq, lse2, delta,
                first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim,
                stride_dqs, LEFT, RIGHT,
            )),
            (_copy, (
                q_desc, g_desc, k_desc, v_desc, q_buffers, g_buffers, k_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty,
                batch, head, group, first, top, number,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
