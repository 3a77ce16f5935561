"""Grouped GEMMs by the best ordinary GEMM, one call an expert: right everywhere, fast where experts are few and large.

It reads the number of tokens of every expert on the host. Where only the GPU knows it, that is a wait in every call, which the
report says (`Backend.note`); no graph can be captured around it.
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.grouped_checks import Operand
from primus_turbo_plugin.kernels.grouped_loop import GemmNt, depth_by_loop, rows_by_loop
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import Backend, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, GroupedGemmRequest
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


@torch.no_grad()
def grouped_gemm_nt(a: Operand, b: Operand, groups: Groups, *, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T; arguments as in kernels/reference/grouped_gemm.py."""
    return rows_by_loop(_gemm(a, b, out_dtype, accumulate=False), a, b, groups, out_dtype)


@torch.no_grad()
def grouped_gemm_depth(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool, scales_by_expert: bool = False
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T; arguments as in kernels/reference/grouped_gemm.py."""
    gemm = _gemm(a, b, out.dtype, accumulate=accumulate)
    return depth_by_loop(gemm, a, b, groups, out, accumulate=accumulate)


def _gemm(a: Operand, b: Operand, out_dtype: torch.dtype, *, accumulate: bool) -> GemmNt:
    kinds = [operand.spec if isinstance(operand, QuantizedTensor) else operand.dtype for operand in (a, b)]
    request = GemmRequest(device=a.device.type, a=kinds[0], b=kinds[1], out_dtype=out_dtype, accumulate=accumulate)
    gemm: GemmNt = default_registry().select("gemm_nt", request).kernels.gemm_nt
    return gemm


def supports(request: GroupedGemmRequest) -> str | None:
    """None, or why no ordinary GEMM serves one expert."""
    try:
        default_registry().select("gemm_nt", request.dense())
    except UnsupportedError as error:
        return "; ".join(f"{name}: {reason}" for name, reason in error.reasons.items())
    return None


BACKEND = Backend(
    name="per_expert",
    request=GroupedGemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    note="one product an expert; waits for the GPU to learn how many tokens each has",
)
