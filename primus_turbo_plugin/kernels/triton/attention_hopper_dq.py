"""Gradients of queries for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_bwd.py
Layout    as attention_hopper_fwd.py: 128 queries a tile, their q and dout stay in shared memory, keys and values pass by
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

from primus_turbo_plugin.kernels.triton.attention_hopper_pieces import (
    key_blocks,
    query_tile,
    visible,
)
from primus_turbo_plugin.kernels.triton.attention_hopper_tile import (
    ROWS,
    barriers,
    copy_blocks,
    item_ring,
    next_item,
    ring,
    scores_of,
    tile_2d,
)


@gluon.jit
def _differentiate(
    HALF: gl.constexpr, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
    qg_full, qg_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
    dq, lse2, delta, lengths, sizes, items, left, right, scale, grad_scale, dim, strides,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, META: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries of each of the program's tiles through all their blocks."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    V_SLOTS: gl.constexpr = v_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[-3]
    D: gl.constexpr = k_ring.shape[-1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(TAIL, 16), 16])
    T_OPERAND: gl.constexpr = gl.DotOperandLayout(0, T_LAYOUT, 2)
    stride_dqb, stride_dqs, stride_dqh = strides
    heads, q_tokens = sizes[2], sizes[4]
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    base = 0  # blocks of the tiles before
    tiles = 0  # with queries in them
    turn = 0
    item = gl.program_id(0)
    while item < items:
        batch, head, first, q_start, q_len, room, _k_start, k_len, position = query_tile(
            item, lengths, sizes, META, 2 * ROWS
        )
        if first < room:
            top, number, right_masked, left_masked = key_blocks(
                first, gl.minimum(2 * ROWS, q_len - first), position, k_len, left, right, LEFT, RIGHT, BLOCK_N
            )
            near, far = left - position, right + position  # counted from a query's own number
            rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
            line = (batch.to(gl.int64) * heads + head) * q_tokens + q_start
            row_lse = gl.load(lse2 + line + rows, mask=rows < q_len, other=float("inf"))
            row_delta = gl.load(delta + line + rows, mask=rows < q_len, other=0.0)
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            acc_tail = gl.zeros([ROWS, max(TAIL, 16)], gl.float32, T_LAYOUT)
            mbarrier.wait(qg_full, tiles & 1)
            mbarrier.wait(k_full.index(base % SLOTS), (base // SLOTS) & 1)
            scores = scores_of(q_tiles, q_tails, HALF, k_ring, k_tail_ring, base % SLOTS, TAIL, S_LAYOUT, False)
            for j in range(number):
                step = base + j
                slot, following, v_slot = step % SLOTS, (step + 1) % SLOTS, step % V_SLOTS
                half = HALF
                if V_SLOTS == 1:
                    # Zero, without the compiler's knowing: it would keep all addresses in fixed tiles in registers, and spill.
                    v_slot = gl.maximum(j - k_len, 0)
                    half = HALF + v_slot
                g = tile_2d(g_tiles.index(half), DTYPE, ROWS, D)
                mbarrier.wait(v_full.index(v_slot), (step // V_SLOTS) & 1)
                values = tile_2d(v_ring.index(v_slot), DTYPE, BLOCK_N, D)
                dp_token = warpgroup_mma(g, values.permute((1, 0)), zero, use_acc=False, is_async=True)
                p = gl.exp2(scores * scale - row_lse[:, None])
                if (j < right_masked) | (j >= number - left_masked):
                    cols = (top - j) * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
                    ok = visible(rows[:, None], cols[None, :], k_len, near, far, LEFT, RIGHT)
                    p = gl.where(ok, p, 0.0)
                # A branch, so that ptxas does not move the wait below up: see attention_hopper_fwd.py.
                mbarrier.wait(k_full.index(following), ((step + 1) // SLOTS) & 1, pred=j + 1 < number)
                dp = warpgroup_mma_wait(0, deps=[dp_token])
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                ds = (p * (dp - row_delta[:, None])).to(DTYPE)
                keys = tile_2d(k_ring.index(slot), DTYPE, BLOCK_N, D)
                acc_token = warpgroup_mma(gl.convert_layout(ds, OPERAND), keys, acc, is_async=True)
                tail_token = acc_tail
                if TAIL > 0:
                    keys = tile_2d(k_tail_ring.index(slot), DTYPE, BLOCK_N, TAIL)
                    tail_token = warpgroup_mma(gl.convert_layout(ds, T_OPERAND), keys, acc_tail, is_async=True)
                # Behind the last block this multiplies whatever the slot holds, for nothing.
                scores_token = scores_of(q_tiles, q_tails, half, k_ring, k_tail_ring, following, TAIL, S_LAYOUT, True)
                if TAIL > 0:
                    acc, acc_tail = warpgroup_mma_wait(2, deps=[acc_token, tail_token])
                else:
                    acc = warpgroup_mma_wait(1, deps=[acc_token])
                mbarrier.arrive(k_empty.index(slot), count=1)
                scores = warpgroup_mma_wait(0, deps=[scores_token])
            mbarrier.arrive(qg_empty, count=1)
            base += number
            tiles += 1
            rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
            cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
            place = batch.to(gl.int64) * stride_dqb + head.to(gl.int64) * stride_dqh + q_start.to(gl.int64) * stride_dqs
            places = dq + place + rows[:, None].to(gl.int64) * stride_dqs + cols[None, :]
            acc = (acc * grad_scale).to(dq.dtype.element_ty)
            gl.store(places, acc, mask=(rows < room)[:, None] & (cols < dim)[None, :])
            if TAIL > 0:
                rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T_LAYOUT))
                cols = D + gl.arange(0, TAIL, layout=gl.SliceLayout(0, T_LAYOUT))
                places = dq + place + rows[:, None].to(gl.int64) * stride_dqs + cols[None, :]
                acc_tail = (acc_tail * grad_scale).to(dq.dtype.element_ty)
                gl.store(places, acc_tail, mask=(rows < room)[:, None] & (cols < dim)[None, :])
        if PERSISTENT:
            item = next_item(turn, ring_of_items, item_full, item_empty)
        else:
            item = items
        turn += 1


@gluon.jit
def attention_hopper_dq_kernel(
    q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc, dq, lse2, delta, counter, cu_q, starts_q, cu_k, starts_k,
    items, slots, chunk, heads, groups, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size,
    left, right, scale, grad_scale, dim, stride_dqb, stride_dqs, stride_dqh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, META: gl.constexpr, PERSISTENT: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr, SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
):  # fmt: skip
    """`items` tiles of 128 queries, see `query_tile`: each a program, or PERSISTENT, where each program takes the next that is
    left when it is done with one, by `counter`, an int32 that is zero at the start."""
    lengths = (0, 0, 0, 0)  # a tuple of arguments takes no None
    if not PERSISTENT:
        counter = lse2
    if META.packed:
        lengths = (cu_q, starts_q, cu_k, starts_k)
    sizes = (slots, chunk, heads, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size)
    strides = (stride_dqb, stride_dqs, stride_dqh)
    q_tiles = ring(q_desc, 2)
    g_tiles = ring(g_desc, 2)
    k_ring = ring(k_desc, SLOTS)
    v_ring = ring(v_desc, V_SLOTS)
    q_tails, k_tail_ring = q_tiles, k_ring
    if TAIL > 0:
        q_tails = ring(q_tail_desc, 2)
        k_tail_ring = ring(k_tail_desc, SLOTS)
    qg_full, qg_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(V_SLOTS, 1), barriers(V_SLOTS, 2)
    ring_of_items = item_ring()
    item_full, item_empty = barriers(2, 1), barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
                qg_full, qg_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
                dq, lse2, delta, lengths, sizes, items, left, right, scale, grad_scale, dim, strides,
                LEFT, RIGHT, TAIL, META, PERSISTENT,
            )),
            (_differentiate, (
                1, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
                qg_full, qg_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
                dq, lse2, delta, lengths, sizes, items, left, right, scale, grad_scale, dim, strides,
                LEFT, RIGHT, TAIL, META, PERSISTENT,
            )),
            (copy_blocks, (
                q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc,
                q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
                qg_full, qg_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
                lengths, sizes, items, counter, groups, left, right,
                LEFT, RIGHT, TAIL, True, META, PERSISTENT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
