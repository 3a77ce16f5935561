"""Number formats of a quantised GEMM operand: element types, the E8M0 block scale, and which formats combine them.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.2 and 5.3 (E2M1, E4M3, E5M2) and 5.4.1 (E8M0).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

MX_BLOCK_SIZE = 32
"""Elements that share one E8M0 scale."""

E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_MAX = 0xFE
"""Largest byte that is a number: 2^127."""


class Format(str, Enum):
    """How an operand is held. `BF16` stands for "not quantised": the operand keeps the dtype it has."""

    BF16 = "bf16"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    FP8 = "fp8"

    def __str__(self) -> str:
        return self.value


class ScaleRule(str, Enum):
    """How an MX block's E8M0 scale follows from its amax; the arithmetic is in `precision.scaling`."""

    FLOOR = "floor"
    EVEN = "even"
    CEIL = "ceil"
    RCEIL = "rceil"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementType:
    """A small float: sign, exponent, mantissa; subnormals; no Inf is ever produced (rounding saturates).

    Attributes:
        name: The key users write, such as `e2m1`.
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the mantissa field.
        bias: Exponent bias.
        emax: Exponent of the largest finite value, floor(log2(max_value)).
        max_value: Largest finite value.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max_value: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits

    @property
    def max_code(self) -> int:
        """Code of `max_value` (the sign bit is clear)."""
        return {"e2m1": 0x7, "e4m3": 0x7E, "e5m2": 0x7B}[self.name]

    @property
    def torch_dtype(self) -> torch.dtype:
        """What torch calls this type; `QuantizedTensor.data` holds the same bytes as uint8. FP4 needs torch 2.8."""
        return getattr(torch, {"e2m1": "float4_e2m1fn_x2", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[self.name])


E2M1 = ElementType(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, emax=2, max_value=6.0)
E4M3 = ElementType(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, emax=8, max_value=448.0)
E5M2 = ElementType(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, emax=15, max_value=57344.0)

ELEMENT_TYPES = {element.name: element for element in (E2M1, E4M3, E5M2)}

FORMAT_ELEMENTS: dict[Format, tuple[str, ...]] = {
    Format.BF16: (),
    Format.MXFP4: ("e2m1",),
    Format.MXFP8: ("e4m3", "e5m2"),
    Format.FP8: ("e4m3", "e5m2"),
}
"""Element types a format may hold, the default first."""

FORMAT_BLOCKS: dict[Format, tuple[str, ...]] = {
    Format.BF16: (),
    Format.MXFP4: ("1x32", "32x32"),
    Format.MXFP8: ("1x32", "32x32"),
    Format.FP8: ("tensorwise", "rowwise", "1x128", "128x128"),
}
"""Block shapes (outer x contraction) a format may have, the default first."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0..7; codes 8..15 are their negatives (8 is -0)."""


def decode_code(element: ElementType, code: int) -> float:
    """Value of one code, from its sign, exponent and mantissa fields (exact in a Python float)."""
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    exponent, mantissa = magnitude >> element.mantissa_bits, magnitude & ((1 << element.mantissa_bits) - 1)
    sign = -1.0 if code >> (element.bits - 1) else 1.0
    if magnitude > element.max_code:
        is_inf = element.name == "e5m2" and mantissa == 0
        return sign * float("inf") if is_inf else float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - element.bias - element.mantissa_bits)
    return sign * (1 + mantissa / (1 << element.mantissa_bits)) * 2.0 ** (exponent - element.bias)


def decode_e8m0(byte: int) -> float:
    """Value of an E8M0 byte b: 2^(b - 127), NaN for 0xFF."""
    return float("nan") if byte == E8M0_NAN else 2.0 ** (byte - E8M0_BIAS)


def element_table(element: ElementType, device: torch.device | str = "cpu") -> torch.Tensor:
    """Values of all 256 bytes of packed codes, fp32 `[256, codes_per_byte]`, low nibble first."""
    return _as_tensor(_element_table_bytes(element), device).view(256, element.codes_per_byte)


def e8m0_table(device: torch.device | str = "cpu") -> torch.Tensor:
    """Values of all 256 E8M0 bytes, fp32 `[256]`; 2^-127 is an fp32 subnormal and exact."""
    return _as_tensor(_e8m0_table_bytes(), device)


# Cached as bytes, not as tensors: a tensor made under a fake or functional tensor mode must not outlive it.
@lru_cache(maxsize=len(ELEMENT_TYPES))
def _element_table_bytes(element: ElementType) -> bytearray:
    bits, mask = element.bits, (1 << element.bits) - 1
    codes = ((byte >> (bits * i)) & mask for byte in range(256) for i in range(element.codes_per_byte))
    return bytearray(array("f", (decode_code(element, code) for code in codes)).tobytes())


@lru_cache(maxsize=1)
def _e8m0_table_bytes() -> bytearray:
    return bytearray(array("f", (decode_e8m0(byte) for byte in range(256))).tobytes())


def _as_tensor(values: bytearray, device: torch.device | str) -> torch.Tensor:
    return torch.frombuffer(values, dtype=torch.float32).to(device, copy=True)
