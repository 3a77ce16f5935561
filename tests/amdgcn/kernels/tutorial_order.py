"""Kernels of the kind Triton's tutorials teach, that order and count: sort, scans, arg-reductions, atomics, integers, fp64.

Written for the emulator's tests: ordinary Triton, nothing made for AMD. Sizes are small and have tails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16

ALL = ("gfx942", "gfx950", "gfx1250")


@triton.jit
def sort_rows(x_ptr, up_ptr, down_ptr, top_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):
    """Ascending, descending, and the largest K, of each row."""
    rows, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = rows[:, None] * COLUMNS + at[None, :]
    x = tl.load(x_ptr + places)
    tl.store(up_ptr + places, tl.sort(x))
    tl.store(down_ptr + places, tl.sort(x, descending=True))
    tl.store(top_ptr + rows[:, None] * K + tl.arange(0, K)[None, :], tl.topk(x, K))


@triton.jit
def first_order(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def scans(a_ptr, b_ptr, sum_ptr, product_ptr, state_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Running sums, backwards running products, and h = a h + b by an associative scan."""
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + places)
    tl.store(sum_ptr + places, tl.cumsum(b, axis=0))
    tl.store(product_ptr + places, tl.cumprod(a, axis=1, reverse=True))
    _, state = tl.associative_scan((a, b), 1, first_order)
    tl.store(state_ptr + places, state)


@triton.jit
def welford(mean1, m21, n1, mean2, m22, n2):
    delta = mean2 - mean1
    n = n1 + n2
    share = tl.where(n == 0.0, 0.0, n2 / n)
    return mean1 + delta * share, m21 + m22 + delta * delta * n1 * share, n


@triton.jit
def arg_reductions(
    x_ptr, where_ptr, least_ptr, mean_ptr, var_ptr, any_ptr, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Places of the largest and least, mean and variance in one pass (Welford), an exclusive-or of integers."""
    rows, at = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (at < columns)[None, :] & (rows >= 0)[:, None]
    x = tl.load(x_ptr + rows[:, None] * columns + at[None, :], mask=inside, other=0.0)
    _, where = tl.max(tl.where(inside, x, -float("inf")), axis=1, return_indices=True)
    tl.store(where_ptr + rows, where)
    tl.store(least_ptr + rows, tl.argmin(tl.where(inside, x, float("inf")), axis=1))
    mean, m2, n = tl.reduce((x, tl.zeros_like(x), inside.to(tl.float32)), 1, welford)
    tl.store(mean_ptr + rows, mean)
    tl.store(var_ptr + rows, m2 / n)
    tl.store(any_ptr + rows, tl.xor_sum(tl.where(inside, x.to(tl.int32, bitcast=True), 0), axis=1))


@triton.jit
def count_and_scatter(
    key_ptr, x_ptr, count_ptr, sum_ptr, half_ptr, top_ptr, low_ptr, bits_ptr, n, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """A histogram in registers, and atomics of several kinds and types into the bins."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    key = tl.load(key_ptr + at, mask=inside, other=0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    counts = tl.histogram(key, BINS, mask=inside)
    tl.atomic_add(count_ptr + tl.arange(0, BINS), counts.to(tl.int64), sem="relaxed")
    tl.atomic_add(sum_ptr + key, x, mask=inside)
    tl.atomic_add(half_ptr + key, tl.where(inside, 1.0, 0.0).to(tl.float16), mask=inside)
    tl.atomic_max(top_ptr + key, x, mask=inside)
    tl.atomic_min(low_ptr + key, at, mask=inside)
    tl.atomic_xor(bits_ptr + key, at, mask=inside)


@triton.jit
def integers(x_ptr, y_ptr, small_ptr, wide_ptr, n, BLOCK: tl.constexpr):
    """Euclid's algorithm by a while loop over lanes; arithmetic of 8, 16 and 64 bits."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x_ptr + at, mask=inside, other=1)
    b = tl.load(y_ptr + at, mask=inside, other=1)
    short = (a.to(tl.int16) * b.to(tl.int16) + (a >> 3).to(tl.int16)) // 3
    byte = (a.to(tl.int8) - b.to(tl.int8)).to(tl.int8)
    tl.store(small_ptr + at, short ^ byte.to(tl.int16) + tl.abs(byte).to(tl.int16), mask=inside)
    wide = a.to(tl.int64) * 1000000007 // b + (a.to(tl.int64) << 33) % (b.to(tl.int64) + 5)
    while tl.max(b, axis=0) > 0:
        rest = tl.where(b > 0, a % tl.maximum(b, 1), 0)
        a, b = tl.where(b > 0, b, a), rest
    tl.store(wide_ptr + at, wide * 64 + a, mask=inside)


@triton.jit
def double_precision(x_ptr, y_ptr, total_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside, other=1.0)
    y = tl.exp(x) / (1.0 + x * x) + tl.sqrt(tl.abs(x)) + tl.log(tl.abs(x)) + tl.floor(x) + x.to(tl.int32).to(tl.float64)
    tl.store(y_ptr + at, y, mask=inside)
    tl.atomic_add(total_ptr, tl.sum(tl.where(inside, x, 0.0), axis=0))


@triton.jit
def shuffles(x_ptr, place_ptr, out_ptr, flipped_ptr, turned_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`tl.gather`, `tl.flip`, a transposed store of bytes, a sum over one axis of three."""
    rows, at = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    places = rows[:, None] * COLUMNS + at[None, :]
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.gather(x, tl.load(place_ptr + places), axis=1))
    tl.store(flipped_ptr + places, tl.flip(x, 1))
    sums = tl.sum(tl.reshape(x.to(tl.float32), [ROWS, 4, COLUMNS // 4]), axis=1)
    code = tl.clamp(sums * 16.0, -127.0, 127.0).to(tl.int8)
    tl.store(turned_ptr + tl.arange(0, COLUMNS // 4)[:, None] * ROWS + rows[None, :], tl.trans(code))


@triton.jit
def embedding_backward(dy_ptr, token_ptr, dw_ptr, tokens, hidden, BLOCK: tl.constexpr):
    """Rows added by atomics of bf16 at the token's place; programs beyond the end return early."""
    t = tl.program_id(0)
    if t >= tokens:
        return
    token = tl.load(token_ptr + t)
    if token < 0:
        return
    for start in range(0, hidden, BLOCK):
        at = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + t * hidden + at, mask=at < hidden, other=0.0)
        tl.atomic_add(dw_ptr + token * hidden + at, dy, mask=at < hidden)


def sort_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal((4, 64), np.float32)
    nothing = np.full_like(x, np.nan)
    return {"x_ptr": x, "up_ptr": nothing.copy(), "down_ptr": nothing, "top_ptr": nothing[:, :8].copy()}


def sort_reference(args: dict[str, Any]) -> dict[str, Any]:
    up = np.sort(args["x_ptr"], -1)
    return {"up_ptr": up, "down_ptr": up[:, ::-1], "top_ptr": up[:, :-9:-1]}


def scan_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a, b = rng.random((8, 64), np.float32) + np.float32(0.5), rng.standard_normal((8, 64), np.float32)
    return {
        "a_ptr": a,
        "b_ptr": b,
        **{name: np.full_like(a, np.nan) for name in ("sum_ptr", "product_ptr", "state_ptr")},
    }


def scan_reference(args: dict[str, Any]) -> dict[str, Any]:
    a, b = args["a_ptr"].astype(np.float64), args["b_ptr"].astype(np.float64)
    state = np.zeros_like(b)
    for i in range(64):
        state[:, i] = (a[:, i] * state[:, i - 1] if i else 0) + b[:, i]
    return {"sum_ptr": b.cumsum(0), "product_ptr": a[:, ::-1].cumprod(1)[:, ::-1], "state_ptr": state}


def reduction_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal((4, 100), np.float32)
    return {
        "x_ptr": x, "where_ptr": np.zeros(4, np.int32), "least_ptr": np.zeros(4, np.int32), "mean_ptr": np.zeros(4, np.float32),
        "var_ptr": np.zeros(4, np.float32), "any_ptr": np.zeros(4, np.int32), "columns": 100,
    }  # fmt: skip


def reduction_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = args["x_ptr"]
    return {
        "where_ptr": x.argmax(1), "least_ptr": x.argmin(1), "mean_ptr": x.astype(np.float64).mean(1),
        "var_ptr": x.astype(np.float64).var(1), "any_ptr": np.bitwise_xor.reduce(x.view(np.int32), 1),
    }  # fmt: skip


def scatter_inputs(rng: np.random.Generator) -> dict[str, Any]:
    n, bins = 200, 16
    return {
        "key_ptr": rng.integers(0, bins, n, dtype=np.int32), "x_ptr": rng.integers(-50, 50, n).astype(np.float32),
        "count_ptr": np.zeros(bins, np.int64), "sum_ptr": np.zeros(bins, np.float32), "half_ptr": np.zeros(bins, np.float16),
        "top_ptr": np.full(bins, -1000, np.float32), "low_ptr": np.full(bins, n, np.int32), "bits_ptr": np.zeros(bins, np.int32),
        "n": n,
    }  # fmt: skip


def scatter_reference(args: dict[str, Any]) -> dict[str, Any]:
    key, x, bins = args["key_ptr"], args["x_ptr"], len(args["count_ptr"])
    at = np.arange(len(key), dtype=np.int32)
    top, low, bits = args["top_ptr"], args["low_ptr"], args["bits_ptr"]
    np.maximum.at(top, key, x)
    np.minimum.at(low, key, at)
    np.bitwise_xor.at(bits, key, at)
    counts = np.bincount(key, minlength=bins)
    sums = np.bincount(key, x, bins)
    return {"count_ptr": counts, "sum_ptr": sums, "half_ptr": counts, "top_ptr": top, "low_ptr": low, "bits_ptr": bits}


def integer_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x, y = (rng.integers(1, 1 << 20, 100, dtype=np.int32) for _ in range(2))
    return {"x_ptr": x, "y_ptr": y, "small_ptr": np.zeros(100, np.int16), "wide_ptr": np.zeros(100, np.int64), "n": 100}


def integer_reference(args: dict[str, Any]) -> dict[str, Any]:
    a, b = args["x_ptr"], args["y_ptr"]
    product = a.astype(np.int16) * b.astype(np.int16) + (a >> 3).astype(np.int16)
    short = np.sign(product) * (np.abs(product.astype(np.int32)) // 3)
    byte = a.astype(np.int8) - b.astype(np.int8)
    small = short.astype(np.int16) ^ (byte.astype(np.int16) + np.abs(byte).astype(np.int16))
    wide = a.astype(np.int64) * 1000000007 // b + (a.astype(np.int64) << 33) % (b.astype(np.int64) + 5)
    return {"small_ptr": small, "wide_ptr": wide * 64 + np.gcd(a, b)}


def double_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal(100)
    return {"x_ptr": x, "y_ptr": np.full_like(x, np.nan), "total_ptr": np.zeros(1), "n": 100}


def double_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = args["x_ptr"]
    y = np.exp(x) / (1 + x * x) + np.sqrt(np.abs(x)) + np.log(np.abs(x)) + np.floor(x) + np.trunc(x)
    return {"y_ptr": y, "total_ptr": x.sum(keepdims=True)}


def shuffle_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x, place = rng.standard_normal((8, 32)).astype(np.float16), rng.integers(0, 32, (8, 32), dtype=np.int32)
    return {
        "x_ptr": x,
        "place_ptr": place,
        "out_ptr": np.zeros_like(x),
        "flipped_ptr": np.zeros_like(x),
        "turned_ptr": np.zeros((8, 8), np.int8),
    }


def shuffle_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = args["x_ptr"]
    codes = np.clip(x.astype(np.float32).reshape(8, 4, 8).sum(1) * 16, -127, 127).astype(np.int8)
    return {"out_ptr": np.take_along_axis(x, args["place_ptr"], 1), "flipped_ptr": x[:, ::-1], "turned_ptr": codes.T}


def embedding_inputs(rng: np.random.Generator) -> dict[str, Any]:
    dy = to_bf16(rng.integers(-3, 4, (6, 100)))
    return {
        "dy_ptr": dy, "token_ptr": np.array([3, 0, 3, -1, 2, 3], np.int64), "dw_ptr": np.zeros((4, 100), np.uint16), "tokens": 6,
        "hidden": 100,
    }  # fmt: skip


def embedding_reference(args: dict[str, Any]) -> dict[str, Any]:
    dw, token = np.zeros((4, 100)), args["token_ptr"]
    np.add.at(dw, token[token >= 0], from_bf16(args["dy_ptr"])[token >= 0])
    return {"dw_ptr": dw}


def isa_targets() -> list[KernelTarget]:
    def target(
        kernel: Any, inputs: Any, expected: Any, tolerance: float = 0.0, grid: int = 1, **fields: Any
    ) -> KernelTarget:
        fields.setdefault("options", {"num_warps": 2})
        return KernelTarget(
            name=kernel.fn.__name__, kernel=kernel, archs=ALL, inputs=inputs, expected=expected, grid=grid, tolerance=tolerance,
            **fields,
        )  # fmt: skip

    return [
        target(sort_rows, sort_inputs, sort_reference, constants={"ROWS": 4, "COLUMNS": 64, "K": 8}),
        target(scans, scan_inputs, scan_reference, 1e-6, constants={"ROWS": 8, "COLUMNS": 64}),
        target(
            arg_reductions, reduction_inputs, reduction_reference, 1e-6, constants={"ROWS": 4, "BLOCK": 128},
            options={"num_warps": 1},
        ),
        target(count_and_scatter, scatter_inputs, scatter_reference, grid=2, constants={"BLOCK": 128, "BINS": 16}),
        target(integers, integer_inputs, integer_reference, grid=2, constants={"BLOCK": 64}),
        target(double_precision, double_inputs, double_reference, 1e-14, grid=2, constants={"BLOCK": 64}),
        target(shuffles, shuffle_inputs, shuffle_reference, constants={"ROWS": 8, "COLUMNS": 32}),
        target(
            embedding_backward, embedding_inputs, embedding_reference, grid=8, constants={"BLOCK": 64},
            types={"dy_ptr": "*bf16", "dw_ptr": "*bf16"},
        ),
    ]  # fmt: skip
