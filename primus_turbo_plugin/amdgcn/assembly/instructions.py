"""One instruction of AMDGCN assembly text, taken apart.

The text is LLVM's: `opcode operand, operand, operand modifier modifier:value`. Encoding suffixes (`_e32`, `_e64`, `_dpp`,
`_sdwa`) are removed from the opcode. gfx1250 prints registers above v255 as `v3 /*v259*/`; the comment is the register.
Dual-issue text (`v_dual_mov_b32 .. :: v_dual_add_f32 ..`) becomes one instruction whose `dual` holds the second half.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from primus_turbo_plugin.amdgcn.assembly.operands import Kind, Operand, parse_operand

Modifier = int | str | list[int]

_HIGH_REGISTER = re.compile(r"[vs](?:\[[\d:]+\]|\d+)(\.[lh])?\s*/\*([vs](?:\[[\d:]+\]|\d+)(?:\.[lh])?)\*/")
_ENCODING = re.compile(r"(?:_e32|_e64|_dpp8|_dpp|_sdwa)+$")

# These take free text (`vmcnt(3) lgkmcnt(0)`, `hwreg(..)`, `depctr_va_vdst(0)`) or hints instead of operands.
_FREE_TEXT = ("s_waitcnt", "s_delay_alu", "s_sendmsg", "s_wait_alu", "s_setreg", "s_getreg", "s_waitcnt_depctr")


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the kernel's source, from the compiler's `.loc` records."""

    file: str
    line: int
    column: int = 0
    inlined_at: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" (inlined at {self.inlined_at})" if self.inlined_at else "")


@dataclass(slots=True)
class Instruction:
    """One decoded instruction.

    Attributes:
        opcode: Name without encoding suffix, for example `v_add_u32`.
        operands: Destinations first, as written.
        modifiers: Everything after the operands; a bare flag has the value 1.
        text: The text it came from, registers above v255 resolved.
        line: Line in the assembly text, from 1.
        source: Line of the kernel's source, if known.
        dual: Second half of a dual-issue instruction.
        free_text: What follows the opcode, for the instructions that take no ordinary operands.
    """

    opcode: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, Modifier]
    text: str
    line: int = 0
    source: SourceLocation | None = None
    dual: Instruction | None = None
    free_text: str = ""
    touched: frozenset[tuple[Kind, int]] = field(default_factory=frozenset)

    @property
    def where(self) -> str:
        """`line 120 of the assembly: v_add_u32 v0, v1, v2 [kernel.py:17]`."""
        return f"line {self.line} of the assembly: {self.text}" + (f" [{self.source}]" if self.source else "")

    def flag(self, name: str) -> bool:
        return name in self.modifiers

    def number(self, name: str, default: int = 0) -> int:
        value = self.modifiers.get(name, default)
        assert isinstance(value, int), f"{self.where}: modifier {name} must be a number, got {value!r}"
        return value

    def vector(self, name: str, length: int, default: int = 0) -> list[int]:
        """A bracketed modifier such as `op_sel:[0,1]`, padded with zeros; `default` fills it where it is absent."""
        value = self.modifiers.get(name)
        if not isinstance(value, list):
            return [default] * length
        return (value + [0] * length)[: max(length, len(value))]

    def word(self, name: str, default: str = "") -> str:
        return str(self.modifiers.get(name, default))


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside brackets; a run of spaces counts as one separator."""
    parts, depth, current = [], 0, ""
    for char in text:
        if char in "[(":
            depth += 1
        elif char in "])":
            depth -= 1
        if char == separator and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [part for part in parts if part]


def _modifier(text: str) -> tuple[str, Modifier]:
    name, colon, value = text.partition(":")
    if not colon:
        return name, 1
    if value.startswith("["):
        return name, [int(item, 0) for item in value[1:-1].split(",")]
    try:
        return name, int(value, 0)
    except ValueError:
        return name, value


def resolve_high_registers(text: str) -> str:
    """Replace `v3 /*v259*/` by `v259` (gfx1250's selected register bank)."""

    def real(match: re.Match[str]) -> str:
        half, name = match.groups()
        return name if "." in name else name + (half or "")

    return _HIGH_REGISTER.sub(real, text)


def parse_instruction(text: str, line: int = 0, source: SourceLocation | None = None) -> Instruction:
    """Take one line of assembly (no label, no trailing comment) apart."""
    text = " ".join(resolve_high_registers(text).split())
    if " :: " in text:
        first, second = text.split(" :: ")
        instruction = parse_instruction(first, line, source)
        instruction.dual = parse_instruction(second, line, source)
        instruction.text = text
        instruction.touched |= instruction.dual.touched
        return instruction
    opcode, _, rest = text.partition(" ")
    opcode = _ENCODING.sub("", opcode)
    if opcode.startswith(_FREE_TEXT):
        return Instruction(opcode, (), {}, text, line, source, free_text=rest)
    operands: list[Operand] = []
    modifiers: dict[str, Modifier] = {}
    for chunk in _split(rest, ","):
        first, *others = _split(chunk, " ")
        operands.append(parse_operand(first))
        modifiers.update(_modifier(item) for item in others)
    touched = frozenset(key for operand in operands for key in operand.registers())
    return Instruction(opcode, tuple(operands), modifiers, text, line, source, touched=touched)
