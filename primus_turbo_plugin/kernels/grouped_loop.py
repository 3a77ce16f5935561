"""Grouped GEMMs as a loop over experts on the host, for backends that have an ordinary GEMM: one call an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from primus_turbo_plugin.kernels.grouped_checks import Operand, check_depth, check_rows
from primus_turbo_plugin.kernels.grouped_operands import take_contraction, take_rows
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

GemmNt = Callable[..., torch.Tensor]


def rows_by_loop(gemm_nt: GemmNt, a: Operand, b: Operand, groups: Groups, out_dtype: torch.dtype) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T by `gemm_nt`, expert by expert. Rows of nobody become zero."""
    cols = check_rows(a, b, groups)
    y = torch.empty(a.shape[0], cols, dtype=out_dtype, device=a.device)
    y[groups.on_host()[-1] :] = 0
    for group, start, stop in _stretches(groups):
        weight = take_rows(b, group * cols, (group + 1) * cols) if isinstance(b, QuantizedTensor) else b[group]
        mine = take_rows(a, start, stop) if isinstance(a, QuantizedTensor) else a[start:stop]
        if cols and a.shape[1]:
            y[start:stop] = gemm_nt(mine, weight, out_dtype=out_dtype)
        else:
            y[start:stop] = 0
    return y


def depth_by_loop(
    gemm_nt: GemmNt, a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool
) -> torch.Tensor:
    """out[g] (+)= a[:, rows of g] @ b[:, rows of g].T by `gemm_nt`, expert by expert."""
    check_depth(a, b, groups, out, accumulate=accumulate)
    if not accumulate:
        out.zero_()
    if not out.numel():
        return out
    for group, start, stop in _stretches(groups):
        left, right = (
            take_contraction(x, start, stop) if isinstance(x, QuantizedTensor) else x[:, start:stop] for x in (a, b)
        )
        if accumulate:
            gemm_nt(left, right, out_dtype=torch.float32, out=out[group])
        else:
            out[group] = gemm_nt(left, right, out_dtype=out.dtype)
    return out


def _stretches(groups: Groups) -> Iterator[tuple[int, int, int]]:
    """(group, start, stop) of every group that has rows."""
    offsets = groups.on_host()
    for group, (start, stop) in enumerate(pairwise(offsets)):
        if stop > start:
            yield group, start, stop
