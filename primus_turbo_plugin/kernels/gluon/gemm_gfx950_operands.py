"""Operands of the gfx950 GEMMs as their kernel reads them: whole 16-byte transfers, MX scales in whole words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch

from primus_turbo_plugin.kernels.gemm_checks import common_length
from primus_turbo_plugin.kernels.gluon import operand_kinds
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_plan import ELEMENT_BITS, HALVES
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

_TRANSFER_BYTES = 16
_WORD = 4
_LEAST_BLOCKS = 8
"""Plain scales are read by whole words, a tile's at once: rows start at words and hold at least one tile's."""


@dataclass(frozen=True, slots=True)
class Source:
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


def _quantized_source(operand: QuantizedTensor, shuffle: bool) -> Source:
    """`shuffle`: MX scales in the gfx950 layout, else plain."""
    spec = operand.spec
    data = operand.data
    places = (data.shape[1], data.stride(0), data.data_ptr())
    if data.stride(1) != 1 or any(place % _TRANSFER_BYTES for place in places):
        data = padded(data)
    scale, stride_scale = operand.block_scale, int(spec.block_shape[0] != 0)
    if spec.is_mx:
        scale = operand.with_scale_layout("gfx950").block_scale.view(torch.int32) if shuffle else _plain_scale(operand)
        stride_scale = scale.stride(0)
    return Source(spec.element_type.name, data, scale, True, data.stride(0), stride_scale, spec.is_mx, shuffle)


def _plain_scale(operand: QuantizedTensor) -> torch.Tensor:
    """Plain MX scales, one for every row and block, as they are or (1/32 of the operand's bytes) in rows of whole words."""
    scale = operand.plain().block_scale
    if operand.spec.block_shape[0] > 1:
        scale = scale.repeat_interleave(operand.spec.block_shape[0], 0)[: operand.shape[0]]
    blocks = scale.shape[1]
    places = (scale.stride(0), scale.data_ptr())
    if blocks >= _LEAST_BLOCKS and scale.stride(1) == 1 and not any(place % _WORD for place in places):
        return scale
    copy = scale.new_zeros(scale.shape[0], max(-(-blocks // _WORD) * _WORD, _LEAST_BLOCKS))
    copy[:, :blocks] = scale
    return copy


def plain_source(operand: torch.Tensor, rows_inner: bool = False) -> Source:
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
        turned = padded(operand if along_k else operand.transpose(-1, -2))
    return Source(operand_kinds.PLAIN[operand.dtype], turned, None, along_k, turned.stride(-2), 0, False, False)


def padded(data: torch.Tensor) -> torch.Tensor:
    """A contiguous copy whose rows are whole transfers, with zeros at their ends."""
    vector = _TRANSFER_BYTES // data.element_size()
    copy = data.new_zeros(*data.shape[:-1], -(-data.shape[-1] // vector) * vector)
    copy[..., : data.shape[-1]] = data
    return copy


def source_of(operand: Operand) -> Source:
    """An operand of one product; MX scales in the gfx950 layout, rearranged if need be."""
    if isinstance(operand, QuantizedTensor):
        return _quantized_source(operand, shuffle=operand.spec.is_mx)
    return plain_source(operand)


def grouped_source(operand: Operand, *, may_shuffle: bool, rows_inner: bool = False) -> Source:
    """An operand of a grouped product; MX scales as they lie, plain ones where groups start inside pieces of the gfx950 layout.

    Args:
        may_shuffle: Groups start at whole pieces of it.
        rows_inner: As in `plain_source`.
    """
    if isinstance(operand, QuantizedTensor):
        return _quantized_source(operand, shuffle=operand.scale_layout == "gfx950" and may_shuffle)
    return plain_source(operand, rows_inner)


def cells_of(a: Operand, b: Operand, left: Source) -> int:
    """Cells of the contraction to multiply, in whole transfers: past the common length both operands hold zeros."""
    elements = common_length(a, b)  # refuses operands that are rotated differently
    if left.is_mx:
        elements = min(x.padded_contraction for x in (a, b) if isinstance(x, QuantizedTensor))
    cells = elements * ELEMENT_BITS[left.element] // (16 if left.element in HALVES else 8)
    vector = 8 if left.element in HALVES else _TRANSFER_BYTES
    return -(-cells // vector) * vector
