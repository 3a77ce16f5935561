"""Forward attention for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_fwd.py
Layout    a tile: 128 queries of one head, 64 for each of two warpgroups; one more warp copies tiles of keys and values into a
          ring of shared buffers. A warpgroup issues S of the next block before the second product of the last one, and computes
          the softmax while that runs; the two warpgroups drift apart, so that one multiplies while the other exponentiates.
          A program a multiprocessor takes tile after tile, the longest first, so that the next one's copies run under the
          stores of the last
Cost      4 * D FLOPs a visible score on the matrix units, 1 exponential
Numerics  as attention_fwd.py: fixed order of every sum
Limits    Triton 3.6 or newer, compute capability 9.0; dim and v_dim to 256 in steps of 8; causality, windows and sinks, no
          other feature (packed and zig-zag order as far as `SEEN_RIGHT` says); descriptors must be able to read q, k and
          v in place
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
    LN2,
    LOG2E,
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
def _softmax(
    scores, maximum, total, scale, rows, first_key, k_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    OPERAND: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(probabilities as the second product's operand, correction, maximum, total) of a block."""
    layout: gl.constexpr = scores.type.layout
    if MASKED:
        keys = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        ok = visible(rows[:, None], keys[None, :], k_len, left, right, LEFT, RIGHT)
        scores = gl.where(ok, scores, -float("inf"))
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale)
    shift = new_maximum
    if MASKED:
        shift = gl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    probabilities = gl.exp2(scores * scale - shift[:, None])
    correction = gl.exp2(maximum - shift)
    total = total * correction + gl.sum(probabilities, 1)
    return gl.convert_layout(probabilities.to(DTYPE), OPERAND), correction, new_maximum, total


@gluon.jit
def _block(
    j, base, number, top, half, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, k_full, k_empty, v_full, v_empty,
    probabilities, acc, maximum, total, scale, rows, k_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, TAIL: gl.constexpr,
    S_LAYOUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """S of block j, the second product of block j - 1 and, while that runs, the softmax of block j."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[-3]
    D: gl.constexpr = k_ring.shape[-1]
    step = base + j
    slot, previous, following = step % SLOTS, (step - 1) % SLOTS, (step + 1) % SLOTS
    scores_token = scores_of(q_tiles, q_tails, half, k_ring, k_tail_ring, slot, TAIL, S_LAYOUT, True)
    mbarrier.wait(v_full.index(previous), ((step - 1) // SLOTS) & 1)
    values = tile_2d(v_ring.index(previous), DTYPE, BLOCK_N, D)
    acc_token = warpgroup_mma(probabilities, values, acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores_token])
    mbarrier.arrive(k_empty.index(slot), count=1)
    probabilities, correction, maximum, total = _softmax(
        scores, maximum, total, scale, rows, (top - j) * BLOCK_N, k_len, left, right,
        LEFT, RIGHT, MASKED, BLOCK_N, OPERAND, DTYPE,
    )  # fmt: skip
    # The next keys are waited for here rather than at the top: ptxas moves the wait below up, ahead of the softmax, unless a
    # branch lies between.
    mbarrier.wait(k_full.index(following), ((step + 1) // SLOTS) & 1, pred=j + 1 < number)
    acc, probabilities = warpgroup_mma_wait(0, deps=[acc_token, probabilities])
    mbarrier.arrive(v_empty.index(previous), count=1)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return probabilities, acc, maximum, total


@gluon.jit
def _attend(
    HALF: gl.constexpr, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    ring_of_items, item_full, item_empty, out, lse, sinks, lengths, sizes, items, left, right, scale, v_dim, strides,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, TAIL: gl.constexpr, META: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries of each of the program's tiles through all their blocks."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[-3]
    D: gl.constexpr = k_ring.shape[-1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    stride_ob, stride_os, stride_oh = strides
    heads, q_tokens = sizes[2], sizes[4]
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
            mbarrier.wait(q_full, tiles & 1)

            # The first block has no predecessor.
            slot = base % SLOTS
            mbarrier.wait(k_full.index(slot), (base // SLOTS) & 1)
            scores = scores_of(q_tiles, q_tails, HALF, k_ring, k_tail_ring, slot, TAIL, S_LAYOUT, False)
            mbarrier.arrive(k_empty.index(slot), count=1)
            maximum = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
            if SINKS:
                sink = gl.load(sinks + head).to(gl.float32) * LOG2E
                maximum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT)) + sink
                total += 1.0
            probabilities, _correction, maximum, total = _softmax(
                scores, maximum, total, scale, rows, top * BLOCK_N, k_len, near, far,
                LEFT, RIGHT, True, BLOCK_N, OPERAND, DTYPE,
            )  # fmt: skip
            acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
            mbarrier.wait(k_full.index((base + 1) % SLOTS), ((base + 1) // SLOTS) & 1, pred=number > 1)

            # Masked on the right, then none, then masked on the left.
            for j in range(1, right_masked):
                probabilities, acc, maximum, total = _block(
                    j, base, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring,
                    k_full, k_empty, v_full, v_empty, probabilities, acc, maximum, total,
                    scale, rows, k_len, near, far, LEFT, RIGHT, True, TAIL, S_LAYOUT, OPERAND,
                )  # fmt: skip
            for j in range(gl.maximum(right_masked, 1), number - left_masked):
                probabilities, acc, maximum, total = _block(
                    j, base, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring,
                    k_full, k_empty, v_full, v_empty, probabilities, acc, maximum, total,
                    scale, rows, k_len, near, far, LEFT, RIGHT, False, TAIL, S_LAYOUT, OPERAND,
                )  # fmt: skip
            if LEFT:
                for j in range(gl.maximum(number - left_masked, 1), number):
                    probabilities, acc, maximum, total = _block(
                        j, base, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring,
                        k_full, k_empty, v_full, v_empty, probabilities, acc, maximum, total,
                        scale, rows, k_len, near, far, LEFT, RIGHT, True, TAIL, S_LAYOUT, OPERAND,
                    )  # fmt: skip

            # The last second product, while the next tile's queries come.
            mbarrier.arrive(q_empty, count=1)
            base += number
            tiles += 1
            last = (base - 1) % SLOTS
            mbarrier.wait(v_full.index(last), ((base - 1) // SLOTS) & 1)
            values = tile_2d(v_ring.index(last), DTYPE, BLOCK_N, D)
            acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(probabilities, values, acc, is_async=True)])
            mbarrier.arrive(v_empty.index(last), count=1)

            # Rows that see nothing: 0 and -inf. Padding likewise, sink or not.
            logarithm = (maximum + gl.log2(total)) * LN2
            line = (batch.to(gl.int64) * heads + head) * q_tokens + q_start
            if META.packed:
                logarithm = gl.where(rows < q_len, logarithm, -float("inf"))
                total = gl.where(rows < q_len, total, 0.0)
            gl.store(lse + line + rows, logarithm, mask=rows < room)
            total = gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))
            acc = acc * gl.where(total > 0, 1.0 / total, 0.0)[:, None]
            rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
            cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
            place = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + q_start.to(gl.int64) * stride_os
            places = out + place + rows[:, None].to(gl.int64) * stride_os + cols[None, :]
            gl.store(places, acc.to(out.dtype.element_ty), mask=(rows < room)[:, None] & (cols < v_dim)[None, :])
        if PERSISTENT:
            item = next_item(turn, ring_of_items, item_full, item_empty)
        else:
            item = items
        turn += 1


@gluon.jit
def attention_hopper_fwd_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out, lse, sinks, counter, cu_q, starts_q, cu_k, starts_k,
    items, slots, chunk, heads, groups, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size,
    left, right, scale, v_dim, stride_ob, stride_os, stride_oh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, META: gl.constexpr, PERSISTENT: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """`items` tiles of 128 queries, see `query_tile`: each a program, or PERSISTENT, where each program takes the next that is
    left when it is done with one, by `counter`, an int32 that is zero at the start."""
    lengths = (0, 0, 0, 0)  # a tuple of arguments takes no None
    if not PERSISTENT:
        counter = lse
    if META.packed:
        lengths = (cu_q, starts_q, cu_k, starts_k)
    sizes = (slots, chunk, heads, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size)
    strides = (stride_ob, stride_os, stride_oh)
    if not SINKS:
        sinks = lse
    q_tiles = ring(q_desc, 2)
    k_ring = ring(k_desc, SLOTS)
    q_tails, k_tail_ring = q_tiles, k_ring
    if TAIL > 0:
        q_tails = ring(q_tail_desc, 2)
        k_tail_ring = ring(k_tail_desc, SLOTS)
    v_ring = ring(v_desc, SLOTS)
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    ring_of_items = item_ring()
    item_full, item_empty = barriers(2, 1), barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                0, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                ring_of_items, item_full, item_empty, out, lse, sinks, lengths, sizes, items, left, right, scale, v_dim, strides,
                LEFT, RIGHT, SINKS, TAIL, META, PERSISTENT,
            )),
            (_attend, (
                1, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                ring_of_items, item_full, item_empty, out, lse, sinks, lengths, sizes, items, left, right, scale, v_dim, strides,
                LEFT, RIGHT, SINKS, TAIL, META, PERSISTENT,
            )),
            (copy_blocks, (
                q_desc, q_tail_desc, q_desc, k_desc, k_tail_desc, v_desc, q_tiles, q_tails, q_tiles, k_ring, k_tail_ring, v_ring,
                q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
                lengths, sizes, items, counter, groups, left, right,
                LEFT, RIGHT, TAIL, False, META, PERSISTENT,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
