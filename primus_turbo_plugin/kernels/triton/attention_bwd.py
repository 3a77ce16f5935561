"""What the two gradient kernels of attention share: each row's delta, and dS of a block (Triton).

Math      P = 2^(S - lse);  dP = dout @ v.T;  dS = P (dP - delta), delta = sum dout * out;  with dropout, kept by K:
          dv = (K P).T @ dout;  dS = P (K dP - delta)
          dk = scale dS.T @ q;  dq = scale dS @ k;  with a softcap dS is first multiplied by 1 - tanh^2
Cost      dkdv 8 D FLOPs a score and dq 6: S and dP are computed twice, 7 products where 5 would do. One kernel for all three,
          adding up dq by atomics, took 10.0 to 14.8 ms where these two take 6.1 (H200, b2 s8192 h32/8 d128 causal, 2026-12)
Numerics  fp32 inside; P and dS are rounded to the tensors' dtype for the products. Every sum has a fixed order: same bits
          every run
Limits    as attention_fwd.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_tile import LOG2E, load_rows, place_of, tanh


@triton.jit
def attention_delta_kernel(
    out, dout, lse, delta, lse2, heads, tokens,
    stride_ob, stride_os, stride_oh, stride_od, stride_gb, stride_gs, stride_gh, stride_gd,
    V_DIM: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """lse in base 2, with +inf for rows that see nothing, so that P = 0 there; unless None, delta = sum of out * dout."""
    head, batch = tl.program_id(1) % heads, tl.program_id(1) // heads
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    out += place_of(batch, 0, head, stride_ob, 0, stride_oh)
    dout += place_of(batch, 0, head, stride_gb, 0, stride_gh)
    place = tl.cast(tl.program_id(1), tl.int64) * tokens + rows
    old = tl.load(lse + place, mask=rows < tokens, other=0.0)
    sees = old != -float("inf")
    tl.store(lse2 + place, tl.where(sees, old * LOG2E, float("inf")), mask=rows < tokens)
    if delta is not None:
        o = load_rows(out, None, 0, 0, 0, first, tokens, stride_os, stride_od, BLOCK_M, 0, DV, V_DIM, True, False, True)
        g = load_rows(
            dout, None, 0, 0, 0, first, tokens, stride_gs, stride_gd, BLOCK_M, 0, DV, V_DIM, True, False, True
        )
        products = tl.where(sees[:, None], o.to(tl.float32) * g.to(tl.float32), 0.0)
        tl.store(delta + place, tl.sum(products, 1), mask=rows < tokens)


@triton.jit
def score_gradients(
    scores, dp, lse2, delta, ok, kept, keep_scale, scale, softcap, META: tl.constexpr, MASKED: tl.constexpr
):
    """(P with what is dropped zeroed, dS) from raw scores and dP; `lse2` and `delta` come ready to broadcast."""
    slope = 1.0
    if META.softcap:
        capped = tanh(scores * scale)
        slope = 1.0 - capped * capped
        p = tl.exp2(capped * softcap - lse2)
    else:
        p = tl.exp2(scores * scale - lse2)
    if MASKED:
        p = tl.where(ok, p, 0.0)
    used = p
    if META.dropout:
        used = tl.where(kept, p, 0.0)
        dp = tl.where(kept, dp * keep_scale, 0.0)
    ds = p * (dp - delta)
    if META.softcap:
        ds = ds * slope
    return used, ds
