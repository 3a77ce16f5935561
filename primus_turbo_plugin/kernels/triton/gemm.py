"""gemm_nt of plain or quantised operands (Triton); the kernel is in gemm_kernel.py.

Two MX operands use the scaled matrix units where the GPU has them (gfx950, gfx1250). Everything else quantised is decoded in the
kernel and multiplied by the bf16 units: the format's values, not its speed. FP8 units are not used yet, on any GPU.
"""

from __future__ import annotations

import sys
from typing import NamedTuple, Union

import torch

from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.targets import SCALED_MATRIX_UNITS, has_scaled_matrix_units, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

_PLAIN_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8, "num_stages": 3}
_QUANTIZED_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "num_warps": 8, "num_stages": 2}
"""BLOCK_K is one FP8 block of 128, or four MX blocks."""
_SMALL_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "GROUP": 8, "num_warps": 4}
_SMALL = 512


class OperandMeta(NamedTuple):
    """Compile-time description of one operand.

    Attributes:
        element: `plain`, `e2m1`, `e4m3` or `e5m2`.
        is_mx: E8M0 scales, applied to the values.
        block_outer: Rows that share a scale, 0 for all.
        block_contraction: Elements that share a scale, 0 for all.
        scaled_by_block: fp32 scales of blocks along K, applied to partial sums.
        scaled_by_row: fp32 scales that cover a row, applied at the end.
    """

    element: str
    is_mx: bool
    block_outer: int
    block_contraction: int
    scaled_by_block: bool
    scaled_by_row: bool

    @classmethod
    def of(cls, operand: Operand) -> OperandMeta:
        """The description of a tensor."""
        if not isinstance(operand, QuantizedTensor):
            return cls("plain", False, 1, 0, False, False)
        spec = operand.spec
        outer, contraction = spec.block_shape
        fp8 = not spec.is_mx
        return cls(
            spec.element_type.name, spec.is_mx, outer, contraction, fp8 and contraction > 0, fp8 and contraction == 0
        )


@torch.no_grad()
def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain (bf16 or fp16, any strides) or quantised.
        b: `[N, K]`, plain or quantised. If one operand is rotated, the other must be rotated alike.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added in fp32 before the rounding; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.

    Returns:
        `[M, N]` in `out_dtype`, or `out`.

    Raises:
        ShapeError: Shapes, dtypes, devices or rotations do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out)
    length = common_length(a, b)
    y = out if out is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if y.numel() == 0:
        return y
    if length == 0:
        return y if out is not None else (y.zero_() if bias is None else y.copy_(bias.expand_as(y)))
    with torch.cuda.device(a.device):
        _launch(a, b, bias, y, length, accumulate=out is not None)
    return y


def supports(request: GemmRequest) -> str | None:
    """None, or why this kernel cannot multiply these operands."""
    reason = refusal(request.device)
    if reason is not None:
        return reason
    plain = {kind for kind in (request.a, request.b) if isinstance(kind, torch.dtype)}
    quantized = any(isinstance(kind, QuantSpec) for kind in (request.a, request.b))
    allowed = {torch.bfloat16} if quantized else {torch.bfloat16, torch.float16}
    if len(plain) > 1 or plain - allowed:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in plain))
        partner = (
            "a quantised operand is multiplied with bf16"
            if quantized
            else "plain operands must both be bf16 or both fp16"
        )
        return f"{partner}, got {names}"
    return None


def _launch(a: Operand, b: Operand, bias: torch.Tensor | None, y: torch.Tensor, length: int, accumulate: bool) -> None:
    from primus_turbo_plugin.kernels.triton.gemm_kernel import gemm_nt_kernel

    meta_a, meta_b = OperandMeta.of(a), OperandMeta.of(b)
    tile = dict(_PLAIN_TILE if meta_a.element == meta_b.element == "plain" else _QUANTIZED_TILE)
    rows, cols = y.shape
    if min(rows, cols) < _SMALL:
        tile |= _SMALL_TILE
    stored = [x.padded_contraction if isinstance(x, QuantizedTensor) else x.shape[1] for x in (a, b)]
    grid = (-(-rows // tile["BLOCK_M"]) * -(-cols // tile["BLOCK_N"]),)
    data_a, scale_a = _buffers(a)
    data_b, scale_b = _buffers(b)
    gemm_nt_kernel[grid](
        data_a, scale_a, data_b, scale_b, bias, y,
        rows, cols, length, *stored,
        *data_a.stride(), *data_b.stride(), *y.stride(),
        A=meta_a, B=meta_b, ACCUMULATE=accumulate,
        EVEN_K=all(size >= length and length % tile["BLOCK_K"] == 0 for size in stored),
        NATIVE_MX=meta_a.is_mx and meta_b.is_mx and has_scaled_matrix_units(y.device.index),
        **tile,
    )  # fmt: skip


def _buffers(operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(operand, QuantizedTensor):
        return operand.data, operand.block_scale
    return operand, None


BACKEND = Backend(
    name="triton",
    request=GemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=SCALED_MATRIX_UNITS,
)
