"""Finding the hot loop of a kernel in its assembly."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.program import Program


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions from a label to a branch back to it.

    Attributes:
        label: Where it begins.
        instructions: Its body, the branch included.
    """

    label: str
    instructions: tuple[Instruction, ...]

    @property
    def mix(self) -> Counter[str]:
        """Opcodes and how often each occurs; both halves of a dual issue count."""
        opcodes: Counter[str] = Counter()
        for instruction in self.instructions:
            opcodes[instruction.opcode] += 1
            if instruction.dual is not None:
                opcodes[instruction.dual.opcode] += 1
        return opcodes

    @property
    def matrix_instructions(self) -> int:
        return sum(is_matrix(item.opcode) for item in self.instructions)


def is_matrix(opcode: str) -> bool:
    return opcode.startswith(("v_mfma", "v_wmma", "v_smfmac", "v_swmmac"))


def find_loops(program: Program) -> list[Loop]:
    """The loops: for every label that is branched back to, the longest body."""
    bodies: dict[str, tuple[int, int]] = {}
    for index, instruction in enumerate(program.instructions):
        if instruction.opcode != "s_branch" and not instruction.opcode.startswith("s_cbranch"):
            continue
        label = instruction.operands[0].text
        start = program.labels.get(label, index + 1)
        if start <= index:
            bodies[label] = (start, index + 1)
    return [Loop(label, program.instructions[start:end]) for label, (start, end) in bodies.items()]


def _innermost(loops: list[Loop]) -> list[Loop]:
    """Those that contain none of the others."""
    return [loop for loop in loops if not any(other is not loop and _inside(other, loop) for other in loops)]


def _inside(inner: Loop, outer: Loop) -> bool:
    first, last = inner.instructions[0].line, inner.instructions[-1].line
    return outer.instructions[0].line <= first and last <= outer.instructions[-1].line


def hot_loop(program: Program) -> Loop | None:
    """The loop that does the kernel's work.

    Among loops with matrix instructions, the innermost with most of them (waiting loops without any do not count as
    inner ones); without any, the longest innermost loop.
    """
    loops = find_loops(program)
    working = [loop for loop in loops if loop.matrix_instructions]
    if working:
        return max(_innermost(working), key=lambda loop: (loop.matrix_instructions, len(loop.instructions)))
    return max(_innermost(loops), key=lambda loop: len(loop.instructions), default=None)
