"""What every grouped GEMM backend checks of its arguments, with the same messages."""

from __future__ import annotations

from typing import Union

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)


def check_rows(a: Operand, b: Operand, groups: Groups) -> int:
    """N of `grouped_gemm_nt`.

    Raises:
        ShapeError: a is not `[T, K]`, or b neither `[groups, N, K]` nor, quantised, `[groups * N, K]`.
    """
    plain = isinstance(b, torch.Tensor)
    fits = len(a.shape) == 2 and len(b.shape) == (3 if plain else 2) and a.shape[-1] == b.shape[-1]
    fits = fits and (b.shape[0] == groups.count if plain else b.shape[0] % groups.count == 0)
    if not fits or a.shape[0] != groups.total:
        raise ShapeError(
            f"grouped_gemm_nt: a must be [T, K] with T = {groups.total} and b [{groups.count}, N, K], quantised "
            f"[{groups.count} * N, K]; got {list(a.shape)} and {list(b.shape)}."
        )
    _check_devices("grouped_gemm_nt", a.device, b.device, groups.offsets.device)
    return b.shape[1] if plain else b.shape[0] // groups.count


def check_depth(a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool) -> None:
    """Arguments of `grouped_gemm_depth`.

    Raises:
        ShapeError: a is not `[M, T]`, b not `[N, T]` or out not `[groups, M, N]`; or it is to be added to and not fp32.
    """
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[1] == groups.total
    if not fits or tuple(out.shape) != (groups.count, a.shape[0], b.shape[0]):
        raise ShapeError(
            f"grouped_gemm_depth: a must be [M, T] and b [N, T] with T = {groups.total}, out [{groups.count}, M, N]; got "
            f"{list(a.shape)}, {list(b.shape)} and {list(out.shape)}."
        )
    if accumulate and out.dtype != torch.float32:
        raise ShapeError(f"grouped_gemm_depth: out must be float32 to be accumulated into, got {out.dtype}.")
    _check_devices("grouped_gemm_depth", a.device, b.device, out.device, groups.offsets.device)


def _check_devices(where: str, *devices: torch.device) -> None:
    if len(set(devices)) != 1:
        raise ShapeError(
            f"{where}: all tensors must be on one device, got {sorted(set(map(str, devices)))}. Move them together."
        )
