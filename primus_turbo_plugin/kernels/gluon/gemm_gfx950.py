"""GEMMs of gfx950: from tensors to a call of `gemm_gfx950_kernel`. Plain, FP8 and MX operands; dense, and grouped for experts.

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
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import ELEMENT_BITS, HALVES, GemmPlan, Tile, choose_tile
from primus_turbo_plugin.kernels.gluon.grouping import check_offsets, row_tiles
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

OLDEST_TRITON = (3, 8)
OPTIONS = {"num_warps": 4, "waves_per_eu": 1}
"""One wave a SIMD, which may then use all 512 registers."""
_TRANSFER_BYTES = 16
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


@torch.no_grad()
def gemm_nt(
    a: Operand, b: Operand, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain or quantised. A plain operand is copied first if its rows (where K is contiguous) or columns do not
            start at multiples of 16 bytes.
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
    y = out if out is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    if y.numel() == 0:
        return y
    if a.shape[1] == 0:
        return y if out is not None else (y.zero_() if bias is None else y.copy_(bias.expand_as(y)))
    with torch.cuda.device(a.device):
        gemm_call(a, b, y, bias=bias, accumulate=out is not None, cus=_cus(y)).run()
    return y


@torch.no_grad()
def grouped_gemm_nt(
    a: Operand, b: Operand, offsets: torch.Tensor, *, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """y[rows of g] = a[rows of g] @ b[g].T (+ bias[g]) for every group (expert), in one launch.

    Args:
        a: `[T, K]`, rows sorted by group, contiguous along K.
        b: `[groups, N, K]`, contiguous along N or K within a group; quantised: `[groups * N, K]`.
        offsets: int32 or int64 `[groups + 1]` on the device: group g has rows offsets[g] ... offsets[g + 1] - 1, the last
            ends at T. Groups may be empty. Never read on the host.
        out_dtype: dtype of the result.
        bias: `[groups, N]`, contiguous.

    Returns:
        `[T, N]`.
    """
    groups = check_offsets("grouped_gemm_nt", offsets)
    cols = b.shape[1] if isinstance(b, torch.Tensor) else b.shape[0] // groups
    y = torch.empty(a.shape[0], cols, dtype=out_dtype, device=a.device)
    if y.numel():
        with torch.cuda.device(a.device):
            grouped_call(a, b, offsets, y, bias=bias, cus=_cus(y)).run()
    return y


@torch.no_grad()
def grouped_gemm_depth(
    a: Operand, b: Operand, offsets: torch.Tensor, out: torch.Tensor, *, accumulate: bool
) -> torch.Tensor:
    """out[g] (+)= a[:, s] @ b[:, s].T with s = offsets[g] ... offsets[g + 1] - 1: a wgrad per expert, in one launch.

    Args:
        a: `[M, T]` (the transposed view of dy, say); plain and contiguous along T it is copied. MX operands need offsets that are
            multiples of 32.
        b: `[N, T]`, likewise.
        offsets: int32 or int64 `[groups + 1]` on the device.
        out: `[groups, M, N]`, contiguous along N; an empty group's becomes zero, or stays as it is with `accumulate`.
        accumulate: Add to `out`, which is float32 then.

    Returns:
        `out`.
    """
    if out.numel():
        with torch.cuda.device(a.device):
            depth_call(a, b, offsets, out, accumulate=accumulate, cus=_cus(out)).run()
    return out


# -- operands -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Source:
    """An operand as the kernel reads it: cells `[rows, K]`, or `[groups, rows, K]` with a stride between groups.

    A cell is an element of 16 bits, or a byte of one or two codes.
    """

    element: str
    data: torch.Tensor
    scale: torch.Tensor | None
    k_inner: bool
    stride: int
    stride_scale: int
    is_mx: bool
    shuffled: bool


def _quantized_source(operand: QuantizedTensor, shuffle: bool) -> _Source:
    """`shuffle`: MX scales in the gfx950 layout, else plain."""
    spec = operand.spec
    data = operand.data
    places = (data.shape[1], data.stride(0), data.data_ptr())
    if data.stride(1) != 1 or any(place % _TRANSFER_BYTES for place in places):
        data = _padded(data)
    scale, stride_scale = operand.block_scale, int(spec.block_shape[0] != 0)
    if spec.is_mx and shuffle:
        scale = operand.with_scale_layout("gfx950").block_scale.view(torch.int32)
        stride_scale = scale.stride(0)
    elif spec.is_mx:
        scale = operand.plain().block_scale
        if spec.block_shape[0] > 1:
            scale = scale.repeat_interleave(spec.block_shape[0], 0)[: operand.shape[0]].contiguous()
        stride_scale = scale.stride(0)
    return _Source(spec.element_type.name, data, scale, True, data.stride(0), stride_scale, spec.is_mx, shuffle)


def _plain_source(operand: torch.Tensor, rows_inner: bool = False) -> _Source:
    """An aligned operand as it is, another as a copy contiguous along K (or its rows), padded with zeros to whole transfers.

    Args:
        rows_inner: Must be contiguous along its rows, because stretches of K that start anywhere are read.
    """
    vector = _TRANSFER_BYTES // operand.element_size()
    along_k = operand.stride(-1) == 1 and not rows_inner
    turned = operand if along_k else operand.transpose(-1, -2)
    aligned = (
        turned.stride(-1) == 1
        and all(stride % vector == 0 for stride in turned.stride()[:-1])
        and turned.shape[-1] % vector == 0
        and operand.data_ptr() % _TRANSFER_BYTES == 0
        and (rows_inner or operand.shape[-1] % vector == 0)
    )
    if not aligned:
        along_k = not rows_inner
        turned = _padded(operand if along_k else operand.transpose(-1, -2))
    return _Source(operand_kinds.PLAIN[operand.dtype], turned, None, along_k, turned.stride(-2), 0, False, False)


def _padded(data: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose rows are whole transfers, with zeros at their ends."""
    vector = _TRANSFER_BYTES // data.element_size()
    copy = data.new_zeros(*data.shape[:-1], -(-data.shape[-1] // vector) * vector)
    copy[..., : data.shape[-1]] = data
    return copy


def _source(operand: Operand, *, shuffle: bool = True, rows_inner: bool = False) -> _Source:
    if isinstance(operand, QuantizedTensor):
        return _quantized_source(operand, shuffle and operand.spec.is_mx)
    return _plain_source(operand, rows_inner)


def _cells(a: Operand, b: Operand, left: _Source) -> int:
    """Cells of the contraction to multiply, in whole transfers: past the common length both operands hold zeros."""
    elements = common_length(a, b)  # refuses operands that are rotated differently
    if left.is_mx:
        elements = min(x.padded_contraction for x in (a, b) if isinstance(x, QuantizedTensor))
    cells = elements * ELEMENT_BITS[left.element] // (16 if left.element in HALVES else 8)
    vector = 8 if left.element in HALVES else _TRANSFER_BYTES
    return -(-cells // vector) * vector


# -- calls as data ------------------------------------------------------------------------------------------------------
def _plan(a: _Source, b: _Source, tile: Tile, grouped: str, groups: int, accumulate: bool, cells: int | None,
          ablation: Ablation) -> GemmPlan:  # fmt: skip
    pair = 2 * (64 if a.element in HALVES else 128)
    return GemmPlan(
        A=a.element, B=b.element, A_K=a.k_inner, B_K=b.k_inner, MX=a.is_mx, A_SHUFFLED=a.shuffled, B_SHUFFLED=b.shuffled,
        ROW_SCALE=not a.is_mx and a.scale is not None, ACCUMULATE=accumulate, GROUPED=grouped, GROUPS=groups,
        EVEN_K=cells is not None and cells % pair == 0, ASYNC_COPY=ablation.async_copy, TRANSPOSE_LOAD=ablation.transpose_load,
        **{name: value for name, value in tile._asdict().items() if name != "share"},
    )  # fmt: skip


def _call(a: _Source, b: _Source, y: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None,
          tiles: torch.Tensor | None, sizes: tuple[int, int, int], plan: GemmPlan, count: int,
          strides: dict[str, int]) -> KernelCall:  # fmt: skip
    _check_output(y)
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
    left, right = _source(a), _source(b)
    if left.k_inner != right.k_inner and a.shape[1] % 8:  # one operand was padded along K, the other must be as well
        left, right = (_plain_source(_padded(x)) for x in (a, b) if isinstance(x, torch.Tensor))
    rows, cols, cells = a.shape[0], b.shape[0], _cells(a, b, left)
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
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_nt`."""
    groups = check_offsets("grouped_gemm_nt", offsets)
    rows, cols = y.shape
    whole = isinstance(b, QuantizedTensor) and cols % 32 == 0
    left, right = _source(a, shuffle=False), _source(b, shuffle=whole)
    weight = (groups, cols, a.shape[1]) if isinstance(b, torch.Tensor) else (groups * cols, a.shape[1])
    if tuple(b.shape) != weight or left.is_mx != right.is_mx:
        raise ShapeError(
            f"grouped_gemm_nt: a must be [T, K] and b [groups, N, K] of the same kind, quantised [groups * N, K], with {groups} "
            f"groups; got a {list(a.shape)}, b {list(b.shape)} and {cols} columns."
        )
    if a.shape[1] == 0:
        raise ShapeError("grouped_gemm_nt: the contraction is empty (K is 0), there is nothing to multiply.")
    if not left.k_inner:
        left = _plain_source(_padded(a)) if isinstance(a, torch.Tensor) else left
    if not right.k_inner and a.shape[1] % 8 and isinstance(b, torch.Tensor):
        right = _plain_source(_padded(b))
    cells = _cells(a, b, left) if not isinstance(b, torch.Tensor) else -(-a.shape[1] // 8) * 8
    tile = tile or choose_tile(left.element, -(-rows // groups), cols, groups, cus)
    plan = _plan(left, right, tile, "rows", groups, False, cells, Ablation())
    plain = isinstance(b, torch.Tensor)
    strides = {
        "stride_bg": right.data.stride(0) if plain else cols * right.stride,
        "stride_sbg": (cols // 32 if right.shuffled else cols) * right.stride_scale,
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
    tile: Tile | None = None,
) -> KernelCall:
    """The call behind `grouped_gemm_depth`."""
    groups = check_offsets("grouped_gemm_depth", offsets)
    left, right = (_source(x, shuffle=False, rows_inner=True) for x in (a, b))
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


# -- checks -------------------------------------------------------------------------------------------------------------
def _check_output(y: torch.Tensor) -> None:
    if y.stride(-1) != 1:
        raise ShapeError(
            f"gemm: the output must be contiguous along its last axis, got strides {list(y.stride())}. Accumulate into a "
            "contiguous tensor."
        )


def _cus(tensor: torch.Tensor) -> int:
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)
