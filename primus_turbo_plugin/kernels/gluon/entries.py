"""The functions of the Gluon GEMMs that are the same on every architecture: what is checked and allocated before a call.

    gemm_nt             y = a @ b.T (+ bias), or out += a @ b.T
    grouped_gemm_nt     the same for stretches of a's rows, each with its own b: fprop and dgrad of experts
    grouped_gemm_depth  out[g] = a[:, stretch] @ b[:, stretch].T: wgrad of experts

Plain operands may be contiguous along either axis, which covers NT, NN and TN; others are copied first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt
from primus_turbo_plugin.kernels.gluon.grouping import num_groups
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

MX_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Entries:
    """An architecture's GEMMs.

    Attributes:
        gemm_call: From operands and output to the launch, given the number of compute units.
        grouped_call: Likewise for `grouped_gemm_nt`.
        depth_call: Likewise for `grouped_gemm_depth`.
    """

    gemm_call: Callable[..., KernelCall]
    grouped_call: Callable[..., KernelCall]
    depth_call: Callable[..., KernelCall]

    @torch.no_grad()
    def gemm_nt(
        self,
        a: Operand,
        b: Operand,
        *,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

        Args:
            a: `[M, K]`, plain or quantised.
            b: `[N, K]`, likewise.
            out_dtype: dtype of the result; float32 when `out` is given.
            bias: `[N]`, added in fp32 before the rounding; not together with `out`.
            out: fp32 `[M, N]`, contiguous along N, accumulated into in place and returned.

        Returns:
            `[M, N]` in `out_dtype`, or `out`.

        Raises:
            ShapeError: Shapes, dtypes, devices, strides or rotations do not fit.
        """
        check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out)
        check_rows_contiguous(out)
        y = out if out is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
        if y.numel() == 0:
            return y
        if a.shape[1] == 0:
            return y if out is not None else (y.zero_() if bias is None else y.copy_(bias.expand_as(y)))
        _run(self.gemm_call(a, b, y, bias=bias, accumulate=out is not None, cus=_cus(y)), y)
        return y

    @torch.no_grad()
    def grouped_gemm_nt(
        self,
        a: Operand,
        b: Operand,
        offsets: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        multiple: int = 1,
        check_on_device: bool = False,
    ) -> torch.Tensor:
        """y[rows of g] = a[rows of g] @ b[g].T (+ bias[g]) for every group (expert), in one launch.

        Args:
            a: `[T, K]`, rows sorted by group, contiguous along K.
            b: `[groups, N, K]`, contiguous along N or K within a group; quantised: `[groups * N, K]`.
            offsets: int32 or int64 `[groups + 1]` on the device: group g has rows offsets[g] ... offsets[g + 1] - 1, the last
                ends at T or before; y's rows past it are not written. Groups may be empty. Never read on the host.
            out_dtype: dtype of the result.
            bias: `[groups, N]`.
            multiple: What every offset is a multiple of, on the caller's word. Multiples of 32 let MX scales of a in the gfx950
                layout be read as they lie.
            check_on_device: Check the values of `offsets` on the GPU, without waiting; see `grouping.check_offsets`.

        Returns:
            `[T, N]`.
        """
        groups = num_groups("grouped_gemm_nt", offsets)
        cols = b.shape[1] if isinstance(b, torch.Tensor) else b.shape[0] // groups
        y = torch.empty(a.shape[0], cols, dtype=out_dtype, device=a.device)
        if y.numel():
            check = {"multiple": multiple, "check_on_device": check_on_device}
            _run(self.grouped_call(a, b, offsets, y, bias=bias, cus=_cus(y), **check), y)
        return y

    @torch.no_grad()
    def grouped_gemm_depth(
        self,
        a: Operand,
        b: Operand,
        offsets: torch.Tensor,
        out: torch.Tensor,
        *,
        accumulate: bool,
        multiple: int | None = None,
        check_on_device: bool = False,
    ) -> torch.Tensor:
        """out[g] (+)= a[:, s] @ b[:, s].T with s = offsets[g] ... offsets[g + 1] - 1: a wgrad per expert, in one launch.

        Args:
            a: `[M, T]` (the transposed view of dy, say).
            b: `[N, T]`, likewise.
            offsets: int32 or int64 `[groups + 1]` on the device, the last at most T.
            out: `[groups, M, N]`, contiguous along N; an empty group's becomes zero, or stays as it is with `accumulate`.
            accumulate: Add to `out`, which is float32 then.
            multiple: What every offset is a multiple of, on the caller's word: 1 for plain operands by default, 32 for MX ones,
                which need it (other offsets give wrong results, unnoticed unless `offsets` is on the CPU or checked). Multiples
                of 256 let MX scales in the gfx950 layout be read as they lie.
            check_on_device: Check the values of `offsets` on the GPU, without waiting; see `grouping.check_offsets`.

        Returns:
            `out`.

        Raises:
            ShapeError: Shapes, dtypes or strides do not fit, or `multiple` is none of 32 with MX operands.
        """
        if out.numel():
            check = {"multiple": multiple, "check_on_device": check_on_device}
            _run(self.depth_call(a, b, offsets, out, accumulate=accumulate, cus=_cus(out), **check), out)
        return out


def depth_multiple(a: Operand, multiple: int | None) -> int:
    """`multiple` or its default, checked: a block of MX scales must not hold elements of two groups."""
    is_mx = isinstance(a, QuantizedTensor) and a.spec.is_mx
    multiple = (MX_BLOCK if is_mx else 1) if multiple is None else multiple
    if is_mx and multiple % MX_BLOCK:
        raise ShapeError(
            f"grouped_gemm_depth: MX scales cover {MX_BLOCK} elements of the contraction, so offsets must be multiples of "
            f"{MX_BLOCK}, got multiple={multiple}. Pad every group."
        )
    return multiple


def check_rows_contiguous(y: torch.Tensor | None) -> None:
    """Raises ShapeError unless an output is contiguous along its last axis."""
    if y is not None and y.stride(-1) != 1:
        raise ShapeError(
            f"gemm: the output must be contiguous along its last axis, got strides {list(y.stride())}. Accumulate into a "
            "contiguous tensor."
        )


def _cus(tensor: torch.Tensor) -> int:
    """Compute units; 1 where there is no GPU, so that arguments are checked before the launch fails."""
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count) if tensor.is_cuda else 1


def _run(call: KernelCall, output: torch.Tensor) -> None:
    with torch.cuda.device(output.device):
        call.run()
