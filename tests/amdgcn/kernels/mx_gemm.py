"""Block-scaled GEMMs: MXFP8 and MXFP4, K-contiguous and K-strided (transpose loads), and plain FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.emulator.isa.formats import E2M1, E4M3
from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16
from tests.amdgcn.kernels.gemm import BF16_STEP


@triton.jit
def mx_gemm(a_ptr, sa_ptr, b_ptr, sb_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_sa, stride_sb,
            FORMAT: tl.constexpr, PACK: tl.constexpr, K_MAJOR: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c = (a * sa) @ (b * sb).T with one scale per 32 along K.

    K_MAJOR: a is [M, K / PACK], b is [N, K / PACK]; otherwise a is [K, M / PACK], b is [K, N / PACK] (packed along M and N).
    """
    m, n = tl.program_id(0), tl.program_id(1)
    rows, columns = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    scales = tl.arange(0, BK // 32)
    sa = sa_ptr + rows[:, None] * stride_sa + scales[None, :]
    sb = sb_ptr + columns[:, None] * stride_sb + scales[None, :]
    if K_MAJOR:
        depth = tl.arange(0, BK // PACK)
        a = a_ptr + rows[:, None] * stride_a + depth[None, :]
        b = b_ptr + depth[:, None] + columns[None, :] * stride_b
    else:
        depth = tl.arange(0, BK)
        a = a_ptr + depth[None, :] * stride_a + (m * (BM // PACK) + tl.arange(0, BM // PACK))[:, None]
        b = b_ptr + depth[:, None] * stride_b + (n * (BN // PACK) + tl.arange(0, BN // PACK))[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        total = tl.dot_scaled(tl.load(a), tl.load(sa), FORMAT, tl.load(b), tl.load(sb), FORMAT, total,
                              lhs_k_pack=K_MAJOR or PACK == 1, rhs_k_pack=K_MAJOR or PACK == 1)  # fmt: skip
        a += BK // PACK if K_MAJOR else BK * stride_a
        b += BK // PACK if K_MAJOR else BK * stride_b
        sa += BK // 32
        sb += BK // 32
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))


@triton.jit
def fp8_gemm(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = a.T @ b for a [K, M], b [K, N] in e4m3 (both K-strided)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a = a_ptr + depth[None, :] * M + rows[:, None]
    b = b_ptr + depth[:, None] * N + columns[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += BK * M
        b += BK * N
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16))


SHAPE = (128, 128, 512)
BLOCKS = {"BM": 128, "BN": 128, "BK": 256}
SMALL_SHAPE = (32, 32, 128)  # for gfx942, which has no block-scaled instruction: the compiler writes out the decoding
SMALL_BLOCKS = {"BM": 32, "BN": 32, "BK": 64}


def _fp8_codes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x30  # no NaN
    return codes


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte along the last axis, even element in the low half."""
    return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << 4))


def mx_inputs(
    fmt: str, k_major: bool, shape: tuple[int, int, int] = SHAPE
) -> Callable[[np.random.Generator], dict[str, Any]]:
    m, n, k = shape

    def make(rng: np.random.Generator) -> dict[str, Any]:
        args: dict[str, Any] = {"M": m, "N": n, "K": k, "c_ptr": np.zeros((m, n), np.uint16)}
        for side, rows in (("a", m), ("b", n)):
            if fmt == "e2m1":
                codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
                stored = _pack(codes) if k_major else _pack(np.ascontiguousarray(codes.T))
            else:
                codes = _fp8_codes(rng, (rows, k))
                stored = codes if k_major else np.ascontiguousarray(codes.T)
            args[f"{side}_ptr"] = stored
            args[f"s{side}_ptr"] = rng.integers(120, 134, (rows, k // 32), dtype=np.uint8)
            args[f"stride_{side}"], args[f"stride_s{side}"] = stored.shape[1], k // 32
        return args

    return make


def mx_reference(fmt: str, k_major: bool) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def values(args: dict[str, Any], side: str) -> np.ndarray:
        stored = args[f"{side}_ptr"]
        if fmt == "e2m1":
            stored = np.stack([stored & 15, stored >> 4], axis=-1).reshape(stored.shape[0], -1)
        decoded = (E2M1 if fmt == "e2m1" else E4M3).decode(stored).astype(np.float64)
        decoded = decoded if k_major else decoded.T
        return decoded * np.repeat(2.0 ** (args[f"s{side}_ptr"].astype(np.float64) - 127), 32, axis=1)

    def expected(args: dict[str, Any]) -> dict[str, Any]:
        return {"c_ptr": from_bf16(to_bf16(values(args, "a") @ values(args, "b").T))}

    return expected


def fp8_inputs(rng: np.random.Generator) -> dict[str, Any]:
    m, n, k = SHAPE
    return {"a_ptr": _fp8_codes(rng, (k, m)), "b_ptr": _fp8_codes(rng, (k, n)), "c_ptr": np.zeros((m, n), np.uint16),
            "M": m, "N": n, "K": k}  # fmt: skip


def fp8_reference(args: dict[str, Any]) -> dict[str, Any]:
    a, b = (E4M3.decode(args[name]).astype(np.float64) for name in ("a_ptr", "b_ptr"))
    return {"c_ptr": from_bf16(to_bf16(a.T @ b))}


def mx_target(
    name: str, fmt: str, k_major: bool, archs: tuple[str, ...], shape: tuple[int, int, int], blocks: dict[str, int]
) -> KernelTarget:
    pointers = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv"} if fmt == "e4m3" else {}
    return KernelTarget(
        name=name,
        kernel=mx_gemm,
        archs=archs,
        inputs=mx_inputs(fmt, k_major, shape),
        grid=(shape[0] // blocks["BM"], shape[1] // blocks["BN"]),
        constants={**blocks, "FORMAT": fmt, "PACK": 2 if fmt == "e2m1" else 1, "K_MAJOR": k_major},
        options=lambda arch: {"num_stages": 2, **({"matrix_instr_nonkdim": 16} if arch == "gfx950" else {})},
        types={"c_ptr": "*bf16", **pointers},
        expected=mx_reference(fmt, k_major),
        tolerance=BF16_STEP,
    )


def isa_targets() -> list[KernelTarget]:
    targets = [
        mx_target(f"mx_gemm_{fmt}_{'nt' if k_major else 'tn'}", fmt, k_major, archs, SHAPE, BLOCKS)
        for fmt, k_major, archs in (
            ("e2m1", True, ("gfx950", "gfx1250")),
            ("e4m3", True, ("gfx950", "gfx1250")),
            ("e4m3", False, ("gfx950", "gfx1250")),
            ("e2m1", False, ("gfx950",)),  # Triton 3.8 miscompiles this one for gfx1250; see test_kernels.py
        )
    ]
    targets.append(mx_target("mx_gemm_e2m1_nt_small", "e2m1", True, ("gfx942",), SMALL_SHAPE, SMALL_BLOCKS))
    targets.append(
        KernelTarget(
            name="fp8_gemm_tn",
            kernel=fp8_gemm,
            archs=("gfx950", "gfx1250"),
            inputs=fp8_inputs,
            grid=(SHAPE[0] // BLOCKS["BM"], SHAPE[1] // BLOCKS["BN"]),
            constants={**BLOCKS, "BK": 128},
            options={"num_stages": 2},
            types={"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", "c_ptr": "*bf16"},
            expected=fp8_reference,
            tolerance=BF16_STEP,
        )
    )
    return targets
