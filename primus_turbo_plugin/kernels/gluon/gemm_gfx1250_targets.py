"""The gfx1250 GEMMs as targets of `primus-turbo isa` and `primus-turbo emulate`, with their gates and an independent reference.

Sizes are the smallest that still have tails in every dimension, several tiles a work-group, and more stages than the pipeline
holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.gluon import gemm_targets
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250 import (
    NUM_WARPS,
    Ablation,
    depth_call,
    gemm_call,
    grouped_call,
    triton_refusal,
)
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import Tile, tiles_for
from primus_turbo_plugin.kernels.gluon.gemm_targets import BF16_STEP, FP32_STEP, Case, Make, plain, quantized
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec

_TILE_LOADS = ("global_load_(?!async).*", "buffer_load.*", "global_load_async.*", "flat_load.*")
_NARROW = ("ds_load_u16.*", "ds_load_u8.*", "scratch_.*")
SIZES = (300, 264, 264)
MX_SIZES = (500, 264, 544)
GROUP_SIZES = (100, 0, 37, 130, 1)
MX_GROUP_SIZES = (96, 0, 32, 544)


def gate(*required: str, mma_bound: bool = True) -> IsaGate:
    """All tiles by the TDM, in and out, nothing narrow, no spills."""
    return IsaGate(
        required=("tensor_load_to_lds", *required),
        required_anywhere=("tensor_store_from_lds",),
        forbidden=_TILE_LOADS,
        forbidden_anywhere=_NARROW,
        bound_by="mma" if mma_bound else None,
    )


FULL = Ablation()


def dense(
    a: Make,
    b: Make,
    sizes: tuple[int, int, int],
    tile: Tile,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    accumulate: bool = False,
    ablation: Ablation = FULL,
) -> Case:
    """y = a @ b.T of random operands on two work-groups."""
    launch = partial(gemm_call, cus=2, tile=tile, ablation=ablation)
    return gemm_targets.dense(a, b, sizes, launch, out_dtype=out_dtype, bias=bias, accumulate=accumulate)


def by_rows(spec: QuantSpec | None, b_k: bool, tile: Tile, depth: int) -> Case:
    """Experts: fprop and dgrad."""
    launch = partial(grouped_call, cus=3, tile=tile)
    return gemm_targets.by_rows(spec, b_k, GROUP_SIZES, 200, depth, launch)


def by_depth(spec: QuantSpec | None, sizes: tuple[int, ...], tile: Tile, accumulate: bool) -> Case:
    """Experts: wgrad."""
    launch = partial(depth_call, cus=3, tile=tile)
    return gemm_targets.by_depth(
        spec, sizes, (160, 200), launch, accumulate=accumulate, offsets_dtype=torch.int32 if accumulate else torch.int64
    )


def _target(name: str, case: Case, isa_gate: IsaGate | None, tolerance: float = BF16_STEP) -> KernelTarget:
    """A target of a case."""
    return gemm_targets.target(name, case, isa_gate, tolerance, arch="gfx1250", options={"num_warps": NUM_WARPS})


def _mx(element: str | None = None, **fields: Any) -> QuantSpec:
    return (
        QuantSpec(format=Format.MXFP4, **fields) if element is None else QuantSpec(format=Format.MXFP8, element=element)
    )


def _operand(spec: QuantSpec | None, k_inner: bool = True, dtype: torch.dtype = torch.bfloat16) -> Callable[..., Any]:
    if spec is None:
        return lambda rng, rows, depth: plain(rng, rows, depth, k_inner, dtype)
    return lambda rng, rows, depth: quantized(rng, rows, depth, spec)


def isa_targets() -> list[KernelTarget]:
    if (reason := triton_refusal()) is not None:
        raise UnsupportedError(f"amdgcn: the gfx1250 GEMMs: {reason}.")
    large, small = tiles_for("bf16", "bf16")
    wide, _, little = tiles_for("e2m1", "e2m1")
    eight, eight_mx = tiles_for("e4m3", "e4m3")[0], tiles_for("e4m3", "e4m3", mx=True)[0]
    mixed = tiles_for("e4m3", "e2m1")[1]
    row = QuantSpec(format=Format.FP8, block="rowwise")
    whole = QuantSpec(format=Format.FP8, element="e5m2", block="tensorwise")
    k, rows = _operand(None), _operand(None, k_inner=False)
    fp4, fp4_square = _operand(_mx()), _operand(_mx(block="32x32"))
    transposing = gate("ds_load_tr16_b128", "v_wmma_f32_16x16x32_bf16")
    accumulated = {"out_dtype": torch.float32, "accumulate": True}
    scaled, full_rate = "v_wmma_scale_f32_16x16x128_f8f6f4", "v_wmma_scale_f32_32x16x128_f4"
    half = _operand(None, dtype=torch.float16)
    return [
        _target("gfx1250_bf16_nt", dense(k, k, SIZES, large, bias=True), gate("v_wmma_f32_16x16x32_bf16")),
        _target("gfx1250_bf16_nn", dense(k, rows, SIZES, large), transposing),
        _target("gfx1250_bf16_tn", dense(rows, rows, SIZES, large, **accumulated), transposing, FP32_STEP),
        _target(
            "gfx1250_fp16_nt_small", dense(half, half, SIZES, small, out_dtype=torch.float16),
            gate("v_wmma_f32_16x16x32_f16"), 2.0**-10,
        ),
        _target(
            "gfx1250_fp8", dense(_operand(row), _operand(whole), (300, 264, 528), eight), gate("v_wmma_f32_16x16x128_.*")
        ),
        _target(
            "gfx1250_mxfp8", dense(_operand(_mx("e4m3")), _operand(_mx("e5m2")), (300, 264, 776), eight_mx),
            gate(scaled, mma_bound=False),
        ),
        _target(
            "gfx1250_mxfp8_mxfp4", dense(_operand(_mx("e4m3")), fp4, (150, 264, 520), mixed), gate(scaled, mma_bound=False)
        ),
        _target("gfx1250_mxfp4", dense(fp4, fp4_square, (500, 264, 872), wide), gate(full_rate)),
        _target(
            "gfx1250_mxfp4_fp32", dense(fp4, fp4, (500, 264, 544), wide, **accumulated), gate(full_rate), FP32_STEP
        ),
        _target("gfx1250_bf16_experts_fprop", by_rows(None, True, small, 264), gate("v_wmma_f32_16x16x32_bf16")),
        _target("gfx1250_bf16_experts_dgrad", by_rows(None, False, small, 264), transposing),
        _target("gfx1250_bf16_experts_wgrad", by_depth(None, GROUP_SIZES, small, True), transposing, FP32_STEP),
        _target("gfx1250_bf16_experts_wgrad_first", by_depth(None, GROUP_SIZES, small, False), transposing, FP32_STEP),
        _target("gfx1250_mxfp4_experts_fprop", by_rows(_mx(), True, little, 544), gate(full_rate, mma_bound=False)),
        _target(
            "gfx1250_mxfp4_experts_wgrad", by_depth(_mx(), MX_GROUP_SIZES, little, True),
            gate(full_rate, mma_bound=False), FP32_STEP,
        ),
        *_ablations(small),
    ]  # fmt: skip


def _ablations(small: Tile) -> list[KernelTarget]:
    """The variants benchmarks/data_movement.py compares with, right in themselves."""
    k, rows = _operand(None), _operand(None, k_inner=False)
    pointers = IsaGate(
        required=("global_load_async_to_lds_b128",),
        required_anywhere=("tensor_store_from_lds",),
        forbidden=("tensor_load_to_lds",),
        forbidden_anywhere=("scratch_.*",),
    )
    plain_loads = IsaGate(
        required=("tensor_load_to_lds",), forbidden=("ds_load_tr.*",), forbidden_anywhere=("scratch_.*",)
    )
    off, turned = Ablation(tdm=False), Ablation(transpose_load=False)
    return [
        _target("gfx1250_bf16_nt_without_tdm", dense(k, k, (200, 152, 264), small, ablation=off), pointers),
        _target("gfx1250_bf16_nn_without_tdm", dense(k, rows, (200, 152, 256), small, ablation=off), pointers),
        _target(
            "gfx1250_bf16_tn_without_transpose_load",
            dense(rows, rows, (200, 152, 264), small, ablation=turned),
            plain_loads,
        ),
    ]
