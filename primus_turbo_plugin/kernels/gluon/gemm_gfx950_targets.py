"""The gfx950 GEMMs as targets of `primus-turbo isa` and `primus-turbo emulate`, with their gates and an independent reference.

Sizes are the smallest that still have tails in every dimension, several tiles, and three or more rounds of the pipeline.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.gluon import gemm_targets
from primus_turbo_plugin.kernels.gluon.gemm_gfx950 import (
    OPTIONS,
    Ablation,
    depth_call,
    gemm_call,
    grouped_call,
    triton_refusal,
)
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import Tile, tiles_for
from primus_turbo_plugin.kernels.gluon.gemm_targets import BF16_STEP, FP32_STEP, Case, Make, plain, quantized
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

GROUP_SIZES = (100, 0, 37, 130, 1)
DEPTH_SIZES = (100, 0, 37, 420, 1)
MX_DEPTH_SIZES = (96, 0, 32, 800)
LONG_DEPTH_SIZES = (96, 0, 32, 1312)
WIDE_DEPTH_SIZES = (512, 0, 256)

FULL = Ablation()


_NOT_DIRECT = (
    "ds_write.*",
    "global_load.*",
    "flat_load.*",
    "buffer_load_dword(x[23])? lds",
    "s_buffer_load.*",
    "buffer_load_dwordx[234]",
    "buffer_load_.*(byte|short).*",
)
"""How a tile could get into LDS otherwise: through registers. Nothing but MX scales goes there from memory, by 32-bit loads."""


def gate(*required: str, floor: float | None = None, bound: str | None = "mma", scale_loads: int = 0) -> IsaGate:
    """Tiles by direct copies, nothing narrow, no spills; the matrix unit is the limit (not of small tiles).

    Args:
        scale_loads: MX scales: 32-bit loads in an iteration of two tiles, two a piece of 64 rows and tile (one of plain FP8's).
    """
    return IsaGate(
        required=("buffer_load_dwordx4 lds", *required),
        forbidden=_NOT_DIRECT,
        forbidden_anywhere=("ds_read_u16.*", "ds_read_u8.*", "scratch_.*"),
        limits=(("buffer_load_dword", scale_loads),),
        bound_by=bound,
        min_mca_share=floor,
    )


def _scaled_gate(opcode: str, scale_loads: int, **fields: Any) -> IsaGate:
    return gate(opcode, scale_loads=scale_loads, **fields)


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
    """y = a @ b.T of random operands."""
    launch = partial(gemm_call, cus=1, tile=tile, ablation=ablation)
    return gemm_targets.dense(a, b, sizes, launch, out_dtype=out_dtype, bias=bias, accumulate=accumulate)


def by_rows(
    spec: QuantSpec | None,
    b_k: bool,
    tile: Tile,
    depth: int,
    wide: torch.dtype = torch.int32,
    *,
    shuffled: bool = False,
) -> Case:
    """Experts: fprop and dgrad, weights with MX scales in the gfx950 layout; `shuffled`: so has a, experts of whole pieces."""
    launch = partial(grouped_call, cus=1, tile=tile, multiple=32 if shuffled else 1)
    sizes = MX_DEPTH_SIZES if shuffled else GROUP_SIZES
    layouts: tuple[ScaleLayout, ScaleLayout] = ("gfx950" if shuffled else "plain", "gfx950")
    return gemm_targets.by_rows(spec, b_k, sizes, 160, depth, launch, offsets_dtype=wide, scale_layouts=layouts)


def by_depth(
    spec: QuantSpec | None, sizes: tuple[int, ...], tile: Tile, accumulate: bool, *, shuffled: bool = False
) -> Case:
    """Experts: wgrad; `shuffled`: MX scales in the gfx950 layout, experts of whole pieces of it."""
    launch = partial(depth_call, cus=1, tile=tile, multiple=256 if shuffled else None)
    layout: ScaleLayout = "gfx950" if shuffled else "plain"
    return gemm_targets.by_depth(spec, sizes, (136, 72), launch, accumulate=accumulate, scale_layout=layout)


def target(name: str, case: Case, isa_gate: IsaGate | None, tolerance: float = BF16_STEP) -> KernelTarget:
    """A target of a case."""
    return gemm_targets.target(name, case, isa_gate, tolerance, arch="gfx950", options=OPTIONS)


def _operand(spec: QuantSpec | None, k_inner: bool = True, dtype: torch.dtype = torch.bfloat16) -> Make:
    if spec is None:
        return lambda rng, rows, depth: plain(rng, rows, depth, k_inner, dtype)
    return lambda rng, rows, depth: quantized(rng, rows, depth, spec)


def _eight(element: str, **fields: Any) -> QuantSpec:
    return QuantSpec(format=Format.MXFP8, element=element, **fields)


def isa_targets() -> list[KernelTarget]:
    if (reason := triton_refusal()) is not None:
        raise UnsupportedError(f"amdgcn: the gfx950 GEMMs: {reason}.")
    large, middle, small = tiles_for("bf16")
    fp4_large, _, fp4_small = tiles_for("e2m1")
    eight, _, eight_small = tiles_for("e4m3")
    row, whole = (
        QuantSpec(format=Format.FP8, block="rowwise"),
        QuantSpec(format=Format.FP8, element="e5m2", block="tensorwise"),
    )
    k, rows, half = _operand(None), _operand(None, k_inner=False), _operand(None, dtype=torch.float16)
    fp4, fp4_square = QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP4, block="32x32")
    plain_mfma, scaled = "v_mfma_f32_32x32x16_bf16", "v_mfma_scale_f32_32x32x64_f8f6f4"
    turned = ("ds_read_b64_tr_b16", plain_mfma)
    mx = partial(_scaled_gate, scaled)
    into: dict[str, Any] = {"out_dtype": torch.float32, "accumulate": True}
    little: dict[str, Any] = {"bound": None}
    return [
        target("gfx950_bf16_nt", dense(k, k, (264, 200, 328), large, bias=True), gate("ds_read_b128", plain_mfma, floor=0.95)),
        target("gfx950_bf16_nn", dense(k, rows, (264, 200, 328), large), gate(*turned, floor=0.95)),
        target("gfx950_bf16_tn", dense(rows, rows, (264, 200, 328), large, **into), gate(*turned, floor=0.95), FP32_STEP),
        target("gfx950_bf16_nt_even", dense(k, k, (256, 192, 384), large), gate(plain_mfma, floor=0.95)),
        target(
            "gfx950_fp16_nt", dense(half, half, (264, 136, 328), middle, out_dtype=torch.float16), gate(floor=0.92, **little),
            2.0**-10,
        ),
        target("gfx950_bf16_nt_small", dense(k, k, (136, 136, 328), small), gate(plain_mfma, **little)),
        target("gfx950_fp8", dense(_operand(row), _operand(whole), (264, 200, 656), eight), gate("v_mfma.*32x32x64.*")),
        target("gfx950_mxfp8", dense(_operand(_eight("e4m3")), _operand(_eight("e5m2")), (264, 200, 672), eight), mx(28)),
        target("gfx950_mxfp4", dense(_operand(fp4), _operand(fp4_square), (264, 200, 1312), fp4_large), mx(28, floor=0.95)),
        target("gfx950_mxfp4_even", dense(_operand(fp4), _operand(fp4), (256, 192, 1536), fp4_large), mx(28, floor=0.95)),
        target(
            "gfx950_mxfp4_fp32", dense(_operand(fp4), _operand(fp4), (136, 72, 1568), fp4_small, **into), mx(16, **little),
            FP32_STEP,
        ),
        target("gfx950_bf16_experts_fprop", by_rows(None, True, small, 328), gate(plain_mfma, **little)),
        target("gfx950_bf16_experts_dgrad", by_rows(None, False, small, 328, torch.int64), gate(*turned, **little)),
        target("gfx950_bf16_experts_wgrad", by_depth(None, DEPTH_SIZES, small, True), gate(*turned, **little), FP32_STEP),
        target("gfx950_bf16_experts_wgrad_first", by_depth(None, DEPTH_SIZES, small, False), gate(*turned, **little), FP32_STEP),
        target("gfx950_mxfp4_experts_fprop", by_rows(fp4, True, fp4_small, 1312), mx(16, **little)),
        target(
            "gfx950_mxfp4_experts_fprop_aligned", by_rows(fp4, True, fp4_large, 1312, shuffled=True),
            mx(28, floor=0.95),
        ),
        target("gfx950_mxfp8_experts_fprop", by_rows(_eight("e4m3"), True, eight_small, 672), mx(12, **little)),
        target(
            "gfx950_mxfp4_experts_wgrad", by_depth(fp4, LONG_DEPTH_SIZES, fp4_large, True),
            mx(28, floor=0.95), FP32_STEP,
        ),
        target(
            "gfx950_mxfp8_experts_wgrad", by_depth(_eight("e4m3"), MX_DEPTH_SIZES, eight_small, True),
            mx(8, **little), FP32_STEP,
        ),
        target(
            "gfx950_mxfp8_experts_wgrad_aligned", by_depth(_eight("e4m3"), WIDE_DEPTH_SIZES, eight_small, False, shuffled=True),
            mx(16, **little), FP32_STEP,
        ),
        *_ablations(large),
    ]  # fmt: skip


def _ablations(tile: Tile) -> list[KernelTarget]:
    """The variants benchmarks/data_movement.py compares with, right in themselves."""
    k, rows = _operand(None), _operand(None, k_inner=False)
    through_registers = IsaGate(
        required=("buffer_load_dwordx4", "ds_write_b128"), forbidden=(".* lds",), forbidden_anywhere=("scratch_.*",)
    )
    plain_reads = IsaGate(required=("buffer_load_dwordx4 lds",), forbidden=("ds_read_b64_tr.*",))
    return [
        target(
            "gfx950_bf16_nt_without_async_copy",
            dense(k, k, (264, 200, 328), tile, ablation=Ablation(async_copy=False)),
            through_registers,
        ),
        target(
            "gfx950_bf16_nn_without_transpose_load",
            dense(k, rows, (264, 200, 328), tile, ablation=Ablation(transpose_load=False)),
            plain_reads,
        ),
    ]
