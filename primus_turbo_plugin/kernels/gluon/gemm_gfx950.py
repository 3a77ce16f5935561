"""GEMMs of gfx950: from tensors to a call of `gemm_gfx950_kernel`. Plain, FP8 and MX operands; dense, and grouped for experts.

`entries.Entries` says what the functions do. Plain operands whose rows do not start at multiples of 16 bytes are copied first. No
AMD GPU has run these kernels; see docs/amd.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.gluon import operand_kinds, triton_release
from primus_turbo_plugin.kernels.gluon.entries import MX_BLOCK, Entries, Operand, check_rows_contiguous, depth_multiple
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_operands import (
    Source,
    cells_of,
    grouped_source,
    padded,
    plain_source,
    source_of,
)
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import ELEMENT_BITS, HALVES, GemmPlan, Tile, choose_tile
from primus_turbo_plugin.kernels.gluon.grouping import check_offsets, num_groups, row_tiles
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.scale_layout import BLOCKS, ROWS

OLDEST_TRITON = (3, 8)
OPTIONS = {"num_warps": 4, "waves_per_eu": 1}
"""One wave a SIMD, which may then use all 512 registers."""
_LARGEST_OFFSET = 2**31 - 1
"""Offsets inside a tile are 32 bits, in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Features switched off, to measure what they are worth.

    Attributes:
        async_copy: Tiles by direct-to-LDS copies; off, through registers.
        transpose_load: Row-contiguous operands by transpose loads; off, transposed through LDS.
    """

    async_copy: bool = True
    transpose_load: bool = True


def triton_refusal() -> str | None:
    """Why the installed Triton cannot compile these kernels, or None."""
    return triton_release.refusal(OLDEST_TRITON, "gfx950's layouts in Gluon")


def supports(request: GemmRequest) -> str | None:
    """None, or why these kernels cannot multiply such operands; whether this is a gfx950 is not asked here."""
    reason = operand_kinds.refusal(request)
    if reason is not None:
        return reason
    specs = [kind for kind in (request.a, request.b) if isinstance(kind, QuantSpec)]
    if len({ELEMENT_BITS[spec.element_type.name] for spec in specs}) > 1:
        return f"both operands must have 8-bit or both 4-bit elements, got {specs[0]} and {specs[1]}"
    return triton_refusal()


def _plan(a: Source, b: Source, tile: Tile, grouped: str, groups: int, accumulate: bool, cells: int | None,
          ablation: Ablation) -> GemmPlan:  # fmt: skip
    pair = 2 * (64 if a.element in HALVES else 128)
    return GemmPlan(
        A=a.element, B=b.element, A_K=a.k_inner, B_K=b.k_inner, MX=a.is_mx, A_SHUFFLED=a.shuffled, B_SHUFFLED=b.shuffled,
        ROW_SCALE=not a.is_mx and a.scale is not None, ACCUMULATE=accumulate, GROUPED=grouped, GROUPS=groups,
        EVEN_K=cells is not None and cells % pair == 0, ASYNC_COPY=ablation.async_copy, TRANSPOSE_LOAD=ablation.transpose_load,
        **{name: value for name, value in tile._asdict().items() if name != "share"},
    )  # fmt: skip


def _call(a: Source, b: Source, y: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
          tiles: torch.Tensor | None, sizes: tuple[int, int, int], plan: GemmPlan, count: int,
          strides: dict[str, int]) -> KernelCall:  # fmt: skip
    check_rows_contiguous(y)
    for name, tensor, stride in (("a", a.data, a.stride), ("b", b.data, b.stride), ("the output", y, y.stride(-2))):
        if max(plan.BM, plan.BN) * stride * tensor.element_size() > _LARGEST_OFFSET:
            raise ShapeError(
                f"gemm: rows of {name} are {stride} elements apart, too far for 32-bit offsets inside a tile. Use another "
                "backend for this product."
            )
    bias = bias if bias is None else bias.contiguous()
    from primus_turbo_plugin.kernels.gluon.gemm_gfx950_kernel import gemm_gfx950_kernel

    args: dict[str, Any] = {
        "a_ptr": a.data, "a_scale": a.scale, "b_ptr": b.data, "b_scale": b.scale, "bias_ptr": bias, "c_ptr": y,
        "offsets_ptr": offsets, "tiles_ptr": tiles, "M": sizes[0], "N": sizes[1], "K": sizes[2],
        "stride_a": a.stride, "stride_sa": a.stride_scale, "stride_b": b.stride, "stride_sb": b.stride_scale,
        "stride_bg": 0, "stride_sbg": 0, "stride_c": y.stride(-2), "stride_cg": 0, **strides,
    }  # fmt: skip
    return KernelCall(gemm_gfx950_kernel, (max(count, 1),), args, {"P": plan}, dict(OPTIONS))


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
        cus: Compute units of the GPU.
        tile: Instead of the one chosen.
        ablation: Features switched off.
    """
    left, right = source_of(a), source_of(b)
    if left.k_inner != right.k_inner and a.shape[1] % 8:  # one operand was padded along K, the other must be as well
        left, right = (plain_source(padded(x)) for x in (a, b) if isinstance(x, torch.Tensor))
    rows, cols, cells = a.shape[0], b.shape[0], cells_of(a, b, left)
    tile = tile or choose_tile(left.element, rows, cols, 1, cus)
    plan = _plan(left, right, tile, "none", 1, accumulate, cells, ablation)
    count = -(-rows // plan.BM) * -(-cols // plan.BN)
    return _call(left, right, y, bias, None, None, (rows, cols, cells), plan, count, {})


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
    rows, cols = y.shape
    check_offsets("grouped_gemm_nt", offsets, rows, multiple, check_on_device)
    left = grouped_source(a, may_shuffle=multiple % ROWS == 0)
    right = grouped_source(b, may_shuffle=cols % ROWS == 0)
    weight = (groups, cols, a.shape[1]) if isinstance(b, torch.Tensor) else (groups * cols, a.shape[1])
    if tuple(b.shape) != weight or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_nt: a must be [T, K] and b [groups, N, K] of the same kind, quantised [groups * N, K], with {groups} "
            f"groups; got a {list(a.shape)}, b {list(b.shape)} and {cols} columns."
        )
    if a.shape[1] == 0:
        raise ShapeError("grouped_gemm_nt: the contraction is empty (K is 0), there is nothing to multiply.")
    if not left.k_inner:
        left = plain_source(padded(a)) if isinstance(a, torch.Tensor) else left
    if not right.k_inner and a.shape[1] % 8 and isinstance(b, torch.Tensor):
        right = plain_source(padded(b))
    cells = cells_of(a, b, left) if not isinstance(b, torch.Tensor) else -(-a.shape[1] // 8) * 8
    tile = tile or choose_tile(left.element, -(-rows // groups), cols, groups, cus)
    plan = _plan(left, right, tile, "rows", groups, False, cells, Ablation())
    plain = isinstance(b, torch.Tensor)
    strides = {
        "stride_bg": right.data.stride(0) if plain else cols * right.stride,
        "stride_sbg": (cols // ROWS if right.shuffled else cols) * right.stride_scale,
    }
    count = (-(-rows // plan.BM) + groups) * -(-cols // plan.BN)
    tiles = row_tiles(offsets, plan.BM, rows)
    return _call(left, right, y, bias, offsets, tiles, (rows, cols, cells), plan, count, strides)


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
    multiple = depth_multiple(a, multiple)
    check_offsets("grouped_gemm_depth", offsets, a.shape[1], multiple, check_on_device)
    whole = multiple % (BLOCKS * MX_BLOCK) == 0
    left, right = (grouped_source(x, may_shuffle=whole, rows_inner=True) for x in (a, b))
    if tuple(out.shape) != (groups, a.shape[0], b.shape[0]) or a.shape[1] != b.shape[1] or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_depth: a must be [M, T], b [N, T] of the same kind and out [{groups}, M, N]; got a {list(a.shape)}, "
            f"b {list(b.shape)}, out {list(out.shape)}."
        )
    if accumulate and out.dtype != torch.float32:
        raise ShapeError(f"grouped_gemm_depth: out must be float32 to accumulate into, got {out.dtype}.")
    if not left.is_mx and left.scale is not None:
        raise ShapeError("grouped_gemm_depth: FP8 operands are not offered, their stretches start anywhere. Use MXFP8.")
    if left.is_mx:  # offsets count elements, the kernel counts cells
        offsets = offsets * ELEMENT_BITS[left.element] // 8
    rows, cols = out.shape[1:]
    tile = tile or choose_tile(left.element, rows, cols, groups, cus)
    plan = _plan(left, right, tile, "depth", groups, accumulate, None, Ablation())
    count = -(-rows // plan.BM) * -(-cols // plan.BN) * groups
    return _call(
        left, right, out, None, offsets, None, (rows, cols, a.shape[1]), plan, count, {"stride_cg": out.stride(0)}
    )


_ENTRIES = Entries(gemm_call, grouped_call, depth_call)
gemm_nt = _ENTRIES.gemm_nt
grouped_gemm_nt = _ENTRIES.grouped_gemm_nt
grouped_gemm_depth = _ENTRIES.grouped_gemm_depth
