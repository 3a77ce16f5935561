"""Gradients of queries (Triton kernel); the launcher is in attention_launch.py, the formulas in attention_bwd.py.

Layout    a program has BLOCK_M queries of one head and goes through their keys, as the forward does
Cost      6 D FLOPs and one exponential a visible score
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_bwd import score_gradients
from primus_turbo_plugin.kernels.triton.attention_tile import (
    dropout_words,
    find_piece,
    kept_scores,
    key_range,
    key_words,
    load_columns,
    load_rows,
    place_of,
    query_piece,
    query_words,
    seen,
    store_rows,
    token_places,
)


@triton.jit
def _dq_block(
    dq0, dq1, q0, q1, g, row_lse, row_delta, k, k_desc, k_desc1, v, v_desc,
    masked, k_places, row_words, word, threshold, keep_scale,
    batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
    stride_ks, stride_kd, stride_vs, stride_vd, stride_mk,
    META: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys: the new (dq0, dq1)."""
    TMA: tl.constexpr = META.tma and not (MASKED and META.packed)
    keys = first_key + tl.arange(0, BLOCK_N)
    k0 = load_rows(
        k, k_desc, batch, group, k_start, first_key, k_len, stride_ks, stride_kd,
        BLOCK_N, 0, META.d0, META.dim, MASKED, TMA, META.wide,
    )  # fmt: skip
    if META.both_ways:
        k0_t = load_columns(k, first_key, k_len, stride_ks, stride_kd, BLOCK_N, 0, META.d0, META.dim, MASKED, META.wide)
        scores = tl.dot(q0, k0_t)
    else:
        scores = tl.dot(q0, tl.trans(k0))
    if META.d1 > 0:
        k1 = load_rows(
            k, k_desc1, batch, group, k_start, first_key, k_len, stride_ks, stride_kd,
            BLOCK_N, META.d0, META.d1, META.dim, MASKED, TMA, META.wide,
        )  # fmt: skip
        if META.both_ways:
            k1_t = load_columns(
                k, first_key, k_len, stride_ks, stride_kd, BLOCK_N, META.d0, META.d1, META.dim, MASKED, META.wide
            )
            scores = tl.dot(q1, k1_t, scores)
        else:
            scores = tl.dot(q1, tl.trans(k1), scores)
    if META.both_ways:
        values_t = load_columns(
            v, first_key, k_len, stride_vs, stride_vd, BLOCK_N, 0, META.dv, META.v_dim, MASKED, META.wide
        )
        dp = tl.dot(g, values_t)
    else:
        values = load_rows(
            v, v_desc, batch, group, k_start, first_key, k_len, stride_vs, stride_vd,
            BLOCK_N, 0, META.dv, META.v_dim, MASKED, TMA, META.wide,
        )  # fmt: skip
        dp = tl.dot(g, tl.trans(values))
    ok = True
    if MASKED:
        ok = seen(queries[:, None], keys[None, :], q_len, k_len, left, right, META)
        if META.masked:
            hidden = tl.load(masked + keys.to(tl.int64)[None, :] * stride_mk, mask=ok, other=1)
            ok = ok & (hidden == 0)
    kept = True
    if META.dropout:
        places = token_places(k_places, k_start, k_start, keys, k_len)
        kept = kept_scores(row_words[:, None], key_words(places, word)[None, :], threshold)
    _p, ds = score_gradients(
        scores, dp, row_lse[:, None], row_delta[:, None], ok, kept, keep_scale, scale, softcap, META, MASKED
    )
    ds = ds.to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0)
    if META.d1 > 0:
        dq1 = tl.dot(ds, k1, dq1)
    return dq0, dq1


@triton.jit
def attention_dq_kernel(
    q, k, v, k_desc, k_desc1, v_desc, dout, dq, lse2, delta, masked, seed, q_places, k_places, cu_q, starts_q, cu_k, starts_k,
    heads, groups, q_tokens, k_tokens, sequences, slots, cp_rank, cp_size,
    left, right, scale, grad_scale, softcap, first_head, threshold, keep_scale,
    stride_qb, stride_qs, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_gb, stride_gs, stride_gh, stride_gd,
    stride_dqb, stride_dqs, stride_dqh, stride_dqd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    META: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_FIRST: tl.constexpr, MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: batch * heads * slots."""
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

    # Queries and the gradients of their outputs stay.
    q += place_of(batch, q_start, head, stride_qb, stride_qs, stride_qh)
    dout += place_of(batch, q_start, head, stride_gb, stride_gs, stride_gh)
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
    g = load_rows(
        dout, None, 0, 0, 0, first, q_len, stride_gs, stride_gd, BLOCK_M, 0, META.dv, META.v_dim, True, False, META.wide
    )
    line = tl.cast(head_batch, tl.int64) * q_tokens + q_start
    row_lse = tl.load(lse2 + line + rows, mask=rows < q_len, other=float("inf"))
    row_delta = tl.load(delta + line + rows, mask=rows < q_len, other=0.0)
    queries = position + rows
    if META.masked:
        masked += place_of(batch, 0, head, stride_mb, 0, stride_mh)
        masked = masked + (q_start + tl.minimum(rows, q_len - 1)).to(tl.int64)[:, None] * stride_mq
    row_words = rows
    word = 0
    if META.dropout:
        query_word, word = dropout_words(seed, batch, first_head + head)
        row_words = query_words(token_places(q_places, q_start, natural, rows, q_len), query_word)

    D0: tl.constexpr = META.d0
    D1: tl.constexpr = max(META.d1, 1)
    dq0 = tl.zeros((BLOCK_M, D0), tl.float32)
    dq1 = tl.zeros((BLOCK_M, D1), tl.float32)
    low, full_low, full_high, high = key_range(first, last, position, k_len, left, right, META, BLOCK_N)
    high = tl.where(last > first, high, low)  # nothing but padding
    full_low = tl.minimum(full_low, high)
    full_high = tl.minimum(full_high, high)
    if META.has_left or META.masked:
        for first_key in tl.range(low, full_low, BLOCK_N, num_stages=MASKED_STAGES):
            dq0, dq1 = _dq_block(
                dq0, dq1, q0, q1, g, row_lse, row_delta, k, k_desc, k_desc1, v, v_desc,
    masked, k_places, row_words, word, threshold, keep_scale,
                batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
                stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, True,
            )  # fmt: skip
    if not META.masked:
        for first_key in range(full_low, full_high, BLOCK_N):
            dq0, dq1 = _dq_block(
                dq0, dq1, q0, q1, g, row_lse, row_delta, k, k_desc, k_desc1, v, v_desc,
    masked, k_places, row_words, word, threshold, keep_scale,
                batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
                stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, False,
            )  # fmt: skip
    for first_key in tl.range(full_high, high, BLOCK_N, num_stages=MASKED_STAGES):
        dq0, dq1 = _dq_block(
            dq0, dq1, q0, q1, g, row_lse, row_delta, k, k_desc, k_desc1, v, v_desc,
    masked, k_places, row_words, word, threshold, keep_scale,
            batch, group, k_start, k_len, q_len, first_key, queries, left, right, scale, softcap,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_mk, META, BLOCK_N, True,
        )  # fmt: skip

    dq += place_of(batch, q_start, head, stride_dqb, stride_dqs, stride_dqh)
    store_rows(dq, dq0 * grad_scale, first, room, stride_dqs, stride_dqd, BLOCK_M, 0, META.d0, META.dim, META.wide)
    if META.d1 > 0:
        store_rows(
            dq, dq1 * grad_scale, first, room, stride_dqs, stride_dqd, BLOCK_M, META.d0, META.d1, META.dim, META.wide
        )
