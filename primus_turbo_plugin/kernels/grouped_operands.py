"""Quantised operands of grouped GEMMs: all experts' copies in one `QuantizedTensor`, each as if quantised alone.

rows    x or dy [T, features], contraction along features: expert by expert in its rows
depth   x' or dy' [features, padded T], contraction along tokens: expert by expert in its columns (`Groups.padded`)
weight  [experts * outer, contraction]: expert by expert in its rows

A scale that spans an expert's operand (FP8 `tensorwise`), its tokens (`rowwise` in a depth copy) or several of them (square
blocks in a row copy) has no place in a `QuantizedTensor` of all experts. It is repeated, for each row or for each 128 tokens:
codes and values are those of the expert alone, and the spec is the one that `rows_spec`, `depth_spec` and `weight_spec` name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_ROWS = {"tensorwise": "rowwise", "32x32": "1x32", "128x128": "1x128"}
_DEPTH = {"tensorwise": "1x128", "rowwise": "1x128"}
_WEIGHT = {"tensorwise": "rowwise"}


def rows_spec(spec: QuantSpec) -> QuantSpec:
    """Spec of all experts' row copies of x or dy."""
    return _with_block(spec, _ROWS)


def depth_spec(spec: QuantSpec) -> QuantSpec:
    """Spec of all experts' columnwise copies of x or dy."""
    return _with_block(spec, _DEPTH)


def weight_spec(spec: QuantSpec, outer: int | None = None) -> QuantSpec:
    """Spec of all experts' weights, either copy.

    Args:
        spec: Of one weight.
        outer: Rows of one expert's copy, None for a multiple of any block: square blocks that two experts would share are
            repeated for each row.
    """
    spec = _with_block(spec, _WEIGHT)
    if outer is not None and spec.block_shape[0] > 1 and outer % spec.block_shape[0]:
        return _with_block(spec, _ROWS)
    return spec


def depth_multiple(*specs: QuantSpec | None) -> int:
    """What every expert's tokens are padded to, so that no block and no rotation of these columnwise copies spans two."""
    return math.lcm(1, *(depth_spec(spec).contraction_multiple for spec in specs if spec is not None))


def _with_block(spec: QuantSpec, blocks: dict[str, str]) -> QuantSpec:
    block = blocks.get(str(spec.block))
    return spec if block is None else replace(spec, block=block)


def repeat_scale(copy: QuantizedTensor, spec: QuantSpec) -> Tensor:
    """Scales of a copy with one for every row of `spec`, whose blocks are no taller than the copy's own."""
    scale, height = copy.plain().block_scale, copy.spec.block_shape[0]
    if copy.spec.block_shape == spec.block_shape:
        return scale
    return scale.expand(copy.outer, -1) if height == 0 else scale.repeat_interleave(height, 0)[: copy.outer]


def stack_weights(copies: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """`[experts * outer, contraction]` of every expert's weight, all alike."""
    first = copies[0]
    spec = weight_spec(first.spec, first.outer)
    data = torch.cat([copy.data for copy in copies])
    scale = torch.cat([repeat_scale(copy, spec) for copy in copies])
    return QuantizedTensor(data, scale, spec, (first.outer * len(copies), first.contraction), first.signs_seed)


def take_rows(operand: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Rows start ... stop - 1, which hold whole blocks or end with the operand."""
    operand, height = operand.plain(), operand.spec.block_shape[0]
    scale = operand.block_scale
    if height:
        assert start % height == 0, (start, height)
        scale = scale[start // height : -(-stop // height)]
    return replace(operand, data=operand.data[start:stop], block_scale=scale, shape=(stop - start, operand.contraction))


def take_contraction(operand: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Elements start ... stop - 1 of the contraction, whole blocks and rotations."""
    operand, spec = operand.plain(), operand.spec
    assert start % spec.contraction_multiple == 0 == stop % spec.contraction_multiple, (start, stop, str(spec))
    per_byte, width = spec.element_type.codes_per_byte, spec.block_shape[1]
    data = operand.data[:, start // per_byte : stop // per_byte].contiguous()
    scale = operand.block_scale[:, start // width : stop // width].contiguous() if width else operand.block_scale
    return replace(operand, data=data, block_scale=scale, shape=(operand.outer, stop - start))
