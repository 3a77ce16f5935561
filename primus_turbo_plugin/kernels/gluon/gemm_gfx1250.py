"""GEMMs of gfx1250: from tensors to a call of `gemm_gfx1250_kernel`. Plain, FP8 and MX operands; dense, and grouped for experts.

    gemm_nt             y = a @ b.T (+ bias), or out += a @ b.T
    grouped_gemm_nt     the same for stretches of a's rows, each with its own b: fprop and dgrad of experts
    grouped_gemm_depth  out[g] = a[:, stretch] @ b[:, stretch].T: wgrad of experts

Plain operands may be contiguous along either axis, which covers NT, NN and TN. No AMD GPU has run these kernels; see docs/amd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Union

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.gluon import operand_kinds, triton_release
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import GemmPlan, Tile, complete
from primus_turbo_plugin.kernels.gluon.grouping import check_offsets, row_tiles
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

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


@torch.no_grad()
def gemm_nt(
    a: Operand, b: Operand, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain or quantised; a plain operand that is contiguous along neither axis is copied.
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
    _check_rows("out", out)
    y = out if out is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if y.numel() == 0:
        return y
    if a.shape[1] == 0:
        return y if out is not None else (y.zero_() if bias is None else y.copy_(bias.expand_as(y)))
    with torch.cuda.device(a.device):
        gemm_call(a, b, y, bias=bias, accumulate=out is not None, programs=_programs(y)).run()
    return y


@torch.no_grad()
def grouped_gemm_nt(
    a: Operand, b: Operand, offsets: torch.Tensor, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T (+ bias[g]) for every group (expert), in one launch.

    Args:
        a: `[T, K]`, rows sorted by group, contiguous along either axis.
        b: `[groups, N, K]`, contiguous along N or K within a group; quantised: `[groups * N, K]`.
        offsets: int32 or int64 `[groups + 1]` on the device: group g has rows offsets[g] ... offsets[g + 1] - 1, the last
            ends at T. Groups may be empty. Never read on the host.
        out_dtype: dtype of the result.
        bias: `[groups, N]`.

    Returns:
        `[T, N]`.
    """
    groups = offsets.numel() - 1
    cols = b.shape[1] if isinstance(b, torch.Tensor) else b.shape[0] // groups
    y = torch.empty(a.shape[0], cols, dtype=out_dtype, device=a.device)
    if y.numel():
        with torch.cuda.device(a.device):
            grouped_call(a, b, offsets, y, bias=bias, programs=_programs(y)).run()
    return y


@torch.no_grad()
def grouped_gemm_depth(
    a: Operand, b: Operand, offsets: torch.Tensor, out: torch.Tensor, *, accumulate: bool
) -> torch.Tensor:
    """out[g] (+)= a[:, s] @ b[:, s].T with s = offsets[g] ... offsets[g + 1] - 1: a wgrad per expert, in one launch.

    Args:
        a: `[M, T]` (the transposed view of dy, say), contiguous along either axis; MX operands need offsets that are multiples
            of 32.
        b: `[N, T]`, likewise.
        offsets: int32 or int64 `[groups + 1]` on the device.
        out: `[groups, M, N]`, contiguous along N; an empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.

    Returns:
        `out`.
    """
    if accumulate and out.dtype != torch.float32:
        raise ShapeError(f"grouped_gemm_depth: out must be float32 to accumulate into, got {out.dtype}.")
    if out.numel():
        with torch.cuda.device(a.device):
            depth_call(a, b, offsets, out, accumulate=accumulate, programs=_programs(out)).run()
    return out


# -- calls as data ------------------------------------------------------------------------------------------------------
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
    a: _Source, b: _Source, y: torch.Tensor, rows: int, groups: int, grouped: str, accumulate: bool, programs: int,
    length: int | None, ablation: Ablation, tile: Tile | None, bias: bool,
) -> GemmPlan:  # fmt: skip
    wanted = GemmPlan(
        A=a.element, B=b.element, A_K=a.k_inner, B_K=b.k_inner, MX=a.is_mx,
        ROW_SCALE=not a.is_mx and a.scale is not None, ACCUMULATE=accumulate, GROUPED=grouped, GROUPS=groups,
        TDM=ablation.tdm, TRANSPOSE_LOAD=ablation.transpose_load,
    )  # fmt: skip
    return complete(wanted, tile, rows, y.shape[-1], programs, length, y.element_size(), bias)


def _call(
    a: _Source, b: _Source, y: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None, sizes: dict[str, int],
    plan: GemmPlan, tiles: int, programs: int, strides: dict[str, int], table: torch.Tensor | None = None,
) -> KernelCall:  # fmt: skip
    from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_kernel import gemm_gfx1250_kernel

    args: dict[str, Any] = {
        "a_ptr": a.data, "a_scale": a.scale, "b_ptr": b.data, "b_scale": b.scale, "bias_ptr": bias, "c_ptr": y,
        "offsets_ptr": offsets, "tiles_ptr": table, **sizes,
        "stride_a": a.stride, "stride_sa": a.stride_scale, "stride_b": b.stride, "stride_sb": b.stride_scale,
        "stride_bg": 0, "stride_sbg": 0, "stride_c": y.stride(-2), "stride_cg": 0, **strides,
    }  # fmt: skip
    return KernelCall(gemm_gfx1250_kernel, (max(min(tiles, programs), 1),), args, {"P": plan}, {"num_warps": NUM_WARPS})


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
    programs: int,
    tile: Tile | None = None,
    ablation: Ablation = Ablation(),
) -> KernelCall:
    """The call that makes y `[M, N]` of a `[M, K]` and b `[N, K]`.

    Args:
        programs: Work-groups that share the tiles.
        tile: Instead of the one chosen.
        ablation: Features switched off.

    Raises:
        ShapeError: Pointer copies were asked for and rows are not multiples of 16 bytes.
    """
    left, right = _source(a), _source(b)
    rows, cols, length = a.shape[0], b.shape[0], _length(a, b, left)
    plan = _plan(left, right, y, rows, 1, "none", accumulate, programs, length, ablation, tile, bias is not None)
    if not ablation.tdm:
        _check_aligned(left, right, rows, cols, length)
    tiles = -(-rows // plan.BM) * -(-cols // plan.BN)
    return _call(left, right, y, bias, None, {"M": rows, "N": cols, "K": length}, plan, tiles, programs, {})


def grouped_call(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    programs: int,
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_nt`."""
    groups = check_offsets("grouped_gemm_nt", offsets)
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
    plan = _plan(left, right, y, average, groups, "rows", False, programs, None, Ablation(), tile, bias is not None)
    table = row_tiles(offsets, plan.BM, rows)
    tiles = (table.numel() - groups - 1) * -(-cols // plan.BN)
    plain = isinstance(b, torch.Tensor)
    strides = {
        "stride_bg": right.data.stride(0) if plain else cols * right.stride,
        "stride_sbg": cols * right.stride_scale if right.is_mx else 0,
    }
    sizes = {"M": rows, "N": cols, "K": length}
    return _call(left, right, y, bias, offsets, sizes, plan, tiles, programs, strides, table)


def depth_call(
    a: Operand,
    b: Operand,
    offsets: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool,
    programs: int,
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_depth`."""
    groups = check_offsets("grouped_gemm_depth", offsets)
    left, right = _source(a), _source(b)
    _check_rows("out", out)
    if tuple(out.shape) != (groups, a.shape[0], b.shape[0]) or a.shape[1] != b.shape[1] or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_depth: a must be [M, T], b [N, T] of the same kind and out [{groups}, M, N]; got a {list(a.shape)}, "
            f"b {list(b.shape)}, out {list(out.shape)}."
        )
    rows, cols = out.shape[1:]
    plan = _plan(left, right, out, rows, groups, "depth", accumulate, programs, None, Ablation(), tile, False)
    tiles = -(-rows // plan.BM) * -(-cols // plan.BN) * groups
    sizes = {"M": rows, "N": cols, "K": a.shape[1]}
    return _call(left, right, out, None, offsets, sizes, plan, tiles, programs, {"stride_cg": out.stride(0)})


# -- checks -------------------------------------------------------------------------------------------------------------
def _check_rows(name: str, tensor: torch.Tensor | None) -> None:
    if tensor is not None and tensor.stride(-1) != 1:
        raise ShapeError(
            f"gemm: {name} must be contiguous along its last axis, got strides {list(tensor.stride())}. "
            f"Accumulate into a contiguous tensor."
        )


def _check_aligned(a: _Source, b: _Source, rows: int, cols: int, length: int) -> None:
    for name, source, outer in (("a", a, rows), ("b", b, cols)):
        items = 16 // source.data.element_size()
        inner = (length // 2 if source.element == "e2m1" else length) if source.k_inner else outer
        if source.stride % items or inner % items or (source.is_mx and length % 256):
            raise ShapeError(
                f"gemm_nt without the tensor data mover: rows of {name} must be multiples of 16 bytes (and K of 256 with MX "
                f"scales), got {inner} elements with stride {source.stride}. Pad them, or leave the tensor data mover on."
            )


def _programs(tensor: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)
