"""The gfx1250 GEMMs as targets of `primus-turbo isa` and `primus-turbo emulate`, with their gates and an independent reference.

Sizes are the smallest that still have tails in every dimension, several tiles a work-group, and more stages than the pipeline
holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250 import (
    NUM_WARPS,
    Ablation,
    depth_call,
    gemm_call,
    grouped_call,
    triton_refusal,
)
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import Tile, tiles_for
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

BF16_STEP = 2.0**-7
"""Results are rounded to bfloat16; a sum in another order may round to the neighbour."""
FP32_STEP = 2.0**-18
"""fp32 sums of a few hundred products in another order, relative to the largest result."""

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


def plain(
    rng: np.random.Generator, rows: int, depth: int, k_inner: bool, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A random operand [rows, depth], contiguous along K or along its rows."""
    shape = (rows, depth) if k_inner else (depth, rows)
    values = torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype)
    return values if k_inner else values.t()


def quantized(rng: np.random.Generator, rows: int, depth: int, spec: QuantSpec) -> QuantizedTensor:
    """Random codes (no NaN) and scales: what a quantiser of the layer above would have made."""
    element = spec.element_type.name
    stored = spec.padded(depth)
    codes = rng.integers(0, 256, (rows, stored // (2 if element == "e2m1" else 1)), dtype=np.uint8)
    if element != "e2m1":
        codes[(codes & 0x7F) >= (0x7F if element == "e4m3" else 0x7C)] = 0x30
    if depth < stored:  # a quantiser pads with zeros
        codes[:, depth // (2 if element == "e2m1" else 1) :] = 0
    shape = spec.scale_shape(rows, depth)
    if spec.is_mx:
        scale = torch.from_numpy(rng.integers(120, 134, shape, dtype=np.uint8))
    else:
        scale = torch.from_numpy(rng.random(shape, np.float32) + np.float32(0.5))
    return QuantizedTensor(torch.from_numpy(codes), scale, spec, (rows, depth))


def values(operand: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What an operand stands for, in float64."""
    tensor = operand.decode() if isinstance(operand, QuantizedTensor) else operand
    return np.asarray(tensor.double())


Case = Callable[[np.random.Generator], tuple[KernelCall, Any]]
"""Makes a call and the right output."""


def dense(
    a: Callable[[np.random.Generator, int, int], Any],
    b: Callable[[np.random.Generator, int, int], Any],
    sizes: tuple[int, int, int],
    tile: Tile,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    accumulate: bool = False,
    ablation: Ablation = FULL,
) -> Case:
    """y = a @ b.T of random operands, on two work-groups."""
    rows, cols, depth = sizes

    def make(rng: np.random.Generator) -> tuple[KernelCall, Any]:
        left, right = a(rng, rows, depth), b(rng, cols, depth)
        y = torch.full((rows, cols), float("nan"), dtype=out_dtype)
        want = values(left) @ values(right).T
        added = torch.from_numpy(rng.standard_normal(cols, np.float32)).bfloat16() if bias else None
        if added is not None:
            want = want + values(added)
        if accumulate:
            y = torch.from_numpy(rng.standard_normal((rows, cols), np.float32)) * 10
            want = want + values(y)
        call = gemm_call(left, right, y, bias=added, accumulate=accumulate, programs=2, tile=tile, ablation=ablation)
        return call, want

    return make


def by_rows(quantize: QuantSpec | None, b_k: bool, tile: Tile, depth: int) -> Case:
    """Experts: fprop (b contiguous along K) and dgrad (along N), with a bias, empty and tiny groups."""

    def make(rng: np.random.Generator) -> tuple[KernelCall, Any]:
        groups, cols = len(GROUP_SIZES), 200
        offsets = np.cumsum((0, *GROUP_SIZES), dtype=np.int32)
        total = int(offsets[-1])
        if quantize is None:
            left = plain(rng, total, depth, True)
            right: Any = torch.stack([plain(rng, cols, depth, b_k) for _ in range(groups)])
            if not b_k:
                right = right.transpose(1, 2).contiguous().transpose(1, 2)
            weights = values(right)
        else:
            left, right = quantized(rng, total, depth, quantize), quantized(rng, groups * cols, depth, quantize)
            weights = values(right).reshape(groups, cols, -1)
        bias = torch.from_numpy(rng.standard_normal((groups, cols), np.float32))
        x = values(left)
        want = np.concatenate(
            [x[offsets[g] : offsets[g + 1]] @ weights[g].T + np.asarray(bias[g].double()) for g in range(groups)]
        )
        y = torch.full((total, cols), float("nan"), dtype=torch.bfloat16)
        call = grouped_call(left, right, torch.from_numpy(offsets), y, bias=bias, programs=3, tile=tile)
        return call, want

    return make


def by_depth(quantize: QuantSpec | None, sizes: tuple[int, ...], tile: Tile, accumulate: bool) -> Case:
    """Experts: wgrad, into fp32 gradients that are there already or not, with empty and tiny groups."""

    def make(rng: np.random.Generator) -> tuple[KernelCall, Any]:
        rows, cols = 160, 200
        offsets = np.cumsum((0, *sizes), dtype=np.int32 if accumulate else np.int64)
        total = int(offsets[-1])
        left, right = (
            plain(rng, outer, total, False) if quantize is None else quantized(rng, outer, total, quantize)
            for outer in (rows, cols)
        )
        x, y = values(left), values(right)
        out = torch.from_numpy(rng.standard_normal((len(sizes), rows, cols), np.float32))
        want = np.stack([x[:, s:e] @ y[:, s:e].T for s, e in itertools.pairwise(offsets)])
        if accumulate:
            want = want + values(out)
        else:
            out.fill_(float("nan"))
        call = depth_call(left, right, torch.from_numpy(offsets), out, accumulate=accumulate, programs=3, tile=tile)
        return call, want

    return make


def _target(name: str, case: Case, isa_gate: IsaGate | None, tolerance: float = BF16_STEP) -> KernelTarget:
    """A target of a case. The right output travels with the arguments and is taken out again before the launch."""
    call, _ = case(np.random.default_rng(0))
    wanted: dict[int, Any] = {}

    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        made, want = case(rng)
        wanted[0] = want
        return dict(made.args)

    return KernelTarget(
        name=name,
        kernel=call.kernel,
        archs=("gfx1250",),
        inputs=inputs,
        grid=call.grid,
        constants=call.constants,
        options={"num_warps": NUM_WARPS},
        expected=lambda args: {"c_ptr": wanted[0]},
        tolerance=tolerance,
        gate=isa_gate,
    )


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
    eight = tiles_for("e4m3", "e4m3")[0]
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
            "gfx1250_mxfp8", dense(_operand(_mx("e4m3")), _operand(_mx("e5m2")), (300, 264, 520), eight),
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
