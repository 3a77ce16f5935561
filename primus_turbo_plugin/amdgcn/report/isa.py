"""The ISA report of a compiled kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from primus_turbo_plugin.amdgcn.architecture import Architecture
from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.report.costs import lds_bytes, matrix_clocks, matrix_flops, memory_bytes
from primus_turbo_plugin.amdgcn.report.loops import hot_loop, is_matrix
from primus_turbo_plugin.amdgcn.report.mca import McaResult, run_mca
from primus_turbo_plugin.amdgcn.report.occupancy import occupancy


@dataclass(frozen=True, slots=True)
class LoopEstimate:
    """Static estimate of one iteration of the hot loop, in clocks of a compute unit running one work-group.

    Attributes:
        label: Where the loop begins.
        instructions: Instructions in it.
        matrix: Matrix instructions.
        vector: Other vector instructions.
        scalar: Scalar instructions.
        mma_clocks: Clocks the matrix units are busy.
        lds_clocks: Clocks LDS is busy at peak bandwidth, without bank conflicts.
        valu_clocks: Clocks the vector units are busy with everything else.
        flops: Matrix operations of the work-group.
        memory_bytes: Bytes moved by loads and stores (tensor transfers not counted).
        tensor_transfers: Tensor data mover instructions of one wave.
    """

    label: str
    instructions: int
    matrix: int
    vector: int
    scalar: int
    mma_clocks: float
    lds_clocks: float
    valu_clocks: float
    flops: int
    memory_bytes: int
    tensor_transfers: int

    @property
    def clocks(self) -> dict[str, float]:
        return {"mma": self.mma_clocks, "lds": self.lds_clocks, "valu": self.valu_clocks}


@dataclass(frozen=True, slots=True)
class IsaReport:
    """Everything the report knows. Loop figures are static estimates.

    Attributes:
        kernel, arch, num_warps: What was compiled.
        vgprs, agprs, sgprs: Registers of a wave; `vgprs` includes accumulation registers.
        vgpr_spills, sgpr_spills, scratch_bytes: Spilling.
        lds_bytes: LDS of a work-group.
        workgroups_per_cu, waves_per_simd, occupancy_limit: Occupancy.
        loop: Estimate of the hot loop, or None.
        loop_mix, whole_mix: Opcodes with counts; a transfer straight to LDS is `<opcode> lds`.
        mca: LLVM MCA's simulation of the loop, if it was run.
    """

    kernel: str
    arch: str
    num_warps: int
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    workgroups_per_cu: int
    waves_per_simd: float
    occupancy_limit: str
    loop: LoopEstimate | None
    loop_mix: Counter[str] = field(default_factory=Counter)
    whole_mix: Counter[str] = field(default_factory=Counter)
    mca: McaResult | None = None

    @property
    def bound_by(self) -> str:
        """Pipeline with the most clocks in the hot loop (ties go to the matrix unit), or `none`."""
        if self.loop is None:
            return "none"
        clocks = self.loop.clocks
        return max(clocks, key=lambda name: (clocks[name], name == "mma"))

    @property
    def mma_share(self) -> float:
        """Matrix clocks over the clocks of the busiest pipeline."""
        if self.loop is None or not self.loop.mma_clocks:
            return 0.0
        return self.loop.mma_clocks / max(self.loop.clocks.values())


def opcode_counts(instructions: tuple[Instruction, ...]) -> Counter[str]:
    """Opcodes with counts; both halves of a dual issue count."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        counts[instruction.opcode + (" lds" if instruction.flag("lds") else "")] += 1
        if instruction.dual is not None:
            counts[instruction.dual.opcode] += 1
    return counts


def _estimate(label: str, body: tuple[Instruction, ...], arch: Architecture, num_warps: int) -> LoopEstimate:
    matrix = [item for item in body if is_matrix(item.opcode)]
    vector = sum(item.opcode.startswith("v_") for item in body) - len(matrix)
    share = num_warps / arch.simds  # waves of the group per SIMD
    lanes = arch.wave * num_warps
    return LoopEstimate(
        label=label,
        instructions=len(body),
        matrix=len(matrix),
        vector=vector,
        scalar=sum(item.opcode.startswith("s_") for item in body),
        mma_clocks=sum(matrix_clocks(item, arch) for item in matrix) * share,
        lds_clocks=sum(lds_bytes(item) for item in body) * lanes / arch.lds_bytes_per_clock,
        valu_clocks=vector * arch.valu_clocks * share,
        flops=sum(matrix_flops(item) for item in matrix) * num_warps,
        memory_bytes=sum(memory_bytes(item) for item in body) * lanes,
        tensor_transfers=sum(item.opcode.startswith("tensor_") for item in body),
    )


def isa_report(compiled: CompiledKernel, *, mca: bool = False) -> IsaReport:
    """Report on a compiled kernel.

    Args:
        compiled: The kernel.
        mca: Also simulate the hot loop with LLVM MCA.

    Raises:
        UnsupportedError: MCA was asked for and cannot be had.
    """
    descriptor, arch, program = compiled.descriptor, compiled.architecture, compiled.program
    held = occupancy(arch, descriptor.vgprs, compiled.shared, compiled.num_warps)
    loop = hot_loop(program)
    return IsaReport(
        kernel=compiled.name,
        arch=compiled.arch,
        num_warps=compiled.num_warps,
        vgprs=descriptor.vgprs,
        agprs=descriptor.agprs,
        sgprs=descriptor.sgprs,
        vgpr_spills=descriptor.vgpr_spills,
        sgpr_spills=descriptor.sgpr_spills,
        scratch_bytes=descriptor.scratch_bytes,
        lds_bytes=compiled.shared,
        workgroups_per_cu=held.workgroups,
        waves_per_simd=held.waves_per_simd,
        occupancy_limit=held.limited_by,
        loop=_estimate(loop.label, loop.instructions, arch, compiled.num_warps) if loop is not None else None,
        loop_mix=opcode_counts(loop.instructions) if loop is not None else Counter(),
        whole_mix=opcode_counts(program.instructions),
        mca=run_mca(compiled) if mca else None,
    )
