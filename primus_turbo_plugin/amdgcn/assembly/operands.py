"""Operands of an instruction: registers, constants and symbols, as LLVM prints them.

Register numbers live in two flat spaces. Scalar: `s0..s105`, then the special registers below. Vector: `v0..` and, on
CDNA, the accumulation registers `a0..` from `ACCUMULATION_BASE` on.
"""

from __future__ import annotations

import enum
import functools
import re
import struct
from dataclasses import dataclass, replace

from primus_turbo_plugin.amdgcn.faults import AssemblyError

VCC = 106
TTMP = 108
M0 = 124
EXEC = 126
FLAT_SCRATCH = 130
PRIVATE_BASE = 132
SHARED_BASE = 134
SCC = 140
NUM_SCALARS = 144
ACCUMULATION_BASE = 256


class Kind(enum.Enum):
    """What an operand is."""

    VECTOR = "vector register"
    SCALAR = "scalar register"
    INTEGER = "integer constant"
    FLOAT = "floating-point constant"
    ABSENT = "off or null"
    SYMBOL = "symbol"


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand.

    Attributes:
        kind: What it is.
        index: First register number, or the integer's value.
        count: Registers it spans as written (1 for constants).
        value: The number, for a floating-point constant.
        negate: Leading minus (floating point) or `neg(..)`.
        absolute: `|..|` or `abs(..)`.
        sign_extend: `sext(..)`: the selected part of an SDWA source is sign-extended.
        half: `"l"` or `"h"` where a 16-bit half is named (`v3.h`).
        text: As written.
    """

    kind: Kind
    index: int = 0
    count: int = 1
    value: float = 0.0
    negate: bool = False
    absolute: bool = False
    sign_extend: bool = False
    half: str = ""
    text: str = ""

    @property
    def is_vector(self) -> bool:
        return self.kind is Kind.VECTOR

    @property
    def is_scalar(self) -> bool:
        return self.kind is Kind.SCALAR

    def shifted(self, registers: int, count: int | None = None) -> Operand:
        """The operand `registers` further on; constants stay what they are."""
        if self.kind not in (Kind.VECTOR, Kind.SCALAR):
            return self
        return replace(self, index=self.index + registers, count=self.count if count is None else count)

    def registers(self) -> list[tuple[Kind, int]]:
        """The registers it names, as hashable keys."""
        if self.kind in (Kind.VECTOR, Kind.SCALAR):
            return [(self.kind, self.index + i) for i in range(self.count)]
        return []


_SPECIAL: dict[str, tuple[int, int]] = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1),
    "exec": (EXEC, 2), "exec_lo": (EXEC, 1), "exec_hi": (EXEC + 1, 1),
    "m0": (M0, 1), "scc": (SCC, 1), "src_scc": (SCC, 1), "flat_scratch": (FLAT_SCRATCH, 2),
    "src_flat_scratch_base_lo": (FLAT_SCRATCH, 1), "src_flat_scratch_base_hi": (FLAT_SCRATCH + 1, 1),
    "src_private_base": (PRIVATE_BASE, 2), "src_shared_base": (SHARED_BASE, 2),
}  # fmt: skip

_REGISTER = re.compile(r"(ttmp|[vsa])(?:(\d+)|\[(\d+):(\d+)\])(?:\.([lh]))?$")
_INTEGER = re.compile(r"-?(?:0x[0-9a-fA-F]+|\d+)$")


def _register(match: re.Match[str], text: str) -> Operand:
    bank, single, first, last, half = match.groups()
    low = int(single if single is not None else first)
    count = 1 if single is not None else int(last) - low + 1
    if bank in "va":
        return Operand(Kind.VECTOR, low + (ACCUMULATION_BASE if bank == "a" else 0), count, half=half or "", text=text)
    return Operand(Kind.SCALAR, low + (TTMP if bank == "ttmp" else 0), count, text=text)


@functools.lru_cache(maxsize=65536)
def parse_operand(text: str) -> Operand:
    """Read one operand, for example `-|v3|`, `sext(v3)`, `s[4:7]`, `0x3f80`, `1.0`, `off` or a label."""
    if text.startswith("sext(") and text.endswith(")"):
        return replace(parse_operand(text[5:-1]), sign_extend=True, text=text)
    bare, negate, absolute = text, False, False
    for prefix, suffix in (("neg(", ")"), ("abs(", ")"), ("-", ""), ("|", "|")):
        if not bare.startswith(prefix) or not bare.endswith(suffix):
            continue
        if prefix == "-" and not re.match(r"-(\||[vsa]|abs\(|m0|vcc|exec|ttmp|src_)", bare):
            continue  # a negative constant, not a modifier
        bare = bare[len(prefix) : len(bare) - len(suffix)]
        negate |= prefix in ("neg(", "-")
        absolute |= prefix in ("abs(", "|")
    if bare.startswith("|") and bare.endswith("|") and len(bare) > 2:  # -|x|, neg(|x|)
        bare, absolute = bare[1:-1], True
    if (match := _REGISTER.match(bare)) is not None:
        return replace(_register(match, text), negate=negate, absolute=absolute)
    if bare in _SPECIAL:
        index, count = _SPECIAL[bare]
        return Operand(Kind.SCALAR, index, count, negate=negate, absolute=absolute, text=text)
    if bare in ("off", "null"):
        return Operand(Kind.ABSENT, text=text)
    if _INTEGER.match(bare):
        return Operand(Kind.INTEGER, int(bare, 0), negate=negate, absolute=absolute, text=text)
    try:
        return Operand(Kind.FLOAT, value=float(bare), negate=negate, absolute=absolute, text=text)
    except ValueError:
        return Operand(Kind.SYMBOL, text=text)


def float_bits(value: float) -> int:
    """The 32-bit pattern of a number."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def require_vector(operand: Operand, where: str) -> Operand:
    """Check that an operand is a vector register, and return it."""
    if not operand.is_vector:
        raise AssemblyError(f"{where}: operand must be a vector register, got {operand.text!r}.")
    return operand
