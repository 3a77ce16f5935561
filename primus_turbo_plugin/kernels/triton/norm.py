"""RMS norm and layer norm, forward and backward (Triton): one read forward, one read of each tensor backward, any width.

Math      as kernels/reference/norm.py; the RMS norm's forward bit for bit
Layout    x, dy and dresidual by their strides, without hidden copies; y and dx contiguous
Cost      docs/performance.md has measurements; norm_kernel.py says what is read
Limits    bf16, fp16 and fp32 on a GPU, weights too. Rows of more than 2^15 columns forward, 2^14 backward, are taken in chunks
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.triton.launching import Answers, Launcher, facts, on_device
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


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward pass of tensors that are alike.

    Attributes:
        launch: Fills y and the statistics; None for no rows.
        sizes: Its integers.
    """

    launch: Launcher | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Backward:
    """The backward pass of tensors that are alike.

    Attributes:
        main: Fills dx; None for no rows.
        sizes: Its integers.
        sums: Shape of the partial sums of columns, `[1 or 2, programs, hidden]`.
        columns: Fills the partial sums, by a read of its own; None where `main` does.
        column_sizes: Its integers.
        total: Adds them up.
    """

    main: Launcher | None
    sizes: tuple[int, ...]
    sums: tuple[int, int, int]
    columns: Launcher | None = None
    column_sizes: tuple[int, ...] = ()
    total: Launcher | None = None


_FORWARD: Answers[_Forward] = Answers()
_BACKWARD: Answers[_Backward] = Answers()


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool, *, rms: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean or None, rstd)."""
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    if torch.compiler.is_compiling():  # a traced tensor has no address; the graph takes the kernel as it is
        plan = _forward_plan(x, bias is not None, zero_centered, rms)
    else:
        question = facts(x), facts(weight), facts(bias), zero_centered, rms
        kept = _FORWARD.get(question)
        plan = kept or _FORWARD.keep(question, _forward_plan(x, bias is not None, zero_centered, rms))
    device = x.device
    y = torch.empty(*x.shape, dtype=x.dtype, device=device)
    rstd = torch.empty(x.shape[0], dtype=torch.float32, device=device)
    mean = None if rms else torch.empty_like(rstd)
    if plan.launch is not None:
        with on_device(device):
            plan.launch(x, weight, bias, y, mean, rstd, *plan.sizes, float(eps))  # an integer is compiled into a kernel
    return y, mean, rstd


def _forward_plan(x: Tensor, has_bias: bool, zero_centered: bool, rms: bool) -> _Forward:
    from primus_turbo_plugin.kernels.triton.norm_kernel import norm_fwd_chunks_kernel, norm_fwd_kernel

    rows, hidden = x.shape
    sizes = rows, hidden, *x.stride()
    if not rows:
        return _Forward(None, sizes)
    constants: dict[str, Any] = {"RMS": rms, "ZERO_CENTERED": zero_centered, "BIAS": has_bias}
    if _log2_up(hidden) <= LOG_WHOLE_FORWARD:
        tile = forward_tile(hidden, warp_size(x.device.index))
        kernel, grid, warps = norm_fwd_kernel, -(-rows // tile["ROWS"]), tile.pop("num_warps")
    else:
        tile = {"LOG": LOG_CHUNK, "LOG_CHUNKS": _log2_up(-(-hidden >> LOG_CHUNK))}
        kernel, grid, warps = norm_fwd_chunks_kernel, rows, 4
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return _Forward(Launcher(kernel, (grid,), {**constants, **tile}, options), sizes)


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
    weight = weight.contiguous()
    if torch.compiler.is_compiling():
        plan = _backward_plan(dy, x, mean is None, dresidual, zero_centered)
    else:
        question = *map(facts, (dy, x, weight, mean, rstd, dresidual)), zero_centered
        kept = _BACKWARD.get(question)
        plan = kept or _BACKWARD.keep(question, _backward_plan(dy, x, mean is None, dresidual, zero_centered))
    device, (sums, _, hidden) = x.device, plan.sums
    dx = torch.empty(*x.shape, dtype=x.dtype, device=device)
    if plan.main is None or plan.total is None:
        return dx, torch.zeros((sums, hidden), dtype=torch.float32, device=device)
    parts = torch.empty(*plan.sums, dtype=torch.float32, device=device)
    total = torch.empty(sums, hidden, dtype=torch.float32, device=device)
    with on_device(device):
        if plan.columns is None:
            plan.main(dy, x, weight, mean, rstd, dresidual, dx, parts, *plan.sizes)
        else:
            unused = () if _log2_up(hidden) > LOG_WHOLE_BACKWARD else (None,)
            plan.main(dy, x, weight, mean, rstd, dresidual, dx, *unused, *plan.sizes)
            plan.columns(dy, x, mean, rstd, parts, *plan.column_sizes)
        plan.total(parts, total, plan.sums[1], hidden)
    return dx, total


def _backward_plan(dy: Tensor, x: Tensor, rms: bool, dresidual: Tensor | None, zero_centered: bool) -> _Backward:
    from primus_turbo_plugin.kernels.triton import norm_kernel as kernels

    rows, hidden = x.shape
    strides = *dy.stride(), *x.stride()
    sizes = rows, hidden, *strides, *((0, 0) if dresidual is None else dresidual.stride())
    count = 1 if rms else 2
    if not rows:
        return _Backward(None, sizes, (count, 0, hidden))
    constants = {"RMS": rms, "ZERO_CENTERED": zero_centered, "RESIDUAL": dresidual is not None}
    programs, with_sums = rows, False
    if _log2_up(hidden) <= LOG_WHOLE_BACKWARD:
        tile = backward_tile(hidden, warp_size(x.device.index))
        programs, with_sums = -(-rows // tile["ROWS"]), bool(tile["SUMS"])
        if with_sums:
            units = torch.cuda.get_device_properties(x.device).multi_processor_count
            programs = min(programs, units * programs_per_unit(hidden))
        kernel, warps = kernels.norm_bwd_kernel, tile.pop("num_warps")
    else:
        kernel, warps, tile = kernels.norm_bwd_chunks_kernel, 8, {"LOG": LOG_CHUNK}
    main = Launcher(kernel, (programs,), {**constants, **tile}, {"num_warps": warps})
    columns = None
    if not with_sums:
        programs = min(-(-rows // _WEIGHT_ROWS), _WEIGHT_PROGRAMS)
        block = {"RMS": rms, "ROWS": _WEIGHT_ROWS, "COLS": _WEIGHT_COLS}
        grid = programs, -(-hidden // _WEIGHT_COLS)
        columns = Launcher(kernels.norm_weight_kernel, grid, block, {"num_warps": 4})
    block = {"ROWS": kernels.SUM_ROWS, "COLS": kernels.SUM_COLS}
    total = Launcher(kernels.sum_parts_kernel, (-(-hidden // kernels.SUM_COLS), count), block, {"num_warps": 4})
    return _Backward(main, sizes, (count, programs, hidden), columns, (rows, hidden, *strides), total)


def supports(request: NormRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every width and stride, on GPUs, but not float64."""
    return refusal(request.device) or dtype_refusal(request.dtype) or dtype_refusal(request.weight_dtype)


BACKEND = Backend(name="triton", request=NormRequest, kernels=sys.modules[__name__], supports=supports)
