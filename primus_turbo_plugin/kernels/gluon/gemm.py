"""gemm_nt in Gluon, where Triton's own code generation leaves data movers and matrix units waiting: gfx950 and gfx1250.

The kernels of each are in `gemm_gfx950.py` and `gemm_gfx1250.py`, with the same functions. Importing this needs no triton.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Union

import torch

from primus_turbo_plugin.devices.detect import detect
from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt
from primus_turbo_plugin.kernels.gluon import gemm_gfx950, gemm_gfx1250
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

KERNELS: dict[str, ModuleType] = {"gfx950": gemm_gfx950, "gfx1250": gemm_gfx1250}
"""Architecture -> its GEMMs."""
MATRIX_UNITS = dict.fromkeys(KERNELS, ("fp8", "mxfp8", "mxfp4"))


@functools.cache
def this_arch() -> str:
    """Architecture of the GPUs of this process, `cpu` without any."""
    return detect().capabilities.arch


def gemm_nt(
    a: Operand,
    b: Operand,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain (bf16 or fp16, any strides) or quantised.
        b: `[N, K]`, plain or quantised like `a`. If one operand is rotated, the other must be rotated alike.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added in fp32 before the rounding; not together with `out`.
        out: fp32 `[M, N]`, contiguous along N, accumulated into in place and returned.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.

    Returns:
        `[M, N]` in `out_dtype`, or `out` or `into`.

    Raises:
        ShapeError: Shapes, dtypes, devices, strides or rotations do not fit.
    """
    y: torch.Tensor = KERNELS[this_arch()].gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out)
    if into is None:
        return y
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
    return into.copy_(y)  # TODO(#4): let the kernels store there


def supports(request: GemmRequest) -> str | None:
    """None, or why these kernels cannot serve the request here."""
    known = " and ".join(KERNELS)
    if request.device != "cuda":
        return f"runs on {known} GPUs, the tensors are on {request.device}"
    arch = this_arch()
    if arch not in KERNELS:
        return f"is written for {known}, this GPU is {arch}"
    return KERNELS[arch].supports(request)


BACKEND = Backend(
    name="gluon",
    request=GemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=MATRIX_UNITS,
    written_for=lambda request: request.device == "cuda" and this_arch() in KERNELS,
    scale_layout=lambda request: "gfx950" if this_arch() == "gfx950" else "plain",
)
