"""Sum of a few tensors from left to right (Triton): what a reduce-scatter's owner does with the ranks' parts.

Math      out[i] = (((p0[i] + p1[i]) + p2[i]) + ...)
Layout    contiguous, any shape; one program for BLOCK elements
Cost      (n + 1) * bytes of one part: memory-bound
Numerics  fp32 (fp64 for fp64) in the order given, one rounding at the store: the same bits every run
Limits    parts are added four at a time; what lies between stays in fp32
Oracle    communication/rank_sum.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_AT_ONCE = 4


@triton.jit
def _sum_kernel(
    p0,
    p1,
    p2,
    p3,
    carry,
    out,
    size,
    COUNT: tl.constexpr,
    CARRIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    total = tl.load(p0 + i, inside).to(WIDE)
    if CARRIES:
        total = tl.load(carry + i, inside) + total
    if COUNT > 1:
        total += tl.load(p1 + i, inside).to(WIDE)
    if COUNT > 2:
        total += tl.load(p2 + i, inside).to(WIDE)
    if COUNT > 3:
        total += tl.load(p3 + i, inside).to(WIDE)
    tl.store(out + i, total.to(out.dtype.element_ty), inside)


def rank_sum(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """See `communication.rank_sum`; on a GPU."""
    size = out.numel()
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    carry = None
    for first in range(0, len(parts), _AT_ONCE):
        some = [part.view(-1) for part in parts[first : first + _AT_ONCE]]
        last = first + _AT_ONCE >= len(parts)
        target = out.view(-1) if last else torch.empty(size, dtype=wide, device=out.device)
        filled = some + some[:1] * (_AT_ONCE - len(some))
        _sum_kernel[(triton.cdiv(size, _BLOCK),)](
            *filled,
            target if carry is None else carry,
            target,
            size,
            COUNT=len(some),
            CARRIES=carry is not None,
            BLOCK=_BLOCK,
            WIDE=tl.float64 if wide == torch.float64 else tl.float32,
            num_warps=8,
        )
        carry = target
