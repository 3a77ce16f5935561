"""bf16 GEMMs in the three layouts, through pointers and through tensor descriptors, and two of their mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16


@triton.jit
def gemm(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
         BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c[M, N] = a[M, K] @ b[K, N], any strides, M and N with a tail, K a multiple of BK."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a = a_ptr + (rows % M)[:, None] * stride_am + depth[None, :] * stride_ak
    b = b_ptr + depth[:, None] * stride_bk + (columns % N)[None, :] * stride_bn
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += BK * stride_ak
        b += BK * stride_bk
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16), mask=inside)


@triton.jit
def gemm_k_tail(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The same with any K: masked loads, whose rows are aligned to 2 bytes only."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    a = a_ptr + (rows % M)[:, None] * stride_am + depth[None, :] * stride_ak
    b = b_ptr + depth[:, None] * stride_bk + (columns % N)[None, :] * stride_bn
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        inside = k + depth < K
        left = tl.load(a + k * stride_ak, mask=inside[None, :], other=0)
        total = tl.dot(left, tl.load(b + k * stride_bk, mask=inside[:, None], other=0), total)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(tl.bfloat16), mask=inside)


@triton.jit
def gemm_descriptor(a_ptr, b_ptr, c_ptr, M, N, K, A_T: tl.constexpr, B_T: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The same through descriptors, which are TDM on gfx1250; A_T: a is stored [K, M], B_T: b is stored [N, K]."""
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    if A_T:
        a = tl.make_tensor_descriptor(a_ptr, [K, M], [M, 1], [BK, BM])
    else:
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    if B_T:
        b = tl.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK])
    else:
        b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        if A_T:
            left = a.load([k * BK, m]).T
        else:
            left = a.load([m, k * BK])
        if B_T:
            right = b.load([n, k * BK]).T
        else:
            right = b.load([k * BK, n])
        total = tl.dot(left, right, total)
    c.store([m, n], total.to(tl.bfloat16))


def inputs(layout: str, m: int, n: int, k: int, strides: bool) -> Callable[[np.random.Generator], dict[str, Any]]:
    """`layout` is BLAS's: the first letter says whether a, the second whether b is stored transposed (NT: b is [N, K])."""

    def make(rng: np.random.Generator) -> dict[str, Any]:
        a, b = to_bf16(rng.standard_normal((m, k))), to_bf16(rng.standard_normal((k, n)))
        stored_a = np.ascontiguousarray(a.T) if layout[0] == "T" else a
        stored_b = np.ascontiguousarray(b.T) if layout[1] == "T" else b
        args = {
            "a_ptr": stored_a,
            "b_ptr": stored_b,
            "c_ptr": np.full((m, n), 0x7FC0, np.uint16),
            "M": m,
            "N": n,
            "K": k,
        }
        if strides:
            args["stride_am"], args["stride_ak"] = (1, m) if layout[0] == "T" else (k, 1)
            args["stride_bk"], args["stride_bn"] = (1, k) if layout[1] == "T" else (n, 1)
        return args

    return make


def reference(layout: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def expected(args: dict[str, Any]) -> dict[str, Any]:
        a, b = from_bf16(args["a_ptr"]), from_bf16(args["b_ptr"])
        a = a.T if layout[0] == "T" else a
        b = b.T if layout[1] == "T" else b
        return {"c_ptr": from_bf16(to_bf16(a.astype(np.float64) @ b))}

    return expected


TYPES = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16"}
BLOCKS = {"BM": 64, "BN": 64, "BK": 64}
BF16_STEP = 2.0**-7  # results are rounded to bfloat16; a sum in another order may round to the neighbour


def _grid(args: dict[str, Any]) -> tuple[int, int]:
    return triton.cdiv(args["M"], BLOCKS["BM"]), triton.cdiv(args["N"], BLOCKS["BN"])


def _gate(layout: str, arch: str) -> IsaGate:
    """K-strided operands must use the transpose load and nothing may be picked together in 16-bit pieces."""
    transpose = {"gfx950": "ds_read_b64_tr_b16", "gfx1250": "ds_load_tr16_b128"}[arch]
    needed = (transpose,) if layout in ("NN", "TN") else ()
    return IsaGate(required=needed, forbidden=("ds_read_u16.*", "ds_load_u16.*", "scratch_.*"))


def isa_targets() -> list[KernelTarget]:
    targets = [
        KernelTarget(
            name="gemm_k_tail",  # 64 narrow loads on gfx950, one more than vmcnt counts; switched-off LDS stores on gfx1250
            kernel=gemm_k_tail,
            archs=("gfx942", "gfx950", "gfx1250"),
            inputs=inputs("NT", 70, 66, 200, strides=True),
            grid=_grid,
            constants=BLOCKS | {"BK": 128},
            options={"num_warps": 4, "num_stages": 2},
            types=TYPES,
            expected=reference("NT"),
            tolerance=BF16_STEP,
        )
    ]
    for layout in ("NT", "NN", "TN"):
        for arch in ("gfx942", "gfx950", "gfx1250"):
            targets.append(
                KernelTarget(
                    name=f"gemm_{layout.lower()}_{arch}",
                    kernel=gemm,
                    archs=(arch,),
                    inputs=inputs(layout, 112, 80, 192, strides=True),  # tails in M and N
                    grid=_grid,
                    constants=BLOCKS,
                    options={"num_warps": 4, "num_stages": 2},
                    types=TYPES,
                    expected=reference(layout),
                    tolerance=BF16_STEP,
                    gate=None if arch == "gfx942" else _gate(layout, arch),
                )
            )
        targets.append(
            KernelTarget(
                name=f"gemm_tdm_{layout.lower()}",
                kernel=gemm_descriptor,
                archs=("gfx1250",),
                inputs=inputs(layout, 112, 80, 160, strides=False),  # tails in M, N and K, filled with zeros by the TDM
                grid=_grid,
                constants={**BLOCKS, "A_T": layout[0] == "T", "B_T": layout[1] == "T"},
                options={"num_warps": 4, "num_stages": 2},
                types=TYPES,
                expected=reference(layout),
                tolerance=BF16_STEP,
                gate=IsaGate(
                    required=("tensor_load_to_lds",),
                    required_anywhere=("tensor_store_from_lds",),
                    forbidden_anywhere=("global_load_b.*", "scratch_.*"),
                ),
            )
        )
    return targets
