"""FP8 attention, forward (Triton kernel): out and lse from codes; the numbers are those of kernels/reference/attention_fp8.py.

Math      attention_fwd.py's, with S = (codes of q @ codes of k.T) * scale_q * scale_k, a row's shift rounded up to an integer,
          which makes every correction a power of two, P and its sums in units of 1 / 256, and acc in units of the last block's
          scale_v, also a power of two: acc = acc * correction * (last scale_v / scale_v) + codes of P @ codes of v
Layout    q, k [batch * heads | groups, slots * BLOCK_TOKENS, columns] and v_t [.., columns, slots * BLOCK_TOKENS] as
          attention_fp8_quantize.py writes them: tiles need no mask. A program: BLOCK_M queries of one head
Cost      4 * D FP8 FLOPs and one exponential a visible score
Numerics  Hopper's FP8 units keep some 14 bits of a sum: there a block's products are summed in them and blocks in fp32.
          Without FP8 units the codes come as bf16 numbers, and P is rounded by arithmetic: the same products
Limits    BLOCK_M and BLOCK_N divide BLOCK_TOKENS; the largest numbers of two blocks of v differ by less than 2^100, or the
          result is Inf; otherwise attention_fwd.py's
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_fp8_quantize import rounded
from primus_turbo_plugin.kernels.triton.attention_tile import (
    LN2,
    LOG2E,
    dropout_words,
    find_piece,
    kept_scores,
    key_range,
    key_words,
    place_of,
    query_piece,
    query_words,
    seen,
    store_rows,
    tanh,
    token_places,
)


class Fp8Meta(NamedTuple):
    """What FP8 adds to `AttentionMeta`.

    Attributes:
        columns: Of the codes of q and k: d0 + d1.
        block: Tokens that share a scale.
        units: Whether codes are FP8; else bf16 numbers.
        apart: Whether a block's products with v are summed apart before they are added, as Hopper's short sums need.
        p_bits: The power of two that probabilities are multiplied by.
        v_factor: What v's codes are multiplied by.
        s_factor: What the products of q's and k's codes are multiplied by.
    """

    columns: int
    block: int
    units: bool
    apart: bool
    p_bits: float
    v_factor: float
    s_factor: float


@triton.jit
def _code_rows(x, desc, first, columns, ROWS: tl.constexpr, D_FIRST: tl.constexpr, D: tl.constexpr, TMA: tl.constexpr):
    """Rows `first` ... of codes `[ROWS, D]`, x at row 0; through a descriptor they count from the tensor's start."""
    if TMA:
        tile = desc.load([first, D_FIRST])
    else:
        places = tl.arange(0, ROWS)[:, None] * columns + (D_FIRST + tl.arange(0, D))[None, :]
        tile = tl.load(x + tl.cast(first, tl.int64) * columns + places)
    return tile


@triton.jit
def _forward_block(
    maximum, total, acc, unit, q0, q1, q_scale, k, k_desc, k_desc1, v_t, v_desc, k_scales, v_scales, masked, k_places,
    row_words, word, threshold, k_row, v_row, slot_row, wide, k_start, k_len, q_len, first_key, queries, left, right, softcap,
    stride_mk, META: tl.constexpr, FP8: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new (maximum, total, acc, unit), acc being in units of `unit`. `q_scale` includes log2(e) unless
    scores are capped."""
    here = tl.multiple_of(slot_row + first_key, BLOCK_N)  # among the rows of all slots
    k_scale = tl.load(k_scales + here // FP8.block)
    v_scale = tl.load(v_scales + here // FP8.block)
    k0 = _code_rows(k, k_desc, k_row + here, FP8.columns, BLOCK_N, 0, META.d0, META.tma)
    raw = tl.dot(q0, tl.trans(k0))
    if META.d1 > 0:
        k1 = _code_rows(k, k_desc1, k_row + here, FP8.columns, BLOCK_N, META.d0, META.d1, META.tma)
        raw = tl.dot(q1, tl.trans(k1), raw)
    if META.tma:
        values = v_desc.load([v_row, here])
    else:
        places = tl.arange(0, META.dv).to(tl.int64)[:, None] * wide + tl.arange(0, BLOCK_N)[None, :]
        values = tl.load(v_t + here + places)
    factor = q_scale * k_scale
    scores = raw
    if META.softcap:
        scores = tanh(raw * factor) * softcap
    elif not META.fold_scale:
        scores = raw * factor
    if MASKED:
        keys = first_key + tl.arange(0, BLOCK_N)
        ok = seen(queries[:, None], keys[None, :], q_len, k_len, left, right, META)
        if META.masked:
            hidden = tl.load(masked + keys.to(tl.int64)[None, :] * stride_mk, mask=ok, other=1)
            ok = ok & (hidden == 0)
        scores = tl.where(ok, scores, -float("inf"))
    peak = tl.max(scores, 1)
    if META.fold_scale:
        peak = peak * factor
    new_maximum = tl.maximum(maximum, tl.ceil(peak))
    shift = new_maximum
    if MASKED:
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    if META.fold_scale:
        probabilities = tl.exp2(scores * factor + (FP8.p_bits - shift)[:, None])
    else:
        probabilities = tl.exp2(scores + (FP8.p_bits - shift)[:, None])
    correction = tl.exp2(maximum - shift)
    total = total * correction + tl.sum(probabilities, 1)
    if META.dropout:
        places = token_places(k_places, k_start, k_start, first_key + tl.arange(0, BLOCK_N), k_len)
        kept = kept_scores(row_words[:, None], key_words(places, word)[None, :], threshold)
        probabilities = tl.where(kept, probabilities, 0.0)
    if FP8.units:
        p_codes = probabilities.to(v_t.dtype.element_ty)
    else:
        p_codes = rounded(probabilities, 3, 121).to(tl.bfloat16)
    if FP8.apart:
        acc = acc * correction[:, None] + tl.dot(p_codes, tl.trans(values)) * v_scale
    else:
        acc = acc * (correction * (unit / v_scale))[:, None]
        acc = tl.dot(p_codes, tl.trans(values), acc)
        unit = v_scale
    return new_maximum, total, acc, unit


@triton.jit
def attention_fp8_fwd_kernel(
    q, k, v_t, k_desc, k_desc1, v_desc, q_scales, k_scales, v_scales, out, lse, sinks, masked, seed, q_places, k_places,
    cu_q, starts_q, cu_k, starts_k,
    heads, groups, q_tokens, k_tokens, sequences, q_slots, k_slots, cp_rank, cp_size,
    left, right, scale, softcap, first_head, threshold, keep_scale,
    stride_ob, stride_os, stride_oh, stride_od, stride_mb, stride_mh, stride_mq, stride_mk,
    META: tl.constexpr, FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_FIRST: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: batch * heads * q_slots * (block / BLOCK_M). `lse` is fp32 `[batch, heads, q_tokens]`."""
    # Which tile: the last ones of a sequence first, under a causal mask they take longest.
    TILES: tl.constexpr = FP8.block // BLOCK_M
    tiles = q_slots * TILES
    program = tl.program_id(0)
    if HEADS_FIRST:
        head_batch = program % (tl.num_programs(0) // tiles)
        tile = tiles - 1 - program // (tl.num_programs(0) // tiles)
    else:
        tile = tiles - 1 - program % tiles
        head_batch = program // tiles
    slot = tile // TILES
    head = head_batch % heads
    batch = head_batch // heads
    group = head // (heads // groups)
    HALVES: tl.constexpr = 2 if META.zigzag else 1
    if META.packed:
        piece = find_piece(slot, starts_q, sequences, cp_size, HALVES, FP8.block)
    else:
        piece = slot // (q_slots // HALVES)
    q_start, q_len, room, natural, k_start, k_len, position = query_piece(
        piece, cu_q, starts_q, cu_k, starts_k, q_tokens, k_tokens, sequences, cp_rank, cp_size, META
    )
    if META.packed:
        first = (slot - q_start // FP8.block - piece) * FP8.block + tile % TILES * BLOCK_M
        slot_row = (k_start // FP8.block + piece // HALVES) * FP8.block
    else:
        first = (slot % (q_slots // HALVES)) * FP8.block + tile % TILES * BLOCK_M
        slot_row = 0
    if first >= room:
        return
    last = tl.minimum(first + BLOCK_M, q_len)

    # Queries, and where keys and values start. Descriptors count rows from the tensors' start.
    q_line = tl.cast(head_batch, tl.int64) * q_slots
    k_line = (tl.cast(batch, tl.int64) * groups + group) * k_slots
    q_row = (q_line + slot) * FP8.block + tile % TILES * BLOCK_M
    q0 = _code_rows(q, None, q_row, FP8.columns, BLOCK_M, 0, META.d0, False)
    q1 = q0
    if META.d1 > 0:
        q1 = _code_rows(q, None, q_row, FP8.columns, BLOCK_M, META.d0, META.d1, False)
    q_scale = tl.load(q_scales + q_line + slot) * (scale * FP8.s_factor)
    wide = tl.cast(k_slots, tl.int64) * FP8.block
    k_row = (k_line * FP8.block).to(tl.int32) if META.tma else k_line * FP8.block
    v_row = (batch * groups + group) * META.dv
    v_t += tl.cast(v_row, tl.int64) * wide
    k_scales += k_line
    v_scales += k_line
    rows = first + tl.arange(0, BLOCK_M)
    queries = position + rows
    if META.masked:
        masked += place_of(batch, 0, head, stride_mb, 0, stride_mh)
        masked = masked + (q_start + tl.minimum(rows, q_len - 1)).to(tl.int64)[:, None] * stride_mq
    row_words = rows
    word = 0
    if META.dropout:
        query_word, word = dropout_words(seed, batch, first_head + head)
        row_words = query_words(token_places(q_places, q_start, natural, rows, q_len), query_word)

    maximum = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if META.sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        maximum = tl.zeros((BLOCK_M,), tl.float32) + tl.ceil(sink)
        total += tl.exp2(sink - tl.ceil(sink) + FP8.p_bits)
    DV: tl.constexpr = META.dv
    acc = tl.zeros((BLOCK_M, DV), tl.float32)
    unit = 1.0
    low, full_low, full_high, high = key_range(first, last, position, k_len, left, right, META, BLOCK_N)
    high = tl.where(last > first, high, low)  # nothing but padding
    full_low = tl.minimum(full_low, high)
    full_high = tl.minimum(full_high, high)
    if META.has_left or META.masked:
        for first_key in tl.range(low, full_low, BLOCK_N, num_stages=MASKED_STAGES):
            maximum, total, acc, unit = _forward_block(
                maximum, total, acc, unit, q0, q1, q_scale, k, k_desc, k_desc1, v_t, v_desc, k_scales, v_scales, masked,
                k_places, row_words, word, threshold, k_row, v_row, slot_row, wide, k_start, k_len, q_len, first_key, queries,
                left, right, softcap, stride_mk, META, FP8, BLOCK_N, True,
            )  # fmt: skip
    if not META.masked:
        for first_key in range(full_low, full_high, BLOCK_N):
            maximum, total, acc, unit = _forward_block(
                maximum, total, acc, unit, q0, q1, q_scale, k, k_desc, k_desc1, v_t, v_desc, k_scales, v_scales, masked,
                k_places, row_words, word, threshold, k_row, v_row, slot_row, wide, k_start, k_len, q_len, first_key, queries,
                left, right, softcap, stride_mk, META, FP8, BLOCK_N, False,
            )  # fmt: skip
    for first_key in tl.range(full_high, high, BLOCK_N, num_stages=MASKED_STAGES):
        maximum, total, acc, unit = _forward_block(
            maximum, total, acc, unit, q0, q1, q_scale, k, k_desc, k_desc1, v_t, v_desc, k_scales, v_scales, masked,
            k_places, row_words, word, threshold, k_row, v_row, slot_row, wide, k_start, k_len, q_len, first_key, queries,
            left, right, softcap, stride_mk, META, FP8, BLOCK_N, True,
        )  # fmt: skip

    # Rows that see nothing: 0 and -inf. Padding likewise, sink or not.
    is_query = rows < q_len
    acc = acc * tl.where(is_query & (total != 0), keep_scale * FP8.v_factor * unit / total, 0.0)[:, None]
    out += place_of(batch, q_start, head, stride_ob, stride_os, stride_oh)
    store_rows(out, acc, first, room, stride_os, stride_od, BLOCK_M, 0, META.dv, META.v_dim, META.wide)
    lse += tl.cast(head_batch, tl.int64) * q_tokens + q_start
    logarithm = tl.where(is_query, (maximum + tl.log2(total) - FP8.p_bits) * LN2, -float("inf"))
    tl.store(lse + rows, logarithm, mask=rows < room)
