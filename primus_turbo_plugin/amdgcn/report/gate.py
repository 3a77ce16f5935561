"""ISA gates: what the compiled code of a kernel must look like, checked without hardware."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from primus_turbo_plugin.amdgcn.report.isa import IsaReport


@dataclass(frozen=True, kw_only=True, slots=True)
class IsaGate:
    """Requirements on one kernel.

    Patterns are regular expressions matched against whole opcodes; a transfer straight to LDS is seen as
    `buffer_load_dwordx4 lds`.

    Attributes:
        max_spills: Vector registers spilled.
        max_scratch_bytes: Scratch of a lane.
        required: Patterns that must occur in the hot loop.
        required_anywhere: Patterns that must occur somewhere (prologue, epilogue).
        forbidden: Patterns that must not occur in the hot loop.
        forbidden_anywhere: Patterns that must not occur at all.
        limits: (pattern, most) of instructions that may occur in the hot loop, but not more often.
        max_vgprs: Vector registers, if bounded.
        min_workgroups: Work-groups a compute unit must be able to hold.
        bound_by: Pipeline the static estimate must name as the limit (`mma`, `lds`, `valu`).
        min_mma_share: Share of the estimated loop time the matrix unit must be busy.
        min_mca_share: The same by LLVM MCA; checked only on reports MCA was run for.
    """

    max_spills: int = 0
    max_scratch_bytes: int = 0
    required: tuple[str, ...] = ()
    required_anywhere: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    forbidden_anywhere: tuple[str, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    max_vgprs: int | None = None
    min_workgroups: int | None = None
    bound_by: str | None = None
    min_mma_share: float | None = None
    min_mca_share: float | None = None


def _matching(pattern: str, mix: Counter[str]) -> list[str]:
    return sorted(opcode for opcode in mix if re.fullmatch(pattern, opcode))


def _opcodes(report: IsaReport, gate: IsaGate) -> list[str]:
    loop, whole = report.loop_mix, report.whole_mix
    problems = [
        f"hot loop lacks an instruction matching {item!r}" for item in gate.required if not _matching(item, loop)
    ]
    problems += [
        f"kernel lacks an instruction matching {item!r}"
        for item in gate.required_anywhere
        if not _matching(item, whole)
    ]
    for patterns, mix, place in ((gate.forbidden, loop, "hot loop"), (gate.forbidden_anywhere, whole, "kernel")):
        for pattern in patterns:
            found = _matching(pattern, mix)
            if found:
                counted = ", ".join(f"{opcode} x{mix[opcode]}" for opcode in found)
                problems.append(f"{place} holds {counted}, forbidden by {pattern!r}")
    for pattern, most in gate.limits:
        count = sum(loop[opcode] for opcode in _matching(pattern, loop))
        if count > most:
            problems.append(f"hot loop holds {count} instructions matching {pattern!r}, at most {most} allowed")
    return problems


def check_gate(report: IsaReport, gate: IsaGate) -> list[str]:
    """Violations of a gate, one line each; empty if the kernel passes."""
    problems = []
    if report.vgpr_spills > gate.max_spills:
        problems.append(f"{report.vgpr_spills} vector registers spilled, at most {gate.max_spills} allowed")
    if report.scratch_bytes > gate.max_scratch_bytes:
        problems.append(f"{report.scratch_bytes} bytes of scratch per lane, at most {gate.max_scratch_bytes} allowed")
    if gate.max_vgprs is not None and report.vgprs > gate.max_vgprs:
        problems.append(f"{report.vgprs} vector registers, at most {gate.max_vgprs} allowed")
    if gate.min_workgroups is not None and report.workgroups_per_cu < gate.min_workgroups:
        problems.append(
            f"{report.workgroups_per_cu} work-groups fit a compute unit, at least {gate.min_workgroups} required"
        )
    if report.loop is None and (gate.required or gate.bound_by or gate.min_mma_share is not None):
        return [*problems, "the kernel has no loop, but the gate describes one", *_opcodes(report, gate)]
    if gate.bound_by is not None and report.bound_by != gate.bound_by:
        problems.append(f"the static estimate is bound by {report.bound_by}, must be by {gate.bound_by}")
    if gate.min_mma_share is not None and report.mma_share < gate.min_mma_share:
        problems.append(
            f"static MMA share of the hot loop is {report.mma_share:.0%}, at least {gate.min_mma_share:.0%} required"
        )
    if gate.min_mca_share is not None and report.mca is not None and report.mca.matrix_share < gate.min_mca_share:
        problems.append(
            f"LLVM MCA: matrix unit busy {report.mca.matrix_share:.1%}, at least {gate.min_mca_share:.1%} required"
        )
    return [f"{report.kernel} on {report.arch}: {problem}" for problem in problems + _opcodes(report, gate)]
