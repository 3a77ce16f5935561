"""The cases of the self-test: what each op is given on the device, and the independent result it must equal.

Those of quantisation are here, the others in selftest_*.py beside.

quantize   codes and scales equal the reference's on the CPU, bit for bit
fused_quantize  the same for an op fused with a quantisation
grouped_quantize, grouped_gemm  the same as these two for experts
gemm_nt    inputs on the format's grid, whose sums are exact in fp32: equal to float64, bit for bit
norm       float64 formula; bf16 results within one rounding, 2^-8 relative, of fp32-accurate ones
attention  float64 softmax and its autograd gradients; bf16 tensors, so SNR of at least 40 dB; FP8: those at the decoded numbers
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.diagnostics.selftest_attention import attention_cases
from primus_turbo_plugin.diagnostics.selftest_fused import fused_cases
from primus_turbo_plugin.diagnostics.selftest_gemm import Case, gemm_cases, show_difference
from primus_turbo_plugin.diagnostics.selftest_grouped import grouped_gemm_cases, grouped_quantize_cases
from primus_turbo_plugin.diagnostics.selftest_norm import norm_cases
from primus_turbo_plugin.kernels.attention import AttentionRequest
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.reference import quantize as reference_quantize
from primus_turbo_plugin.kernels.requests import (
    FusedQuantizeRequest,
    GemmRequest,
    GroupedGemmRequest,
    GroupedQuantizeRequest,
    QuantizeRequest,
)
from primus_turbo_plugin.precision.formats import Format, ScaleRule
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

_SEED = 20260801


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _specs() -> tuple[QuantSpec, ...]:
    """Every format, block shape, a rotation, and stochastic rounding, at least once each."""
    return (
        QuantSpec(format=Format.MXFP4),
        QuantSpec(format=Format.MXFP4, hadamard=16),
        QuantSpec(format=Format.MXFP4, hadamard=32, random_signs=True, rounding="stochastic"),
        QuantSpec(format=Format.MXFP4, block="32x32"),
        QuantSpec(format=Format.MXFP8),
        QuantSpec(format=Format.MXFP8, element="e5m2", scale_rule=ScaleRule.FLOOR),
        QuantSpec(format=Format.FP8, block="tensorwise"),
        QuantSpec(format=Format.FP8, block="rowwise"),
        QuantSpec(format=Format.FP8, block="1x128"),
        QuantSpec(format=Format.FP8, block="128x128"),
    )


def quantize_cases(torch_device: str) -> Iterator[Case]:
    """Every spec, MX scales in both layouts, a tensor of a few blocks of bf16; other dtypes; on GPUs one of many blocks."""
    few = _hard_values(96, 160)
    for spec in _specs():
        yield _quantize_case(torch_device, spec, few)
    for dtype in (torch.float16, torch.float32):
        yield _quantize_case(torch_device, QuantSpec(format=Format.MXFP4, hadamard=16), few.to(dtype), dtype)
    if torch_device != "cpu":
        many = _hard_values(1056, 2080)
        for spec in _specs():
            yield _quantize_case(torch_device, spec, many)


def _hard_values(rows: int, cols: int) -> Tensor:
    """Magnitudes over 12 decades, zeros, and rows where scale rules turn over: amax = max_element * 2^k."""
    x = torch.randn(rows, cols, generator=_generator()) * torch.logspace(-6, 6, rows).unsqueeze(1)
    x[5, :40] = 0.0
    for row, peak in enumerate((6.0, 448.0, 57344.0), start=10):
        x[row] = x[row].clamp(-peak / 8, peak / 8)
        x[row, ::32] = peak * 2.0 ** (torch.arange(len(range(0, cols, 32))) % 5)
    return x.to(torch.bfloat16)


def _quantize_case(torch_device: str, spec: QuantSpec, finite: Tensor, dtype: torch.dtype = torch.bfloat16) -> Case:
    """With and without NaN and Inf, which would make a tensorwise scale NaN."""
    key = RoundingKey(seed=_SEED, draw=1, tensor=2, rank=0)
    layouts: tuple[ScaleLayout, ...] = ("plain", "gfx950") if spec.is_mx else ("plain",)

    def check(kernels: Any, device: torch.device) -> str | None:
        special = finite.clone()
        special[7, 3], special[9, 64] = torch.nan, torch.inf
        for x, layout in itertools.product((finite, special), layouts):
            options: dict[str, Any] = {"key": key, "signs_seed": 3, "scale_layout": layout}
            wanted = reference_quantize.quantize_both(x, spec, spec, **options)
            got = kernels.quantize_both(x.to(device), spec, spec, **options)
            wrong = _differing_copies(wanted, got)
            if wrong is not None:
                return f"{wrong}, {layout} scales"
        return None

    request = QuantizeRequest(device=torch_device, dtype=dtype, row_spec=spec, col_spec=spec)
    return request, check, f"{finite.shape[0]}x{finite.shape[1]}"


def _differing_copies(wanted: Copies, got: Copies) -> str | None:
    """The first part of the first copy that differs in a bit."""
    for name, expected, actual in zip(("rowwise", "columnwise"), wanted, got):
        for part in ("block_scale", "data"):
            left, right = _bits(getattr(expected, part)), _bits(getattr(actual, part).cpu())
            if not torch.equal(left, right):
                return show_difference(f"{name} {part}", left, right)
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Floats as integers, so that -0 differs from 0; every NaN as the same one, since devices write different NaNs."""
    if tensor.dtype != torch.float32:
        return tensor
    return tensor.view(torch.int32).masked_fill(tensor.isnan(), -1)


#: Op -> its cases on a device.
CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    QuantizeRequest.op: quantize_cases,
    FusedQuantizeRequest.op: fused_cases,
    GemmRequest.op: gemm_cases,
    GroupedQuantizeRequest.op: grouped_quantize_cases,
    GroupedGemmRequest.op: grouped_gemm_cases,
    NormRequest.op: norm_cases,
    AttentionRequest.op: attention_cases,
}
