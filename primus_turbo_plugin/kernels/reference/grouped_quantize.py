"""Quantisation of experts' tokens (torch reference): as if every expert's rows were quantised alone.

Math      kernels/reference/quantize.py's, on each expert's rows
Layout    x [T, features], rows sorted by expert -> row copy [T, features], columnwise copy [features, padded T]
          (`kernels/grouped_operands.py` names the specs that result, `Groups.padded` the padding)
Cost      one pass more over x than the copies need, where rows must be moved apart
Numerics  stochastic rounding draws its bits by place in the stacked copy, so that no two experts share them
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.grouped_operands import depth_spec, repeat_scale, rows_spec
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference import quantize as dense
from primus_turbo_plugin.kernels.reference.element import round_to_codes
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedQuantizeRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotate, rotation_signs
from primus_turbo_plugin.precision.rounding import RoundingKey, random_words
from primus_turbo_plugin.precision.scaling import fp8_scale

_ROWS_AT_ONCE = 4096
"""Rows of x whose fp32 values are held at once; whole blocks and rotations of every kind."""


@torch.no_grad()
def grouped_quantize(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> Copies:
    """Both copies of x, whose rows are sorted by group.

    Args:
        x: bf16, fp16 or fp32 `[T, features]`, any strides.
        row_spec: Spec of one expert's row copy, or None.
        col_spec: Spec of one expert's columnwise copy, or None.
        groups: Of x's rows.
        padded: `groups.padded(m)` with m a multiple of `depth_spec(col_spec).contraction_multiple`.
        key: Random bits for stochastic rounding.
        signs_seed: Seed of the rotation's signs.

    Returns:
        (row copy `[T, features]` in `rows_spec(row_spec)`, columnwise copy `[features, padded.total]` in `depth_spec(col_spec)`),
        None where there is no spec.

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: A spec rounds stochastically and there is no key.
    """
    return quantize_groups(_KERNELS, x, row_spec, col_spec, groups, padded, key=key, signs_seed=signs_seed)


def quantize_groups(
    kernels: Any,
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None,
    signs_seed: int,
) -> Copies:
    """`grouped_quantize` by a backend's parts.

    Args:
        kernels: Has `quantize` and `quantize_both`, the ordinary quantisation, for blocks that belong to one expert;
            `move_apart`; and `whole_axis`, for FP8 scales that span an expert's tokens.
        x: The rest as in `grouped_quantize`.
    """
    for spec in (row_spec, col_spec):
        if spec is not None and spec.rounding == "stochastic" and key is None:
            raise ConfigError(
                "grouped_quantize: rounding: stochastic needs a RoundingKey, got none. Pass key=, or set rounding to nearest."
            )
    row_spans = row_spec is not None and row_spec.block_shape[0] == 0
    col_spans = col_spec is not None and col_spec.block_shape[1] == 0
    row = col = None
    if row_spans or col_spans:
        specs = (row_spec if row_spans else None, col_spec if col_spans else None)
        row, col = kernels.whole_axis(x, *specs, groups, padded, key=key, signs_seed=signs_seed)
    apart_already = padded is groups and not row_spans and not col_spans
    if apart_already and (row_spec is None or row_spec.block_shape[0] == 1):  # one read for both
        both: Copies = kernels.quantize_both(x, row_spec, col_spec, key=key, signs_seed=signs_seed)
        return both
    if row_spec is not None and not row_spans:
        row = _row_copy(kernels, x, row_spec, groups, key, signs_seed)
    if col_spec is not None and not col_spans:
        apart = kernels.move_apart(x, groups, padded)
        col = kernels.quantize(apart, col_spec, columnwise=True, key=key, signs_seed=signs_seed)
    return row, col


def move_apart(x: Tensor, groups: Groups, padded: Groups) -> Tensor:
    """x `[T, features]` with every group's rows at its place in `padded`, zeros in between."""
    if padded is groups:
        return x
    return x.new_zeros(padded.total, x.shape[1]).index_copy_(0, groups.places_in(padded), x)


def _row_copy(
    kernels: Any, x: Tensor, spec: QuantSpec, groups: Groups, key: RoundingKey | None, signs_seed: int
) -> QuantizedTensor:
    height = spec.block_shape[0]
    if height == 1:
        copy: QuantizedTensor = kernels.quantize(x, spec, key=key, signs_seed=signs_seed)
        return copy
    padded = groups.padded(height)
    apart = kernels.quantize(kernels.move_apart(x, groups, padded), spec, key=key, signs_seed=signs_seed)
    places, wanted = groups.places_in(padded), rows_spec(spec)
    scale = repeat_scale(apart, wanted).index_select(0, places)
    data = apart.data.index_select(0, places)
    return replace(apart, data=data, block_scale=scale, spec=wanted, shape=(x.shape[0], x.shape[1]))


def whole_axis(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None,
    signs_seed: int,
) -> Copies:
    """FP8 with a scale for an expert's operand (`tensorwise`) or, columnwise, for a feature of it (`rowwise`)."""
    row = col = None
    if row_spec is not None:
        row = _whole_axis(x, row_spec, groups, columnwise=False, key=key, signs_seed=signs_seed)
    if col_spec is not None:
        apart = move_apart(x, groups, padded)
        col = _whole_axis(apart, col_spec, padded, columnwise=True, key=key, signs_seed=signs_seed)
    return row, col


def _whole_axis(
    x: Tensor, spec: QuantSpec, groups: Groups, *, columnwise: bool, key: RoundingKey | None, signs_seed: int
) -> QuantizedTensor:
    rows, features = x.shape
    wanted = depth_spec(spec) if columnwise else rows_spec(spec)
    shape = (features, rows) if columnwise else (rows, features)
    width = features if columnwise else spec.padded(features)
    per_feature = columnwise and spec.block_shape[0] == 1
    group_of_row = groups.of_rows()
    amax = torch.zeros(groups.count, width if per_feature else 1, dtype=torch.int32, device=x.device)
    for piece, values in _pieces(x, spec, columnwise, signs_seed):
        bits = values.view(torch.int32) & 0x7FFFFFFF  # ordered as the values are, NaN last
        bits = bits if per_feature else bits.amax(1, keepdim=True)
        index = group_of_row[piece].unsqueeze(1).expand_as(bits)
        amax.scatter_reduce_(0, index, bits, "amax")
    group_scale = fp8_scale(amax.view(torch.float32), spec.element_type)
    scale = group_scale[group_of_row]  # [rows, width or 1]
    data = torch.empty(shape if columnwise else (rows, width), dtype=torch.uint8, device=x.device)
    for piece, values in _pieces(x, spec, columnwise, signs_seed):
        factor = scale[piece].expand_as(values)
        words = _words(spec, key, piece, width, rows, columnwise, x.device)
        codes = round_to_codes((values / factor).contiguous(), spec.element_type, words)
        codes *= ~factor.isnan()
        if columnwise:
            data[:, piece] = codes.t()
        else:
            data[piece] = codes
    if columnwise:
        block = wanted.block_shape[1]
        scale = scale.expand(rows, features)[::block].t().contiguous()
    return QuantizedTensor(data, scale, wanted, shape, signs_seed if spec.random_signs else 0)


def _pieces(x: Tensor, spec: QuantSpec, columnwise: bool, signs_seed: int) -> Any:
    """(slice of rows, their fp32 values, padded along features and rotated) of all of x."""
    signs = rotation_signs(spec.hadamard, signs_seed, x.device) if spec.random_signs else None
    width = x.shape[1] if columnwise else spec.padded(x.shape[1])
    for start in range(0, x.shape[0], _ROWS_AT_ONCE):
        piece = slice(start, min(start + _ROWS_AT_ONCE, x.shape[0]))
        values = torch.nn.functional.pad(x[piece].float(), (0, width - x.shape[1]))
        if spec.hadamard:
            values = rotate(values, spec.hadamard, signs, 0 if columnwise else 1)
        yield piece, values.contiguous()


def _words(
    spec: QuantSpec,
    key: RoundingKey | None,
    piece: slice,
    width: int,
    rows: int,
    columnwise: bool,
    device: torch.device,
) -> Tensor | None:
    if spec.rounding == "nearest":
        return None
    assert key is not None
    here, across = range(piece.start, piece.stop), range(width)
    outer, contraction, padded = (across, here, rows) if columnwise else (here, across, width)
    return random_words(key, outer, contraction, padded, columnwise=columnwise, device=device)


def supports(request: GroupedQuantizeRequest) -> str | None:
    """None, or why the reference cannot do it: it serves every spec, on every device."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"quantises bf16, fp16 and fp32, not {request.dtype}"
    return None


_KERNELS = SimpleNamespace(
    quantize=dense.quantize, quantize_both=dense.quantize_both, move_apart=move_apart, whole_axis=whole_axis
)

BACKEND = Backend(name="reference", request=GroupedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
