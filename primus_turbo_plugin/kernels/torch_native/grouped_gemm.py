"""Grouped GEMMs of plain tensors by torch: `torch._grouped_mm` on sm90 and later, a product an expert on the CPU.

Math      y[rows of g] = a[rows of g] @ b[g].T        out[g] = a[:, rows of g] @ b[:, rows of g].T
Numerics  CPU: bit for bit what a loop of torch.matmul over experts gives, as Megatron's own experts compute it. GPU: bf16 in and
          out, fp32 sums; it writes no fp32 and adds to nothing
Limits    GPU: rows that start at multiples of 16 bytes
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.grouped_checks import check_depth, check_rows
from primus_turbo_plugin.kernels.grouped_loop import depth_by_loop, rows_by_loop
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest
from primus_turbo_plugin.kernels.torch_native import gemm

_ALIGNMENT_BYTES = 16


@torch.no_grad()
def grouped_gemm_nt(a: torch.Tensor, b: torch.Tensor, groups: Groups, *, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T for every group.

    Args:
        a: `[T, K]`.
        b: `[groups, N, K]`, contiguous along N or K on GPUs.
        groups: Of a's rows.
        out_dtype: The operands' dtype; on the CPU float32 as well.

    Returns:
        `[T, N]`.

    Raises:
        ShapeError: Shapes or devices do not fit; on GPUs, rows that do not start at multiples of 16 bytes.
    """
    if a.device.type == "cpu":
        return rows_by_loop(gemm.gemm_nt, a, b, groups, out_dtype)
    cols = check_rows(a, b, groups)
    if 0 in (a.shape[0], a.shape[1], cols):
        return torch.zeros(a.shape[0], cols, dtype=out_dtype, device=a.device)
    a, b = _readable("a", a), _readable("b", b)
    return torch._grouped_mm(a, b.transpose(1, 2), offs=_ends(groups))


@torch.no_grad()
def grouped_gemm_depth(
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
    *,
    accumulate: bool,
    scales_by_expert: bool = False,
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T for every group; adding on the CPU only.

    Args:
        a: `[M, T]`.
        b: `[N, T]`.
        groups: Of the contraction.
        out: `[groups, M, N]`. An empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.
        scales_by_expert: As in kernels/reference/grouped_gemm.py; of no use here.

    Returns:
        `out`.

    Raises:
        ShapeError: As in `grouped_gemm_nt`.
    """
    if a.device.type == "cpu":
        return depth_by_loop(gemm.gemm_nt, a, b, groups, out, accumulate=accumulate)
    check_depth(a, b, groups, out, accumulate=accumulate)
    if groups.total == 0:
        return out.zero_()
    a, b = _readable("a", a), _readable("b", b)
    return out.copy_(torch._grouped_mm(a, b.t(), offs=_ends(groups)))


def _ends(groups: Groups) -> torch.Tensor:
    return groups.offsets[1:].to(torch.int32)


def _readable(name: str, t: torch.Tensor) -> torch.Tensor:
    """t, or a copy where only its strides (of an expanded gradient, say) keep torch from reading it."""
    for laid_out in (lambda: t, t.contiguous, lambda: t.mT.contiguous().mT):
        found: torch.Tensor = laid_out()
        strides = sorted(found.stride()[-2:])
        starts = strides[1] * t.element_size(), found.data_ptr()
        if strides[0] == 1 and not any(start % _ALIGNMENT_BYTES for start in starts):
            return found
    raise ShapeError(
        f"torch._grouped_mm: rows of {name} must be contiguous and start at multiples of {_ALIGNMENT_BYTES} bytes, got "
        f"{t.dtype} {list(t.shape)} with strides {list(t.stride())}. Pad the layer's sizes to multiples of 8, or allow "
        "another backend: kernels: {grouped_gemm: [triton, per_expert]}."
    )


def supports(request: GroupedGemmRequest) -> str | None:
    """None, or why torch does not fit the request."""
    if request.device == "cpu":
        return gemm.supports(request.dense())
    if not request.is_plain:
        return "multiplies plain tensors only, not quantised ones"
    if {request.a, request.b, request.out_dtype} != {torch.bfloat16} or request.accumulate:
        return "torch._grouped_mm multiplies bf16 into bf16 and adds to nothing"
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no _grouped_mm"
    if torch.version.hip is not None or (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9):
        return "torch._grouped_mm is fast on sm90 and later only"
    return None


BACKEND = Backend(name="torch", request=GroupedGemmRequest, kernels=sys.modules[__name__], supports=supports)
