"""RMS norm and layer norm, forward and backward (Triton): one read forward, one read of each tensor backward, any width.

Math      as kernels/reference/norm.py; the RMS norm's forward bit for bit
Layout    x, dy and dresidual by their strides, without hidden copies; y and dx contiguous
Cost      docs/performance.md has measurements; norm_kernel.py says what is read
Limits    bf16, fp16 and fp32 on a GPU, weights too. Rows of more than 2^15 columns forward, 2^14 backward, are taken in chunks
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.triton.targets import dtype_refusal, refusal, warp_size

LOG_WHOLE_FORWARD, LOG_WHOLE_BACKWARD = 15, 14
"""Longest rows that a program holds whole: 64 elements a thread, of one tensor or of two."""
LOG_SUMS = 13
"""Longest rows beside which sums of columns stay in registers."""
LOG_CHUNK = 12
"""Columns that are taken at a time of longer rows."""
_TILE = 4096
"""Elements of a program's rows, where a row is shorter."""
_WEIGHT_ROWS, _WEIGHT_COLS, _WEIGHT_PROGRAMS = 32, 64, 32


def rms_norm_fwd(x: Tensor, weight: Tensor, eps: float, *, zero_centered_gamma: bool = False) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.norm.rms_norm_fwd`; the same bits."""
    y, _, rstd = _forward(x, weight, None, eps, zero_centered_gamma, rms=True)
    return y, rstd


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool = False,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.reference.norm.rms_norm_bwd`."""
    dx, sums = _backward(dy, x, weight, None, rstd, dresidual, zero_centered_gamma)
    return dx, sums[0]


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.norm.layer_norm_fwd`."""
    y, mean, rstd = _forward(x, weight, bias, eps, zero_centered_gamma, rms=False)
    assert mean is not None
    return y, mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.reference.norm.layer_norm_bwd`."""
    dx, sums = _backward(dy, x, weight, mean, rstd, None, zero_centered_gamma)
    return dx, sums[0], sums[1]


def _log2_up(hidden: int) -> int:
    return max(hidden - 1, 0).bit_length()


def forward_tile(hidden: int, lanes: int) -> dict[str, int]:
    """Constants and warps of the forward kernel of whole rows: 32 elements a thread."""
    log = _log2_up(hidden)
    rows = max(1, _TILE >> log)
    return {"ROWS": rows, "LOG": log, "num_warps": _warps(rows << log, 32, 16, lanes)}


def backward_tile(hidden: int, lanes: int) -> dict[str, int]:
    """Constants and warps of the backward kernel of whole rows: 16 elements a thread with sums of columns, 32 without."""
    log = _log2_up(hidden)
    rows, sums = max(1, _TILE >> log), log <= LOG_SUMS
    return {"ROWS": rows, "LOG": log, "SUMS": sums, "num_warps": _warps(rows << log, 16 if sums else 32, 16, lanes)}


def programs_per_unit(hidden: int) -> int:
    """Programs of the backward pass on a multiprocessor or compute unit; each holds sums of its rows. Timed on an H200."""
    log = _log2_up(hidden)
    return 1 if log > 12 else 4 if log == 12 else 2


def _warps(elements: int, per_thread: int, most: int, lanes: int) -> int:
    return max(1, min(elements // (per_thread * lanes), most * 32 // lanes))


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, *, rms: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean or None, rstd)."""
    from primus_turbo_plugin.kernels.triton.norm_kernel import norm_fwd_chunks_kernel, norm_fwd_kernel

    rows, hidden = x.shape
    y = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = None if rms else torch.empty_like(rstd)
    args = (
        x,
        weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        mean,
        rstd,
        rows,
        hidden,
        *x.stride(),
        eps,
    )
    kinds: dict[str, Any] = {"RMS": rms, "ZERO_CENTERED": zero_centered, "BIAS": bias is not None}
    kinds["enable_fp_fusion"] = False
    if rows:
        with torch.cuda.device(x.device):
            if _log2_up(hidden) <= LOG_WHOLE_FORWARD:
                tile = forward_tile(hidden, warp_size(x.device.index))
                norm_fwd_kernel[(-(-rows // tile["ROWS"]),)](*args, **kinds, **tile)
            else:
                log_chunks = _log2_up(-(-hidden >> LOG_CHUNK))
                norm_fwd_chunks_kernel[(rows,)](*args, **kinds, LOG=LOG_CHUNK, LOG_CHUNKS=log_chunks, num_warps=4)
    return y, mean, rstd


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """(dx, fp32 sums `[1 or 2, hidden]`: dweight, and for a layer norm dbias)."""
    rows, hidden = x.shape
    dx = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if not rows:
        return dx, torch.zeros((1 if mean is None else 2, hidden), dtype=torch.float32, device=x.device)
    residual = (None, 0, 0) if dresidual is None else (dresidual, *dresidual.stride())
    kinds = {"RMS": mean is None, "ZERO_CENTERED": zero_centered, "RESIDUAL": dresidual is not None}
    with torch.cuda.device(x.device):
        if _log2_up(hidden) <= LOG_WHOLE_BACKWARD:
            parts = _whole_rows(dy, x, weight.contiguous(), mean, rstd, residual, dx, kinds)
        else:
            parts = _chunks(dy, x, weight.contiguous(), mean, rstd, residual, dx, kinds)
        return dx, _sum(parts)


def _whole_rows(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    residual: tuple[Any, int, int],
    dx: Tensor,
    kinds: dict[str, bool],
) -> Tensor:
    """Fills dx; partial sums `[1 or 2, programs, hidden]`."""
    from primus_turbo_plugin.kernels.triton.norm_kernel import norm_bwd_kernel

    rows, hidden = x.shape
    tile = backward_tile(hidden, warp_size(x.device.index))
    programs, parts = -(-rows // tile["ROWS"]), None
    if tile["SUMS"]:
        units = torch.cuda.get_device_properties(x.device).multi_processor_count
        programs = min(programs, units * programs_per_unit(hidden))
        parts = torch.empty((1 if mean is None else 2, programs, hidden), dtype=torch.float32, device=x.device)
    norm_bwd_kernel[(programs,)](
        dy, x, weight, mean, rstd, residual[0], dx, parts,
        rows, hidden,
        *dy.stride(), *x.stride(), *residual[1:],
        **kinds, **tile,
    )  # fmt: skip
    return _column_sums(dy, x, mean, rstd) if parts is None else parts


def _chunks(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    residual: tuple[Any, int, int],
    dx: Tensor,
    kinds: dict[str, bool],
) -> Tensor:
    """As `_whole_rows`, for longer rows."""
    from primus_turbo_plugin.kernels.triton.norm_kernel import norm_bwd_chunks_kernel

    rows, hidden = x.shape
    norm_bwd_chunks_kernel[(rows,)](
        dy, x, weight, mean, rstd, residual[0], dx,
        rows, hidden,
        *dy.stride(), *x.stride(), *residual[1:],
        **kinds, LOG=LOG_CHUNK, num_warps=8,
    )  # fmt: skip
    return _column_sums(dy, x, mean, rstd)


def _column_sums(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """Partial sums `[1 or 2, programs, hidden]` by a read of their own."""
    from primus_turbo_plugin.kernels.triton.norm_kernel import norm_weight_kernel

    rows, hidden = x.shape
    programs = min(-(-rows // _WEIGHT_ROWS), _WEIGHT_PROGRAMS)
    parts = torch.empty((1 if mean is None else 2, programs, hidden), dtype=torch.float32, device=x.device)
    norm_weight_kernel[(programs, -(-hidden // _WEIGHT_COLS))](
        dy, x, mean, rstd, parts,
        rows, hidden,
        *dy.stride(), *x.stride(),
        RMS=mean is None, ROWS=_WEIGHT_ROWS, COLS=_WEIGHT_COLS, num_warps=4,
    )  # fmt: skip
    return parts


def _sum(parts: Tensor) -> Tensor:
    """fp32 `[sums, programs, hidden]` over programs."""
    from primus_turbo_plugin.kernels.triton.norm_kernel import SUM_COLS, SUM_ROWS, sum_parts_kernel

    sums, count, hidden = parts.shape
    out = torch.empty((sums, hidden), dtype=torch.float32, device=parts.device)
    sum_parts_kernel[(-(-hidden // SUM_COLS), sums)](
        parts, out, count, hidden, ROWS=SUM_ROWS, COLS=SUM_COLS, num_warps=4
    )
    return out


def supports(request: NormRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every width and stride, on GPUs, but not float64."""
    return refusal(request.device) or dtype_refusal(request.dtype) or dtype_refusal(request.weight_dtype)


BACKEND = Backend(name="triton", request=NormRequest, kernels=sys.modules[__name__], supports=supports)
