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

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest
from primus_turbo_plugin.kernels.triton import quantize as plain
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.kernels.triton.quantize_launch import has_words, launch_shared, serves, tile_tokens
from primus_turbo_plugin.kernels.triton.targets import has_gluon, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

MAX_HIDDEN = 1 << 15
"""Longest row of the RMS norm: one program holds it in registers."""


@torch.no_grad()
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
    from primus_turbo_plugin.kernels.triton.quantize_front import FrontMeta

    x = _words(x, (row_spec, col_spec), key)
    rstd = _rstd(x, eps)
    row, col = _copies(x.shape[0], x.shape[1], x.device, row_spec, col_spec, key, signs_seed, scale_layout)
    if x.numel():
        with torch.cuda.device(x.device):
            front = FrontMeta("rms_norm", zero_centered_gamma)
            launch_shared(x, row, col, front=front, gamma=weight.contiguous(), rstd=rstd)
    return row.result() if row else None, col.result() if col else None, rstd


@torch.no_grad()
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
    from primus_turbo_plugin.kernels.triton.quantize_front import FrontMeta

    x = _words(x, (row_spec, col_spec), key)
    if x.shape[1] % 16:
        raise ShapeError(f"swiglu_quantize (triton): hidden must be a multiple of 8, got x {list(x.shape)}. Pad it.")
    hidden = x.shape[1] // 2
    row, col = _copies(x.shape[0], hidden, x.device, row_spec, col_spec, key, signs_seed, scale_layout)
    if x.numel():
        with torch.cuda.device(x.device):
            launch_shared(x, row, col, cols=hidden, front=FrontMeta("swiglu"))
    return row.result() if row else None, col.result() if col else None


@torch.no_grad()
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
    x = _words(x, (row_spec, col_spec), key)
    rows, cols = x.shape
    row, col = _copies(rows, cols, x.device, row_spec, col_spec, key, signs_seed, scale_layout)
    sums = torch.zeros(1, cols, dtype=torch.float32, device=x.device)
    if x.numel():
        sums = torch.empty(-(-rows // tile_tokens(x, (row_spec, col_spec))), cols, dtype=torch.float32, device=x.device)
        with torch.cuda.device(x.device):
            launch_shared(x, row, col, sums=sums)
            sums = _sum_rows(sums)
    return row.result() if row else None, col.result() if col else None, sums[0]


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
    x = x if has_words(x) else x.contiguous()
    if not has_words(x):
        raise ShapeError(
            f"fused quantisation (triton): x must be bf16 with a multiple of 8 columns, got {x.dtype} {list(x.shape)}. "
            "Use the reference backend, or quantise apart."
        )
    return x


def _copies(
    rows: int,
    cols: int,
    device: torch.device,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    key: RoundingKey | None,
    signs_seed: int,
    scale_layout: ScaleLayout,
) -> tuple[Copy | None, Copy | None]:
    return (
        Copy.of(rows, cols, device, row_spec, False, key, signs_seed, scale_layout),
        Copy.of(rows, cols, device, col_spec, True, key, signs_seed, scale_layout),
    )


def _rstd(x: Tensor, eps: float) -> Tensor:
    from primus_turbo_plugin.kernels.triton.row_sums import rstd_kernel

    rows, hidden = x.shape
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    log_hidden = max(hidden - 1, 1).bit_length()
    per_program = max(1, 4096 >> log_hidden)
    if rows:
        with torch.cuda.device(x.device):
            rstd_kernel[(-(-rows // per_program),)](
                x, rstd, rows, hidden, x.stride(0), eps,
                ROWS=per_program, LOG_HIDDEN=log_hidden,
                num_warps=4 if log_hidden <= 13 else 8 if log_hidden == 14 else 16,
                enable_fp_fusion=False,
            )  # fmt: skip
    return rstd


def _sum_rows(sums: Tensor) -> Tensor:
    """fp32 `[rows, cols]` to `[1, cols]`, 128 rows at a time."""
    from primus_turbo_plugin.kernels.triton.row_sums import CHUNK, SUM_COLS, sum_rows_kernel

    while sums.shape[0] > 1:
        rows, cols = sums.shape
        out = torch.empty(-(-rows // CHUNK), cols, dtype=torch.float32, device=sums.device)
        sum_rows_kernel[(out.shape[0], -(-cols // SUM_COLS))](sums, out, rows, cols, num_warps=4)
        sums = out
    return sums


BACKEND = Backend(name="triton", request=FusedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
