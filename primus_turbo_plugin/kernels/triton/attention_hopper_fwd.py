"""Forward attention for Hopper's warpgroups (Gluon kernel); the launcher is in attention_hopper.py.

Math      as attention_fwd.py
Layout    a program: 128 queries of one head, 64 for each of two warpgroups; one more warp copies tiles of keys and values into a
          ring of shared buffers. A warpgroup issues S of the next block before the second product of the last one, and computes
          the softmax while that runs; the two warpgroups drift apart, so that one multiplies while the other exponentiates
Cost      4 * D FLOPs a visible score on the matrix units, 1 exponential
Numerics  as attention_fwd.py: fixed order of every sum
Limits    Triton 3.6 or newer, compute capability 9.0; dim to 192 and v_dim to 128 in steps of 8; dense batches; causality,
          windows and sinks, no other feature; descriptors must be able to read q, k and v in place
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

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup
# Triton 3.9 renamed both.
load_tile = tma.async_load if "async_load" in dir(tma) else tma.async_copy_global_to_shared
REINTERPRET_IS_PUBLIC = gl.constexpr("reinterpret" in dir(gl.shared_memory_descriptor))


@gluon.jit
def tile_2d(buffer, DTYPE: gl.constexpr, HEIGHT: gl.constexpr, D: gl.constexpr):
    """A `[1, HEIGHT, 1, D]` buffer as a descriptor fills it, seen as `[HEIGHT, D]`."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if REINTERPRET_IS_PUBLIC:
        tile = buffer.reinterpret(DTYPE, [HEIGHT, D], layout)
    else:
        tile = buffer._reinterpret(DTYPE, [HEIGHT, D], layout)
    return tile


@gluon.jit
def scores_of(
    q_tiles, q_tails, half, k_ring, k_tail_ring, slot, TAIL: gl.constexpr, LAYOUT: gl.constexpr, ASYNC: gl.constexpr
):
    """Raw scores of a warpgroup's queries and the keys in a slot; with TAIL columns of the head beyond its first D."""
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    q = tile_2d(q_tiles.index(half), DTYPE, ROWS, D)
    keys = tile_2d(k_ring.index(slot), DTYPE, BLOCK_N, D)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
    scores = warpgroup_mma(q, keys.permute((1, 0)), zero, use_acc=False, is_async=ASYNC)
    if TAIL > 0:
        q = tile_2d(q_tails.index(half), DTYPE, ROWS, TAIL)
        keys = tile_2d(k_tail_ring.index(slot), DTYPE, BLOCK_N, TAIL)
        scores = warpgroup_mma(q, keys.permute((1, 0)), scores, is_async=ASYNC)
    return scores


@gluon.jit
def key_blocks(first, rows, position, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK: gl.constexpr):
    """(top, number, right_masked, left_masked) for the queries first ... first + rows - 1: blocks of keys top, top - 1, ... hold
    all that any of them sees, at least one; the first `right_masked` and the last `left_masked` of them must be masked."""
    high = k_len
    full_high = k_len // BLOCK
    if RIGHT:
        high = gl.minimum(k_len, position + first + rows + right)
        full_high = gl.maximum(gl.minimum(k_len, position + first + right + 1), 0) // BLOCK
    low = 0
    full_low = 0
    if LEFT:
        low = gl.maximum(position + first - left, 0) // BLOCK
        full_low = (gl.maximum(position + first + rows - 1 - left, 0) + BLOCK - 1) // BLOCK
    top = gl.maximum((gl.maximum(high, 0) + BLOCK - 1) // BLOCK - 1, 0)
    number = gl.maximum(top - low + 1, 1)
    right_masked = gl.minimum(gl.maximum(top + 1 - full_high, 0), number)
    left_masked = gl.minimum(gl.maximum(full_low - low, 0), number - right_masked)
    return top, number, right_masked, left_masked


@gluon.jit
def visible(queries, keys, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether a query sees a key, `left` and `right` counted from the query's number; both broadcast against each other."""
    ok = keys < k_len
    if RIGHT:
        ok = ok & (keys <= queries + right)
    if LEFT:
        ok = ok & (keys >= queries - left)
    return ok


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
    j, number, top, half, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, k_full, k_empty, v_full, v_empty,
    probabilities, acc, maximum, total, scale, rows, k_len, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, TAIL: gl.constexpr,
    S_LAYOUT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """S of block j, the second product of block j - 1 and, while that runs, the softmax of block j."""
    DTYPE: gl.constexpr = k_ring.dtype
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    slot, previous, following = j % SLOTS, (j - 1) % SLOTS, (j + 1) % SLOTS
    scores_token = scores_of(q_tiles, q_tails, half, k_ring, k_tail_ring, slot, TAIL, S_LAYOUT, True)
    mbarrier.wait(v_full.index(previous), ((j - 1) // SLOTS) & 1)
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
    mbarrier.wait(k_full.index(following), ((j + 1) // SLOTS) & 1, pred=j + 1 < number)
    acc, probabilities = warpgroup_mma_wait(0, deps=[acc_token, probabilities])
    mbarrier.arrive(v_empty.index(previous), count=1)
    acc = acc * gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    return probabilities, acc, maximum, total


@gluon.jit
def _attend(
    HALF: gl.constexpr, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, out, lse, sink,
    first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, v_dim, stride_os,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, TAIL: gl.constexpr,
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
    mbarrier.wait(q_full, 0)

    # The first block has no predecessor.
    mbarrier.wait(k_full.index(0), 0)
    scores = scores_of(q_tiles, q_tails, HALF, k_ring, k_tail_ring, 0, TAIL, S_LAYOUT, False)
    mbarrier.arrive(k_empty.index(0), count=1)
    maximum = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if SINKS:
        maximum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT)) + gl.load(sink).to(gl.float32) * LOG2E
        total += 1.0
    probabilities, _correction, maximum, total = _softmax(
        scores, maximum, total, scale, rows, top * BLOCK_N, k_len, left, right,
        LEFT, RIGHT, True, BLOCK_N, OPERAND, DTYPE,
    )  # fmt: skip
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mbarrier.wait(k_full.index(1 % SLOTS), (1 // SLOTS) & 1, pred=number > 1)

    # Masked on the right, then none, then masked on the left.
    for j in range(1, right_masked):
        probabilities, acc, maximum, total = _block(
            j, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, k_full, k_empty, v_full, v_empty,
            probabilities, acc, maximum, total,
            scale, rows, k_len, left, right, LEFT, RIGHT, True, TAIL, S_LAYOUT, OPERAND,
        )  # fmt: skip
    for j in range(gl.maximum(right_masked, 1), number - left_masked):
        probabilities, acc, maximum, total = _block(
            j, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, k_full, k_empty, v_full, v_empty,
            probabilities, acc, maximum, total,
            scale, rows, k_len, left, right, LEFT, RIGHT, False, TAIL, S_LAYOUT, OPERAND,
        )  # fmt: skip
    if LEFT:
        for j in range(gl.maximum(number - left_masked, 1), number):
            probabilities, acc, maximum, total = _block(
                j, number, top, HALF, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, k_full, k_empty, v_full, v_empty,
            probabilities, acc, maximum, total,
                scale, rows, k_len, left, right, LEFT, RIGHT, True, TAIL, S_LAYOUT, OPERAND,
            )  # fmt: skip

    # The last second product.
    previous = (number - 1) % SLOTS
    mbarrier.wait(v_full.index(previous), ((number - 1) // SLOTS) & 1)
    acc_token = warpgroup_mma(probabilities, tile_2d(v_ring.index(previous), DTYPE, BLOCK_N, D), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_token])
    gl.store(lse + rows, (maximum + gl.log2(total)) * LN2, mask=rows < q_len)
    total = gl.convert_layout(total, gl.SliceLayout(1, O_LAYOUT))
    acc = acc * gl.where(total > 0, 1.0 / total, 0.0)[:, None]
    rows = first + HALF * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_LAYOUT))
    places = out + rows[:, None].to(gl.int64) * stride_os + cols[None, :]
    gl.store(places, acc.to(out.dtype.element_ty), mask=(rows < q_len)[:, None] & (cols < v_dim)[None, :])


@gluon.jit
def _copy(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, q_tiles, q_tails, k_ring, k_tail_ring, v_ring,
    q_full, k_full, k_empty, v_full, v_empty, batch, head, group, first, top, number, TAIL: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the rings full."""
    SLOTS: gl.constexpr = k_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[2]
    D: gl.constexpr = k_ring.shape[4]
    mbarrier.expect(q_full, 2 * ROWS * (D + TAIL) * 2)
    for half in gl.static_range(2):
        row = first + half * ROWS
        load_tile(q_desc, [batch, row, head, 0], q_full, q_tiles.index(half))
        if TAIL > 0:
            load_tile(q_tail_desc, [batch, row, head, D], q_full, q_tails.index(half))
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
def barriers(SLOTS: gl.constexpr, count: gl.constexpr):
    """`SLOTS` barriers, each for `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def attention_hopper_fwd_kernel(
    q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, out, lse, sinks,
    heads, groups, q_len, k_len, tiles, left, right, scale, v_dim, stride_ob, stride_os, stride_oh,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, TAIL: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Programs: batch * heads * tiles of 128 queries; the last tiles of a head first, which under causality take longest."""
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
    out += batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    lse += head_batch.to(gl.int64) * q_len
    sink = lse  # anything: a tuple of arguments takes no None
    if SINKS:
        sink = sinks + head
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, D], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], k_desc.layout)
    q_tails, k_tail_ring = q_tiles, k_ring
    if TAIL > 0:
        q_tails = gl.allocate_shared_memory(q_desc.dtype, [2, 1, ROWS, 1, TAIL], q_tail_desc.layout)
        k_tail_ring = gl.allocate_shared_memory(k_desc.dtype, [SLOTS, 1, BLOCK_N, 1, TAIL], k_tail_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, 1, BLOCK_N, 1, D], v_desc.layout)
    q_full = barriers(1, 1).index(0)
    k_full, k_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    v_full, v_empty = barriers(SLOTS, 1), barriers(SLOTS, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (
                0, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, out, lse, sink,
                first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, v_dim, stride_os,
                LEFT, RIGHT, SINKS, TAIL,
            )),
            (_attend, (
                1, q_tiles, q_tails, k_ring, k_tail_ring, v_ring, q_full, k_full, k_empty, v_full, v_empty, out, lse, sink,
                first, top, number, right_masked, left_masked, q_len, k_len, left, right, scale, v_dim, stride_os,
                LEFT, RIGHT, SINKS, TAIL,
            )),
            (_copy, (
                q_desc, q_tail_desc, k_desc, k_tail_desc, v_desc, q_tiles, q_tails, k_ring, k_tail_ring, v_ring,
                q_full, k_full, k_empty, v_full, v_empty, batch, head, group, first, top, number, TAIL,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
