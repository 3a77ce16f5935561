"""Gradients of keys and values (Triton kernel); the launcher is in attention_launch.py, the formulas in attention_bwd.py.

Layout    a program has BLOCK_N keys of one group and goes through the queries of all its heads that see any; scores are computed
          transposed, so that P and dS stay in registers. Blocks without a mask run in a loop of their own
Cost      8 D FLOPs and one exponential a visible score
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_bwd import score_gradients
from primus_turbo_plugin.kernels.triton.attention_tile import (
    dropout_words,
    find_piece,
    kept_scores,
    key_words,
    load_columns,
    load_rows,
    place_of,
    query_piece,
    query_range,
    query_words,
    seen,
    store_rows,
    token_places,
)


@triton.jit
def _dkdv_block(
    dk0, dk1, dv, k0, k1, values, q, q_desc, q_desc1, dout, dout_desc, lse2, delta, masked,
    q_places, column_words, query_word, threshold, keep_scale, natural,
    batch, head, q_start, q_len, k_len, position, first, keys, left, right, scale, softcap,
    stride_qs, stride_qd, stride_gs, stride_gd, stride_mq,
    META: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of queries: the new (dk0, dk1, dv), with `keys` as rows."""
    TMA: tl.constexpr = META.tma and not (MASKED and (META.packed or META.zigzag))
    rows = first + tl.arange(0, BLOCK_M)
    q0 = load_rows(
        q, q_desc, batch, head, q_start, first, q_len, stride_qs, stride_qd,
        BLOCK_M, 0, META.d0, META.dim, MASKED, TMA, META.wide,
    )  # fmt: skip
    if META.both_ways:
        q0_t = load_columns(q, first, q_len, stride_qs, stride_qd, BLOCK_M, 0, META.d0, META.dim, MASKED, META.wide)
        scores = tl.dot(k0, q0_t)
    else:
        scores = tl.dot(k0, tl.trans(q0))
    if META.d1 > 0:
        q1 = load_rows(
            q, q_desc1, batch, head, q_start, first, q_len, stride_qs, stride_qd,
            BLOCK_M, META.d0, META.d1, META.dim, MASKED, TMA, META.wide,
        )  # fmt: skip
        if META.both_ways:
            q1_t = load_columns(
                q, first, q_len, stride_qs, stride_qd, BLOCK_M, META.d0, META.d1, META.dim, MASKED, META.wide
            )
            scores = tl.dot(k1, q1_t, scores)
        else:
            scores = tl.dot(k1, tl.trans(q1), scores)
    g = load_rows(
        dout, dout_desc, batch, head, q_start, first, q_len, stride_gs, stride_gd,
        BLOCK_M, 0, META.dv, META.v_dim, MASKED, TMA, META.wide,
    )  # fmt: skip
    if META.both_ways:
        g_t = load_columns(dout, first, q_len, stride_gs, stride_gd, BLOCK_M, 0, META.dv, META.v_dim, MASKED, META.wide)
        dp = tl.dot(values, g_t)
    else:
        dp = tl.dot(values, tl.trans(g))
    if MASKED:
        row_lse = tl.load(lse2 + rows, mask=rows < q_len, other=float("inf"))
        row_delta = tl.load(delta + rows, mask=rows < q_len, other=0.0)
        ok = seen((position + rows)[None, :], keys[:, None], q_len, k_len, left, right, META)
        if META.masked:
            places = masked + tl.minimum(rows, q_len - 1).to(tl.int64)[None, :] * stride_mq
            ok = ok & (tl.load(places, mask=ok, other=1) == 0)
    else:
        row_lse = tl.load(lse2 + rows)
        row_delta = tl.load(delta + rows)
        ok = True
    kept = True
    if META.dropout:
        places = token_places(q_places, q_start, natural, rows, q_len)
        kept = kept_scores(column_words[:, None], query_words(places, query_word)[None, :], threshold)
    p, ds = score_gradients(
        scores, dp, row_lse[None, :], row_delta[None, :], ok, kept, keep_scale, scale, softcap, META, MASKED
    )
    dv = tl.dot(p.to(g.dtype), g, dv)
    ds = ds.to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0)
    if META.d1 > 0:
        dk1 = tl.dot(ds, q1, dk1)
    return dk0, dk1, dv


@triton.jit
def attention_dkdv_kernel(
    q, k, v, q_desc, q_desc1, dout, dout_desc, dk, dv, lse2, delta, masked, seed, q_places, k_places,
    cu_q, starts_q, cu_k, starts_k,
    heads, groups, q_tokens, k_tokens, sequences, slots, cp_rank, cp_size, splits,
    left, right, scale, grad_scale, softcap, first_head, threshold, keep_scale,
    stride_qb, stride_qs, stride_qh, stride_qd,
    stride_kb, stride_ks, stride_kh, stride_kd,
    stride_vb, stride_vs, stride_vh, stride_vd,
    stride_gb, stride_gs, stride_gh, stride_gd,
    stride_dkp, stride_dkb, stride_dks, stride_dkh, stride_dkd,
    stride_dvp, stride_dvb, stride_dvs, stride_dvh, stride_dvd,
    stride_mb, stride_mh, stride_mq, stride_mk,
    META: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS_FIRST: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: batch * groups * splits * slots. The heads of a group are shared out over `splits` programs, each with a part
    of its own in dk and dv (strides `p`), for the caller to sum."""
    # Which tile: the first keys of a sequence first, under a causal mask most queries see them.
    program = tl.program_id(0)
    if HEADS_FIRST:
        lane = program % (tl.num_programs(0) // slots)
        slot = program // (tl.num_programs(0) // slots)
    else:
        slot = program % slots
        lane = program // slots
    split = lane % splits
    group = (lane // splits) % groups
    batch = lane // splits // groups
    HALVES: tl.constexpr = 2 if META.zigzag else 1
    if META.packed:
        sequence = find_piece(slot, starts_k, sequences, 1, 1, BLOCK_N)
        is_sequence = sequence < sequences
        k_start = tl.load(starts_k + sequence)
        this = tl.minimum(sequence, sequences - 1)
        room = tl.where(is_sequence, tl.load(starts_k + this + 1), k_tokens) - k_start
        k_len = tl.where(is_sequence, tl.load(cu_k + this + 1) - tl.load(cu_k + this), 0)
        first_key = (slot - k_start // BLOCK_N - sequence) * BLOCK_N
    else:
        sequence = 0
        this = 0
        k_start = 0
        room = k_tokens
        k_len = k_tokens
        first_key = slot * BLOCK_N
    if first_key >= room:
        return

    # Keys and values stay.
    k += place_of(batch, k_start, group, stride_kb, stride_ks, stride_kh)
    v += place_of(batch, k_start, group, stride_vb, stride_vs, stride_vh)
    k0 = load_rows(
        k, None, 0, 0, 0, first_key, k_len, stride_ks, stride_kd, BLOCK_N, 0, META.d0, META.dim, True, False, META.wide
    )
    k1 = k0
    if META.d1 > 0:
        k1 = load_rows(
            k, None, 0, 0, 0, first_key, k_len, stride_ks, stride_kd,
            BLOCK_N, META.d0, META.d1, META.dim, True, False, META.wide,
        )  # fmt: skip
    values = load_rows(
        v,
        None,
        0,
        0,
        0,
        first_key,
        k_len,
        stride_vs,
        stride_vd,
        BLOCK_N,
        0,
        META.dv,
        META.v_dim,
        True,
        False,
        META.wide,
    )
    keys = first_key + tl.arange(0, BLOCK_N)
    D0: tl.constexpr = META.d0
    D1: tl.constexpr = max(META.d1, 1)
    DV: tl.constexpr = META.dv
    dk0 = tl.zeros((BLOCK_N, D0), tl.float32)
    dk1 = tl.zeros((BLOCK_N, D1), tl.float32)
    dvalues = tl.zeros((BLOCK_N, DV), tl.float32)

    heads_each = heads // groups // splits
    # Padding has no queries.
    for index in range(tl.where(first_key < k_len, heads_each * HALVES, 0)):
        head = group * (heads // groups) + split * heads_each + index // HALVES
        q_start, q_len, _room, natural, _k_start, _k_len, position = query_piece(
            this * HALVES + index % HALVES,
            cu_q,
            starts_q,
            cu_k,
            starts_k,
            q_tokens,
            k_tokens,
            sequences,
            cp_rank,
            cp_size,
            META,
        )
        line = (tl.cast(batch, tl.int64) * heads + head) * q_tokens + q_start
        q_here = q + place_of(batch, q_start, head, stride_qb, stride_qs, stride_qh)
        g_here = dout + place_of(batch, q_start, head, stride_gb, stride_gs, stride_gh)
        masked_here = masked
        if META.masked:
            masked_here = masked + place_of(batch, q_start, head, stride_mb, stride_mq, stride_mh)
            masked_here = masked_here + keys.to(tl.int64)[:, None] * stride_mk
        column_words = keys
        query_word = 0
        if META.dropout:
            query_word, key_word = dropout_words(seed, batch, first_head + head)
            column_words = key_words(token_places(k_places, k_start, k_start, keys, k_len), key_word)
        low, full_low, full_high, high = query_range(
            first_key, first_key + BLOCK_N, position, q_len, k_len, left, right, META, BLOCK_M
        )
        if META.has_right or META.masked:
            for first in tl.range(low, full_low, BLOCK_M, num_stages=MASKED_STAGES):
                dk0, dk1, dvalues = _dkdv_block(
                    dk0, dk1, dvalues, k0, k1, values, q_here, q_desc, q_desc1, g_here, dout_desc, lse2 + line,
                    delta + line, masked_here, q_places, column_words, query_word, threshold, keep_scale, natural,
                    batch, head, q_start, q_len, k_len, position, first, keys, left, right, scale, softcap,
                    stride_qs, stride_qd, stride_gs, stride_gd, stride_mq, META, BLOCK_M, BLOCK_N, True,
                )  # fmt: skip
        if not META.masked:
            for first in range(full_low, full_high, BLOCK_M):
                dk0, dk1, dvalues = _dkdv_block(
                    dk0, dk1, dvalues, k0, k1, values, q_here, q_desc, q_desc1, g_here, dout_desc, lse2 + line,
                    delta + line, masked_here, q_places, column_words, query_word, threshold, keep_scale, natural,
                    batch, head, q_start, q_len, k_len, position, first, keys, left, right, scale, softcap,
                    stride_qs, stride_qd, stride_gs, stride_gd, stride_mq, META, BLOCK_M, BLOCK_N, False,
                )  # fmt: skip
        for first in tl.range(full_high, high, BLOCK_M, num_stages=MASKED_STAGES):
            dk0, dk1, dvalues = _dkdv_block(
                dk0, dk1, dvalues, k0, k1, values, q_here, q_desc, q_desc1, g_here, dout_desc, lse2 + line,
                delta + line, masked_here, q_places, column_words, query_word, threshold, keep_scale, natural,
                batch, head, q_start, q_len, k_len, position, first, keys, left, right, scale, softcap,
                stride_qs, stride_qd, stride_gs, stride_gd, stride_mq, META, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip

    # Rows past k_len hold what masked blocks left there: zero.
    dk += tl.cast(split, tl.int64) * stride_dkp + place_of(batch, k_start, group, stride_dkb, stride_dks, stride_dkh)
    store_rows(dk, dk0 * grad_scale, first_key, room, stride_dks, stride_dkd, BLOCK_N, 0, META.d0, META.dim, META.wide)
    if META.d1 > 0:
        store_rows(
            dk,
            dk1 * grad_scale,
            first_key,
            room,
            stride_dks,
            stride_dkd,
            BLOCK_N,
            META.d0,
            META.d1,
            META.dim,
            META.wide,
        )
    dv += tl.cast(split, tl.int64) * stride_dvp + place_of(batch, k_start, group, stride_dvb, stride_dvs, stride_dvh)
    store_rows(
        dv, dvalues * keep_scale, first_key, room, stride_dvs, stride_dvd, BLOCK_N, 0, META.dv, META.v_dim, META.wide
    )
