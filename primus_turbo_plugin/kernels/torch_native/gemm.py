"""y = a @ b.T of plain operands through torch.matmul: bit for bit what Megatron's own linears compute.

Math      y[M, N] = a[M, K] @ b[N, K].T, then + bias[N] in y's dtype (Megatron's order: two roundings);  or  out += a @ b.T
Layout    contraction last in both; a transposed view costs no copy
Numerics  torch.matmul accumulates bf16 and fp16 in fp32 and rounds once. Into fp32 (`out`, or out_dtype float32) nothing is
          rounded to bf16 on the way: on CPU the operands are widened first, on CUDA the GEMM writes fp32 itself
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest

_HALF = (torch.bfloat16, torch.float16)


def gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias).

    Args:
        a: `[M, K]`, bf16, fp16 or fp32.
        b: `[N, K]`, the same dtype.
        out_dtype: The operands' dtype, or float32.
        bias: `[N]`, added after the product was rounded to `out_dtype`; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.

    Returns:
        `[M, N]` in `out_dtype`, or `out`.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out)
    if out_dtype == a.dtype and out is None:
        y = torch.matmul(a, b.t())
        return y if bias is None else (y + bias).to(out_dtype)
    if a.dtype in _HALF and a.device.type == "cuda":
        y = torch.mm(a, b.t(), out_dtype=torch.float32)
        if out is not None:
            return out.add_(y)
    elif out is not None:
        return out.addmm_(a.float(), b.t().float())
    else:
        y = torch.matmul(a.float(), b.t().float())
    return y if bias is None else y + bias


def supports(request: GemmRequest) -> str | None:
    """None, or why torch.matmul does not fit the request."""
    if not request.is_plain:
        return "multiplies plain tensors only, not quantised ones"
    if request.a != request.b:
        return f"needs both operands in one dtype, got {request.a} and {request.b}"
    if request.out_dtype not in (request.a, torch.float32):
        return f"writes the operands' dtype or float32, not {request.out_dtype} from {request.a}"
    return None


BACKEND = Backend(name="torch", request=GemmRequest, kernels=sys.modules[__name__], supports=supports)
