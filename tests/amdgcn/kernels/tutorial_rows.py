"""Kernels of the kind Triton's tutorials teach, over rows: softmax, layer norm, dropout, cross-entropy, activations, RoPE.

Written for the emulator's tests: ordinary Triton, nothing made for AMD. Sizes are small and have tails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16

ALL = ("gfx942", "gfx950", "gfx1250")
FLOAT = 2e-6
"""fp32 arithmetic of a few hundred terms against float64, relative to the largest result."""


@triton.jit
def softmax(x_ptr, y_ptr, stride, rows, columns, BLOCK: tl.constexpr):
    """A grid-stride loop over rows, each in one block."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=2):
        at = tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(x_ptr + row * stride + at, mask=inside, other=-float("inf"))
        e = tl.exp(x - tl.max(x, axis=0))
        tl.store(y_ptr + row * stride + at, e / tl.sum(e, axis=0), mask=inside)


@triton.jit
def layer_norm(x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    """Three passes over a row in blocks: mean, variance, result."""
    row = tl.program_id(0)
    x_ptr += row * columns
    y_ptr += row * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(at < columns, x - mean, 0.0)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        w, b = tl.load(w_ptr + at, mask=inside), tl.load(b_ptr + at, mask=inside)
        tl.store(y_ptr + at, (x - mean) * rstd * w + b, mask=inside)


@triton.jit
def layer_norm_backward(
    dx_ptr,
    dy_ptr,
    dw_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    lock_ptr,
    columns,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx of a row, and dw summed over rows in a few buffers, each guarded by a lock that programs spin on."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0)
    dy = tl.load(dy_ptr + row * columns + at, mask=inside, other=0.0)
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    normed = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    weighted = tl.where(inside, w * dy, 0.0)
    along = tl.sum(normed * weighted, axis=0) / columns
    shift = tl.sum(weighted, axis=0) / columns
    tl.store(dx_ptr + row * columns + at, (weighted - (normed * along + shift)) * rstd, mask=inside)
    lock = lock_ptr + row % GROUP
    used = lock + GROUP
    dw_ptr += row % GROUP * columns
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    part = dy * normed
    if tl.load(used) == 0:
        tl.atomic_xchg(used, 1)
    else:
        part += tl.load(dw_ptr + at, mask=inside)
    tl.store(dw_ptr + at, part, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def seeded_dropout(x_ptr, y_ptr, n, p, seed, BLOCK: tl.constexpr):
    """Philox numbers, drawn again where they are needed again."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    keep = tl.rand(seed, at) > p
    tl.store(y_ptr + at, tl.where(keep, tl.load(x_ptr + at, mask=inside) / (1 - p), 0.0), mask=inside)


@triton.jit
def cross_entropy(logits_ptr, label_ptr, loss_ptr, columns, BLOCK: tl.constexpr):
    """Running maximum and sum over blocks of a row of bf16 logits; the label's logit is gathered."""
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    label = tl.load(label_ptr + row)
    wanted = tl.load(logits_ptr + row * columns + label).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(label < 0, 0.0, top + tl.log(total) - wanted))


@triton.jit
def activations(x_ptr, half_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """Functions of libdevice in fp32, arithmetic in fp16."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=0.5)
    gelu = 0.5 * x * (1 + libdevice.erf(x * 0.7071067811865476))
    y = gelu + libdevice.tanh(x) + libdevice.log1p(tl.abs(x)) + libdevice.pow(tl.abs(x) + 0.5, 1.7)
    y += tl.ceil(x) + tl.exp2(x * 0.25) + tl.log2(tl.abs(x) + 1) + tl.cos(x) + tl.sigmoid(x) + tl.fma(x, x, 1.0)
    tl.store(y_ptr + at, y, mask=inside)
    h = tl.load(half_ptr + at, mask=inside, other=0.0)
    tl.store(z_ptr + at, tl.maximum(h * h - h, 0.25) * 0.5 + tl.abs(h), mask=inside)


@triton.jit
def rope(q_ptr, cos_ptr, sin_ptr, out_ptr, stride, HALF: tl.constexpr):
    """Interleaved pairs of bf16: split, rotated, joined again."""
    token = tl.program_id(0)
    at = tl.arange(0, 2 * HALF)
    pairs = tl.reshape(tl.load(q_ptr + token * stride + at), [HALF, 2])
    even, odd = tl.split(pairs.to(tl.float32))
    angle = token * HALF + tl.arange(0, HALF)
    cos, sin = tl.load(cos_ptr + angle), tl.load(sin_ptr + angle)
    tl.store(
        out_ptr + token * stride + at, tl.interleave(even * cos - odd * sin, even * sin + odd * cos).to(tl.bfloat16)
    )


def _randn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def softmax_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = _randn(rng, 7, 100) * 4
    return {"x_ptr": x, "y_ptr": np.full_like(x, np.nan), "stride": 100, "rows": 7, "columns": 100}


def softmax_reference(args: dict[str, Any]) -> dict[str, Any]:
    e = np.exp(args["x_ptr"].astype(np.float64))
    return {"y_ptr": e / e.sum(-1, keepdims=True)}


def norm_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = _randn(rng, 3, 150) + 1
    row = np.full(3, np.nan, np.float32)
    return {
        "x_ptr": x, "y_ptr": np.full_like(x, np.nan), "w_ptr": _randn(rng, 150), "b_ptr": _randn(rng, 150),
        "mean_ptr": row.copy(), "rstd_ptr": row, "columns": 150, "eps": 1e-5,
    }  # fmt: skip


def norm_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = args["x_ptr"].astype(np.float64)
    mean, rstd = x.mean(-1), 1 / np.sqrt(x.var(-1) + 1e-5)
    y = (x - mean[:, None]) * rstd[:, None] * args["w_ptr"] + args["b_ptr"]
    return {"y_ptr": y, "mean_ptr": mean, "rstd_ptr": rstd}


def norm_backward_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = _randn(rng, 6, 100)
    nothing = np.full_like(x, np.nan)
    mean, rstd = x.mean(-1), 1 / x.std(-1)
    return {
        "dx_ptr": nothing, "dy_ptr": _randn(rng, 6, 100), "dw_ptr": nothing[:2].copy(), "x_ptr": x, "w_ptr": _randn(rng, 100),
        "mean_ptr": mean, "rstd_ptr": rstd, "lock_ptr": np.zeros(4, np.int32), "columns": 100,
    }  # fmt: skip


def norm_backward_reference(args: dict[str, Any]) -> dict[str, Any]:
    dy, x = args["dy_ptr"].astype(np.float64), args["x_ptr"].astype(np.float64)
    rstd = args["rstd_ptr"][:, None].astype(np.float64)
    normed, weighted = (x - args["mean_ptr"][:, None]) * rstd, dy * args["w_ptr"]
    dx = (weighted - normed * (normed * weighted).mean(-1, keepdims=True) - weighted.mean(-1, keepdims=True)) * rstd
    return {"dx_ptr": dx, "dw_ptr": np.stack([(dy * normed)[i::2].sum(0) for i in range(2)])}


def dropout_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = _randn(rng, 300)
    return {"x_ptr": x, "y_ptr": np.full_like(x, np.nan), "n": 300, "p": 0.4, "seed": int(rng.integers(1 << 31))}


def philox(seed: int, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers of Philox 4x32-10 (Salmon and others, 2011), as `tl.rand` makes them of the first word."""
    words = [counters.astype(np.uint64), *(np.zeros_like(counters, np.uint64) for _ in range(3))]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        one, two = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(two >> np.uint64(32)) ^ words[1] ^ np.uint64(key[0]), two & mask,
                 (one >> np.uint64(32)) ^ words[3] ^ np.uint64(key[1]), one & mask]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    signed = words[0].astype(np.uint32).view(np.int32)
    return np.where(signed < 0, -signed.astype(np.int64) - 1, signed) * 4.6566127342e-10


def dropout_reference(args: dict[str, Any]) -> dict[str, Any]:
    keep = philox(args["seed"], np.arange(300)) > args["p"]
    return {"y_ptr": np.where(keep, args["x_ptr"] / (1 - args["p"]), 0)}


def entropy_inputs(rng: np.random.Generator) -> dict[str, Any]:
    logits = to_bf16(_randn(rng, 5, 300) * 3)
    return {
        "logits_ptr": logits, "label_ptr": rng.integers(0, 300, 5), "loss_ptr": np.full(5, np.nan, np.float32), "columns": 300,
    }  # fmt: skip


def entropy_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = from_bf16(args["logits_ptr"]).astype(np.float64)
    return {"loss_ptr": np.log(np.exp(x).sum(-1)) - x[np.arange(5), args["label_ptr"]]}


def activation_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x, half = _randn(rng, 300) * 3, _randn(rng, 300).astype(np.float16)
    return {"x_ptr": x, "half_ptr": half, "y_ptr": np.full_like(x, np.nan), "z_ptr": np.zeros_like(half), "n": 300}


def activation_reference(args: dict[str, Any]) -> dict[str, Any]:
    from math import erf

    x, h = args["x_ptr"].astype(np.float64), args["half_ptr"].astype(np.float64)
    y = 0.5 * x * (1 + np.vectorize(erf)(x * 0.5**0.5)) + np.tanh(x) + np.log1p(np.abs(x)) + (np.abs(x) + 0.5) ** 1.7
    y += np.ceil(x) + np.exp2(x / 4) + np.log2(np.abs(x) + 1) + np.cos(x) + 1 / (1 + np.exp(-x)) + x * x + 1
    return {"y_ptr": y, "z_ptr": np.maximum(h * h - h, 0.25) * 0.5 + np.abs(h)}


def rope_inputs(rng: np.random.Generator) -> dict[str, Any]:
    angle = _randn(rng, 3, 32)
    q = to_bf16(_randn(rng, 3, 64))
    return {"q_ptr": q, "cos_ptr": np.cos(angle), "sin_ptr": np.sin(angle), "out_ptr": np.zeros_like(q), "stride": 64}


def rope_reference(args: dict[str, Any]) -> dict[str, Any]:
    q, c, s = from_bf16(args["q_ptr"]), args["cos_ptr"], args["sin_ptr"]
    even, odd = q[:, ::2], q[:, 1::2]
    return {"out_ptr": np.stack([even * c - odd * s, even * s + odd * c], -1).reshape(3, 64)}


def isa_targets() -> list[KernelTarget]:
    def target(
        kernel: Any, inputs: Any, expected: Any, grid: int, tolerance: float = FLOAT, **fields: Any
    ) -> KernelTarget:
        return KernelTarget(
            name=kernel.fn.__name__, kernel=kernel, archs=ALL, inputs=inputs, expected=expected, grid=grid, tolerance=tolerance,
            **fields,
        )  # fmt: skip

    return [
        target(softmax, softmax_inputs, softmax_reference, 2, constants={"BLOCK": 128}, options={"num_warps": 2}),
        target(layer_norm, norm_inputs, norm_reference, 3, constants={"BLOCK": 64}, options={"num_warps": 2}),
        target(
            layer_norm_backward, norm_backward_inputs, norm_backward_reference, 6, constants={"GROUP": 2, "BLOCK": 128},
            options={"num_warps": 2},
        ),
        target(seeded_dropout, dropout_inputs, dropout_reference, 2, constants={"BLOCK": 256}),
        target(
            cross_entropy, entropy_inputs, entropy_reference, 5, constants={"BLOCK": 128}, options={"num_warps": 2},
            types={"logits_ptr": "*bf16"},
        ),
        target(activations, activation_inputs, activation_reference, 2, 2.0**-10, constants={"BLOCK": 256}),
        target(
            rope, rope_inputs, rope_reference, 3, 2.0**-8, constants={"HALF": 32}, options={"num_warps": 1},
            types={"q_ptr": "*bf16", "out_ptr": "*bf16"},
        ),
    ]  # fmt: skip
