"""out = softmax(scale * q @ k.T, sinks) @ v and its log-sum-exp (Triton kernel); the launcher is in attention_launch.py.

Math      online softmax in base 2: over blocks of keys, m' = max(m, max S), l' = l 2^(m - m') + sum 2^(S - m'), and acc likewise;
          a sink starts a row at m = sink, l = 1. out = acc / l, lse = (m + log2 l) ln 2
Layout    a program: BLOCK_M queries of one head over all keys that any of them sees. Blocks that all of them see run without a
          mask, in a loop of their own, so a causal row pays for one or two masked blocks and a window for its own width
Cost      4 * D FLOPs and one exponential a visible score; q, out once, k and v once a tile of queries (L2 has them)
Numerics  products of 16-bit values in fp32; probabilities are rounded to v's dtype for the second product. Every row's sums are
          in a fixed order: same bits every run
Limits    dim and v_dim to 256; a sequence of up to 2^31 - 1 tokens; offsets between tiles are int64
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_tile import (
    LN2,
    LOG2E,
    dropout_words,
    find_piece,
    kept_scores,
    key_range,
    key_words,
    load_rows,
    place_of,
    query_piece,
    query_words,
    seen,
    store_rows,
    tanh,
    token_places,
)


@triton.jit
def _forward_block(
    maximum, total, acc, q0, q1, k, k_desc, k_desc1, v, v_desc, masked, k_places, row_words, word, threshold,
    batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
    stride_ks, stride_kd, stride_vs, stride_vd, stride_mk,
    META: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new (maximum, total, acc). `scale` includes log2(e) unless scores are capped."""
    TMA: tl.constexpr = META.tma and not (MASKED and META.packed)
    k0 = load_rows(
        k, k_desc, batch, group, k_start, first_key, k_len, stride_ks, stride_kd,
        BLOCK_N, 0, META.d0, META.dim, MASKED, TMA, META.wide,
    )  # fmt: skip
    scores = tl.dot(q0, tl.trans(k0))
    if META.d1 > 0:
        k1 = load_rows(
            k, k_desc1, batch, group, k_start, first_key, k_len, stride_ks, stride_kd,
            BLOCK_N, META.d0, META.d1, META.dim, MASKED, TMA, META.wide,
        )  # fmt: skip
        scores = tl.dot(q1, tl.trans(k1), scores)
    if META.softcap:
        scores = tanh(scores * scale) * softcap
    elif not META.fold_scale:
        scores = scores * scale
    keys = first_key + tl.arange(0, BLOCK_N)
    if MASKED:
        ok = seen(queries[:, None], keys[None, :], q_len, k_len, left, right, META)
        if META.masked:
            hidden = tl.load(masked + keys.to(tl.int64)[None, :] * stride_mk, mask=ok, other=1)
            ok = ok & (hidden == 0)
        scores = tl.where(ok, scores, -float("inf"))
    peak = tl.max(scores, 1)
    if META.fold_scale:
        peak = peak * scale
    new_maximum = tl.maximum(maximum, peak)
    shift = new_maximum
    if MASKED:
        shift = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    if META.fold_scale:
        probabilities = tl.exp2(scores * scale - shift[:, None])
    else:
        probabilities = tl.exp2(scores - shift[:, None])
    correction = tl.exp2(maximum - shift)
    total = total * correction + tl.sum(probabilities, 1)
    if META.dropout:
        places = token_places(k_places, k_start, k_start, keys, k_len)
        kept = kept_scores(row_words[:, None], key_words(places, word)[None, :], threshold)
        probabilities = tl.where(kept, probabilities, 0.0)
    acc = acc * correction[:, None]
    values = load_rows(
        v, v_desc, batch, group, k_start, first_key, k_len, stride_vs, stride_vd,
        BLOCK_N, 0, META.dv, META.v_dim, MASKED, TMA, META.wide,
    )  # fmt: skip
    acc = tl.dot(probabilities.to(v.dtype.element_ty), values, acc)
    return new_maximum, total, acc


@triton.jit
def attention_fwd_kernel(
    q, k, v, k_desc, k_desc1, v_desc, out, lse, sinks, masked, seed, q_places, k_places, cu_q, starts_q, cu_k, starts_k,
    heads, groups, q_tokens, k_tokens, sequences, slots, cp_rank, cp_size,
    left, right, scale, softcap, first_head, threshold, keep_scale,
    stride_qb, stride_qs, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_ob, stride_os, stride_oh, stride_od,
    stride_mb, stride_mh, stride_mq, stride_mk,
    META: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_FIRST: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: batch * heads * slots. `lse` is fp32 `[batch, heads, q_tokens]`; `seed` int64; packed lengths int32."""
    # Which tile: the last ones of a sequence first, under a causal mask they take longest.
    program = tl.program_id(0)
    if HEADS_FIRST:
        head_batch = program % (tl.num_programs(0) // slots)
        slot = slots - 1 - program // (tl.num_programs(0) // slots)
    else:
        slot = slots - 1 - program % slots
        head_batch = program // slots
    head = head_batch % heads
    batch = head_batch // heads
    group = head // (heads // groups)
    HALVES: tl.constexpr = 2 if META.zigzag else 1
    if META.packed:
        piece = find_piece(slot, starts_q, sequences, cp_size, HALVES, BLOCK_M)
    else:
        piece = slot // (slots // HALVES)
    q_start, q_len, room, natural, k_start, k_len, position = query_piece(
        piece, cu_q, starts_q, cu_k, starts_k, q_tokens, k_tokens, sequences, cp_rank, cp_size, META
    )
    if META.packed:
        first = (slot - q_start // BLOCK_M - piece) * BLOCK_M
    else:
        first = (slot % (slots // HALVES)) * BLOCK_M
    if first >= room:
        return
    last = tl.minimum(first + BLOCK_M, q_len)

    # Queries, and where the rest starts.
    q += place_of(batch, q_start, head, stride_qb, stride_qs, stride_qh)
    k += place_of(batch, k_start, group, stride_kb, stride_ks, stride_kh)
    v += place_of(batch, k_start, group, stride_vb, stride_vs, stride_vh)
    rows = first + tl.arange(0, BLOCK_M)
    q0 = load_rows(
        q, None, 0, 0, 0, first, q_len, stride_qs, stride_qd, BLOCK_M, 0, META.d0, META.dim, True, False, META.wide
    )
    q1 = q0
    if META.d1 > 0:
        q1 = load_rows(
            q, None, 0, 0, 0, first, q_len, stride_qs, stride_qd,
            BLOCK_M, META.d0, META.d1, META.dim, True, False, META.wide,
        )  # fmt: skip
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
        maximum = tl.zeros((BLOCK_M,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    DV: tl.constexpr = META.dv
    acc = tl.zeros((BLOCK_M, DV), tl.float32)
    low, full_low, full_high, high = key_range(first, last, position, k_len, left, right, META, BLOCK_N)
    high = tl.where(last > first, high, low)  # nothing but padding
    full_low = tl.minimum(full_low, high)
    full_high = tl.minimum(full_high, high)
    if META.has_left or META.masked:
        for first_key in tl.range(low, full_low, BLOCK_N, num_stages=MASKED_STAGES):
            maximum, total, acc = _forward_block(
                maximum, total, acc, q0, q1, k, k_desc, k_desc1, v, v_desc, masked, k_places, row_words, word, threshold,
                batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
                stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, True,
            )  # fmt: skip
    if not META.masked:
        for first_key in range(full_low, full_high, BLOCK_N):
            maximum, total, acc = _forward_block(
                maximum, total, acc, q0, q1, k, k_desc, k_desc1, v, v_desc, masked, k_places, row_words, word, threshold,
                batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
                stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, False,
            )  # fmt: skip
    for first_key in tl.range(full_high, high, BLOCK_N, num_stages=MASKED_STAGES):
        maximum, total, acc = _forward_block(
            maximum, total, acc, q0, q1, k, k_desc, k_desc1, v, v_desc, masked, k_places, row_words, word, threshold,
            batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, True,
        )  # fmt: skip

    # Rows that see nothing: 0 and -inf. Padding likewise, sink or not.
    is_query = rows < q_len
    acc = acc * tl.where(is_query & (total > 0), keep_scale / total, 0.0)[:, None]
    out += place_of(batch, q_start, head, stride_ob, stride_os, stride_oh)
    store_rows(out, acc, first, room, stride_os, stride_od, BLOCK_M, 0, META.dv, META.v_dim, META.wide)
    lse += tl.cast(head_batch, tl.int64) * q_tokens + q_start
    logarithm = tl.where(is_query, (maximum + tl.log2(total)) * LN2, -float("inf"))
    tl.store(lse + rows, logarithm, mask=rows < room)
