"""Which tiles and blocks the programs of the Hopper attention kernels go through, and what is visible in them (Gluon).

Index arithmetic alone, which the tests run on the host. Pieces, slots and packed lengths are those of attention_tile.py.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.triton.attention_tile import query_piece


class Pieces(NamedTuple):
    """How tokens fall into sequences, as `attention_tile.AttentionMeta` says it: what `query_piece` asks."""

    packed: bool
    zigzag: bool
    odd_starts: bool = False
    """Sequences, or halves of them, may start at any query: for who reads fp32 rows by descriptors."""


@gluon.jit
def find_sequence(slot, starts, sequences, cp_size, HALVES: gl.constexpr, BLOCK: gl.constexpr):
    """As `attention_tile.find_piece`, by halving: scalars only, so that a single warp can do it."""
    low = 0
    high = sequences * HALVES
    while low < high:
        piece = (low + high + 1) // 2
        sequence = piece // HALVES
        start = gl.load(starts + sequence) // cp_size
        if HALVES == 2:
            behind = gl.load(starts + gl.minimum(sequence + 1, sequences)) // cp_size
            start += (piece % 2) * ((behind - start) // 2)
        if start // BLOCK + piece <= slot:
            low = piece
        else:
            high = piece - 1
    return low


@gluon.jit
def turn(item, slots, chunk, lanes):
    """(lane, index) of an item: of every `chunk` lanes (heads, or groups of them) in turn the first slot, then the second, ..."""
    first = item // (slots * chunk) * chunk
    rest = item % (slots * chunk)
    width = gl.minimum(chunk, lanes - first)
    return first + rest % width, rest // width


@gluon.jit
def query_tile(item, lengths, sizes, META: gl.constexpr, BLOCK: gl.constexpr):
    """(batch, head, first, q_start, q_len, room, k_start, k_len, position): a program's tile of `BLOCK` queries, number `item`.

    There is no such tile if first >= room. The last tiles come first, which under causality take longest.
    """
    cu_q, starts_q, cu_k, starts_k = lengths
    slots, chunk, heads, lanes, q_tokens, k_tokens, sequences, cp_rank, cp_size = sizes
    HALVES: gl.constexpr = 2 if META.zigzag else 1
    lane, index = turn(item, slots, chunk, lanes)
    slot = slots - 1 - index
    if META.packed:
        piece = find_sequence(slot, starts_q, sequences, cp_size, HALVES, BLOCK)
    else:
        piece = slot // (slots // HALVES)
    q_start, q_len, room, _natural, k_start, k_len, position = query_piece(
        piece, cu_q, starts_q, cu_k, starts_k, q_tokens, k_tokens, sequences, cp_rank, cp_size, META
    )
    if META.packed:
        first = (slot - q_start // BLOCK - piece) * BLOCK
    else:
        first = (slot % (slots // HALVES)) * BLOCK
    return lane // heads, lane % heads, first, q_start, q_len, room, k_start, k_len, position


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
def key_tile(program, lengths, sizes, META: gl.constexpr, BLOCK: gl.constexpr):
    """(batch, group, split, sequence, first, k_start, k_len, room): a program's tile of `BLOCK` keys.

    There is no such tile if first >= room. The first tiles come first, which under causality take longest.
    """
    _cu_q, _starts_q, cu_k, starts_k = lengths
    slots, chunk, lanes, splits, groups, _q_tokens, k_tokens, sequences, _cp_rank, _cp_size = sizes
    lane, slot = turn(program, slots, chunk, lanes)
    sequence = 0
    k_start = 0
    k_len = k_tokens
    room = k_tokens
    first = slot * BLOCK
    if META.packed:
        found = find_sequence(slot, starts_k, sequences, 1, 1, BLOCK)
        sequence = gl.minimum(found, sequences - 1)
        k_start = gl.load(starts_k + found)
        room = gl.where(found < sequences, gl.load(starts_k + sequence + 1), k_tokens) - k_start
        k_len = gl.where(found < sequences, gl.load(cu_k + sequence + 1) - gl.load(cu_k + sequence), 0)
        first = (slot - k_start // BLOCK - found) * BLOCK
    return lane // splits // groups, (lane // splits) % groups, lane % splits, sequence, first, k_start, k_len, room


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
def query_run(
    half, sequence, first, k_len, lengths, sizes, left, right,
    META: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """(q_start, q_len, low, full_low, full_high, number, near, far): a sequence's blocks of queries that see a tile of keys,
    `number` from `low` on; under zig-zag order those of one `half`. `near` and `far` count from a query's own number."""
    cu_q, starts_q, cu_k, starts_k = lengths
    _slots, _chunk, _lanes, _splits, _groups, q_tokens, k_tokens, sequences, cp_rank, cp_size = sizes
    HALVES: gl.constexpr = 2 if META.zigzag else 1
    q_start, q_len, _room, _natural, _k_start, _k_len, position = query_piece(
        sequence * HALVES + half, cu_q, starts_q, cu_k, starts_k, q_tokens, k_tokens, sequences, cp_rank, cp_size, META
    )
    low, full_low, full_high, high = query_blocks(first, KEYS, position, q_len, k_len, left, right, LEFT, RIGHT, BLOCK)
    number = gl.where(first < k_len, high - low, 0)
    return q_start, q_len, low, full_low, full_high, number, left - position, right + position


@gluon.jit
def query_runs(
    sequence, first, k_len, lengths, sizes, left, right,
    META: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, KEYS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Both halves' `query_run`; without zig-zag order the one run there is, twice."""
    run = query_run(0, sequence, first, k_len, lengths, sizes, left, right, META, LEFT, RIGHT, KEYS, BLOCK)
    other = run
    if META.zigzag:
        other = query_run(1, sequence, first, k_len, lengths, sizes, left, right, META, LEFT, RIGHT, KEYS, BLOCK)
    return run, other


@gluon.jit
def blocks_of_a_head(runs, META: gl.constexpr):
    """How many blocks of queries a head has in `query_runs`."""
    number = runs[0][5]
    if META.zigzag:
        number += runs[1][5]
    return number


@gluon.jit
def query_block(j, runs, each, META: gl.constexpr):
    """(head, block, q_start, q_len, full_low, full_high, near, far) of step j through `query_runs`, `each` blocks a head."""
    q_start, q_len, low, full_low, full_high, number, near, far = runs[0]
    index = j % each
    block = low + index
    if META.zigzag:
        q_start_1, q_len_1, low_1, full_low_1, full_high_1, _number, near_1, far_1 = runs[1]
        second = index >= number
        block = gl.where(second, low_1 + index - number, block)
        q_start = gl.where(second, q_start_1, q_start)
        q_len = gl.where(second, q_len_1, q_len)
        full_low = gl.where(second, full_low_1, full_low)
        full_high = gl.where(second, full_high_1, full_high)
        near = gl.where(second, near_1, near)
        far = gl.where(second, far_1, far)
    return j // each, block, q_start, q_len, full_low, full_high, near, far


@gluon.jit
def visible(queries, keys, k_len, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Whether a query sees a key, `left` and `right` counted from the query's number; both broadcast against each other."""
    ok = keys < k_len
    if RIGHT:
        ok = ok & (keys <= queries + right)
    if LEFT:
        ok = ok & (keys >= queries - left)
    return ok
