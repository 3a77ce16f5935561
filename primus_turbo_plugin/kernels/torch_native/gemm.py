"""gemm_nt of plain operands through torch.matmul: bit for bit what Megatron's own linears compute."""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest


def gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[M, N] = a[M, K] @ b[N, K].T (+ bias)."""
    if out is not None:
        return out.addmm_(a.float(), b.float().t())
    if a.dtype == b.dtype == out_dtype:
        y = torch.matmul(a, b.t())
    else:
        y = torch.matmul(a.float(), b.float().t()).to(out_dtype)
    return y if bias is None else y + bias


def supports(request: GemmRequest) -> str | None:
    if not request.is_plain:
        return "multiplies plain tensors only, not quantised ones"
    return None


BACKEND = Backend(name="torch", request=GemmRequest, kernels=sys.modules[__name__], supports=supports)
