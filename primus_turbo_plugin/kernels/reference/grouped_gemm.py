"""Grouped GEMMs of experts, one after the other in fp32 (torch reference; the oracle of every other backend).

Math      y[rows of g] = a[rows of g] @ b[g].T        out[g] (+)= a[:, rows of g] @ b[:, rows of g].T
Layout    a [T, K], b [groups, N, K] or quantised [groups * N, K];  a [M, T], b [N, T], out [groups, M, N]
Numerics  those of kernels/reference/gemm.py for every expert
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.kernels.grouped_checks import Operand
from primus_turbo_plugin.kernels.grouped_loop import depth_by_loop, rows_by_loop
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference.gemm import gemm_nt
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest


@torch.no_grad()
def grouped_gemm_nt(a: Operand, b: Operand, groups: Groups, *, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T for every group.

    Args:
        a: `[T, K]`, plain or quantised along K (`grouped_operands.rows_spec`).
        b: `[groups, N, K]`, any strides; quantised `[groups * N, K]`.
        groups: Of a's rows.
        out_dtype: dtype of the result.

    Returns:
        `[T, N]`.

    Raises:
        ShapeError: Shapes or devices do not fit.
    """
    return rows_by_loop(gemm_nt, a, b, groups, out_dtype)


@torch.no_grad()
def grouped_gemm_depth(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool, scales_by_expert: bool = False
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T for every group.

    Args:
        a: `[M, T]`, the transposed view of dy, say; or quantised along T (`grouped_operands.depth_spec`).
        b: `[N, T]`, likewise.
        groups: Of the contraction; of quantised operands, `Groups.padded`.
        out: `[groups, M, N]`. An empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.
        scales_by_expert: On the caller's word, FP8 scales of 128 tokens are the same for all tokens of an expert, as those of
            `tensorwise` and `rowwise` recipes are. Kernels may then take them out of the sum.

    Returns:
        `out`.

    Raises:
        ShapeError: Shapes, dtypes or devices do not fit.
    """
    return depth_by_loop(gemm_nt, a, b, groups, out, accumulate=accumulate)


def supports(request: GroupedGemmRequest) -> str | None:
    """None: the reference multiplies every pair of operands, on every device."""
    return None


BACKEND = Backend(
    name="reference",
    request=GroupedGemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    note="one product an expert; waits for the GPU to learn how many tokens each has",
)
