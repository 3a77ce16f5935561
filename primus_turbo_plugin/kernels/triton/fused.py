"""A neighbouring op and a quantisation as one (Triton): the op in the kernel of the quantisation, the same bytes as apart.

Math      as kernels/reference/fused.py, bit for bit
Cost      rms_norm: x is read twice (rstd, then norm and quantisation), the normed tensor is neither written nor read: 5.1 bytes
          an element for two MXFP4 copies, against 7.1 apart.  swiglu: x is read once, 5.1 bytes an element of the output against
          9.1.  sums: x is read once, and 1/16 byte an element of partial sums written and read
Limits    bf16 on a GPU, hidden a multiple of 8 (rms_norm: at most 32768), specs that quantize_shared.py makes. Rows that are not
          16-byte aligned are copied first
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest
from primus_turbo_plugin.kernels.triton import quantize as plain
from primus_turbo_plugin.kernels.triton.launching import Answers, Launcher, facts, on_device, untraced
from primus_turbo_plugin.kernels.triton.quantize_copy import CopyPlan
from primus_turbo_plugin.kernels.triton.quantize_launch import QuantizePlan, has_words, serves, shared_plan, tile_tokens
from primus_turbo_plugin.kernels.triton.targets import has_gluon, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

MAX_HIDDEN = 1 << 15
"""Longest row of the RMS norm: one program holds it in registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """One fused op on one kind of tensor.

    Attributes:
        copies: The quantisation, with the op in it.
        rstd: Fills 1 / RMS of every row; None for the other ops, and of no rows.
        sums: Fills sums of rows, (their number, launch) one after the other; the first are `copies`' own, and have no launch.
    """

    copies: QuantizePlan
    rstd: Launcher | None = None
    sums: tuple[tuple[int, Launcher | None], ...] = ()


_PLANS: Answers[_Plan] = Answers()


@untraced
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    zero_centered_gamma: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """See `kernels.reference.fused.rms_norm_quantize`."""
    gamma = weight.contiguous()
    x, plan = _plan_for("rms_norm", x, row_spec, col_spec, key, scale_layout, gamma, zero_centered_gamma)
    rows, hidden = x.shape
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if plan.rstd is not None:
        with on_device(x.device):
            plan.rstd(x, rstd, rows, hidden, x.stride(0), float(eps))  # an integer is compiled into a kernel
    return *plan.copies.run(x, key, signs_seed, gamma=gamma, rstd=rstd), rstd


@untraced
def swiglu_quantize(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> Copies:
    """See `kernels.reference.fused.swiglu_quantize`."""
    x, plan = _plan_for("swiglu", x, row_spec, col_spec, key, scale_layout)
    return plan.copies.run(x, key, signs_seed)


@untraced
def quantize_and_sum(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """See `kernels.reference.fused.quantize_and_sum`."""
    if not _in_words(col_spec, x):
        *_, sums = quantize_and_sum(x, None, None)
        return *plain.quantize_both(
            x, row_spec, col_spec, key=key, signs_seed=signs_seed, scale_layout=scale_layout
        ), sums
    x, plan = _plan_for("sums", x, row_spec, col_spec, key, scale_layout)
    cols, device = x.shape[1], x.device
    if not plan.sums:
        return *plan.copies.run(x, key, signs_seed), torch.zeros(cols, dtype=torch.float32, device=device)
    sums = torch.empty(plan.sums[0][0], cols, dtype=torch.float32, device=device)
    row, col = plan.copies.run(x, key, signs_seed, sums=sums)
    for count, launch in plan.sums[1:]:
        assert launch is not None
        further = torch.empty(count, cols, dtype=torch.float32, device=device)
        with on_device(device):
            launch(sums, further, sums.shape[0], cols)
        sums = further
    return row, col, sums[0]


def _in_words(col_spec: QuantSpec | None, x: Tensor) -> bool:
    """Whether a columnwise copy of x consists of whole words. FP8 with a scale for a column is not padded."""
    return x.dim() != 2 or serves(col_spec, x.shape[0])


def supports(request: FusedQuantizeRequest) -> str | None:
    """None, or why these kernels cannot do it."""
    reason = refusal(request.device)
    if reason is not None:
        return reason
    if not has_gluon():
        return "needs Triton 3.6 or later, with Gluon"
    if request.dtype is not torch.bfloat16:
        return f"fuses with bf16, not {str(request.dtype).removeprefix('torch.')}"
    if request.hidden % 8:
        return f"reads 8 columns at a time, hidden is {request.hidden}"
    if request.kind == "rms_norm" and request.hidden > MAX_HIDDEN:
        return f"normalises rows of at most {MAX_HIDDEN}, hidden is {request.hidden}"
    if request.kind == "rms_norm" and request.weight_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"reads a norm weight in bf16, fp16 or fp32, not {request.weight_dtype}"
    for spec, contraction in ((request.row_spec, request.hidden), (request.col_spec, 8)):
        if spec is not None and spec.is_quantized:
            if not serves(spec, contraction):
                return f"has no fused kernel for {spec}"
            if 0 in spec.block_shape and request.kind != "sums":
                return f"cannot scale {spec} by an amax that it knows only after the op in front"
    return None


def _words(x: Tensor, specs: tuple[QuantSpec | None, ...], key: RoundingKey | None) -> Tensor:
    plain.check(x, specs, key)
    if not has_words(x):  # a copy even where x is contiguous: it may begin at an odd address
        x = x.clone(memory_format=torch.contiguous_format)
    if not has_words(x):
        raise ShapeError(
            f"fused quantisation (triton): x must be bf16 with a multiple of 8 columns, got {x.dtype} {list(x.shape)}. "
            "Use the reference backend, or quantise apart."
        )
    return x


def _plan_for(
    kind: str,
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    key: RoundingKey | None,
    scale_layout: ScaleLayout,
    gamma: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, _Plan]:
    """x, or a copy of it that can be read, and the plan for tensors like it."""
    asked = kind, row_spec, col_spec, scale_layout, facts(gamma), zero_centered
    question = facts(x), asked
    plan = _PLANS.get(question)
    if plan is None or (key is None and plan.copies.stochastic):
        x = _words(x, (row_spec, col_spec), key)
        question = facts(x), asked
        plan = _PLANS.get(question)
    if plan is None:
        plan = _PLANS.keep(question, _plan(kind, x, row_spec, col_spec, scale_layout, zero_centered))
    return x, plan


def _plan(
    kind: str,
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    scale_layout: ScaleLayout,
    zero_centered: bool,
) -> _Plan:
    from primus_turbo_plugin.kernels.triton.quantize_front import FrontMeta

    rows, cols = x.shape
    if kind == "swiglu":
        if cols % 16:
            raise ShapeError(
                f"swiglu_quantize (triton): hidden must be a multiple of 8, got x {list(x.shape)}. Pad it."
            )
        cols //= 2
    row, col = (
        CopyPlan.of(rows, cols, row_spec, False, scale_layout),
        CopyPlan.of(rows, cols, col_spec, True, scale_layout),
    )
    if not x.numel():
        return _Plan(
            copies=QuantizePlan(row=row, col=col), rstd=_rstd(rows, cols) if kind == "rms_norm" and rows else None
        )
    if kind == "sums":
        first = -(-rows // tile_tokens(x, (row_spec, col_spec)))
        return _Plan(copies=shared_plan(x, row, col, sums=True), sums=_sums(first, cols))
    front = FrontMeta(kind, zero_centered)
    return _Plan(
        copies=shared_plan(x, row, col, cols=cols, front=front), rstd=_rstd(rows, cols) if kind == "rms_norm" else None
    )


def _rstd(rows: int, hidden: int) -> Launcher:
    """Launch over bf16 `[rows, hidden]`."""
    from primus_turbo_plugin.kernels.triton.row_sums import rstd_kernel

    log_hidden = max(hidden - 1, 1).bit_length()
    per_program = max(1, 4096 >> log_hidden)
    options: dict[str, Any] = {"num_warps": 4 if log_hidden <= 13 else 8 if log_hidden == 14 else 16}
    constants = {"ROWS": per_program, "LOG_HIDDEN": log_hidden}
    return Launcher(rstd_kernel, (-(-rows // per_program),), constants, {**options, "enable_fp_fusion": False})


def _sums(rows: int, cols: int) -> tuple[tuple[int, Launcher | None], ...]:
    """fp32 `[rows, cols]` down to `[1, cols]`, 128 rows at a time: rows of each step, and the launch that fills them."""
    from primus_turbo_plugin.kernels.triton.row_sums import CHUNK, SUM_COLS, sum_rows_kernel

    steps: list[tuple[int, Launcher | None]] = [(rows, None)]
    while rows > 1:
        rows = -(-rows // CHUNK)
        steps.append((rows, Launcher(sum_rows_kernel, (rows, -(-cols // SUM_COLS)), {}, {"num_warps": 4})))
    return tuple(steps)


BACKEND = Backend(name="triton", request=FusedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
