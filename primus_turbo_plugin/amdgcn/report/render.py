"""The ISA report as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from primus_turbo_plugin.amdgcn.report.isa import IsaReport

_SHOWN = (
    "v_mfma",
    "v_wmma",
    "ds_",
    "buffer_",
    "global_",
    "flat_",
    "scratch_",
    "tensor_",
    "s_barrier",
    "s_wait_tensorcnt",
)


def _mix(report: IsaReport) -> str:
    """Opcodes of the hot loop that move data or multiply, with counts."""
    shown = [f"{name} x{count}" for name, count in sorted(report.loop_mix.items()) if name.startswith(_SHOWN)]
    return ", ".join(shown) or "no memory or matrix instruction"


def rows(report: IsaReport) -> list[tuple[str, str]]:
    """Label and value of each line."""
    result = [
        ("kernel", f"{report.kernel} for {report.arch}, {report.num_warps} waves per work-group"),
        (
            "registers",
            f"{report.vgprs} VGPR ({report.agprs} of them AGPR), {report.sgprs} SGPR; spilled {report.vgpr_spills} VGPR, "
            f"{report.sgpr_spills} SGPR; scratch {report.scratch_bytes} bytes a lane",
        ),
        (
            "occupancy",
            f"{report.workgroups_per_cu} work-group(s) a compute unit, {report.waves_per_simd:g} waves a SIMD, limited by "
            f"{report.occupancy_limit}; LDS {report.lds_bytes} bytes",
        ),
    ]
    loop = report.loop
    if loop is None:
        return [*result, ("hot loop", "none: the kernel has no loop")]
    result += [
        (
            "hot loop",
            f"{loop.label}: {loop.instructions} instructions ({loop.matrix} matrix, {loop.vector} other vector, "
            f"{loop.scalar} scalar)",
        ),
        ("mix", _mix(report)),
        (
            "static estimate",
            f"clocks an iteration: matrix {loop.mma_clocks:g}, LDS {loop.lds_clocks:g}, vector {loop.valu_clocks:g}; "
            f"bound by {report.bound_by}, matrix unit busy at most {report.mma_share:.0%}",
        ),
    ]
    if report.mca is not None:
        clocks, share = report.mca.clocks, report.mca.matrix_share
        result.append(
            ("LLVM MCA", f"simulated: {clocks:g} clocks an iteration of one wave, matrix unit busy {share:.1%}")
        )
    return result


def render(report: IsaReport, violations: list[str] | None = None) -> str:
    """A small table; `violations` of a gate (or an empty list) add a line."""
    lines = rows(report)
    if violations is not None:
        lines.append(("gate", "passes" if not violations else "; ".join(violations)))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def to_json(report: IsaReport, violations: list[str] | None = None) -> dict[str, Any]:
    """Everything in the report, ready for `json.dumps`; figures of the loop are marked as estimates."""
    data = dataclasses.asdict(report)
    data["loop_mix"], data["whole_mix"] = dict(report.loop_mix), dict(report.whole_mix)
    data["bound_by"], data["mma_share"] = report.bound_by, report.mma_share
    data["loop_figures_are"] = "static estimate"
    if report.mca is not None:
        data["mca"]["matrix_share"] = report.mca.matrix_share
    if violations is not None:
        data["gate_violations"] = violations
    return data
