"""What the attention kernels share: which piece of a sequence a program works on, loads, visibility, dropout (Triton).

A *piece* is a run of queries with consecutive positions: a dense batch entry, a packed sequence, or one of the two zig-zag chunks
that a context-parallel rank holds of either (kernels/attention_spans.py spells it out on the host). Packed lengths are read on
the device. Tile t of piece p has *slot* start(p) // BLOCK + p + t: rooms rounded down and one more a piece always suffice, so
that the number of slots follows from the tensors' shapes and the host need not know any length.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

_SEARCH = tl.constexpr(64)  # pieces looked at in one step
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class AttentionMeta(NamedTuple):
    """Compile-time description of an attention problem.

    Attributes:
        dim: Of q and k.
        v_dim: Of v.
        d0: Columns of q and k in the first tile of the head dimension, a power of two.
        d1: Columns in the second, 0 or a power of two.
        dv: Columns in v's tile, a power of two.
        has_left: Whether a query's reach to the left is limited.
        has_right: Whether its reach to the right is.
        packed: Whether sequences are packed.
        zigzag: Whether queries are a context-parallel rank's two chunks.
        masked: Whether there is a mask tensor.
        sinks: Whether heads have a sink logit.
        softcap: Whether scores are capped.
        dropout: Whether probabilities are dropped.
        fold_scale: Whether the scale can be applied inside the exponent: it is positive, and no softcap comes between.
        tma: Whether tiles without a mask come by tensor descriptors.
        both_ways: Whether a tile needed in both orientations is loaded twice (AMD) instead of transposed in shared memory.
        wide: Whether offsets inside a tile need 64 bits.
    """

    dim: int
    v_dim: int
    d0: int
    d1: int
    dv: int
    has_left: bool
    has_right: bool
    packed: bool
    zigzag: bool
    masked: bool
    sinks: bool
    softcap: bool
    dropout: bool
    fold_scale: bool
    tma: bool
    both_ways: bool
    wide: bool


@triton.jit
def find_piece(slot, starts, sequences, cp_size, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    """The last piece whose first slot is not behind `slot`; number sequences * HALVES is the tokens behind all sequences."""
    pieces = sequences * HALVES + 1
    found = 0
    for first in range(0, pieces, _SEARCH):
        piece = first + tl.arange(0, _SEARCH)
        sequence = tl.minimum(piece // HALVES, sequences)
        start = tl.load(starts + sequence) // cp_size
        if HALVES == 2:
            behind = tl.load(starts + tl.minimum(sequence + 1, sequences)) // cp_size
            start += (piece % 2) * ((behind - start) // 2)
        found += tl.sum(((start // BLOCK + piece <= slot) & (piece < pieces)).to(tl.int32), 0)
    return found - 1


@triton.jit
def query_piece(
    piece, cu_q, starts_q, cu_k, starts_k, q_tokens, k_tokens, sequences, cp_rank, cp_size, META: tl.constexpr
):  # fmt: skip
    """(q_start, q_len, q_room, natural, k_start, k_len, position) of a piece.

    q_start and k_start are tokens; q_room counts padding in; `natural` is the first query's place among all ranks' tokens,
    `position` its place among its own keys.
    """
    if META.zigzag:
        half = piece % 2
        sequence = piece // 2
        number = cp_rank * (1 - half) + (2 * cp_size - 1 - cp_rank) * half
    else:
        half = 0
        sequence = piece
        number = 0
    if META.packed:
        is_sequence = sequence < sequences
        this = tl.minimum(sequence, sequences - 1)
        first = tl.load(starts_q + this)
        behind = tl.load(starts_q + this + 1)
        length = tl.load(cu_q + this + 1) - tl.load(cu_q + this)
        k_start = tl.load(starts_k + this)
        k_len = tl.load(cu_k + this + 1) - tl.load(cu_k + this)
        if META.zigzag:
            room = (behind - first) // cp_size // 2
            q_start = first // cp_size + half * room
            position = number * room
            natural = first + position
            q_len = tl.maximum(tl.minimum(room, length - position), 0)
        else:
            room = behind - first
            q_start = first
            position = k_len - length
            natural = first
            q_len = length
        tail = behind // cp_size
        q_start = tl.where(is_sequence, q_start, tail)
        room = tl.where(is_sequence, room, q_tokens - tail)
        q_len = tl.where(is_sequence, q_len, 0)
        k_len = tl.where(is_sequence, k_len, 0)
    else:
        k_start = 0
        k_len = k_tokens
        if META.zigzag:
            room = q_tokens // 2
            q_start = half * room
            position = number * room
            natural = position
        else:
            room = q_tokens
            q_start = 0
            position = k_tokens - q_tokens
            natural = 0
        q_len = room
    return q_start, q_len, room, natural, k_start, k_len, position


@triton.jit
def key_range(first, last, position, k_len, left, right, META: tl.constexpr, BLOCK: tl.constexpr):
    """(low, full_low, full_high, high) for queries first ... last - 1 of a piece: keys outside low ... high are seen by none,
    those inside full_low ... full_high by all. low is a multiple of BLOCK, and so are the distances from it up to the last."""
    low = 0
    high = k_len
    full_low = 0
    full_high = k_len
    if META.has_left:
        low = tl.maximum(position + first - left, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(position + last - 1 - left, 0), BLOCK) * BLOCK
    if META.has_right:
        high = tl.minimum(k_len, position + last + right)
        full_high = tl.minimum(k_len, position + first + right + 1)
    high = tl.maximum(high, low)
    full_low = tl.minimum(full_low, high)
    full_high = tl.maximum(tl.maximum(full_high, 0) // BLOCK * BLOCK, full_low)
    if META.masked:
        full_high = full_low
    return low, full_low, full_high, high


@triton.jit
def query_range(first, last, position, q_len, k_len, left, right, META: tl.constexpr, BLOCK: tl.constexpr):
    """The same the other way round: which queries of a piece see any, and which all, of the keys first ... last - 1.

    Keys past k_len make every block a masked one."""
    low = 0
    high = q_len
    full_low = 0
    full_high = q_len // BLOCK * BLOCK
    if META.has_right:
        low = tl.maximum(first - right - position, 0) // BLOCK * BLOCK
        full_low = tl.cdiv(tl.maximum(last - 1 - right - position, 0), BLOCK) * BLOCK
    if META.has_left:
        high = tl.minimum(q_len, last + left - position)
        full_high = tl.maximum(tl.minimum(q_len, first + left - position + 1), 0) // BLOCK * BLOCK
    high = tl.maximum(high, low)
    full_low = tl.minimum(full_low, high)
    full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    if META.masked:
        full_high = full_low
    full_high = tl.where(last > k_len, full_low, full_high)
    return low, full_low, full_high, high


@triton.jit
def place_of(batch, token, head, stride_b, stride_s, stride_h):
    """Offset of a batch entry's token and head: 64 bits, since each product may need them."""
    place = tl.cast(batch, tl.int64) * stride_b + tl.cast(token, tl.int64) * stride_s
    return place + tl.cast(head, tl.int64) * stride_h


@triton.jit
def load_rows(
    x, desc, batch, head, start, first, length, stride_s, stride_d,
    ROWS: tl.constexpr, D_FIRST: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    CHECK: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows first ... first + ROWS - 1 and columns D_FIRST ... D_FIRST + D - 1 `[ROWS, D]`; zero past `length` (if CHECK) and DIM.

    `x` points at row 0 of the sequence and head; `start` is where that row lies among the descriptor's tokens.
    """
    if TMA:
        tile = tl.reshape(desc.load([batch, start + first, head, D_FIRST]), (ROWS, D))
    else:
        rows = tl.arange(0, ROWS)
        cols = D_FIRST + tl.arange(0, D)
        places = _offsets(rows, stride_s, WIDE)[:, None] + _offsets(cols, stride_d, WIDE)[None, :]
        base = x + tl.cast(first, tl.int64) * stride_s
        if CHECK:
            if D_FIRST + D > DIM:
                tile = tl.load(base + places, mask=(rows < length - first)[:, None] & (cols < DIM)[None, :], other=0.0)
            else:
                tile = tl.load(base + places, mask=(rows < length - first)[:, None], other=0.0)
        elif D_FIRST + D > DIM:
            tile = tl.load(base + places, mask=(cols < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(base + places)
    return tile


@triton.jit
def load_columns(
    x, first, length, stride_s, stride_d,
    ROWS: tl.constexpr, D_FIRST: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`load_rows` transposed, `[D, ROWS]`."""
    rows = tl.arange(0, ROWS)
    cols = D_FIRST + tl.arange(0, D)
    places = _offsets(cols, stride_d, WIDE)[:, None] + _offsets(rows, stride_s, WIDE)[None, :]
    base = x + tl.cast(first, tl.int64) * stride_s
    if CHECK:
        if D_FIRST + D > DIM:
            tile = tl.load(base + places, mask=(cols < DIM)[:, None] & (rows < length - first)[None, :], other=0.0)
        else:
            tile = tl.load(base + places, mask=(rows < length - first)[None, :], other=0.0)
    elif D_FIRST + D > DIM:
        tile = tl.load(base + places, mask=(cols < DIM)[:, None], other=0.0)
    else:
        tile = tl.load(base + places)
    return tile


@triton.jit
def store_rows(
    x, tile, first, length, stride_s, stride_d,
    ROWS: tl.constexpr, D_FIRST: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_rows` by pointers, rounded to x's dtype."""
    rows = tl.arange(0, ROWS)
    cols = D_FIRST + tl.arange(0, D)
    places = _offsets(rows, stride_s, WIDE)[:, None] + _offsets(cols, stride_d, WIDE)[None, :]
    mask = (rows < length - first)[:, None]
    if D_FIRST + D > DIM:
        mask = mask & (cols < DIM)[None, :]
    base = x + tl.cast(first, tl.int64) * stride_s
    tl.store(base + places, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _offsets(indices, stride, WIDE: tl.constexpr):
    if WIDE:
        indices = indices.to(tl.int64)
    return indices * stride


@triton.jit
def seen(queries, keys, q_len, k_len, left, right, META: tl.constexpr):
    """Whether a query (its position) sees a key, by their ranges alone; `queries` and `keys` broadcast against each other."""
    ok = keys < k_len
    if META.has_right:
        ok = ok & (keys <= queries + right)
    if META.has_left:
        ok = ok & (keys >= queries - left)
    return ok


@triton.jit
def tanh(x):
    """1 - 2 / (1 + e^(2 x)): right at both infinities, off by some 2^-23 of 1 in between."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def mix(x):
    """See kernels/attention_dropout.py."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_words(seed, batch, head):
    """(w0, w1) of a head: what its queries and its keys are mixed with."""
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    zero = (batch * 0).to(tl.uint32)
    w0, w1, _w2, _w3 = tl.philox_impl(
        head.to(tl.uint32), batch.to(tl.uint32), zero, zero,
        (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32), 10,
    )  # fmt: skip
    return w0, w1


@triton.jit
def query_words(places, word):
    """The queries' share of each score's bits; `places` are int32."""
    return mix(places.to(tl.uint32) * 0x9E3779B1 + word)


@triton.jit
def key_words(places, word):
    """The keys' share."""
    return mix(places.to(tl.uint32) * 0x85EBCA77 + word)


@triton.jit
def kept_scores(words, other_words, threshold):
    """Whether each score is kept; `threshold` is an int32, 2^31 less than meant."""
    return mix(words ^ other_words) >= tl.cast(threshold, tl.int32).to(tl.uint32, bitcast=True) + 0x80000000


@triton.jit
def token_places(places, start, natural, index, length):
    """Places (int32) of tokens `index` of a run that starts at token `start`: as told by `places`, or counted from `natural`."""
    if places is None:
        found = natural + index
    else:
        found = tl.load(places + start + index, mask=index < length, other=0)
    return found
