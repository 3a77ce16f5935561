"""The sum of a reduce-scatter: in the order given, in fp32, rounded once."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def rank_sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """out = parts[0] + parts[1] + ..., from left to right.

    Args:
        parts: Each [rows, columns], contiguous, of one dtype and device.
        out: [rows, columns], contiguous, of any floating dtype; none of the parts.
    """
    if out.numel() == 0:
        return
    if len(parts) == 1:
        out.copy_(parts[0])
    elif out.device.type == "cuda" and len(parts) == 2 and parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)  # in fp32 with one rounding, and launched sooner than a kernel of ours
    elif out.device.type == "cuda" and _has_triton():
        from primus_turbo_plugin.kernels.triton.rank_sum import rank_sum as fused

        fused(parts, out)
    else:
        wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        out.copy_(total)
