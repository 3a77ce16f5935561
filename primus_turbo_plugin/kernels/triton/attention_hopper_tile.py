"""What the Hopper attention kernels share: tiles in shared memory, and the warp that copies them there (Gluon).

A copy of packed tensors ends at the end of its sequence and leaves zeros behind: see `copy_rows`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

from primus_turbo_plugin.kernels.triton.attention_hopper_pieces import key_blocks, query_tile

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup
# Triton 3.9 renamed both.
load_tile = tma.async_load if "async_load" in dir(tma) else tma.async_copy_global_to_shared
REINTERPRET_IS_PUBLIC = gl.constexpr("reinterpret" in dir(gl.shared_memory_descriptor))
RUN_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2))  # of `[1, queries]`


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
def copy_rows(desc, batch, start, length, row, head, FIRST_COLUMN: gl.constexpr, barrier, buffer, META: gl.constexpr):
    """Rows row, row + 1, ... of a head's sequence, which is `length` tokens long and starts at token `start`.

    Dense: rows past the tensor are zero. Packed: rows past the sequence are. A descriptor's bounds are fixed, but its first
    dimension is free to move where it starts, since both step from token to token: of the T rows of the second those asked
    for are the last, and the first makes up for it. The descriptor's base lies T rows ahead of the tensor.
    """
    if META.packed:
        load_tile(desc, [start + length, desc.shape[1] - length + row, head, FIRST_COLUMN], barrier, buffer)
    else:
        load_tile(desc, [batch, start + row, head, FIRST_COLUMN], barrier, buffer)


@gluon.jit
def load_run(numbers, line, tokens, start, length, row, QUERIES: gl.constexpr):
    """fp32 `[1, QUERIES]` by one warp: those of a head's queries row, row + 1, ..., beyond the sequence its last.

    For sequences that start anywhere. A descriptor copies from multiples of 16 bytes only, counted in its last dimension: from
    elsewhere Hopper raises an illegal instruction.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0])
    rows = gl.minimum(row + gl.arange(0, QUERIES, layout=gl.SliceLayout(0, LAYOUT)), length - 1)
    places = numbers + (line.to(gl.int64) * tokens + start) + rows
    return gl.expand_dims(gl.load(places), 0)


@gluon.jit
def scores_of(
    q_tiles, q_tails, half, k_ring, k_tail_ring, slot, TAIL: gl.constexpr, LAYOUT: gl.constexpr, ASYNC: gl.constexpr
):
    """Raw scores of a warpgroup's queries and the keys in a slot; with TAIL columns of the head beyond its first D."""
    DTYPE: gl.constexpr = k_ring.dtype
    BLOCK_N: gl.constexpr = k_ring.shape[-3]
    D: gl.constexpr = k_ring.shape[-1]
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
def barriers(SLOTS: gl.constexpr, count: gl.constexpr):
    """`SLOTS` barriers, each for `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def ring(desc, SLOTS: gl.constexpr):
    """Shared memory for `SLOTS` tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_shape, desc.layout)  # noqa: RUF005 (knows no unpacking)


@gluon.jit
def item_ring():
    """Shared memory for the numbers of a program's next tiles: see `publish_item`."""
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def publish_item(item, turn, ring_of_items, item_full, item_empty):
    """By the copying warp: the number of the program's tile `turn` + 1 for the warpgroups that multiply."""
    slot = turn % 2
    mbarrier.wait(item_empty.index(slot), ((turn // 2) & 1) ^ 1)
    ring_of_items.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def next_item(turn, ring_of_items, item_full, item_empty):
    """By a warpgroup behind its tile `turn`: which is the next."""
    slot = turn % 2
    mbarrier.wait(item_full.index(slot), (turn // 2) & 1)
    item = gl.max(ring_of_items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(item_empty.index(slot), count=1)
    return item


@gluon.jit
def copy_blocks(
    q_desc, q_tail_desc, g_desc, k_desc, k_tail_desc, v_desc, q_tiles, q_tails, g_tiles, k_ring, k_tail_ring, v_ring,
    q_full, q_empty, k_full, k_empty, v_full, v_empty, ring_of_items, item_full, item_empty,
    lengths, sizes, items, counter, groups, left, right,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, GRADIENT: gl.constexpr,
    META: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The warp that keeps the rings of keys and values full, and loads each tile of queries; with GRADIENT of dout, too.

    PERSISTENT, it also fetches what the program does next: the first item that no other has begun.
    """
    SLOTS: gl.constexpr = k_ring.shape[0]
    V_SLOTS: gl.constexpr = v_ring.shape[0]
    BLOCK_N: gl.constexpr = k_ring.shape[-3]
    D: gl.constexpr = k_ring.shape[-1]
    heads = sizes[2]
    base = 0  # blocks of the tiles before
    tiles = 0  # with queries in them
    turn = 0
    item = gl.program_id(0)
    while item < items:
        following = items
        if PERSISTENT:
            following = gl.num_programs(0) + gl.atomic_add(counter, 1)
            publish_item(following, turn, ring_of_items, item_full, item_empty)
        batch, head, first, q_start, q_len, room, k_start, k_len, position = query_tile(
            item, lengths, sizes, META, 2 * ROWS
        )
        if first < room:
            top, number, _right_masked, _left_masked = key_blocks(
                first, gl.minimum(2 * ROWS, q_len - first), position, k_len, left, right, LEFT, RIGHT, BLOCK_N
            )
            group = head // (heads // groups)
            for j in range(number):
                step = base + j
                slot, v_slot = step % SLOTS, step % V_SLOTS
                key = (top - j) * BLOCK_N
                mbarrier.wait(k_empty.index(slot), ((step // SLOTS) & 1) ^ 1)
                full = k_full.index(slot)
                mbarrier.expect(full, BLOCK_N * (D + TAIL) * 2)
                copy_rows(k_desc, batch, k_start, k_len, key, group, 0, full, k_ring.index(slot), META)
                if TAIL > 0:
                    copy_rows(k_tail_desc, batch, k_start, k_len, key, group, D, full, k_tail_ring.index(slot), META)
                if j == 0:
                    mbarrier.wait(q_empty, (tiles & 1) ^ 1)
                    mbarrier.expect(q_full, 2 * ROWS * ((2 if GRADIENT else 1) * D + TAIL) * 2)
                    for half in gl.static_range(2):
                        row = first + half * ROWS
                        copy_rows(q_desc, batch, q_start, q_len, row, head, 0, q_full, q_tiles.index(half), META)
                        if GRADIENT:
                            copy_rows(g_desc, batch, q_start, q_len, row, head, 0, q_full, g_tiles.index(half), META)
                        if TAIL > 0:
                            copy_rows(
                                q_tail_desc, batch, q_start, q_len, row, head, D, q_full, q_tails.index(half), META
                            )
                mbarrier.wait(v_empty.index(v_slot), ((step // V_SLOTS) & 1) ^ 1)
                full = v_full.index(v_slot)
                mbarrier.expect(full, BLOCK_N * D * 2)
                copy_rows(v_desc, batch, k_start, k_len, key, group, 0, full, v_ring.index(v_slot), META)
            base += number
            tiles += 1
        item = following
        turn += 1
