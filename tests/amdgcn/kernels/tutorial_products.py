"""Kernels of the kind Triton's tutorials teach, around `tl.dot`: 8-bit operands, batches, groups, descriptors, int4 weights.

Written for the emulator's tests: ordinary Triton, nothing made for AMD. Sizes are small and have tails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.emulator.isa.formats import E4M3, E5M2
from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16

ALL = ("gfx942", "gfx950", "gfx1250")


@triton.jit
def leaky_relu(x):
    return tl.where(x >= 0, x, 0.01 * x)


@triton.jit
def matmul_leaky(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Tiles in groups of rows, masked tails along K, wrapped rows and columns."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    i, j = first + pid % (GROUP * tiles_n) % height, pid % (GROUP * tiles_n) // height
    rows, columns, depth = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BK)
    a = a_ptr + (rows % M)[:, None] * stride_a + depth[None, :]
    b = b_ptr + depth[:, None] * stride_b + (columns % N)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        x = tl.load(a, mask=depth[None, :] < left, other=0.0)
        total = tl.dot(x, tl.load(b, mask=depth[:, None] < left, other=0.0), total)
        a += BK
        b += BK * stride_b
    if ACT is not None:
        total = ACT(total)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * stride_c + columns[None, :], total.to(tl.float16), mask=inside)


@triton.jit
def dot_eight_bits(a_ptr, b_ptr, c_ptr, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr):
    """Operands of 8 bits: int8 to int32, FP8 to fp32."""
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    total = tl.zeros([M, N], TYPE)
    for k in range(0, K, BK):
        x = tl.load(a_ptr + rows[:, None] * K + k + depth[None, :])
        y = tl.load(b_ptr + columns[None, :] * K + k + depth[:, None])
        total = tl.dot(x, y, total, out_dtype=TYPE)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total)


@triton.jit
def batched_dot(a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """`tl.dot` of three dimensions, b transposed."""
    batch = tl.arange(0, B)[:, None, None]
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + batch * M * K + m[None, :, None] * K + k[None, None, :])
    b = tl.load(b_ptr + batch * N * K + n[None, :, None] * K + k[None, None, :])
    c = tl.dot(a, tl.trans(b, 0, 2, 1))
    tl.store(c_ptr + batch * M * N + m[None, :, None] * N + n[None, None, :], c)


@triton.jit
def persistent_descriptors(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Tensor descriptors made on the device, a loop over tiles, both halves of the result stored apart."""
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN // 2])
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=True):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
        low, high = tl.split(tl.permute(tl.reshape(total, [BM, 2, BN // 2]), [0, 2, 1]))
        c.store([m, n], low.to(tl.bfloat16))
        c.store([m, n + BN // 2], high.to(tl.bfloat16))


@triton.jit
def int4_weights(x_ptr, w_ptr, scale_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Two signed 4-bit weights a byte, a scale a column: unpacked by shifts, interleaved, multiplied."""
    m, n, half = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 2)
    packed = tl.load(w_ptr + n[:, None] * (K // 2) + half[None, :])
    low, high = ((packed << 4).to(tl.int8) >> 4), (packed.to(tl.int8, bitcast=True) >> 4)
    w = tl.interleave(low, high).to(tl.float16) * tl.load(scale_ptr + n)[:, None]
    x = tl.load(x_ptr + m[:, None] * K + tl.arange(0, K)[None, :])
    tl.store(y_ptr + m[:, None] * N + n[None, :], tl.dot(x, w.T))


@triton.jit
def fp8_quantize(x_ptr, y_ptr, z_ptr, scale_ptr, columns, BLOCK: tl.constexpr, TYPE: tl.constexpr, MOST: tl.constexpr):
    """A scale a row from its largest magnitude; to FP8 and back."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / MOST
    code = (x / scale).to(TYPE)
    tl.store(y_ptr + row * columns + at, code, mask=inside)
    tl.store(z_ptr + row * columns + at, code.to(tl.float32) * scale, mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def causal_convolution(x_ptr, w_ptr, y_ptr, tokens, channels, WIDTH: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    """A depthwise convolution along time, then SiLU; bf16."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BT, BC], tl.float32)
    for back in tl.static_range(WIDTH):
        at = t - back
        inside = (at >= 0)[:, None] & (at < tokens)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + at[:, None] * channels + c[None, :], mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + back * channels + c, mask=c < channels, other=0.0)[None, :]
    total = total * tl.sigmoid(total)
    tl.store(
        y_ptr + t[:, None] * channels + c[None, :],
        total.to(tl.bfloat16),
        mask=(t < tokens)[:, None] & (c < channels)[None, :],
    )


def matmul_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a, b = rng.standard_normal((70, 80)).astype(np.float16), rng.standard_normal((80, 90)).astype(np.float16)
    sizes = {"M": 70, "N": 90, "K": 80, "stride_a": 80, "stride_b": 90, "stride_c": 90}
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.full((70, 90), np.nan, np.float16), **sizes}


def matmul_reference(args: dict[str, Any]) -> dict[str, Any]:
    c = args["a_ptr"].astype(np.float64) @ args["b_ptr"].astype(np.float64)
    return {"c_ptr": np.where(c >= 0, c, 0.01 * c)}


def int8_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a, b = (rng.integers(-128, 128, (rows, 128), dtype=np.int8) for rows in (32, 64))
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.zeros((32, 64), np.int32), "K": 128}


def int8_reference(args: dict[str, Any]) -> dict[str, Any]:
    return {"c_ptr": args["a_ptr"].astype(np.int32) @ args["b_ptr"].astype(np.int32).T}


def fp8_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a = E4M3.encode(rng.standard_normal((32, 128), np.float32)).astype(np.uint8)
    b = E5M2.encode(rng.standard_normal((64, 128), np.float32)).astype(np.uint8)
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.full((32, 64), np.nan, np.float32), "K": 128}


def fp8_reference(args: dict[str, Any]) -> dict[str, Any]:
    return {"c_ptr": E4M3.decode(args["a_ptr"]).astype(np.float64) @ E5M2.decode(args["b_ptr"]).astype(np.float64).T}


def batched_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a, b = rng.standard_normal((4, 16, 32)).astype(np.float16), rng.standard_normal((4, 32, 32)).astype(np.float16)
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.full((4, 16, 32), np.nan, np.float32)}


def batched_reference(args: dict[str, Any]) -> dict[str, Any]:
    return {"c_ptr": np.einsum("bmk,bnk->bmn", args["a_ptr"].astype(np.float64), args["b_ptr"].astype(np.float64))}


def descriptor_inputs(rng: np.random.Generator) -> dict[str, Any]:
    a, b = to_bf16(rng.standard_normal((72, 80))), to_bf16(rng.standard_normal((80, 80)))
    return {"a_ptr": a, "b_ptr": b, "c_ptr": np.zeros((72, 80), np.uint16), "M": 72, "N": 80, "K": 80}


def descriptor_reference(args: dict[str, Any]) -> dict[str, Any]:
    return {"c_ptr": from_bf16(args["a_ptr"]).astype(np.float64) @ from_bf16(args["b_ptr"]).astype(np.float64).T}


def int4_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x, scale = rng.standard_normal((16, 64)).astype(np.float16), (rng.random(32) + 0.5).astype(np.float16)
    w = rng.integers(0, 256, (32, 32), dtype=np.uint8)
    return {"x_ptr": x, "w_ptr": w, "scale_ptr": scale, "y_ptr": np.full((16, 32), np.nan, np.float32)}


def int4_reference(args: dict[str, Any]) -> dict[str, Any]:
    w = args["w_ptr"]
    codes = np.stack([w & 15, w >> 4], -1).reshape(32, 64).astype(np.int8)
    codes = np.where(codes > 7, codes - 16, codes)
    weights = (codes.astype(np.float16) * args["scale_ptr"][:, None]).astype(np.float64)
    return {"y_ptr": args["x_ptr"].astype(np.float64) @ weights.T}


def quantize_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal((3, 100), np.float32)
    return {
        "x_ptr": x, "y_ptr": np.zeros((3, 100), np.uint8), "z_ptr": np.full_like(x, np.nan),
        "scale_ptr": np.zeros(3, np.float32), "columns": 100,
    }  # fmt: skip


def quantize_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = args["x_ptr"]
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(448.0)
    return {"z_ptr": E4M3.decode(E4M3.encode(x / scale).astype(np.uint8)) * scale, "scale_ptr": scale[:, 0]}


def convolution_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = to_bf16(rng.standard_normal((21, 40)))
    return {
        "x_ptr": x,
        "w_ptr": rng.standard_normal((4, 40), np.float32),
        "y_ptr": np.zeros_like(x),
        "tokens": 21,
        "channels": 40,
    }


def convolution_reference(args: dict[str, Any]) -> dict[str, Any]:
    x = np.pad(from_bf16(args["x_ptr"]).astype(np.float64), ((3, 0), (0, 0)))
    y = sum(x[3 - i : 24 - i] * args["w_ptr"][i] for i in range(4))
    return {"y_ptr": y / (1 + np.exp(-y))}


def isa_targets() -> list[KernelTarget]:
    def target(
        kernel: Any, inputs: Any, expected: Any, grid: Any, tolerance: float, name: str = "", **fields: Any
    ) -> KernelTarget:
        name, archs = name or kernel.fn.__name__, fields.pop("archs", ALL)
        return KernelTarget(
            name=name,
            kernel=kernel,
            archs=archs,
            inputs=inputs,
            expected=expected,
            grid=grid,
            tolerance=tolerance,
            **fields,
        )

    eight = {"M": 32, "N": 64, "BK": 64}
    codes = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e5"}
    quantize = {"BLOCK": 128, "TYPE": tl.float8e4nv, "MOST": 448.0}
    return [
        target(
            matmul_leaky, matmul_inputs, matmul_reference, 9, 2.0**-10, options={"num_warps": 2, "num_stages": 3},
            constants={"BM": 32, "BN": 32, "BK": 32, "GROUP": 2, "ACT": leaky_relu},
        ),
        target(dot_eight_bits, int8_inputs, int8_reference, 1, 0, "dot_int8", constants={**eight, "TYPE": tl.int32}),
        target(
            dot_eight_bits, fp8_inputs, fp8_reference, 1, 1e-6, "dot_fp8", constants={**eight, "TYPE": tl.float32}, types=codes,
            archs=("gfx942", "gfx950", "gfx1250"),
        ),
        target(batched_dot, batched_inputs, batched_reference, 1, 1e-6, constants={"B": 4, "M": 16, "N": 32, "K": 32}),
        target(
            persistent_descriptors, descriptor_inputs, descriptor_reference, 3, 2.0**-8, options={"num_warps": 4},
            constants={"BM": 32, "BN": 64, "BK": 32}, types=dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
        ),
        target(int4_weights, int4_inputs, int4_reference, 1, 1e-6, constants={"M": 16, "N": 32, "K": 64}),
        target(
            fp8_quantize, quantize_inputs, quantize_reference, 3, 2.0**-3, constants=quantize, types={"y_ptr": "*fp8e4nv"}
        ),
        target(
            causal_convolution, convolution_inputs, convolution_reference, (3, 2), 2.0**-8,
            constants={"WIDTH": 4, "BT": 8, "BC": 32}, types={"x_ptr": "*bf16", "y_ptr": "*bf16"},
        ),
    ]  # fmt: skip
