"""Gradients of keys and values for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_bwd.py
Layout    a program: 128 keys of one group, 64 for each of two warpgroups, through the queries of the group's heads (or of its
          share of them) that see any; one more warp copies blocks of q, dout, lse and delta into a ring. Scores are computed
          transposed, so that P and dS go from one product's registers into the next's; S of the next block is under way before
          this one is done
Cost      8 * D FLOPs a visible score on the matrix units, 1 exponential
Numerics  as attention_bwd.py: fixed order of every sum
Limits    as attention_hopper_fwd.py; dense batches: queries in multiples of 4 (descriptors read lse and delta)
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
def _differentiate(
    HALF: gl.constexpr, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
    dk, dv, first, runs, heads_each, k_len, room, scale, grad_scale,
    dim, v_dim, stride_dks, stride_dvs, LEFT: gl.constexpr, RIGHT: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 keys through all blocks of queries."""
    DTYPE: gl.constexpr = q_ring.dtype
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    D: gl.constexpr = q_ring.shape[-1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    keys = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    k_half = tile_2d(k_tile, DTYPE, 2 * ROWS, D).slice(HALF * ROWS, ROWS, dim=0)
    v_half = tile_2d(v_tile, DTYPE, 2 * ROWS, D).slice(HALF * ROWS, ROWS, dim=0)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    acc_k = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    acc_v = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    each = blocks_of_a_head(runs, META)
    number = each * heads_each
    scores = zero
    if number > 0:
        mbarrier.wait(kv_full, 0)
        mbarrier.wait(q_full.index(0), 0)
        q = tile_2d(q_ring.index(0), DTYPE, BLOCK_M, D)
        scores = warpgroup_mma(k_half, q.permute((1, 0)), zero, use_acc=False, is_async=False)
    for j in range(number):
        slot, following = j % SLOTS, (j + 1) % SLOTS
        _head, block, _q_start, q_len, full_low, full_high, near, far = query_block(j, runs, each, META)
        q = tile_2d(q_ring.index(slot), DTYPE, BLOCK_M, D)
        g = tile_2d(g_ring.index(slot), DTYPE, BLOCK_M, D)
        mbarrier.wait(g_full.index(slot), (j // SLOTS) & 1)
        dp_token = warpgroup_mma(v_half, g.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = gl.exp2(scores * scale - lse_ring.index(slot).load(S_LAYOUT))  # [1, BLOCK_M], the same for all keys
        if (block < full_low) | (block >= full_high):
            rows = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
            ok = visible(rows[None, :], keys[:, None], k_len, near, far, LEFT, RIGHT)
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
    inside = (rows < room)[:, None]
    wide = rows[:, None].to(gl.int64)
    acc_k = (acc_k * grad_scale).to(dk.dtype.element_ty)
    gl.store(dk + wide * stride_dks + cols[None, :], acc_k, mask=inside & (cols < dim)[None, :])
    gl.store(
        dv + wide * stride_dvs + cols[None, :], acc_v.to(dv.dtype.element_ty), mask=inside & (cols < v_dim)[None, :]
    )


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, g_desc, lse2, delta, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring,
    kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, q_tokens, first, k_start, k_len, runs, heads_each,
    META: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the ring full."""
    SLOTS: gl.constexpr = q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[-3]
    D: gl.constexpr = q_ring.shape[-1]
    each = blocks_of_a_head(runs, META)
    number = each * heads_each
    if number > 0:
        mbarrier.expect(kv_full, 2 * 2 * ROWS * D * 2)
        copy_rows(k_desc, batch, k_start, k_len, first, group, 0, kv_full, k_tile, META)
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
        mbarrier.expect(q_full.index(slot), BLOCK_M * D * 2)
        copy_rows(q_desc, batch, q_start, q_len, row, head, 0, q_full.index(slot), q_ring.index(slot), META)
        mbarrier.wait(g_empty.index(slot), phase)
        full = g_full.index(slot)
        if META.odd_starts:
            mbarrier.expect(full, BLOCK_M * D * 2)
            copy_rows(g_desc, batch, q_start, q_len, row, head, 0, full, g_ring.index(slot), META)
            lse_ring.index(slot).store(run_lse)
            delta_ring.index(slot).store(run_delta)
            mbarrier.arrive(full, count=1)
        else:
            mbarrier.expect(full, BLOCK_M * D * 2 + 2 * BLOCK_M * 4)
            copy_rows(g_desc, batch, q_start, q_len, row, head, 0, full, g_ring.index(slot), META)
            load_tile(lse2, [line, q_start + row], full, lse_ring.index(slot))
            load_tile(delta, [line, q_start + row], full, delta_ring.index(slot))


@gluon.jit
def attention_hopper_dkdv_kernel(
    q_desc, k_desc, v_desc, g_desc, lse2, delta, dk, dv, cu_q, starts_q, cu_k, starts_k,
    slots, chunk, lanes, splits, heads, groups, q_tokens, k_tokens, sequences, cp_rank, cp_size,
    left, right, scale, grad_scale, dim, v_dim,
    stride_dkp, stride_dkb, stride_dks, stride_dkh, stride_dvp, stride_dvb, stride_dvs, stride_dvh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, META: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Programs: batch * groups * splits * slots of 128 keys; splits as `attention_dkdv_kernel` has them. A program without a
    block of queries, as one without keys is, copies nothing and writes zeros, if anything. `lse2` and `delta` are descriptors of
    runs of queries, or pointers where META says odd_starts."""
    lengths = (0, 0, 0, 0)  # a tuple of arguments takes no None
    if META.packed:
        lengths = (cu_q, starts_q, cu_k, starts_k)
    heads_each = heads // groups // splits
    sizes = (slots, chunk, lanes, splits, groups, q_tokens, k_tokens, sequences, cp_rank, cp_size)
    batch, group, split, sequence, first, k_start, k_len, room = key_tile(
        gl.program_id(0), lengths, sizes, META, 2 * ROWS
    )
    first_head = group * (heads // groups) + split * heads_each
    runs = query_runs(sequence, first, k_len, lengths, sizes, left, right, META, LEFT, RIGHT, 2 * ROWS, BLOCK_M)
    start = k_start.to(gl.int64)
    dk += split.to(gl.int64) * stride_dkp + batch.to(gl.int64) * stride_dkb + start * stride_dks
    dk += group.to(gl.int64) * stride_dkh
    dv += split.to(gl.int64) * stride_dvp + batch.to(gl.int64) * stride_dvb + start * stride_dvs
    dv += group.to(gl.int64) * stride_dvh
    k_tile = gl.allocate_shared_memory(k_desc.dtype, k_desc.block_shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, v_desc.block_shape, v_desc.layout)
    q_ring = ring(q_desc, SLOTS)
    g_ring = ring(g_desc, SLOTS)
    lse_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], RUN_LAYOUT)
    delta_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, BLOCK_M], RUN_LAYOUT)
    kv_full = barriers(1, 1).index(0)
    q_full, q_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    g_full, g_empty = barriers(SLOTS, 2 if META.odd_starts else 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (
                0, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
                dk, dv, first, runs, heads_each, k_len, room, scale, grad_scale,
                dim, v_dim, stride_dks, stride_dvs, LEFT, RIGHT, META,
            )),
            (_differentiate, (
                1, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring, kv_full, q_full, q_empty, g_full, g_empty,
                dk, dv, first, runs, heads_each, k_len, room, scale, grad_scale,
                dim, v_dim, stride_dks, stride_dvs, LEFT, RIGHT, META,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, g_desc, lse2, delta, k_tile, v_tile, q_ring, g_ring, lse_ring, delta_ring,
                kv_full, q_full, q_empty, g_full, g_empty, batch, group, first_head, heads, q_tokens, first, k_start, k_len, runs,
                heads_each, META,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
