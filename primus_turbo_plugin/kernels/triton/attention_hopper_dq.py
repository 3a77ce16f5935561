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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from primus_turbo_plugin.kernels.triton.attention_hopper_fwd import (
    ROWS,
    barriers,
    key_blocks,
    load_tile,
    scores_of,
    tile_2d,
    visible,
)


@gluon.jit
def _differentiate(
    HALF: gl.constexpr, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty,
    dq, lse2, delta, first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim, stride_dqs,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries through all their blocks."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(TAIL, 16), 16])
    T_OPERAND: gl.constexpr = gl.DotOperandLayout(0, T_LAYOUT, 2)
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    row_lse = gl.load(lse2 + rows, mask=rows < q_len, other=float("inf"))
    row_delta = gl.load(delta + rows, mask=rows < q_len, other=0.0)
    g = tile_2d(g_tiles.index(HALF), DTYPE, ROWS, D)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    acc_tail = gl.zeros([ROWS, max(TAIL, 16)], gl.float32, T_LAYOUT)
    mbarrier.wait(qg_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    scores = scores_of(q_tiles, q_tails, HALF, k_ring, k_tail_ring, 0, TAIL, S_LAYOUT, False)
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
        ds = (p * (dp - row_delta[:, None])).to(DTYPE)
        keys = tile_2d(k_ring.index(slot), DTYPE, BLOCK_N, D)
        acc_token = warpgroup_mma(gl.convert_layout(ds, OPERAND), keys, acc, is_async=True)
        tail_token = acc_tail
        if TAIL > 0:
            keys = tile_2d(k_tail_ring.index(slot), DTYPE, BLOCK_N, TAIL)
            tail_token = warpgroup_mma(gl.convert_layout(ds, T_OPERAND), keys, acc_tail, is_async=True)
        # Behind the last block this multiplies what the slot held before, for nothing.
        scores_token = scores_of(q_tiles, q_tails, HALF, k_ring, k_tail_ring, following, TAIL, S_LAYOUT, True)
        if TAIL > 0:
            acc, acc_tail = warpgroup_mma_wait(2, deps=[acc_token, tail_token])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc_token])
        mbarrier.arrive(k_empty.index(slot), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    places = dq + rows[:, None].to(gl.int64) * stride_dqs + cols[None, :]
    acc = (acc * grad_scale).to(dq.dtype.element_ty)
    gl.store(places, acc, mask=(rows < q_len)[:, None] & (cols < dim)[None, :])
    if TAIL > 0:
        rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T_LAYOUT))
        cols = D + gl.arange(0, TAIL, layout=gl.SliceLayout(0, T_LAYOUT))
        places = dq + rows[:, None].to(gl.int64) * stride_dqs + cols[None, :]
        acc_tail = (acc_tail * grad_scale).to(dq.dtype.element_ty)
        gl.store(places, acc_tail, mask=(rows < q_len)[:, None] & (cols < dim)[None, :])


@gluon.jit
def _copy(
    q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
    qg_full, k_full, k_empty, v_full, v_empty, batch, head, group, first, top, number, TAIL: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the rings full."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    mbarrier.expect(qg_full, 2 * ROWS * (2 * D + TAIL) * 2)
    for half in gl.static_range(2):
        row = first + half * ROWS
        load_tile(q_desc, [batch, row, head, 0], qg_full, q_tiles.index(half))
        load_tile(g_desc, [batch, row, head, 0], qg_full, g_tiles.index(half))
        if TAIL > 0:
            load_tile(q_tail_desc, [batch, row, head, D], qg_full, q_tails.index(half))
    for j in range(number):
        slot = j % SLOTS
        phase = ((j // SLOTS) & 1) ^ 1
        first_key = (top - j) * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        full = k_full.index(slot)
        mbarrier.expect(full, BLOCK_N * (D + TAIL) * 2)
        load_tile(k_desc, [batch, first_key, group, 0], full, k_ring.index(slot))
        if TAIL > 0:
            load_tile(k_tail_desc, [batch, first_key, group, D], full, k_tail_ring.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), BLOCK_N * D * 2)
        load_tile(v_desc, [batch, first_key, group, 0], v_full.index(slot), v_ring.index(slot))


@gluon.jit
def attention_hopper_dq_kernel(
    q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc, dq, lse2, delta,
    heads, groups, q_len, k_len, tiles, left, right, scale, grad_scale, dim,
    stride_dqb, stride_dqs, stride_dqh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr, SLOTS: gl.constexpr,
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
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, D], q_desc.layout)
    g_tiles = gl.allocate_shared_memory(g_desc.dtype, [2, 1, ROWS, 1, D], g_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], v_desc.layout)
    q_tails, k_tail_ring = q_tiles, k_ring
    if TAIL > 0:
        q_tails = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, TAIL], q_tail_desc.layout)
        k_tail_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, BLOCK_N, 1, TAIL], k_tail_desc.layout)
    qg_full = barriers(1, 1).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty,
                dq, lse2, delta, first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim,
                stride_dqs, LEFT, RIGHT, TAIL,
            )),
            (_differentiate, (
                1, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring, qg_full, k_full, k_empty, v_full, v_empty,
                dq, lse2, delta, first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, grad_scale, dim,
                stride_dqs, LEFT, RIGHT, TAIL,
            )),
            (_copy, (
                q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc,
                q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
                qg_full, k_full, k_empty, v_full, v_empty, batch, head, group, first, top, number, TAIL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
