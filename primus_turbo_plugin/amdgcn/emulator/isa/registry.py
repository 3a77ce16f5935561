"""The table of emulated instructions.

Every instruction is registered with its family, where its meaning was read and one line saying what it does; binding a
decoded instruction gives a function that executes it on a machine. `coverage()` lists them, so documentation and error
messages come from the same place.

Sources are abbreviated: *CDNA* is AMD's "Instinct MI300/CDNA4 Instruction Set Architecture" reference guides, *RDNA4* the
RDNA4 guide (gfx1250 shares most scalar and vector encodings with it), *LLVM* the AMDGPU target of LLVM (definitions,
intrinsics, `AMDGPUUsage`), *Triton* the lowering in Triton's AMD backend, which is where gfx1250-only layouts are public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.faults import UnknownInstructionError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Execute = Callable[["Machine"], None]
Binder = Callable[[Instruction], Execute]

CDNA = frozenset({"gfx942", "gfx950"})
GFX942 = frozenset({"gfx942"})
GFX950 = frozenset({"gfx950"})
GFX1250 = frozenset({"gfx1250"})
ALL = CDNA | GFX1250

# Cache policy, ordering and register-reuse hints: they do not change what an instruction computes.
_HINTS = frozenset({"nt", "sc0", "sc1", "nv", "th", "scope", "glc", "slc", "dlc", "matrix_a_reuse", "matrix_b_reuse"})


@dataclass(frozen=True, slots=True)
class Opcode:
    """One emulated instruction.

    Attributes:
        name: Opcode without encoding suffix.
        family: Group it belongs to, for example `vector alu`.
        source: Where its meaning was read.
        meaning: What it does, in one line.
        bind: Makes the function that executes a decoded instruction.
        archs: Targets that have it.
        modifiers: Modifiers the implementation honours; any other (that is not a mere hint) is refused.
        loads: The first operand is filled when the operation completes, so it is not read at issue.
        branches: It can change the program counter or the run state of a wave.
    """

    name: str
    family: str
    source: str
    meaning: str
    bind: Binder
    archs: frozenset[str]
    modifiers: frozenset[str]
    loads: bool = False
    branches: bool = False


_TABLE: dict[str, Opcode] = {}


def register(
    names: str | Iterable[str],
    bind: Binder,
    *,
    family: str,
    source: str,
    meaning: str,
    archs: frozenset[str] = ALL,
    modifiers: Iterable[str] = (),
    loads: bool = False,
    branches: bool = False,
) -> None:
    """Add instructions that share one implementation; `names` may be one space-separated string."""
    for name in names.split() if isinstance(names, str) else names:
        known = _TABLE.get(name)
        assert known is None or known.bind is bind, f"instruction {name} is registered with two meanings"
        targets = archs if known is None else archs | known.archs
        _TABLE[name] = Opcode(name, family, source, meaning, bind, targets, frozenset(modifiers), loads, branches)


def lookup(name: str, arch: str) -> Opcode | None:
    """The entry for an opcode on a target, or None."""
    opcode = _TABLE.get(name)
    return opcode if opcode is not None and arch in opcode.archs else None


def coverage(arch: str) -> list[Opcode]:
    """Every instruction emulated on a target, by family and name."""
    import primus_turbo_plugin.amdgcn.emulator.isa  # noqa: F401  (fills the table)

    return sorted((op for op in _TABLE.values() if arch in op.archs), key=lambda op: (op.family, op.name))


def _refusal(instruction: Instruction, arch: str) -> str | None:
    """Why an instruction cannot be emulated, or None."""
    for part in (instruction, instruction.dual):
        if part is None:
            continue
        opcode = lookup(part.opcode, arch)
        if opcode is None:
            return f"{part.opcode} is not known"
        extra = set(part.modifiers) - opcode.modifiers - _HINTS
        if extra:
            return f"{part.opcode} with modifier {', '.join(sorted(extra))} is not known"
    return None


def check_program(instructions: Iterable[Instruction], arch: str) -> None:
    """Raise one error that lists every instruction of a kernel that cannot be emulated.

    Raises:
        UnknownInstructionError: With opcode, number of uses and the first place of each.
    """
    unknown: dict[str, list[Instruction]] = {}
    for instruction in instructions:
        reason = _refusal(instruction, arch)
        if reason is not None:
            unknown.setdefault(reason, []).append(instruction)
    if unknown:
        lines = [f"  {reason}: {len(uses)} use(s), first at {uses[0].where}" for reason, uses in unknown.items()]
        raise UnknownInstructionError(
            f"amdgcn: {len(unknown)} instruction(s) not emulated on {arch}:\n" + "\n".join(lines)
        )


def bind(instruction: Instruction, arch: str) -> Execute:
    """The function that executes an instruction (after `check_program`)."""
    opcode = lookup(instruction.opcode, arch)
    assert opcode is not None, f"{instruction.where}: bind before check_program"
    return opcode.bind(instruction)
