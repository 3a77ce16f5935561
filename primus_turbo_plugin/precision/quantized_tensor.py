"""`QuantizedTensor`: the codes and scales of one GEMM operand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.formats import e8m0_table, element_table
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rotation import rotation_signs, unrotate


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """One operand `[outer, contraction]` of a GEMM, contraction last and zero-padded to the block and rotation size.

    A columnwise copy of x `[tokens, hidden]` is the QuantizedTensor of x.T: `[hidden, tokens]`.

    Attributes:
        data: uint8 `[outer, padded_contraction / codes_per_byte]`; FP4 packs two codes a byte, the even element in the low nibble.
        block_scale: Multiplies to dequantise. MX: E8M0 bytes, uint8; FP8: fp32. Shape `spec.scale_shape(outer, contraction)`.
        spec: How the operand is represented.
        shape: Logical (outer, contraction).
        signs_seed: Seed of the rotation's signs; meaningful only when `spec.random_signs`.

    Raises:
        ShapeError: The tensors do not fit the spec and the shape.
    """

    data: torch.Tensor
    block_scale: torch.Tensor
    spec: QuantSpec
    shape: tuple[int, int]
    signs_seed: int = 0

    def __post_init__(self) -> None:
        if not self.spec.is_quantized:
            raise ShapeError("QuantizedTensor: the spec must be quantised, got bf16. Keep the tensor itself instead.")
        expected_data = (self.shape[0], self.padded_contraction // self.spec.element_type.codes_per_byte)
        _require("data", self.data, expected_data, torch.uint8)
        scale_dtype = torch.uint8 if self.spec.is_mx else torch.float32
        _require("block_scale", self.block_scale, self.spec.scale_shape(*self.shape), scale_dtype)
        if self.data.device != self.block_scale.device:
            raise ShapeError(
                "QuantizedTensor: data and block_scale must be on one device, got "
                f"{self.data.device} and {self.block_scale.device}. Move both together."
            )

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
        """`block_scale` as fp32 factors, its shape unchanged."""
        if not self.spec.is_mx:
            return self.block_scale
        return e8m0_table(self.device)[self.block_scale.int()]

    def decode(self, dtype: torch.dtype = torch.float32, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Stored values code * block_scale of rows start..stop, `[rows, padded_contraction]`: padding kept, still rotated.

        This is what a GEMM multiplies. In fp32 every product is exact for the MX formats (a code times a power of two), short of
        overflow in the top binade.
        """
        stop = self.outer if stop is None else stop
        rows, padded = stop - start, self.padded_contraction
        table = element_table(self.spec.element_type.name, self.device)
        values = table[self.data[start:stop].int()].view(rows, padded)
        block_outer, block_contraction = self.spec.block_shape
        scale = self.scale_value()
        if block_outer == 1:
            scale = scale[start:stop]
        elif block_outer > 1:
            index = torch.arange(start, stop, device=self.device) // block_outer
            scale = scale[index]
        if block_contraction:
            values = values.view(rows, padded // block_contraction, block_contraction) * scale.unsqueeze(-1)
        else:
            values = values * scale
        return values.view(rows, padded).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The operand these codes stand for, `[outer, contraction]`: rotation undone (in fp32), padding dropped."""
        values = self.decode(torch.float32)
        if self.spec.hadamard:
            signs = self.signs()
            values = unrotate(values, self.spec.hadamard, signs)
        return values[:, : self.contraction].to(dtype)

    def signs(self) -> torch.Tensor | None:
        """Signs of the rotation, fp32 `[hadamard]`, or None."""
        if not self.spec.random_signs:
            return None
        return rotation_signs(self.spec.hadamard, self.signs_seed).to(self.device)


def _require(name: str, tensor: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ShapeError(
            f"QuantizedTensor: {name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}. "
            "Build it with kernels.reference.quantize, or pass the logical (outer, contraction) shape."
        )
