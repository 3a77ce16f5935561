"""y = a @ b.T of plain operands through torch.matmul: bit for bit what Megatron's own linears compute.

Math      y[M, N] = a[M, K] @ b[N, K].T, then + bias[N] in y's dtype (Megatron's order: two roundings);  or  out += a @ b.T
Layout    contraction last in both; a transposed view costs no copy
Numerics  torch.matmul accumulates bf16 and fp16 in fp32 and rounds once. Into fp32 (`out`, or out_dtype float32) nothing is
          rounded to bf16 on the way: on CPU the operands are widened first, on CUDA the GEMM writes fp32 itself
Memory    accumulating: nothing beside `out` where `torch.addmm` adds to it (CUDA builds); else an fp32 copy of the product
"""

from __future__ import annotations

import functools
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
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias).

    Args:
        a: `[M, K]`, bf16, fp16 or fp32.
        b: `[N, K]`, the same dtype.
        out_dtype: The operands' dtype, or float32.
        bias: `[N]`, added after the product was rounded to `out_dtype`; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.

    Returns:
        `[M, N]` in `out_dtype`, or `out` or `into`.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
    if into is not None:
        if out_dtype == a.dtype and bias is None:
            return torch.mm(a, b.t(), out=into)
        return into.copy_(gemm_nt(a, b, out_dtype=out_dtype, bias=bias))
    if out_dtype == a.dtype and out is None:
        y = torch.matmul(a, b.t())
        return y if bias is None else (y + bias).to(out_dtype)
    if a.dtype in _HALF and a.device.type == "cuda":
        if out is not None and _adds_in_the_gemm(a.dtype):
            return torch.addmm(out, a, b.t(), out_dtype=torch.float32, out=out)
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
    if request.device == "cuda" and request.a in _HALF and torch.float32 in (request.out_dtype, _sum_dtype(request)):
        return _widening_refusal(request.a)
    return None


def _sum_dtype(request: GemmRequest) -> torch.dtype | None:
    """The dtype of what the product is added to, if it is."""
    return torch.float32 if request.accumulate else None


@functools.cache
def _widening_refusal(dtype: torch.dtype) -> str | None:
    """Why this build's GEMM cannot write fp32 from 16-bit operands, or None; asked of the GPU by one tiny product.

    `torch.mm(..., out_dtype=)` came with torch 2.8, and ROCm builds learned it later (pytorch/pytorch#162600). Delete when the
    oldest supported torch has it everywhere.
    """
    if not torch.cuda.is_available():
        return None  # nothing will run; there is nobody to ask
    one = torch.ones(16, 16, dtype=dtype, device="cuda")
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (TypeError, RuntimeError) as error:
        return (
            f"torch {torch.__version__} cannot write float32 from {dtype} operands here: {str(error).splitlines()[0]}"
        )
    return None


@functools.cache
def _adds_in_the_gemm(dtype: torch.dtype) -> bool:
    """Whether this build's GEMM adds its product to an fp32 matrix (`torch.addmm` with `out_dtype`); asked as above."""
    one, total = torch.ones(16, 16, dtype=dtype, device="cuda"), torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return True


BACKEND = Backend(name="torch", request=GemmRequest, kernels=sys.modules[__name__], supports=supports)
