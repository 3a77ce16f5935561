"""FP8 attention, forward, for Hopper's warpgroups (Gluon kernel); the launcher is in attention_fp8_launch.py.

Math      as attention_fp8_fwd.py
Layout    codes as attention_fp8_quantize.py writes them. A program: 128 queries of one head, 64 for each of two warpgroups; one
          more warp copies tiles of keys and values into a ring of shared buffers. As in attention_hopper_fwd.py a warpgroup
          issues S of the next block before the second product of the last one, and computes the softmax while that runs
Cost      4 * D FP8 FLOPs a visible score, 1 exponential
Numerics  the products of a block of v are summed by the FP8 units, in some 14 bits, and blocks in fp32
Limits    Triton 3.6 or newer, compute capability 9.0; columns of codes 64 or 128; causality, windows, sinks, packed and zig-zag
          order, no other feature; a positive scale
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

from primus_turbo_plugin.kernels.triton.attention_hopper_pieces import key_blocks, query_tile, visible
from primus_turbo_plugin.kernels.triton.attention_hopper_tile import LN2, LOG2E, ROWS, barriers, load_tile, ring

BLOCK = gl.constexpr(128)  # tokens that share a scale
P_BITS = gl.constexpr(8.0)  # probabilities are codes of 256 P


@gluon.jit
def _softmax(
    scores, maximum, total, factor, rows, first_key, k_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    OPERAND: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(codes of the probabilities as the second product's operand, correction, maximum, total) of a block."""
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        ok = visible(rows[:, None], keys[None, :], k_len, left, right, LEFT, RIGHT)
        scores = gl.where(ok, scores, -float("inf"))
    new_maximum = gl.maximum(maximum, gl.ceil(gl.max(scores, 1) * factor))
    shift = new_maximum
    if MASKED:
        shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    probabilities = gl.exp2(scores * factor + (P_BITS - shift)[:, None])
    correction = gl.exp2(maximum - shift)
    total = total * correction + gl.sum(probabilities, 1)
    return gl.convert_layout(probabilities.to(DTYPE), OPERAND), correction, new_maximum, total


@gluon.jit
def _block(
    j, number, top, half, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_scales, v_scales, slot_block,
    codes, acc, correction, v_scale, maximum, total, q_scale, rows, k_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    OPERAND: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """S of block j, the second product of block j - 1 and, while that runs, the softmax of block j."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DV: gl.constexpr = v_ring.shape[1]
    slot, previous, following = j % SLOTS, (j - 1) % SLOTS, (j + 1) % SLOTS
    place = slot_block + (top - j) * BLOCK_N // BLOCK
    k_scale = gl.load(k_scales + place)
    next_v_scale = gl.load(v_scales + place)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scores_token = warpgroup_mma(
        q_tiles.index(half), k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(previous), ((j - 1) // SLOTS) & 1)
    if APART:
        into = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
    else:
        into = acc
    part_token = warpgroup_mma(codes, v_ring.index(previous).permute((1, 0)), into, use_acc=not APART, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores_token])
    mbarrier.arrive(k_empty.index(slot), count=1)
    new_codes, new_correction, maximum, total = _softmax(
        scores, maximum, total, q_scale * k_scale, rows, (top - j) * BLOCK_N, k_len, left, right,
        LEFT, RIGHT, MASKED, BLOCK_N, OPERAND, k_ring.dtype,
    )  # fmt: skip
    mbarrier.wait(k_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
    part = warpgroup_mma_wait(0, deps=[part_token])
    mbarrier.arrive(v_empty.index(previous), count=1)
    if APART:
        acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O_LAYOUT))[:, None] + part * v_scale
    else:
        acc = part * gl.convert_layout(new_correction * (v_scale / next_v_scale), gl.SliceLayout(1, O_LAYOUT))[:, None]
    return new_codes, acc, new_correction, next_v_scale, maximum, total


@gluon.jit
def _attend(
    HALF: gl.constexpr, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty,
    q_scales, k_scales, v_scales, out, lse, sinks, lengths, sizes, k_slots, groups, left, right, scale, v_dim, strides,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, META: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries through all their blocks."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    DV: gl.constexpr = v_ring.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    stride_ob, stride_os, stride_oh = strides
    heads, q_tokens = sizes[2], sizes[4]
    batch, head, first, q_start, q_len, room, slot_q, slot_k, k_len, position = _place(lengths, sizes, META)
    if first < room:
        top, number, right_masked, left_masked = key_blocks(
            first, gl.minimum(2 * ROWS, q_len - first), position, k_len, left, right, LEFT, RIGHT, BLOCK_N
        )
        near, far = left - position, right + position  # counted from a query's own number
        rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        k_line = (batch.to(gl.int64) * groups + head // (heads // groups)) * k_slots
        k_scales += k_line
        v_scales += k_line
        q_scale = gl.load(q_scales + (batch.to(gl.int64) * heads + head) * sizes[0] + slot_q) * scale
        k_scale = gl.load(k_scales + slot_k + top * BLOCK_N // BLOCK)
        v_scale = gl.load(v_scales + slot_k + top * BLOCK_N // BLOCK)
        mbarrier.wait(q_full, 0)

        # The first block has no predecessor.
        mbarrier.wait(k_full.index(0), 0)
        zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(
            q_tiles.index(HALF), k_ring.index(0).permute((1, 0)), zero, use_acc=False, is_async=False
        )
        mbarrier.arrive(k_empty.index(0), count=1)
        maximum = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if SINKS:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2E
            maximum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT)) + gl.ceil(sink)
            total += gl.exp2(sink - gl.ceil(sink) + P_BITS)
        codes, correction, maximum, total = _softmax(
            scores, maximum, total, q_scale * k_scale, rows, top * BLOCK_N, k_len, near, far,
            LEFT, RIGHT, True, BLOCK_N, OPERAND, DTYPE,
        )  # fmt: skip
        acc = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
        mbarrier.wait(k_full.index(1 % SLOTS), (1 // SLOTS) & 1, pred=number > 1)

        # Masked on the right, then none, then masked on the left.
        for j in range(1, right_masked):
            codes, acc, correction, v_scale, maximum, total = _block(
                j, number, top, HALF, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_scales, v_scales, slot_k,
                codes, acc, correction, v_scale, maximum, total, q_scale, rows, k_len, near, far,
                LEFT, RIGHT, True, S_LAYOUT, O_LAYOUT, OPERAND, APART,
            )  # fmt: skip
        for j in range(gl.maximum(right_masked, 1), number - left_masked):
            codes, acc, correction, v_scale, maximum, total = _block(
                j, number, top, HALF, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_scales, v_scales, slot_k,
                codes, acc, correction, v_scale, maximum, total, q_scale, rows, k_len, near, far,
                LEFT, RIGHT, False, S_LAYOUT, O_LAYOUT, OPERAND, APART,
            )  # fmt: skip
        if LEFT:
            for j in range(gl.maximum(number - left_masked, 1), number):
                codes, acc, correction, v_scale, maximum, total = _block(
                    j, number, top, HALF, q_tiles, k_ring, v_ring, k_full, k_empty, v_full, v_empty, k_scales, v_scales, slot_k,
                    codes, acc, correction, v_scale, maximum, total, q_scale, rows, k_len, near, far,
                    LEFT, RIGHT, True, S_LAYOUT, O_LAYOUT, OPERAND, APART,
                )  # fmt: skip

        # The last second product.
        last = (number - 1) % SLOTS
        mbarrier.wait(v_full.index(last), ((number - 1) // SLOTS) & 1)
        none = gl.zeros([ROWS, DV], gl.float32, O_LAYOUT)
        if APART:
            part = warpgroup_mma(codes, v_ring.index(last).permute((1, 0)), none, use_acc=False, is_async=False)
            acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, O_LAYOUT))[:, None] + part * v_scale
        else:
            acc = warpgroup_mma(codes, v_ring.index(last).permute((1, 0)), acc, is_async=False) * v_scale

        # Rows that see nothing: 0 and -inf. Padding likewise, sink or not.
        logarithm = (maximum + gl.log2(total) - P_BITS) * LN2
        logarithm = gl.where(rows < q_len, logarithm, -float("inf"))
        total = gl.where(rows < q_len, total, 0.0)
        line = (batch.to(gl.int64) * heads + head) * q_tokens + q_start
        gl.store(lse + line + rows, logarithm, mask=rows < room)
        total = gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))
        acc = acc * gl.where(total != 0, 1.0 / total, 0.0)[:, None]
        rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
        cols = gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT))
        place = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + q_start.to(gl.int64) * stride_os
        places = out + place + rows[:, None].to(gl.int64) * stride_os + cols[None, :]
        gl.store(places, acc.to(out.dtype.element_ty), mask=(rows < room)[:, None] & (cols < v_dim)[None, :])


@gluon.jit
def _place(lengths, sizes, META: gl.constexpr):
    """A program's tile: `query_tile`'s numbers, and the slots of its queries and of their first keys."""
    batch, head, first, q_start, q_len, room, k_start, k_len, position = query_tile(
        gl.program_id(0), lengths, sizes, META, 2 * ROWS
    )
    slots, chunk, lanes = sizes[0], sizes[1], sizes[3]
    rest = gl.program_id(0) % (slots * chunk)
    width = gl.minimum(chunk, lanes - gl.program_id(0) // (slots * chunk) * chunk)
    slot_q = slots - 1 - rest // width  # as `turn` and `query_tile` have it
    slot_k = 0
    if META.packed:
        HALVES: gl.constexpr = 2 if META.zigzag else 1
        piece = slot_q - first // BLOCK - q_start // BLOCK
        slot_k = k_start // BLOCK + piece // HALVES
    return batch, head, first, q_start, q_len, room, slot_q, slot_k, k_len, position


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, lengths, sizes, k_slots, groups,
    left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """The warp that loads the queries and keeps the rings of keys and values full."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    DV: gl.constexpr = v_ring.shape[1]
    batch, head, first, _q_start, q_len, room, slot_q, slot_k, k_len, position = _place(lengths, sizes, META)
    if first < room:
        heads = sizes[2]
        top, number, _right_masked, _left_masked = key_blocks(
            first, gl.minimum(2 * ROWS, q_len - first), position, k_len, left, right, LEFT, RIGHT, BLOCK_N
        )
        row = ((batch * heads + head) * sizes[0] + slot_q) * BLOCK
        mbarrier.expect(q_full, 2 * ROWS * D)
        load_tile(q_desc, [row, 0], q_full, q_tiles.index(0))
        load_tile(q_desc, [row + ROWS, 0], q_full, q_tiles.index(1))
        line = batch * groups + head // (heads // groups)
        for j in range(number):
            slot = j % SLOTS
            key = slot_k * BLOCK + (top - j) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), ((j // SLOTS) & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), BLOCK_N * D)
            load_tile(k_desc, [line * k_slots * BLOCK + key, 0], k_full.index(slot), k_ring.index(slot))
            mbarrier.wait(v_empty.index(slot), ((j // SLOTS) & 1) ^ 1)
            mbarrier.expect(v_full.index(slot), BLOCK_N * DV)
            load_tile(v_desc, [line * DV, key], v_full.index(slot), v_ring.index(slot))


@gluon.jit
def attention_fp8_hopper_kernel(
    q_desc, k_desc, v_desc, q_scales, k_scales, v_scales, out, lse, sinks, cu_q, starts_q, cu_k, starts_k,
    slots, k_slots, chunk, heads, groups, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size,
    left, right, scale, v_dim, stride_ob, stride_os, stride_oh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, META: gl.constexpr, SLOTS: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """Programs: lanes (batch * heads) * slots (blocks of queries)."""
    lengths = (0, 0, 0, 0)  # a tuple of arguments takes no None
    if META.packed:
        lengths = (cu_q, starts_q, cu_k, starts_k)
    sizes = (slots, chunk, heads, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size)
    strides = (stride_ob, stride_os, stride_oh)
    if not SINKS:
        sinks = lse
    q_tiles = ring(q_desc, 2)
    k_ring = ring(k_desc, SLOTS)
    v_ring = ring(v_desc, SLOTS)
    q_full = barriers(1, 1).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                0, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, q_scales, k_scales, v_scales, out, lse,
                sinks, lengths, sizes, k_slots, groups, left, right, scale, v_dim, strides, LEFT, RIGHT, SINKS, META, APART,
            )),
            (_attend, (
                1, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, q_scales, k_scales, v_scales, out, lse,
                sinks, lengths, sizes, k_slots, groups, left, right, scale, v_dim, strides, LEFT, RIGHT, SINKS, META, APART,
            )),
            (_copy, (
                q_desc, k_desc, v_desc, q_tiles, k_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, lengths, sizes,
                k_slots, groups, left, right, LEFT, RIGHT, META,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
