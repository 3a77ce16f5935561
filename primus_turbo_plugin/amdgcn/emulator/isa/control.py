"""Control flow, waits, barriers, and instructions that only steer the hardware.

Source: CDNA "SOPP"; RDNA4 "SOPP" and "Split barriers"; wait counters from the guides' "Data dependency resolution".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import EXEC, VCC, Kind
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, CDNA, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.waits import ASYNC, DS, KM, LGKM, LOAD, STORE, TENSOR, VM
from primus_turbo_plugin.amdgcn.faults import AssemblyError, TrapError, UnknownInstructionError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

_FAMILY = "control"


# -- branches ---------------------------------------------------------------------------------------------------------------
def _bind_branch(instruction: Instruction) -> Execute:
    """Branch always, or on SCC, VCC or EXEC being zero."""
    condition = instruction.opcode.removeprefix("s_cbranch_")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        target = machine.program.target(instruction)
        if instruction.opcode == "s_branch":
            taken = np.ones(waves.count, bool)
        elif condition.startswith("scc"):
            taken = waves.scc[waves.chosen] == (condition == "scc1")
        else:
            base = VCC if condition.startswith("vcc") else EXEC
            zero = np.ones(waves.count, bool)
            for word in range(waves.mask_words):
                zero &= waves.scalar(base + word) == 0
            taken = ~zero if condition.endswith("nz") else zero
        machine.pcs[waves.indices[taken]] = target

    return execute


def _bind_end(instruction: Instruction) -> Execute:
    return lambda machine: machine.finish()


def _bind_trap(instruction: Instruction) -> Execute:
    def execute(machine: Machine) -> None:
        if machine.waves.active.any():
            raise TrapError("the kernel trapped (a device assertion failed).")

    return execute


# -- barriers ---------------------------------------------------------------------------------------------------------------
def _is_cluster(instruction: Instruction) -> bool:
    """Whether a barrier is the cluster's (-3), not the work-group's (-1); named ones are not emulated."""
    text = instruction.operands[0].text if instruction.operands else "-1"
    if text not in ("-1", "0xffff", "-3", "0xfffd"):
        raise UnknownInstructionError(
            f"{instruction.where}: only the barriers of the work-group (-1) and of the cluster (-3) are emulated."
        )
    return text in ("-3", "0xfffd")


def _bind_barrier(instruction: Instruction) -> Execute:
    """Signal and wait at once."""

    def execute(machine: Machine) -> None:
        machine.signal_barrier()
        machine.wait_barrier()

    return execute


def _bind_signal(instruction: Instruction) -> Execute:
    if _is_cluster(instruction):
        return lambda machine: machine.signal_cluster()
    return lambda machine: machine.signal_barrier()


def _bind_barrier_wait(instruction: Instruction) -> Execute:
    if _is_cluster(instruction):
        return lambda machine: machine.wait_cluster()
    return lambda machine: machine.wait_barrier()


# -- wait counters ----------------------------------------------------------------------------------------------------------
def _limit(instruction: Instruction) -> int:
    operand = instruction.operands[-1]
    if operand.kind is not Kind.INTEGER:
        raise AssemblyError(f"{instruction.where}: a wait needs a number.")
    return operand.index


def _bind_waitcnt(instruction: Instruction) -> Execute:
    """s_waitcnt vmcnt(n) lgkmcnt(m), or the packed number (CDNA encoding)."""
    text = instruction.free_text
    limits = [(name, int(value, 0)) for name, value in re.findall(r"(vmcnt|lgkmcnt)\((\w+)\)", text)]
    if not limits and re.fullmatch(r"\w+", text):
        word = int(text, 0)
        limits = [(VM, (word & 15) | ((word >> 14 & 3) << 4)), (LGKM, word >> 8 & 15)]

    def execute(machine: Machine) -> None:
        for name, limit in limits:
            machine.waits.wait(name, limit)

    return execute


_SINGLE = {"loadcnt": LOAD, "storecnt": STORE, "dscnt": DS, "kmcnt": KM, "asynccnt": ASYNC, "tensorcnt": TENSOR}


def _bind_wait(instruction: Instruction) -> Execute:
    """s_wait_<counter> n; s_wait_{loadcnt,storecnt}_dscnt packs two (DS in the low 6 bits)."""
    name = instruction.opcode.removeprefix("s_wait_")
    first, _, second = name.partition("_")
    if name == "idle":
        limits = [(counter, 0) for counter in _SINGLE.values()]
    elif second:
        limit = _limit(instruction)
        limits = [(_SINGLE[first], limit >> 8 & 0x3F), (DS, limit & 0x3F)]
    else:
        limits = [(_SINGLE[first], _limit(instruction))]

    def execute(machine: Machine) -> None:
        for counter, value in limits:
            machine.waits.wait(counter, value)

    return execute


def _nothing(instruction: Instruction) -> Execute:
    return lambda machine: None


# Bits 7:0 of the mode register as the kernels are loaded: round to nearest even, denormals kept.
_INITIAL_MODE = 0xF0


def _bind_set_mode(instruction: Instruction) -> Execute:
    """s_setreg: accepted where it does not change results: other fields, or the value the mode has already."""
    match = re.match(r"hwreg\((\w+)(?:, (\d+), (\d+))?\),?\s*(\w+)?", instruction.free_text)
    if match is None:
        raise AssemblyError(f"{instruction.where}: hwreg(name, offset, width) expected.")
    name, offset, width = match[1], int(match[2] or 0), int(match[3] or 32)
    if name in ("HW_REG_MODE", "HW_REG_WAVE_MODE") and offset < 8:
        mask = (1 << min(width, 8 - offset)) - 1
        number = re.fullmatch(r"0x[0-9a-f]+|\d+", match[4] or "")
        if number is None or int(match[4], 0) & mask != _INITIAL_MODE >> offset & mask:
            raise UnknownInstructionError(f"{instruction.where}: changing rounding or denormal mode is not emulated.")
    return lambda machine: None


def _bind_get_mode(instruction: Instruction) -> Execute:
    """s_getreg: the cluster fields gfx1250 code asks for, all zero because there are no clusters."""
    match = re.match(r"(s\d+), hwreg\((\w+)", instruction.free_text)
    if match is None or match[2] != "HW_REG_IB_STS2":
        raise UnknownInstructionError(f"{instruction.where}: this hardware register is not emulated.")
    target = int(match[1][1:])

    def execute(machine: Machine) -> None:
        machine.waves.write_scalar(target, np.zeros(machine.waves.count, np.uint32))

    return execute


_SOPP = "CDNA, RDNA4: SOPP"
register(
    "s_branch s_cbranch_scc0 s_cbranch_scc1 s_cbranch_vccz s_cbranch_vccnz s_cbranch_execz s_cbranch_execnz", _bind_branch,
    family=_FAMILY, source=_SOPP, meaning="branch, if the condition holds", branches=True,
)  # fmt: skip
register("s_endpgm", _bind_end, family=_FAMILY, source=_SOPP, meaning="end of the wave", branches=True)
register("s_trap", _bind_trap, family=_FAMILY, source=_SOPP, meaning="device assertion: stops the emulation")
register("s_barrier", _bind_barrier, family=_FAMILY, source="CDNA: SOPP", meaning="wait for all waves of the group",
         archs=CDNA, branches=True)  # fmt: skip
register("s_barrier_signal", _bind_signal, family=_FAMILY, source="RDNA4: SOP1", meaning="arrive at the barrier",
         archs=GFX1250, branches=True)  # fmt: skip
register("s_barrier_wait", _bind_barrier_wait, family=_FAMILY, source="RDNA4: SOPP", meaning="wait at the barrier",
         archs=GFX1250, branches=True)  # fmt: skip
register("s_waitcnt", _bind_waitcnt, family=_FAMILY, source="CDNA: SOPP", meaning="wait until counters are low enough",
         archs=CDNA)  # fmt: skip
register(
    [f"s_wait_{name}" for name in (*_SINGLE, "loadcnt_dscnt", "storecnt_dscnt", "idle")], _bind_wait, family=_FAMILY,
    source="RDNA4: SOPP; LLVM: gfx1250", meaning="wait until a counter is low enough", archs=GFX1250,
)  # fmt: skip
register(
    "s_nop s_sleep s_setprio s_sendmsg s_icache_inv s_dcache_wb s_dcache_inv buffer_wbl2 buffer_inv", _nothing, family=_FAMILY,
    source=_SOPP, meaning="timing, priority, cache maintenance: no effect here", archs=ALL,
)  # fmt: skip
register(
    "s_delay_alu s_clause s_wait_alu s_wait_xcnt s_set_vgpr_msb s_setprio_inc_wg s_barrier_leave s_code_end global_wb global_inv "
    "s_prefetch_inst s_prefetch_data s_prefetch_inst_pc_rel v_nop s_sethalt s_wakeup",
    _nothing, family=_FAMILY, source="RDNA4: SOPP; LLVM: gfx1250",
    meaning="scheduling hints, modes, prefetch: no effect here (registers are printed resolved)", archs=ALL,
)  # fmt: skip
register("s_setreg_b32 s_setreg_imm32_b32", _bind_set_mode, family=_FAMILY, source="CDNA, RDNA4: SOPK",
         meaning="mode fields that do not change results; others are refused")  # fmt: skip
register("s_getreg_b32", _bind_get_mode, family=_FAMILY, source="RDNA4: SOPK; LLVM: gfx1250", archs=GFX1250,
         meaning="D = cluster information, zero here; other fields are refused")  # fmt: skip
