"""MXFP4 quantisation of a tile, row-wise and, after a Hadamard rotation of the tokens, column-wise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16


@triton.jit
def e2m1_codes(x):
    """Round scaled values to e2m1, ties to even, saturating; adding and subtracting 1.5 * 2**23 rounds to an integer."""
    a = tl.minimum(tl.abs(x), 6.0)
    step = tl.where(a < 2.0, 0.5, tl.where(a < 4.0, 1.0, 2.0))
    inverse = tl.where(a < 2.0, 2.0, tl.where(a < 4.0, 1.0, 0.5))
    value = ((a * inverse + 12582912.0) - 12582912.0) * step
    code = tl.where(value < 2.0, value * 2.0, tl.where(value < 4.0, value + 2.0, value * 0.5 + 4.0)).to(tl.int32)
    return (code | (((x.to(tl.int32, bitcast=True) >> 31) & 1) << 3)).to(tl.uint8)


@triton.jit
def quantize_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Scale per 32 along the last axis (2 ** (floor(log2 amax) - 2)), codes packed two a byte."""
    blocks = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    amax = tl.max(tl.abs(blocks), axis=2)
    exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 2, 1)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.reshape(e2m1_codes(blocks * inverse[:, :, None]), (ROWS, COLUMNS // 2, 2))
    low, high = tl.split(codes)
    return low | (high << 4), exponent.to(tl.uint8)


@triton.jit
def quantize(x_ptr, row_ptr, row_scale_ptr, column_ptr, column_scale_ptr, h_ptr, M, N,
             BM: tl.constexpr, BN: tl.constexpr, H: tl.constexpr):  # fmt: skip
    m, n = tl.program_id(0), tl.program_id(1)
    rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    packed, scale = quantize_rows(x.to(tl.float32), BM, BN)
    tl.store(row_ptr + rows[:, None] * (N // 2) + (n * (BN // 2) + tl.arange(0, BN // 2))[None, :], packed)
    tl.store(row_scale_ptr + rows[:, None] * (N // 32) + (n * (BN // 32) + tl.arange(0, BN // 32))[None, :], scale)
    h = tl.load(h_ptr + tl.arange(0, H)[:, None] * H + tl.arange(0, H)[None, :])
    turned = tl.dot(tl.reshape(tl.trans(x), (BN * (BM // H), H)), h)  # h is symmetric
    packed, scale = quantize_rows(tl.reshape(turned, (BN, BM)), BN, BM)
    tl.store(column_ptr + columns[:, None] * (M // 2) + (m * (BM // 2) + tl.arange(0, BM // 2))[None, :], packed)
    tl.store(
        column_scale_ptr + columns[:, None] * (M // 32) + (m * (BM // 32) + tl.arange(0, BM // 32))[None, :], scale
    )


@triton.jit
def quantize_by_hardware(x_ptr, code_ptr, scale_ptr, N, BM: tl.constexpr, BN: tl.constexpr):
    """The same rounding by gfx950's converter: two values and a scale to a byte."""
    rows, columns = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :]).to(tl.float32)
    amax = tl.max(tl.abs(tl.reshape(x, (BM, BN // 32, 32))), axis=2)
    exponent = tl.maximum(((amax.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 2, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    low, high = tl.split(tl.reshape(x, (BM, BN // 32, 16, 2)))
    spread = tl.broadcast_to(scale[:, :, None], (BM, BN // 32, 16))
    packed = tl.inline_asm_elementwise("v_cvt_scalef32_pk_fp4_f32 $0, $1, $2, $3", "=v,v,v,v", [low, high, spread],
                                       dtype=tl.int32, is_pure=True, pack=1).to(tl.uint8)  # fmt: skip
    out = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    tl.store(code_ptr + rows[:, None] * (N // 2) + out[None, :], tl.reshape(packed, (BM, BN // 2)))
    blocks = tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
    tl.store(scale_ptr + rows[:, None] * (N // 32) + blocks[None, :], exponent.to(tl.uint8))


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix over its square root."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(size)


def quantize_reference(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales along the last axis; written with a nearest-value search, not with the kernel's arithmetic."""
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // 32, 32).astype(np.float64)
    amax = np.abs(blocks).max(axis=-1)
    exponent = np.maximum(np.floor(np.log2(np.maximum(amax, 2.0**-126))).astype(int) - 2 + 127, 1)
    scaled = blocks / 2.0 ** (exponent - 127)[..., None]
    grid = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = np.abs(np.minimum(np.abs(scaled), 6.0)[..., None] - grid)
    nearest = distance.min(axis=-1, keepdims=True)
    is_nearest = distance == nearest  # two of them at a tie: take the even code
    first = is_nearest.argmax(axis=-1)
    last = 7 - is_nearest[..., ::-1].argmax(axis=-1)
    code = np.where(first % 2 == 0, first, last) | (np.signbit(scaled).astype(int) << 3)
    code = code.reshape(rows, columns).astype(np.uint8)
    return code[:, 0::2] | (code[:, 1::2] << 4), exponent.astype(np.uint8)


M, N = 64, 128


def inputs(h: int) -> Callable[[np.random.Generator], dict[str, Any]]:
    def make(rng: np.random.Generator) -> dict[str, Any]:
        x = rng.standard_normal((M, N)) * np.exp(rng.standard_normal((M, 1)))
        return {
            "x_ptr": to_bf16(x),
            "row_ptr": np.zeros((M, N // 2), np.uint8), "row_scale_ptr": np.zeros((M, N // 32), np.uint8),
            "column_ptr": np.zeros((N, M // 2), np.uint8), "column_scale_ptr": np.zeros((N, M // 32), np.uint8),
            "h_ptr": to_bf16(hadamard(h)), "M": M, "N": N,
        }  # fmt: skip

    return make


def reference(h: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def expected(args: dict[str, Any]) -> dict[str, Any]:
        x, matrix = from_bf16(args["x_ptr"]), from_bf16(args["h_ptr"]).astype(np.float64)
        row, row_scale = quantize_reference(x)
        turned = (x.T.reshape(N, M // h, h).astype(np.float64) @ matrix).reshape(N, M).astype(np.float32)
        column, column_scale = quantize_reference(turned)
        return {"row_ptr": row, "row_scale_ptr": row_scale, "column_ptr": column, "column_scale_ptr": column_scale}

    return expected


def hardware_inputs(rng: np.random.Generator) -> dict[str, Any]:
    x = rng.standard_normal((32, 256)) * np.exp(rng.standard_normal((32, 1)))
    return {
        "x_ptr": to_bf16(x),
        "code_ptr": np.zeros((32, 128), np.uint8),
        "scale_ptr": np.zeros((32, 8), np.uint8),
        "N": 256,
    }


def hardware_reference(args: dict[str, Any]) -> dict[str, Any]:
    codes, scale = quantize_reference(from_bf16(args["x_ptr"]))
    return {"code_ptr": codes, "scale_ptr": scale}


def isa_targets() -> list[KernelTarget]:
    targets = [
        KernelTarget(
            name=f"quantize_h{h}",
            kernel=quantize,
            archs=("gfx942", "gfx950", "gfx1250"),
            inputs=inputs(h),
            grid=(M // 64, N // 64),
            constants={"BM": 64, "BN": 64, "H": h},
            types={"x_ptr": "*bf16", "h_ptr": "*bf16"},
            expected=reference(h),
        )
        for h in (16, 32)
    ]
    targets.append(
        KernelTarget(
            name="quantize_by_hardware",
            kernel=quantize_by_hardware,
            archs=("gfx950",),
            inputs=hardware_inputs,
            grid=2,
            constants={"BM": 32, "BN": 128},
            types={"x_ptr": "*bf16"},
            expected=hardware_reference,
        )
    )
    return targets
