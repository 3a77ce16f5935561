"""Flash attention, forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16


@triton.jit
def attention(q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, scale, S,
              BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """o = softmax(q k^T * scale) v, l = log2 of the row sums; `scale` includes log2(e). [heads, S, D]."""
    head = tl.program_id(1)
    q_ptr += head * S * D
    k_ptr += head * S * D
    v_ptr += head * S * D
    o_ptr += head * S * D
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    columns = tl.arange(0, BN)
    q = tl.load(q_ptr + rows[:, None] * D + d[None, :])
    highest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    o = tl.zeros((BM, D), tl.float32)
    end = (tl.program_id(0) + 1) * BM if CAUSAL else S
    for start in range(0, end, BN):
        k = tl.load(k_ptr + (start + columns)[None, :] * D + d[:, None])
        v = tl.load(v_ptr + (start + columns)[:, None] * D + d[None, :])
        s = tl.dot(q, k) * scale
        if CAUSAL:
            s = tl.where(rows[:, None] >= (start + columns)[None, :], s, -float("inf"))
        new = tl.maximum(highest, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        correction = tl.math.exp2(highest - new)
        total = total * correction + tl.sum(p, 1)
        o = tl.dot(p.to(tl.bfloat16), v, o * correction[:, None])
        highest = new
    tl.store(o_ptr + rows[:, None] * D + d[None, :], (o / total[:, None]).to(tl.bfloat16))
    tl.store(l_ptr + head * S + rows, highest + tl.math.log2(total))


HEADS, S, D = 2, 128, 64
BLOCKS = {"BM": 64, "BN": 32}


def inputs(rng: np.random.Generator) -> dict[str, Any]:
    q, k, v = (to_bf16(rng.standard_normal((HEADS, S, D))) for _ in range(3))
    return {"q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": np.zeros((HEADS, S, D), np.uint16),
            "l_ptr": np.zeros((HEADS, S), np.float32), "scale": float(np.log2(np.e) / np.sqrt(D)), "S": S}  # fmt: skip


def reference(causal: bool) -> Any:
    def expected(args: dict[str, Any]) -> dict[str, Any]:
        q, k, v = (from_bf16(args[name]).astype(np.float64) for name in ("q_ptr", "k_ptr", "v_ptr"))
        s = np.einsum("hqd,hkd->hqk", q, k) * args["scale"]
        if causal:
            s = np.where(np.tril(np.ones((S, S), bool)), s, -np.inf)
        highest = s.max(axis=-1, keepdims=True)
        log_sum = np.log2(np.exp2(s - highest).sum(axis=-1)) + highest[..., 0]
        return {"o_ptr": np.exp2(s - log_sum[..., None]) @ v, "l_ptr": log_sum}

    return expected


def isa_targets() -> list[KernelTarget]:
    return [
        KernelTarget(
            name=f"attention_{'causal' if causal else 'full'}",
            kernel=attention,
            archs=("gfx942", "gfx950", "gfx1250"),
            inputs=inputs,
            grid=(S // BLOCKS["BM"], HEADS),
            constants={**BLOCKS, "D": D, "CAUSAL": causal},
            options={"num_warps": 4, "num_stages": 2},
            types=dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "o_ptr"), "*bf16"),
            expected=reference(causal),
            tolerance=1e-2,
        )
        for causal in (False, True)
    ]
