"""`QuantizedTensor`: the codes and scales of one GEMM operand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.formats import e8m0_table, element_table
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rotation import rotation_signs, unrotate
from primus_turbo_plugin.precision.scale_layout import ScaleLayout, shuffle_scale, shuffled_shape, unshuffle_scale

_CHUNK_ELEMENTS = 1 << 20
"""Elements dequantised at once."""

_WORD_OF = {1: torch.int32, 2: torch.int64}
"""Integer that holds the fp32 values of one byte of codes."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """One operand `[outer, contraction]` of a GEMM, contraction last and zero-padded to the block and rotation size.

    A columnwise copy of x `[tokens, hidden]` is the QuantizedTensor of x.T: `[hidden, tokens]`.

    Attributes:
        data: uint8 `[outer, padded_contraction / codes_per_byte]`; FP4 packs two codes a byte, the even one in the low nibble.
        block_scale: Multiplies to dequantise. MX: E8M0 bytes, uint8; FP8: fp32. Shape `spec.scale_shape(outer, contraction)`.
        spec: How the operand is represented.
        shape: Logical (outer, contraction).
        signs_seed: Seed of the rotation's signs; meaningful only when `spec.random_signs`.
        scale_layout: Where the scales lie: `plain`, or another layout of `precision.scale_layout` (MX only), whose shape
            `block_scale` then has. A kernel that reads `block_scale` itself takes `plain()` or says which layout it wants.

    Raises:
        ShapeError: The tensors do not fit the spec and the shape.
    """

    data: torch.Tensor
    block_scale: torch.Tensor
    spec: QuantSpec
    shape: tuple[int, int]
    signs_seed: int = 0
    scale_layout: ScaleLayout = "plain"

    def __post_init__(self) -> None:
        if not self.spec.is_quantized:
            raise ShapeError("QuantizedTensor: the spec must be quantised, got bf16. Keep the tensor itself instead.")
        expected_data = (self.shape[0], self.padded_contraction // self.spec.element_type.codes_per_byte)
        _require("data", self.data, expected_data, torch.uint8)
        scale_dtype = torch.uint8 if self.spec.is_mx else torch.float32
        scale_shape = self.spec.scale_shape(*self.shape)
        if self.scale_layout != "plain":
            if not self.spec.is_mx:
                raise ShapeError(
                    f"QuantizedTensor: {self.scale_layout} is a layout of MX scales, got {self.spec}. Use plain."
                )
            scale_shape = shuffled_shape(self.outer, scale_shape[1])
        _require("block_scale", self.block_scale, scale_shape, scale_dtype)
        if self.data.device != self.block_scale.device:
            raise ShapeError(
                "QuantizedTensor: data and block_scale must be on one device, got "
                f"{self.data.device} and {self.block_scale.device}. Move both together."
            )

    @classmethod
    def trusted(
        cls,
        data: torch.Tensor,
        block_scale: torch.Tensor,
        spec: QuantSpec,
        shape: tuple[int, int],
        signs_seed: int = 0,
        scale_layout: ScaleLayout = "plain",
    ) -> QuantizedTensor:
        """One whose tensors a kernel's launcher has allocated to fit: nothing is checked."""
        made = object.__new__(cls)
        set_field = object.__setattr__
        set_field(made, "data", data)
        set_field(made, "block_scale", block_scale)
        set_field(made, "spec", spec)
        set_field(made, "shape", shape)
        set_field(made, "signs_seed", signs_seed)
        set_field(made, "scale_layout", scale_layout)
        return made

    @property
    def outer(self) -> int:
        return self.shape[0]

    @property
    def contraction(self) -> int:
        return self.shape[1]

    @property
    def padded_contraction(self) -> int:
        return self.spec.padded(self.shape[1])

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.data.nbytes + self.block_scale.nbytes

    def scale_value(self) -> torch.Tensor:
        """Scales as fp32 factors, `spec.scale_shape(outer, contraction)`."""
        scale = self.plain().block_scale
        if not self.spec.is_mx:
            return scale
        table = e8m0_table(self.device)
        return table.index_select(0, scale.flatten().int()).view(scale.shape)

    def plain(self) -> QuantizedTensor:
        """The same operand with its scales in the plain layout."""
        return self.with_scale_layout("plain")

    def with_scale_layout(self, layout: ScaleLayout) -> QuantizedTensor:
        """The same operand with its scales in that layout; costs a pass over the scales where it has another."""
        if layout == self.scale_layout:
            return self
        block_outer, (_, blocks) = self.spec.block_shape[0], self.spec.scale_shape(*self.shape)
        if layout == "plain":
            scale = unshuffle_scale(self.block_scale, self.outer, blocks, block_outer=block_outer)
        else:
            scale = shuffle_scale(self.block_scale, self.outer, block_outer=block_outer)
        return replace(self, block_scale=scale, scale_layout=layout)

    def decode(self, start: int = 0, stop: int | None = None, *, scaled: bool = True) -> torch.Tensor:
        """Stored values of the rows start ... stop - 1: padding kept, still rotated. This is what a GEMM multiplies.

        A code times an E8M0 scale is exact in fp32, short of overflow in the uppermost binades; a code times an FP8 scale is
        rounded once.

        Args:
            start: First row.
            stop: One past the last row; None for all.
            scaled: Multiply by `block_scale`; otherwise the values of the codes alone.

        Returns:
            fp32 `[stop - start, padded_contraction]`.
        """
        stop = self.outer if stop is None else stop
        values = self._code_values(self.data[start:stop])
        if scaled and values.numel():
            block_outer, block_contraction = self.spec.block_shape
            scale = self.scale_value()
            if block_outer:  # a scale for each row
                scale = scale[torch.arange(start, stop, device=self.device) // block_outer]
            blocks = values.view(stop - start, -1, block_contraction or self.padded_contraction)
            blocks *= scale.unsqueeze(-1)
        return values

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The operand these codes stand for, `[outer, contraction]`: rotation undone (in fp32), padding dropped."""
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        step = max(_CHUNK_ELEMENTS // max(self.padded_contraction, 1), 1)
        for start in range(0, self.outer, step):
            stop = min(start + step, self.outer)
            values = self.decode(start, stop)
            if self.spec.hadamard:
                values = unrotate(values, self.spec.hadamard, self.signs())
            result[start:stop] = values[:, : self.contraction]
        return result

    def signs(self) -> torch.Tensor | None:
        """Signs of the rotation, fp32 `[hadamard]`, or None."""
        if not self.spec.random_signs:
            return None
        return rotation_signs(self.spec.hadamard, self.signs_seed, self.device)

    def _code_values(self, data: torch.Tensor) -> torch.Tensor:
        """fp32 values of packed codes `[rows, bytes]`, by table: one look-up a byte, of 4 or (two FP4 values) 8 bytes."""
        rows, row_bytes = data.shape
        per_byte = self.spec.element_type.codes_per_byte
        table = element_table(self.spec.element_type, self.device).view(_WORD_OF[per_byte]).view(256)
        words = torch.empty(rows * row_bytes, dtype=table.dtype, device=self.device)
        flat = data.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK_ELEMENTS):  # bounds the int32 copy of the indices
            piece = flat[start : start + _CHUNK_ELEMENTS]
            torch.index_select(table, 0, piece.int(), out=words[start : start + _CHUNK_ELEMENTS])
        return words.view(torch.float32).view(rows, row_bytes * per_byte)


def _require(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ShapeError(
            f"QuantizedTensor: {name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}. "
            "Build it with kernels.reference.quantize, or pass the logical (outer, contraction) shape."
        )


Copies: TypeAlias = tuple[QuantizedTensor | None, QuantizedTensor | None]
"""A tensor's row copy and its columnwise copy, each where a spec asks for it."""
