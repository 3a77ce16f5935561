"""What every gemm_nt backend checks of its arguments, with the same messages."""

from __future__ import annotations

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


def check_gemm_nt(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    into: torch.Tensor | None = None,
) -> None:
    """Shapes, dtypes and devices of `gemm_nt`.

    Raises:
        ShapeError: They do not fit.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ShapeError(
            f"gemm_nt: a must be [M, K] and b [N, K] with the same K, got {list(a.shape)} and {list(b.shape)}. "
            "Flatten leading axes; transpose so that the contraction is last in both."
        )
    expected = (a.shape[0], b.shape[0])
    if bias is not None and tuple(bias.shape) != expected[1:]:
        raise ShapeError(f"gemm_nt: bias must be [N] = [{expected[1]}], got {list(bias.shape)}.")
    if out is not None:
        if tuple(out.shape) != expected or out.dtype != torch.float32 or out_dtype != torch.float32:
            raise ShapeError(
                f"gemm_nt: out must be float32 {list(expected)} with out_dtype float32, got {out.dtype} {list(out.shape)} "
                f"with out_dtype {out_dtype}. Accumulate in fp32, for instance in main_grad."
            )
        if bias is not None:
            raise ShapeError(
                "gemm_nt: out and bias exclude each other, got both. A bias has no place in an accumulation."
            )
    if into is not None:
        if tuple(into.shape) != expected or into.dtype != out_dtype:
            raise ShapeError(
                f"gemm_nt: into must be {out_dtype} {list(expected)}, got {into.dtype} {list(into.shape)}. Allocate it so, or "
                "leave it out."
            )
        if out is not None:
            raise ShapeError("gemm_nt: into and out exclude each other, got both: one is written, the other added to.")
    devices = {tensor.device for tensor in (a, b, bias, out, into) if tensor is not None}
    if len(devices) != 1:
        raise ShapeError(
            f"gemm_nt: all tensors must be on one device, got {sorted(map(str, devices))}. Move them together."
        )


def common_length(a: torch.Tensor | QuantizedTensor, b: torch.Tensor | QuantizedTensor) -> int:
    """Stored contraction length both operands share: K, and with a rotation the padding that it filled.

    Two quantised operands may be padded to different block sizes; past this length both hold zeros.
    """
    rotations = [_rotation(a), _rotation(b)]
    if rotations[0] != rotations[1]:
        raise ShapeError(
            f"gemm_nt: both operands must be rotated alike along K, got {rotations[0]} and {rotations[1]}. "
            "Give both specs the same hadamard, random_signs and signs seed."
        )
    size = _hadamard(a) or 1
    return -(-a.shape[1] // size) * size


def _hadamard(operand: torch.Tensor | QuantizedTensor) -> int:
    return operand.spec.hadamard if isinstance(operand, QuantizedTensor) else 0


def _rotation(operand: torch.Tensor | QuantizedTensor) -> str:
    if not isinstance(operand, QuantizedTensor) or not operand.spec.hadamard:
        return "no rotation"
    signs = f" with signs of seed {operand.signs_seed}" if operand.spec.random_signs else ""
    return f"H{operand.spec.hadamard}{signs}"
