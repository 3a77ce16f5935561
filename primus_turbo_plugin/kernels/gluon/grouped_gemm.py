"""Grouped GEMMs of experts in Gluon: gfx950 and gfx1250. The kernels of each are those of its `gemm_*.py`."""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.kernels.gluon import gemm
from primus_turbo_plugin.kernels.gluon.gemm import KERNELS, MATRIX_UNITS, this_arch
from primus_turbo_plugin.kernels.grouped_checks import Operand, check_depth, check_rows
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


@torch.no_grad()
def grouped_gemm_nt(a: Operand, b: Operand, groups: Groups, *, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T for every group, in one launch beside those that find its tiles.

    Args:
        a: `[T, K]`, plain (bf16 or fp16) or quantised along K with scales of single rows.
        b: `[groups, N, K]`, contiguous along N or K (else copied); quantised `[groups * N, K]`.
        groups: Of a's rows.
        out_dtype: dtype of the result.

    Returns:
        `[T, N]`.

    Raises:
        ShapeError: Shapes, devices or rotations do not fit, or a row is too long for 32-bit offsets.
    """
    cols = check_rows(a, b, groups)
    if 0 in (a.shape[0], a.shape[1], cols):
        return torch.zeros(a.shape[0], cols, dtype=out_dtype, device=a.device)
    if isinstance(b, torch.Tensor) and 1 not in b.stride()[1:]:
        b = b.contiguous()
    y: torch.Tensor = KERNELS[this_arch()].grouped_gemm_nt(a, b, groups.offsets, out_dtype=out_dtype)
    return y


@torch.no_grad()
def grouped_gemm_depth(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool, scales_by_expert: bool = False
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T for every group, in one launch.

    Args:
        a: `[M, T]`, plain (bf16 or fp16) or in MX along T.
        b: `[N, T]`, likewise.
        groups: Of the contraction; of quantised operands, `Groups.padded` to whole blocks.
        out: `[groups, M, N]`, contiguous along N. An empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.
        scales_by_expert: As in kernels/reference/grouped_gemm.py; of no use here.

    Returns:
        `out`.

    Raises:
        ShapeError: Shapes, dtypes, strides, devices or rotations do not fit.
    """
    check_depth(a, b, groups, out, accumulate=accumulate)
    if groups.total == 0:
        return out if accumulate else out.zero_()
    multiple = max(x.spec.contraction_multiple if isinstance(x, QuantizedTensor) else 1 for x in (a, b))
    y: torch.Tensor = KERNELS[this_arch()].grouped_gemm_depth(
        a, b, groups.offsets, out, accumulate=accumulate, multiple=multiple
    )
    return y


def supports(request: GroupedGemmRequest) -> str | None:
    """None, or why these kernels cannot serve the request here."""
    reason = gemm.supports(request.dense())
    if reason is None and request.kind == "depth":
        for kind in (request.a, request.b):
            if isinstance(kind, QuantSpec) and not kind.is_mx:
                return f"sums over an expert's tokens in bf16, fp16 and MX, not in {kind}"
    return reason


BACKEND = Backend(
    name="gluon",
    request=GroupedGemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=MATRIX_UNITS,
    scale_layout=lambda request: "gfx950" if this_arch() == "gfx950" else "plain",  # of weights; of tokens always plain
    written_for=lambda request: gemm.BACKEND.written_for(request.dense()),
)
