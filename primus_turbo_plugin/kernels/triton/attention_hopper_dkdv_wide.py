"""Gradients of keys and values of wide heads for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_bwd.py
Layout    a program: 64 keys of one group through the queries of the group's heads (or of its share of them) that see any. The
          accumulators of both gradients, 64 x 256 fp32 each, are more than one warpgroup's registers, so each warpgroup has one:
          the first computes S and P, and dv from them; the second dP, and dk from it and P, which it gets through shared memory
          in fp32. Two products each; one more warp copies blocks of q, dout, lse and delta into a ring
Cost      as attention_hopper_dkdv.py, and 32 KiB of shared memory traffic a block of 64 x 64 scores for P
Numerics  as attention_bwd.py: fixed order of every sum
Limits    dim and v_dim to 256; otherwise as attention_hopper_dkdv.py
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
    blocks_of_a_head,
    key_tile,
    query_block,
    query_runs,
    visible,
)
from primus_turbo_plugin.kernels.triton.attention_hopper_tile import (
    ROWS,
    RUN_LAYOUT,
    barriers,
    copy_rows,
    load_run,
    load_tile,
    ring,
    tile_2d,
)


@gluon.jit
def _keys_by_queries(k_tile, k_tail, q_ring, q_tail_ring, slot, TAIL: gl.constexpr, ASYNC: gl.constexpr):
    """Raw scores, keys as rows."""
    DTYPE: gl.constexpr = q_ring.dtype
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    D: gl.constexpr = q_ring.shape[-1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
    keys = tile_2d(k_tile, DTYPE, ROWS, D)
    q = tile_2d(q_ring.index(slot), DTYPE, BLOCK_M, D)
    scores = warpgroup_mma(keys, q.permute((1, 0)), zero, use_acc=False, is_async=ASYNC)
    if TAIL > 0:
        keys = tile_2d(k_tail, DTYPE, ROWS, TAIL)
        q = tile_2d(q_tail_ring.index(slot), DTYPE, BLOCK_M, TAIL)
        scores = warpgroup_mma(keys, q.permute((1, 0)), scores, is_async=ASYNC)
    return scores


@gluon.jit
def _differentiate_values(
    k_tile, k_tail, q_ring, q_tail_ring, g_ring, lse_ring, p_ring,
    kv_full, q_full, q_empty, g_full, g_empty, p_full, p_empty,
    dv, first, runs, heads_each, k_len, room, scale, v_dim, stride_dvs,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: P of every block, handed to the second, and dv."""
    DTYPE: gl.constexpr = q_ring.dtype
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    DV: gl.constexpr = g_ring.shape[-1]
    P_SLOTS: gl.constexpr = p_ring.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    keys = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
    each = blocks_of_a_head(runs, META)
    number = each * heads_each
    scores = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    if number > 0:
        mbarrier.wait(kv_full, 0)
        mbarrier.wait(q_full.index(0), 0)
        scores = _keys_by_queries(k_tile, k_tail, q_ring, q_tail_ring, 0, TAIL, False)
    for j in range(number):
        slot, following, p_slot = j % SLOTS, (j + 1) % SLOTS, j % P_SLOTS
        _head, block, _q_start, q_len, full_low, full_high, near, far = query_block(j, runs, each, META)
        p = gl.exp2(scores * scale - lse_ring.index(slot).load(S_LAYOUT))  # [1, BLOCK_M], the same for all keys
        mbarrier.arrive(q_empty.index(slot), count=1)
        if (block < full_low) | (block >= full_high):
            rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
            ok = visible(rows[None, :], keys[:, None], k_len, near, far, LEFT, RIGHT)
            p = gl.where(ok & (rows < q_len)[None, :], p, 0.0)
        mbarrier.wait(p_empty.index(p_slot), ((j // P_SLOTS) & 1) ^ 1)
        p_ring.index(p_slot).store(p)
        mbarrier.arrive(p_full.index(p_slot), count=1)
        mbarrier.wait(g_full.index(slot), (j // SLOTS) & 1)
        g = tile_2d(g_ring.index(slot), DTYPE, BLOCK_M, DV)
        token = warpgroup_mma(gl.convert_layout(p.to(DTYPE), OPERAND), g, acc, is_async=True)
        mbarrier.wait(q_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
        # Behind the last block this multiplies what the slot held before, for nothing.
        scores_token = _keys_by_queries(k_tile, k_tail, q_ring, q_tail_ring, following, TAIL, True)
        if TAIL > 0:
            acc = warpgroup_mma_wait(2, deps=[token])
        else:
            acc = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(g_empty.index(slot), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT))
    places = dv + rows[:, None].to(gl.int64) * stride_dvs + cols[None, :]
    gl.store(places, acc.to(dv.dtype.element_ty), mask=(rows < room)[:, None] & (cols < v_dim)[None, :])


@gluon.jit
def _differentiate_keys(
    v_tile, q_ring, q_tail_ring, g_ring, delta_ring, p_ring, kv_full, q_full, q_empty, g_full, g_empty, p_full, p_empty,
    dk, first, number, room, grad_scale, dim, stride_dks, TAIL: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: dP and dS of every block, and dk."""
    DTYPE: gl.constexpr = q_ring.dtype
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    D: gl.constexpr = q_ring.shape[-1]
    DV: gl.constexpr = g_ring.shape[-1]
    P_SLOTS: gl.constexpr = p_ring.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    T_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(TAIL, 16), 16])
    T_OPERAND: gl.constexpr = gl.DotOperandLayout(0, T_LAYOUT, 2)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    acc_tail = gl.zeros([ROWS, max(TAIL, 16)], gl.float32, T_LAYOUT)
    values = tile_2d(v_tile, DTYPE, ROWS, DV)
    dp = zero
    if number > 0:
        mbarrier.wait(kv_full, 0)
        mbarrier.wait(g_full.index(0), 0)
        g = tile_2d(g_ring.index(0), DTYPE, BLOCK_M, DV)
        dp = warpgroup_mma(values, g.permute((1, 0)), zero, use_acc=False, is_async=False)
    for j in range(number):
        slot, following, p_slot = j % SLOTS, (j + 1) % SLOTS, j % P_SLOTS
        row_delta = delta_ring.index(slot).load(S_LAYOUT)
        mbarrier.arrive(g_empty.index(slot), count=1)
        mbarrier.wait(p_full.index(p_slot), (j // P_SLOTS) & 1)
        p = p_ring.index(p_slot).load(S_LAYOUT)
        mbarrier.arrive(p_empty.index(p_slot), count=1)
        ds = (p * (dp - row_delta)).to(DTYPE)
        mbarrier.wait(q_full.index(slot), (j // SLOTS) & 1)
        q = tile_2d(q_ring.index(slot), DTYPE, BLOCK_M, D)
        token = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, acc, is_async=True)
        tail_token = acc_tail
        if TAIL > 0:
            q = tile_2d(q_tail_ring.index(slot), DTYPE, BLOCK_M, TAIL)
            tail_token = warpgroup_mma(gl.convert_layout(ds, T_OPERAND), q, acc_tail, is_async=True)
        mbarrier.wait(g_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
        g = tile_2d(g_ring.index(following), DTYPE, BLOCK_M, DV)
        dp_token = warpgroup_mma(values, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        if TAIL > 0:
            acc, acc_tail = warpgroup_mma_wait(1, deps=[token, tail_token])
        else:
            acc = warpgroup_mma_wait(1, deps=[token])
        mbarrier.arrive(q_empty.index(slot), count=1)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    places = dk + rows[:, None].to(gl.int64) * stride_dks + cols[None, :]
    acc = (acc * grad_scale).to(dk.dtype.element_ty)
    gl.store(places, acc, mask=(rows < room)[:, None] & (cols < dim)[None, :])
    if TAIL > 0:
        rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, T_LAYOUT))
        cols = D + gl.arange(0, TAIL, layout=gl.SliceLayout(0, T_LAYOUT))
        places = dk + rows[:, None].to(gl.int64) * stride_dks + cols[None, :]
        acc_tail = (acc_tail * grad_scale).to(dk.dtype.element_ty)
        gl.store(places, acc_tail, mask=(rows < room)[:, None] & (cols < dim)[None, :])


@gluon.jit
def _copy(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, g_desc, lse2, delta,
    k_tile, k_tail, v_tile, q_ring, q_tail_ring, g_ring, lse_ring, delta_ring,
    kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, q_tokens, first, k_start, k_len, runs, heads_each,
    TAIL: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the ring full."""
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    D: gl.constexpr = q_ring.shape[-1]
    DV: gl.constexpr = g_ring.shape[-1]
    each = blocks_of_a_head(runs, META)
    number = each * heads_each
    if number > 0:
        mbarrier.expect(kv_full, ROWS * (D + TAIL + DV) * 2)
        copy_rows(k_desc, batch, k_start, k_len, first, group, 0, kv_full, k_tile, META)
        if TAIL > 0:
            copy_rows(k_tail_desc, batch, k_start, k_len, first, group, D, kv_full, k_tail, META)
        copy_rows(v_desc, batch, k_start, k_len, first, group, 0, kv_full, v_tile, META)
    for j in range(number):
        slot = j % SLOTS
        phase = ((j // SLOTS) & 1) ^ 1
        index, block, q_start, q_len, _full_low, _full_high, _near, _far = query_block(j, runs, each, META)
        head, row = first_head + index, block * BLOCK_M
        line = batch * heads + head
        if META.odd_starts:
            run_lse = load_run(lse2, line, q_tokens, q_start, q_len, row, BLOCK_M)
            run_delta = load_run(delta, line, q_tokens, q_start, q_len, row, BLOCK_M)
        mbarrier.wait(q_empty.index(slot), phase)
        full = q_full.index(slot)
        mbarrier.expect(full, BLOCK_M * (D + TAIL) * 2 + (0 if META.odd_starts else BLOCK_M * 4))
        copy_rows(q_desc, batch, q_start, q_len, row, head, 0, full, q_ring.index(slot), META)
        if TAIL > 0:
            copy_rows(q_tail_desc, batch, q_start, q_len, row, head, D, full, q_tail_ring.index(slot), META)
        if META.odd_starts:
            lse_ring.index(slot).store(run_lse)
            mbarrier.arrive(full, count=1)
        else:
            load_tile(lse2, [line, q_start + row], full, lse_ring.index(slot))
        mbarrier.wait(g_empty.index(slot), phase)
        full = g_full.index(slot)
        mbarrier.expect(full, BLOCK_M * DV * 2 + (0 if META.odd_starts else BLOCK_M * 4))
        copy_rows(g_desc, batch, q_start, q_len, row, head, 0, full, g_ring.index(slot), META)
        if META.odd_starts:
            delta_ring.index(slot).store(run_delta)
            mbarrier.arrive(full, count=1)
        else:
            load_tile(delta, [line, q_start + row], full, delta_ring.index(slot))


@gluon.jit
def attention_hopper_dkdv_wide_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, g_desc, lse2, delta, dk, dv, cu_q, starts_q, cu_k, starts_k,
    slots, chunk, lanes, splits, heads, groups, q_tokens, k_tokens, sequences, cp_rank, cp_size,
    left, right, scale, grad_scale, dim, v_dim,
    stride_dkp, stride_dkb, stride_dks, stride_dkh, stride_dvp, stride_dvb, stride_dvs, stride_dvh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, META: gl.constexpr,
    BLOCK_M: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr, DV: gl.constexpr, SLOTS: gl.constexpr, P_SLOTS: gl.constexpr,
):  # fmt: skip
    """Programs: batch * groups * splits * slots of 64 keys; all else as `attention_hopper_dkdv_kernel` has it."""
    lengths = (0, 0, 0, 0)  # a tuple of arguments takes no None
    if META.packed:
        lengths = (cu_q, starts_q, cu_k, starts_k)
    heads_each = heads // groups // splits
    sizes = (slots, chunk, lanes, splits, groups, q_tokens, k_tokens, sequences, cp_rank, cp_size)
    batch, group, split, sequence, first, k_start, k_len, room = key_tile(gl.program_id(0), lengths, sizes, META, ROWS)
    first_head = group * (heads // groups) + split * heads_each
    runs = query_runs(sequence, first, k_len, lengths, sizes, left, right, META, LEFT, RIGHT, ROWS, BLOCK_M)
    start = k_start.to(gl.int64)
    dk += split.to(gl.int64) * stride_dkp + batch.to(gl.int64) * stride_dkb + start * stride_dks
    dk += group.to(gl.int64) * stride_dkh
    dv += split.to(gl.int64) * stride_dvp + batch.to(gl.int64) * stride_dvb + start * stride_dvs
    dv += group.to(gl.int64) * stride_dvh
    k_tile = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    q_ring = ring(q_desc, SLOTS)
    g_ring = ring(g_desc, SLOTS)
    k_tail, q_tail_ring = k_tile, q_ring
    if TAIL > 0:
        k_tail = gl.allocate_shared_memory(k_desc.dtype, k_tail_desc.block_shape, k_tail_desc.layout)
        q_tail_ring = ring(q_tail_desc, SLOTS)
    # Swizzled so that the four rows that half a warp stores at once lie in different banks.
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0])
    p_ring = gl.allocate_shared_memory(gl.float32, [P_SLOTS, ROWS, BLOCK_M], P_LAYOUT)
    lse_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], RUN_LAYOUT)
    delta_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], RUN_LAYOUT)
    kv_full = barriers(1, 1).index(0)
    FILLS: gl.constexpr = 2 if META.odd_starts else 1  # arrivals that say that a slot is full
    q_full, q_empty = barriers(SLOTS, FILLS), barriers(SLOTS, 2)
    g_full, g_empty = barriers(SLOTS, FILLS), barriers(SLOTS, 2)
    p_full, p_empty = barriers(P_SLOTS, 1), barriers(P_SLOTS, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate_values, (
                k_tile, k_tail, q_ring, q_tail_ring, g_ring, lse_ring, p_ring,
                kv_full, q_full, q_empty, g_full, g_empty, p_full, p_empty,
                dv, first, runs, heads_each, k_len, room, scale, v_dim, stride_dvs, LEFT, RIGHT, TAIL, META,
            )),
            (_differentiate_keys, (
                v_tile, q_ring, q_tail_ring, g_ring, delta_ring, p_ring,
                kv_full, q_full, q_empty, g_full, g_empty, p_full, p_empty,
                dk, first, blocks_of_a_head(runs, META) * heads_each, room, grad_scale, dim, stride_dks, TAIL,
            )),
            (_copy, (
                q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, g_desc, lse2, delta,
                k_tile, k_tail, v_tile, q_ring, q_tail_ring, g_ring, lse_ring, delta_ring,
                kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, q_tokens, first, k_start, k_len,
                runs, heads_each, TAIL, META,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
