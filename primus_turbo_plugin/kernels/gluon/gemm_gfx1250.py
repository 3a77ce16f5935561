"""GEMMs of gfx1250: from tensors to a call of `gemm_gfx1250_kernel`. Plain, FP8 and MX operands; dense, and grouped for experts.

`entries.Entries` says what the functions do. Plain operands that are contiguous along neither axis are copied first. No AMD GPU
has run these kernels; see docs/amd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.gemm_checks import common_length
from primus_turbo_plugin.kernels.gluon import operand_kinds, triton_release
from primus_turbo_plugin.kernels.gluon.entries import Entries, Operand, check_rows_contiguous, depth_multiple
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import GemmPlan, Tile, complete
from primus_turbo_plugin.kernels.gluon.grouping import check_offsets, num_groups, row_tiles
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

OLDEST_TRITON = (3, 8)
NUM_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Features switched off, to measure what they are worth.

    Attributes:
        tdm: Tiles by the tensor data mover; off, by copies through pointers.
        transpose_load: Row-contiguous operands by transpose loads; off, transposed through LDS.
    """

    tdm: bool = True
    transpose_load: bool = True


def triton_refusal() -> str | None:
    """Why the installed Triton cannot compile these kernels, or None."""
    return triton_release.refusal(OLDEST_TRITON, "gfx1250's tensor data mover")


def supports(request: GemmRequest) -> str | None:
    """None, or why these kernels cannot multiply such operands; whether this is a gfx1250 is not asked here."""
    return operand_kinds.refusal(request) or triton_refusal()


@dataclass(frozen=True, slots=True)
class _Source:
    """An operand as the kernel reads it: `[rows, K]`, or `[groups, rows, K]` with a stride between groups."""

    element: str
    data: torch.Tensor
    scale: torch.Tensor | None
    k_inner: bool
    stride: int
    stride_scale: int
    is_mx: bool


def _source(operand: Operand) -> _Source:
    if isinstance(operand, QuantizedTensor):
        operand = operand.plain()
        spec, rows = operand.spec, operand.shape[0]
        scale = operand.block_scale
        if spec.is_mx and spec.block_shape[0] > 1:
            scale = scale.repeat_interleave(spec.block_shape[0], 0)[:rows].contiguous()
        stride_scale = scale.stride(0) if spec.is_mx else int(spec.block_shape[0] != 0)
        return _Source(
            spec.element_type.name, operand.data, scale, True, operand.data.stride(0), stride_scale, spec.is_mx
        )
    element = operand_kinds.PLAIN[operand.dtype]
    if operand.stride(-1) != 1 and operand.stride(-2) != 1:
        operand = operand.contiguous()
    k_inner = operand.stride(-1) == 1
    return _Source(element, operand, None, k_inner, operand.stride(-2 if k_inner else -1), 0, False)


def _plan(
    a: _Source, b: _Source, y: torch.Tensor, rows: int, groups: int, grouped: str, accumulate: bool, cus: int,
    length: int | None, ablation: Ablation, tile: Tile | None, bias: bool,
) -> GemmPlan:  # fmt: skip
    wanted = GemmPlan(
        A=a.element, B=b.element, A_K=a.k_inner, B_K=b.k_inner, MX=a.is_mx,
        ROW_SCALE=not a.is_mx and a.scale is not None, ACCUMULATE=accumulate, GROUPED=grouped, GROUPS=groups,
        TDM=ablation.tdm, TRANSPOSE_LOAD=ablation.transpose_load,
    )  # fmt: skip
    return complete(wanted, tile, rows, y.shape[-1], cus, length, y.element_size(), bias)


def _call(
    a: _Source, b: _Source, y: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None, sizes: dict[str, int],
    plan: GemmPlan, tiles: int, cus: int, strides: dict[str, int], table: torch.Tensor | None = None,
) -> KernelCall:  # fmt: skip
    from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_kernel import gemm_gfx1250_kernel

    args: dict[str, Any] = {
        "a_ptr": a.data, "a_scale": a.scale, "b_ptr": b.data, "b_scale": b.scale, "bias_ptr": bias, "c_ptr": y,
        "offsets_ptr": offsets, "tiles_ptr": table, **sizes,
        "stride_a": a.stride, "stride_sa": a.stride_scale, "stride_b": b.stride, "stride_sb": b.stride_scale,
        "stride_bg": 0, "stride_sbg": 0, "stride_c": y.stride(-2), "stride_cg": 0, **strides,
    }  # fmt: skip
    return KernelCall(gemm_gfx1250_kernel, (max(min(tiles, cus), 1),), args, {"P": plan}, {"num_warps": NUM_WARPS})


def _length(a: Operand, b: Operand, source: _Source) -> int:
    """Elements of the contraction to multiply: MX blocks are whole, past `common_length` both operands hold zeros."""
    length = common_length(a, b)
    if source.is_mx:
        stored = [x.padded_contraction for x in (a, b) if isinstance(x, QuantizedTensor)]
        return min(stored)
    return length


def gemm_call(
    a: Operand,
    b: Operand,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    cus: int,
    tile: Tile | None = None,
    ablation: Ablation = Ablation(),
) -> KernelCall:
    """The call that makes y `[M, N]` of a `[M, K]` and b `[N, K]`.

    Args:
        cus: Compute units: work-groups that share the tiles.
        tile: Instead of the one chosen.
        ablation: Features switched off.

    Raises:
        ShapeError: Pointer copies were asked for and rows are not multiples of 16 bytes.
    """
    left, right = _source(a), _source(b)
    rows, cols, length = a.shape[0], b.shape[0], _length(a, b, left)
    plan = _plan(left, right, y, rows, 1, "none", accumulate, cus, length, ablation, tile, bias is not None)
    if not ablation.tdm:
        _check_aligned(left, right, rows, cols, length)
    tiles = -(-rows // plan.BM) * -(-cols // plan.BN)
    return _call(left, right, y, bias, None, {"M": rows, "N": cols, "K": length}, plan, tiles, cus, {})


def grouped_call(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    cus: int,
    multiple: int = 1,
    check_on_device: bool = False,
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_nt`."""
    groups = num_groups("grouped_gemm_nt", offsets)
    check_offsets("grouped_gemm_nt", offsets, y.shape[0], multiple, check_on_device)
    left, right = _source(a), _source(b)
    rows, cols = y.shape
    weight = (groups, cols, a.shape[1]) if isinstance(b, torch.Tensor) else (groups * cols, a.shape[1])
    if tuple(b.shape) != weight or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_nt: a must be [T, K] and b [groups, N, K] of the same kind, quantised [groups * N, K], with "
            f"{groups} groups; got a {list(a.shape)}, b {list(b.shape)}."
        )
    length = a.shape[1] if isinstance(a, torch.Tensor) else _length(a, b, left)
    average = -(-rows // groups)
    plan = _plan(left, right, y, average, groups, "rows", False, cus, None, Ablation(), tile, bias is not None)
    table = row_tiles(offsets, plan.BM, rows)
    tiles = (table.numel() - groups - 1) * -(-cols // plan.BN)
    plain = isinstance(b, torch.Tensor)
    strides = {
        "stride_bg": right.data.stride(0) if plain else cols * right.stride,
        "stride_sbg": cols * right.stride_scale if right.is_mx else 0,
    }
    sizes = {"M": rows, "N": cols, "K": length}
    return _call(left, right, y, bias, offsets, sizes, plan, tiles, cus, strides, table)


def depth_call(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool,
    cus: int,
    multiple: int | None = None,
    check_on_device: bool = False,
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_depth`."""
    groups = num_groups("grouped_gemm_depth", offsets)
    check_offsets("grouped_gemm_depth", offsets, a.shape[1], depth_multiple(a, multiple), check_on_device)
    left, right = _source(a), _source(b)
    check_rows_contiguous(out)
    if tuple(out.shape) != (groups, a.shape[0], b.shape[0]) or a.shape[1] != b.shape[1] or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_depth: a must be [M, T], b [N, T] of the same kind and out [{groups}, M, N]; got a {list(a.shape)}, "
            f"b {list(b.shape)}, out {list(out.shape)}."
        )
    if accumulate and out.dtype != torch.float32:
        raise ShapeError(f"grouped_gemm_depth: out must be float32 to accumulate into, got {out.dtype}.")
    rows, cols = out.shape[1:]
    plan = _plan(left, right, out, rows, groups, "depth", accumulate, cus, None, Ablation(), tile, False)
    tiles = -(-rows // plan.BM) * -(-cols // plan.BN) * groups
    sizes = {"M": rows, "N": cols, "K": a.shape[1]}
    return _call(left, right, out, None, offsets, sizes, plan, tiles, cus, {"stride_cg": out.stride(0)})


def _check_aligned(a: _Source, b: _Source, rows: int, cols: int, length: int) -> None:
    for name, source, outer in (("a", a, rows), ("b", b, cols)):
        items = 16 // source.data.element_size()
        inner = (length // 2 if source.element == "e2m1" else length) if source.k_inner else outer
        if source.stride % items or inner % items or (source.is_mx and length % 256):
            raise ShapeError(
                f"gemm_nt without the tensor data mover: rows of {name} must be multiples of 16 bytes (and K of 256 with MX "
                f"scales), got {inner} elements with stride {source.stride}. Pad them, or leave the tensor data mover on."
            )


_ENTRIES = Entries(gemm_call, grouped_call, depth_call)
gemm_nt = _ENTRIES.gemm_nt
grouped_gemm_nt = _ENTRIES.grouped_gemm_nt
grouped_gemm_depth = _ENTRIES.grouped_gemm_depth
