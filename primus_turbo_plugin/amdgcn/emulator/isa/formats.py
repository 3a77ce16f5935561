"""Small floating-point formats of the matrix units: decoding tables and rounding.

gfx950 and gfx1250 use the OCP formats (e4m3, e5m2, e2m3, e3m2, e2m1, scales e8m0: "OCP Microscaling Formats" 1.0); gfx942 uses
the FNUZ 8-bit formats (CDNA3 guide: bias one higher, no infinity, no negative zero, NaN = 0x80). Kept apart from the
package's own number formats on purpose: this tool stands alone and checks kernels that use those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.emulator.isa.values import Array

F32 = np.float32


@dataclass(frozen=True)
class SmallFloat:
    """A floating-point format of at most 8 bits.

    Attributes:
        name: For messages.
        exponent_bits: Width of the exponent.
        mantissa_bits: Width of the mantissa.
        bias: Exponent bias.
        overflow: Code magnitude a value beyond the largest becomes, or None to saturate.
        nan: Code of NaN, or None where there is none.
        fnuz: No infinities, no negative zero.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    overflow: int | None
    nan: int | None
    fnuz: bool = False

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """Value of each code."""
        codes = np.arange(1 << self.bits)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / 2.0**self.mantissa_bits
        value = np.where(
            exponent == 0,
            fraction * 2.0 ** (1 - self.bias),
            (1 + fraction) * 2.0 ** (exponent.astype(float) - self.bias),
        )
        if self.name == "e5m2":
            value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
        value = np.where(codes >> (self.bits - 1), -value, value)
        if self.nan is not None:
            value[self.nan] = np.nan
            if not self.fnuz:
                value[self.nan | (1 << (self.bits - 1))] = np.nan
        return value.astype(F32)

    @cached_property
    def largest(self) -> float:
        """Largest finite value."""
        return float(np.nanmax(np.where(np.isinf(self.table), np.nan, self.table)))

    def decode(self, codes: Array) -> NDArray[np.float32]:
        return self.table[codes]

    def encode(self, value: Array) -> NDArray[np.uint8]:
        """Round to nearest, ties to even. Beyond the largest value: saturate, or the format's overflow code."""
        value = value.astype(np.float64)
        magnitude = np.abs(value)
        least = 1 - self.bias
        exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 0))[1] - 1
        exponent = np.where(magnitude == 0, least, np.maximum(exponent, least))  # frexp calls the exponent of zero 0
        step = np.ldexp(1.0, exponent - self.mantissa_bits)
        with np.errstate(invalid="ignore"):
            steps = np.rint(magnitude / step)
        # Counting steps from the start of the binade gives the code, and rolls over into the next binade by itself.
        code = np.where(np.isfinite(steps), steps, 0).astype(np.int64) + ((exponent - least) << self.mantissa_bits)
        top = int(np.argmax(np.where(self.table == F32(self.largest), 1, 0)))
        code = np.where((code > top) | np.isinf(magnitude), top if self.overflow is None else self.overflow, code)
        sign = np.signbit(value).astype(np.int64) << (self.bits - 1)
        if self.fnuz:
            sign = np.where((code == 0) | (code == self.nan), 0, sign)
        nan = self.nan if self.nan is not None else top
        return np.where(np.isnan(value), nan if self.fnuz else nan | sign, code | sign).astype(np.uint8)


E4M3 = SmallFloat("e4m3", 4, 3, 7, overflow=0x7F, nan=0x7F)
E5M2 = SmallFloat("e5m2", 5, 2, 15, overflow=0x7C, nan=0x7F)
E4M3_FNUZ = SmallFloat("e4m3fnuz", 4, 3, 8, overflow=0x80, nan=0x80, fnuz=True)
E5M2_FNUZ = SmallFloat("e5m2fnuz", 5, 2, 16, overflow=0x80, nan=0x80, fnuz=True)
E2M3 = SmallFloat("e2m3", 2, 3, 1, overflow=None, nan=None)
E3M2 = SmallFloat("e3m2", 3, 2, 3, overflow=None, nan=None)
E2M1 = SmallFloat("e2m1", 2, 1, 1, overflow=None, nan=None)


def eight_bit(name: str, arch: str) -> SmallFloat:
    """What `fp8` and `bf8` mean on a target."""
    if arch == "gfx942":
        return {"fp8": E4M3_FNUZ, "bf8": E5M2_FNUZ}[name]
    return {"fp8": E4M3, "bf8": E5M2}[name]


def e8m0(codes: Array) -> NDArray[np.float64]:
    """Value of block-scale codes: 2 ** (code - 127), NaN for 255."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def unpack(words: Array, bits: int) -> NDArray[np.uint8]:
    """Elements of 4, 6 or 8 bits out of registers, lowest first.

    Args:
        words: [..., registers] 32 bits.
        bits: Element width.

    Returns:
        [..., registers * 32 / bits] codes.
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:-1], -1)
    assert bits == 6, f"no element of {bits} bits"
    flags = np.unpackbits(octets, axis=-1, bitorder="little").reshape(*octets.shape[:-1], -1, 6)
    return (flags << np.arange(6, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
