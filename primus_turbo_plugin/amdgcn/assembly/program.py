"""A kernel's instructions with their labels and source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction, SourceLocation, parse_instruction
from primus_turbo_plugin.amdgcn.faults import AssemblyError

_LABEL = re.compile(r"^([\w.$]+):")
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_INLINED = re.compile(r"@\[ (.*) \]")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_END = (".section", ".amdhsa_kernel", ".Lfunc_end")


@dataclass(frozen=True, slots=True)
class Program:
    """The code of one kernel.

    Attributes:
        instructions: In order.
        labels: Label to index of the instruction that follows it.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def target(self, instruction: Instruction) -> int:
        """Index a branch goes to."""
        name = instruction.operands[0].text
        if name not in self.labels:
            raise AssemblyError(f"{instruction.where}: label {name!r} is not in the kernel.")
        return self.labels[name]


def _location(line: str, files: dict[int, str]) -> SourceLocation | None:
    match = _LOCATION.match(line)
    assert match is not None
    file, number, column = (int(item) for item in match.groups())
    if number == 0:
        return None  # compiler generated
    inlined = _INLINED.search(line)
    return SourceLocation(files.get(file, f"file {file}"), number, column, inlined[1] if inlined else "")


def parse_program(text: str) -> Program:
    """Read the instructions of the (single) kernel in assembly text, from its entry label to its end."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    files: dict[int, str] = {}
    source: SourceLocation | None = None
    inside = False
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if (match := _FILE.match(raw)) is not None:
            files[int(match[1])] = match[3] or match[2]
        elif _LOCATION.match(raw):
            source = _location(raw, files)
        code = stripped.split(";")[0].split("//")[0].rstrip()
        if (match := _LABEL.match(code)) is not None and not code.startswith((".Lfunc_end", ".Ldebug")):
            labels[match[1]] = len(instructions)
            inside |= not match[1].startswith(".")
            continue
        if not inside or not code:
            continue
        if code.startswith(_END):
            if instructions:
                break
            continue
        if not code.startswith("."):
            instructions.append(parse_instruction(code, number, source))
    if not instructions:
        raise AssemblyError("amdgcn: no instruction found; the text must hold a kernel with its entry label.")
    return Program(tuple(instructions), labels)
