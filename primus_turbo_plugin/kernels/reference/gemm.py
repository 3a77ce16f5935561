"""gemm_nt in torch: the oracle of every other GEMM.  (first, simple version)"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


def gemm_nt(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[M, N] = a[M, K] @ b[N, K].T (+ bias), fp32 accumulation, one rounding to out_dtype.

    Args:
        a: `[M, K]`, plain or quantised.
        b: `[N, K]`, plain or quantised.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added in fp32.
        out: fp32 `[M, N]`: out += a @ b.T, in place, and out is returned.

    Raises:
        ShapeError: Shapes, dtypes or rotations do not match.
    """
    length = _common_length(a, b)
    product = _values(a, length) @ _values(b, length).t()
    if bias is not None:
        product = product + bias.float()
    if out is not None:
        return out.add_(product)
    return product.to(out_dtype)


def _common_length(a: torch.Tensor | QuantizedTensor, b: torch.Tensor | QuantizedTensor) -> int:
    if a.shape[1] != b.shape[1]:
        raise ShapeError(f"gemm_nt: a and b must share K, got {list(a.shape)} and {list(b.shape)}.")
    rotations = [
        (x.spec.hadamard, x.spec.random_signs, x.signs_seed if x.spec.random_signs else 0)
        if isinstance(x, QuantizedTensor)
        else (0, False, 0)
        for x in (a, b)
    ]
    if rotations[0] != rotations[1]:
        raise ShapeError(f"gemm_nt: both operands must be rotated alike, got {rotations[0]} and {rotations[1]}.")
    size = max(rotations[0][0], 1)
    return -(-a.shape[1] // size) * size


def _values(x: torch.Tensor | QuantizedTensor, length: int) -> torch.Tensor:
    return (x.decode() if isinstance(x, QuantizedTensor) else x.float())[:, :length]


def supports(request: GemmRequest) -> str | None:
    return None


BACKEND = Backend(name="reference", request=GemmRequest, kernels=sys.modules[__name__], supports=supports)
