"""What the targets of the Gluon GEMMs of every architecture share: random operands, the right output, the target itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

BF16_STEP = 2.0**-7
"""Results are rounded to bfloat16; a sum in another order may round to the neighbour."""
FP32_STEP = 2.0**-18
"""fp32 sums of a few hundred products in another order, relative to the largest result."""

Case = Callable[[np.random.Generator], tuple[KernelCall, Any]]
"""Makes a call and the right output."""
Make = Callable[[np.random.Generator, int, int], Any]
"""Makes an operand `[rows, depth]`."""
Launch = Callable[..., KernelCall]
"""An architecture's call of a product: its tile and number of programs are in it."""


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


def dense(
    a: Make,
    b: Make,
    sizes: tuple[int, int, int],
    launch: Launch,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    accumulate: bool = False,
) -> Case:
    """y = a @ b.T of random operands."""
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
        return launch(left, right, y, bias=added, accumulate=accumulate), want

    return make


def by_rows(
    spec: QuantSpec | None,
    b_k: bool,
    sizes: tuple[int, ...],
    cols: int,
    depth: int,
    launch: Launch,
    *,
    offsets_dtype: torch.dtype = torch.int32,
    scale_layouts: tuple[ScaleLayout, ScaleLayout] = ("plain", "plain"),
) -> Case:
    """Experts: fprop (b contiguous along K) and dgrad (along N), with a bias, empty and tiny groups."""

    def make(rng: np.random.Generator) -> tuple[KernelCall, Any]:
        groups = len(sizes)
        offsets = np.cumsum((0, *sizes))
        total = int(offsets[-1])
        if spec is None:
            left = plain(rng, total, depth, True)
            right: Any = torch.stack([plain(rng, cols, depth, b_k) for _ in range(groups)])
            if not b_k:
                right = right.transpose(1, 2).contiguous().transpose(1, 2)
            weights = values(right)
        else:
            left, right = quantized(rng, total, depth, spec), quantized(rng, groups * cols, depth, spec)
            weights = values(right).reshape(groups, cols, -1)
            left, right = (x.with_scale_layout(layout) for x, layout in zip((left, right), scale_layouts))
        bias = torch.from_numpy(rng.standard_normal((groups, cols), np.float32))
        x = values(left)
        want = np.concatenate(
            [
                x[s:e] @ weights[g].T + np.asarray(bias[g].double())
                for g, (s, e) in enumerate(itertools.pairwise(offsets))
            ]
        )
        y = torch.full((total, cols), float("nan"), dtype=torch.bfloat16)
        return launch(left, right, torch.from_numpy(offsets).to(offsets_dtype), y, bias=bias), want

    return make


def by_depth(
    spec: QuantSpec | None,
    sizes: tuple[int, ...],
    outer: tuple[int, int],
    launch: Launch,
    *,
    accumulate: bool,
    offsets_dtype: torch.dtype = torch.int32,
    scale_layout: ScaleLayout = "plain",
) -> Case:
    """Experts: wgrad, into fp32 gradients that are there already or not, with empty and tiny groups."""

    def make(rng: np.random.Generator) -> tuple[KernelCall, Any]:
        offsets = np.cumsum((0, *sizes))
        total = int(offsets[-1])
        left, right = (
            plain(rng, rows, total, False) if spec is None else quantized(rng, rows, total, spec) for rows in outer
        )
        x, y = values(left), values(right)
        if spec is not None:
            left, right = (operand.with_scale_layout(scale_layout) for operand in (left, right))
        out = torch.from_numpy(rng.standard_normal((len(sizes), *outer), np.float32))
        want = np.stack([x[:, s:e] @ y[:, s:e].T for s, e in itertools.pairwise(offsets)])
        if accumulate:
            want = want + values(out)
        else:
            out.fill_(float("nan"))
        return launch(left, right, torch.from_numpy(offsets).to(offsets_dtype), out, accumulate=accumulate), want

    return make


def target(
    name: str, case: Case, isa_gate: IsaGate | None, tolerance: float, *, arch: str, options: Mapping[str, Any]
) -> KernelTarget:
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
        archs=(arch,),
        inputs=inputs,
        grid=call.grid,
        constants=call.constants,
        options=dict(options),
        expected=lambda args: {"c_ptr": wanted[0]},
        tolerance=tolerance,
        gate=isa_gate,
    )
