"""Quantisation of a GEMM operand (Triton): one kernel, one read, for the rowwise and the columnwise copy together.

Math      as kernels/reference/quantize.py, bit for bit
Layout    x [rows, cols] by its strides, without a hidden copy;  copies as `QuantizedTensor` describes
Cost      reads x once (FP8 scales that span an axis: twice); docs/performance.md has measurements
Limits    GPU only. Aligned bf16 takes quantize_shared.py, all else quantize_tile.py (`quantize_launch.py`)
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.kernels.triton.launching import Answers, facts, untraced
from primus_turbo_plugin.kernels.triton.quantize_launch import QuantizePlan, quantize_plan
from primus_turbo_plugin.kernels.triton.targets import dtype_refusal, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout


def quantize(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    columnwise: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> QuantizedTensor:
    """Quantise x along its last axis, or along its first for a columnwise copy.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]` on a GPU, any strides; may be empty.
        spec: A quantised spec.
        columnwise: Quantise x.T `[cols, rows]` instead.
        key: Random bits; required for, and only read by, stochastic rounding.
        signs_seed: Seed of the rotation's signs, read when `spec.random_signs`.
        scale_layout: Where the scales of an MX copy shall lie.

    Returns:
        The quantised operand `[rows, cols]`, or `[cols, rows]` for a columnwise copy.

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: The spec is bf16, or rounds stochastically and there is no key.
    """
    if not spec.is_quantized:
        raise ConfigError("quantize: the spec must be quantised, got bf16. Use x itself.")
    specs = (None, spec) if columnwise else (spec, None)
    row, col = quantize_both(x, *specs, key=key, signs_seed=signs_seed, scale_layout=scale_layout)
    copy = col if columnwise else row
    assert copy is not None
    return copy


_PLANS: Answers[QuantizePlan] = Answers()


@untraced
def quantize_both(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The rowwise and the columnwise copy of x from one read.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]` on a GPU.
        row_spec: Spec of the rowwise copy; None or bf16 for no such copy.
        col_spec: Spec of the columnwise copy; None or bf16 for no such copy.
        key: As in `quantize`; the two copies get different random bits.
        signs_seed: As in `quantize`.
        scale_layout: As in `quantize`; FP8 copies keep the plain one.

    Returns:
        (rowwise `[rows, cols]` or None, columnwise `[cols, rows]` or None).

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: A spec rounds stochastically and there is no key.
    """
    question = facts(x), row_spec, col_spec, scale_layout
    plan = _PLANS.get(question)
    if plan is None:
        check(x, (row_spec, col_spec), key)
        plan = _PLANS.keep(question, quantize_plan(x, row_spec, col_spec, scale_layout))
    elif key is None and plan.stochastic:
        check(x, (row_spec, col_spec), key)
    return plan.run(x, key, signs_seed)


def supports(request: QuantizeRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every spec, on GPUs."""
    return refusal(request.device) or dtype_refusal(request.dtype)


def check(x: torch.Tensor, specs: tuple[QuantSpec | None, ...], key: RoundingKey | None) -> None:
    """Refuses what no kernel here can read, and stochastic rounding without random bits."""
    if x.dim() != 2 or dtype_refusal(x.dtype) or x.device.type != "cuda":
        raise ShapeError(
            f"quantize (triton): x must be bf16, fp16 or fp32 [rows, cols] on a GPU, got {x.dtype} {list(x.shape)} on "
            f"{x.device}. Flatten the leading axes, convert it, or use the reference backend."
        )
    if key is None and any(spec is not None and spec.rounding == "stochastic" for spec in specs):
        raise ConfigError(
            "quantize: rounding: stochastic needs a RoundingKey, got none. Pass key=, or set rounding to nearest."
        )


BACKEND = Backend(name="triton", request=QuantizeRequest, kernels=sys.modules[__name__], supports=supports)
