"""Grouped GEMMs of plain tensors by torch: `torch._grouped_mm` on sm90 and later, a product an expert on the CPU.

Math      y[rows of g] = a[rows of g] @ b[g].T        out[g] = a[:, rows of g] @ b[:, rows of g].T
Numerics  CPU: bit for bit what a loop of torch.matmul over experts gives, as Megatron's own experts compute it. GPU: bf16 in and
          out, fp32 sums; it writes no fp32 and adds to nothing
Layout    GPU: every expert's piece must start at a multiple of 16 bytes (TMA). In a tensor that is contiguous along tokens it
          starts where the router says, which the host does not know; elsewhere torch stops the process with a device-side
          assertion. So tokens are handed over as rows of contiguous features, and copied into such rows where they are not
Limits    GPU: sizes of whole 16 bytes, fewer than 1,024 experts
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
_MOST_GROUPS = 1023
"""torch prepares the groups by one block of threads."""
_ELSEWHERE = "allow another backend: kernels: {grouped_gemm: [triton, per_expert]}."


@torch.no_grad()
def grouped_gemm_nt(a: torch.Tensor, b: torch.Tensor, groups: Groups, *, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T for every group.

    Args:
        a: `[T, K]`.
        b: `[groups, N, K]`.
        groups: Of a's rows.
        out_dtype: The operands' dtype; on the CPU float32 as well.

    Returns:
        `[T, N]`.

    Raises:
        ShapeError: Shapes or devices do not fit; on GPUs also K or N that are no multiples of 16 bytes, and too many experts.
    """
    if a.device.type == "cpu":
        return rows_by_loop(gemm.gemm_nt, a, b, groups, out_dtype)
    return rows_by_grouped_mm(a, b, groups, out_dtype)


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
    return depth_by_grouped_mm(a, b, groups, out)


def rows_by_grouped_mm(a: torch.Tensor, b: torch.Tensor, groups: Groups, out_dtype: torch.dtype) -> torch.Tensor:
    """`grouped_gemm_nt` in one call, whatever the strides and the groups."""
    cols = check_rows(a, b, groups)
    if 0 in (a.shape[0], a.shape[1], cols):
        return torch.zeros(a.shape[0], cols, dtype=out_dtype, device=a.device)
    _check("grouped_gemm_nt", groups, a.dtype, K=a.shape[1], N=cols)
    weights = b if _is_readable(b) or _is_readable(b.mT) else _copied(b)
    return torch._grouped_mm(_token_rows(a), weights.mT, offs=_ends(groups))


def depth_by_grouped_mm(a: torch.Tensor, b: torch.Tensor, groups: Groups, out: torch.Tensor) -> torch.Tensor:
    """`grouped_gemm_depth` in one call, whatever the strides and the groups."""
    if 0 in (groups.total, a.shape[0], b.shape[0]):
        return out.zero_()
    _check("grouped_gemm_depth", groups, a.dtype, M=a.shape[0], N=b.shape[0])
    return out.copy_(torch._grouped_mm(_token_rows(a.t()).t(), _token_rows(b.t()), offs=_ends(groups)))


def _check(where: str, groups: Groups, dtype: torch.dtype, **features: int) -> None:
    """N of the fprop too, though torch could write it: dgrad and wgrad read such rows, and would refuse them only then."""
    multiple = _ALIGNMENT_BYTES // dtype.itemsize
    if any(size % multiple for size in features.values()):
        sizes = ", ".join(f"{name} = {size}" for name, size in features.items())
        raise ShapeError(
            f"{where} (torch): rows of {dtype} must start at multiples of {_ALIGNMENT_BYTES} bytes, so their sizes must be "
            f"multiples of {multiple}, got {sizes}. Pad the layer's sizes, or {_ELSEWHERE}"
        )
    if groups.count > _MOST_GROUPS:
        raise ShapeError(
            f"{where} (torch): at most {_MOST_GROUPS} experts in a call, got {groups.count}. Spread them over more ranks, or "
            f"{_ELSEWHERE}"
        )


def _ends(groups: Groups) -> torch.Tensor:
    return groups.offsets[1:].to(torch.int32)


def _token_rows(t: torch.Tensor) -> torch.Tensor:
    """t `[T, features]`, or a copy, with contiguous features."""
    return t if _is_readable(t) else _copied(t)


def _is_readable(t: torch.Tensor) -> bool:
    """Whether the last dimension is contiguous and every row starts at 16 bytes and behind the one before.

    torch looks at the rows, but not at where experts' weights start: there the GPU faults.
    """
    *starts, step = t.stride()
    aligned = not any(start * t.element_size() % _ALIGNMENT_BYTES for start in starts)
    return step == 1 and aligned and starts[-1] >= t.shape[-1] and t.data_ptr() % _ALIGNMENT_BYTES == 0


def _copied(t: torch.Tensor) -> torch.Tensor:
    """Not `Tensor.contiguous`, which returns t itself where a dimension of one element has an odd stride."""
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)


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
