"""Quantisation of experts' tokens on GPUs: the Triton quantisation wherever blocks belong to one expert, else kernels for them.

Bytes as of kernels/reference/grouped_quantize.py. For a columnwise copy in blocks of tokens, rows are moved apart by one copy of
x; FP8 with a scale for an expert's tokens reads x where it is. Nothing is read on the host.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch

from primus_turbo_plugin.kernels.grouped_operands import depth_spec, rows_spec
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference.grouped_quantize import quantize_groups
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedQuantizeRequest
from primus_turbo_plugin.kernels.triton import quantize as dense
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.kernels.triton.targets import dtype_refusal, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey

_MOVED_ROWS, _MOVED_COLS = 32, 256
"""A tile of 16 KiB; every padded place starts at a multiple of 32."""
_FP8_TOKENS = 128
"""Tokens of a tile, those of one scale of a depth copy."""
_FP8_COLS = 128


@torch.no_grad()
def grouped_quantize(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> Copies:
    """Both copies of x; arguments and results as in kernels/reference/grouped_quantize.py."""
    dense.check(x, (row_spec, col_spec), key)
    with torch.cuda.device(x.device):
        return quantize_groups(_KERNELS, x, row_spec, col_spec, groups, padded, key=key, signs_seed=signs_seed)


def move_apart(x: torch.Tensor, groups: Groups, padded: Groups) -> torch.Tensor:
    """x `[T, features]` with every group's rows at its place in `padded`, zeros in between."""
    if padded is groups:
        return x
    out = x.new_empty(padded.total, x.shape[1])
    if out.numel():
        move_apart_call(x, out, groups, padded).run()
    return out


def move_apart_call(x: torch.Tensor, out: torch.Tensor, groups: Groups, padded: Groups) -> KernelCall:
    """The launch behind `move_apart`."""
    from primus_turbo_plugin.kernels.triton.grouped_quantize_kernel import move_apart_kernel

    col_tiles = -(-x.shape[1] // _MOVED_COLS)
    grid = (col_tiles * (padded.total // _MOVED_ROWS),)
    constants = {**_search(groups), "ROWS": _MOVED_ROWS, "COLS": _MOVED_COLS}
    args = {"x_ptr": x, "out_ptr": out, "col_tiles": col_tiles, **_places(x, groups, padded)}
    return KernelCall(move_apart_kernel, grid, args, constants, {"num_warps": 4})


def whole_axis(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None,
    signs_seed: int,
) -> Copies:
    """FP8 with a scale for an expert's operand (`tensorwise`) or, columnwise, for a feature of it (`rowwise`)."""
    rows, features = x.shape
    row = Copy.of(rows, features, x.device, row_spec, False, key, signs_seed)
    col = Copy.of(padded.total, features, x.device, col_spec, True, key, signs_seed)
    scales = [
        None if row is None else torch.empty(rows, 1, device=x.device),
        None if col is None else torch.empty(features, padded.total // _FP8_TOKENS, device=x.device),
    ]
    if x.numel():
        for call in whole_axis_calls(x, row, col, scales, groups, padded):
            call.run()
    return _result(row, scales[0], rows_spec), _result(col, scales[1], depth_spec)


def whole_axis_calls(
    x: torch.Tensor,
    row: Copy | None,
    col: Copy | None,
    scales: list[torch.Tensor | None],
    groups: Groups,
    padded: Groups,
) -> list[KernelCall]:
    """The launches behind `whole_axis`: amax of every expert, then the codes."""
    from primus_turbo_plugin.kernels.triton.grouped_quantize_kernel import expert_amax_kernel, expert_fp8_kernel

    tiles = groups.padded(_FP8_TOKENS) if col is None else padded
    features = x.shape[1]
    width = max(features, row.padded if row else 0)
    col_tiles = -(-width // _FP8_COLS)
    grid = (col_tiles * (tiles.total // _FP8_TOKENS),)
    sizes = groups.count, groups.count * (features if col is not None and col.meta.block_outer == 1 else 1)
    amax = [
        None if copy is None else torch.zeros(size, dtype=torch.int32, device=x.device)
        for copy, size in zip((row, col), sizes)
    ]
    constants = {
        **_search(groups), "ROW": row.meta if row else None, "COL": col.meta if col else None, "ROWS": _FP8_TOKENS,
        "COLS": _FP8_COLS,
    }  # fmt: skip
    shared = {
        "row_amax": amax[0], "col_amax": amax[1], "row_signs": row.signs if row else None,
        "col_signs": col.signs if col else None, "col_tiles": col_tiles, **_places(x, groups, tiles),
    }  # fmt: skip
    stores: dict[str, Any] = {"padded_rows": tiles.total, "row_padded": row.padded if row else 0}
    for name, copy, scale in (("row", row, scales[0]), ("col", col, scales[1])):
        stores |= {f"{name}_data": copy.data if copy else None, f"{name}_scale": scale}
        words = copy.words if copy else (0, 0, 0, 0)
        stores |= {f"{name}_{part}": word for part, word in zip(("k0", "k1", "c2", "c3"), words)}
    options = {"num_warps": 8}
    return [
        KernelCall(expert_amax_kernel, grid, {"x_ptr": x, **shared}, constants, options),
        KernelCall(expert_fp8_kernel, grid, {"x_ptr": x, **shared, **stores}, constants, options),
    ]


def _result(copy: Copy | None, scale: torch.Tensor | None, spec_of: Any) -> QuantizedTensor | None:
    if copy is None or scale is None:
        return None
    return QuantizedTensor(copy.data, scale, spec_of(copy.spec), copy.shape, copy.signs_seed)


def _search(groups: Groups) -> dict[str, int]:
    return {"GROUPS": groups.count, "SEARCH": max(1 << (groups.count - 1).bit_length(), 2)}


def _places(x: torch.Tensor, groups: Groups, padded: Groups) -> dict[str, Any]:
    return {
        "offsets_ptr": groups.offsets, "padded_ptr": padded.offsets, "features": x.shape[1], "stride_row": x.stride(0),
        "stride_col": x.stride(1),
    }  # fmt: skip


def supports(request: GroupedQuantizeRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every spec, on GPUs."""
    return refusal(request.device) or dtype_refusal(request.dtype)


_KERNELS = SimpleNamespace(
    quantize=dense.quantize, quantize_both=dense.quantize_both, move_apart=move_apart, whole_axis=whole_axis
)

BACKEND = Backend(name="triton", request=GroupedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
