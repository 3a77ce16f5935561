"""Operand transforms of vector instructions: DPP (data from another lane) and SDWA (a byte or word of a register).

Source: CDNA "Data Parallel Primitives" and "Sub-Dword Addressing"; RDNA4 "DPP".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, Reader
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Bools, Words
from primus_turbo_plugin.amdgcn.faults import AssemblyError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

DPP_MODIFIERS = (
    "quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_newbcast", "row_share",
    "row_xmask", "row_bcast", "wave_shl", "wave_shr", "wave_rol", "wave_ror", "dpp8",
)  # fmt: skip
DPP_CONTROLS = ("row_mask", "bank_mask", "bound_ctrl", "fi")
SDWA_MODIFIERS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")


def uses_dpp(instruction: Instruction) -> bool:
    return any(name in instruction.modifiers for name in DPP_MODIFIERS)


def uses_sdwa(instruction: Instruction) -> bool:
    return any(name in instruction.modifiers for name in SDWA_MODIFIERS)


def dpp_source(instruction: Instruction, lanes: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each lane, the lane its data comes from and whether that lane exists; both [lane]."""
    lane = np.arange(lanes)
    row, column = lane // 16 * 16, lane % 16
    exists = np.ones(lanes, bool)
    name = next(item for item in DPP_MODIFIERS if item in instruction.modifiers)
    if name in ("quad_perm", "dpp8"):
        pattern = np.array(instruction.modifiers[name])
        width = len(pattern)
        return lane // width * width + pattern[lane % width], exists
    amount = instruction.number(name)
    if name == "row_shl":
        return row + (column + amount) % 16, column + amount < 16
    if name == "row_shr":
        return row + (column - amount) % 16, column >= amount
    if name == "row_ror":
        return row + (column - amount) % 16, exists
    if name == "row_mirror":
        return row + 15 - column, exists
    if name == "row_half_mirror":
        return lane // 8 * 8 + 7 - lane % 8, exists
    if name in ("row_newbcast", "row_share"):
        return row + amount, exists
    if name == "row_xmask":
        return row + (column ^ amount), exists
    if name == "row_bcast":
        source = row - 1 if amount == 15 else np.full(lanes, 31)
        return np.maximum(source, 0), lane >= amount + 1
    if name in ("wave_shl", "wave_shr"):
        source = lane + (amount if name == "wave_shl" else -amount)
        return source % lanes, (source >= 0) & (source < lanes)
    return (lane + (amount if name == "wave_rol" else -amount)) % lanes, exists


@dataclass(slots=True)
class Dpp:
    """The DPP control of one instruction.

    Attributes:
        source: Lane the data comes from, [lane].
        exists: Whether that lane exists, [lane].
        enabled: Lanes `row_mask` and `bank_mask` leave on, [lane].
        zero_fill: `bound_ctrl`: a missing source reads as zero instead of disabling the write.
        inactive: `fi`: inactive source lanes are read.
    """

    source: NDArray[np.int64]
    exists: NDArray[np.bool_]
    enabled: NDArray[np.bool_]
    zero_fill: bool
    inactive: bool

    @classmethod
    def of(cls, instruction: Instruction, lanes: int) -> Dpp:
        source, exists = dpp_source(instruction, lanes)
        lane = np.arange(lanes)
        rows, banks = instruction.number("row_mask", 15), instruction.number("bank_mask", 15)
        enabled = ((rows >> (lane // 16)) & 1).astype(bool) & ((banks >> (lane % 16 // 4)) & 1).astype(bool)
        return cls(source, exists, enabled, instruction.flag("bound_ctrl"), instruction.number("fi", 0) == 1)

    def readable(self, machine: Machine) -> Bools:
        """Whether each lane's source delivers data, [chosen, lane]."""
        if self.inactive:
            return np.broadcast_to(self.exists, machine.waves.active.shape)
        return self.exists & machine.waves.active[:, self.source]

    def reader(self, read: Reader) -> Reader:
        """The first source operand, taken through the lane permutation."""

        def permuted(machine: Machine) -> Array:
            value = np.broadcast_to(read(machine), machine.waves.active.shape)[:, self.source]
            return np.where(self.readable(machine), value, value.dtype.type(0))

        return permuted

    def written(self, machine: Machine) -> Bools:
        """Lanes the instruction writes, besides the execution mask."""
        if self.zero_fill:
            return np.broadcast_to(self.enabled, machine.waves.active.shape)
        return self.enabled & self.readable(machine)


def _selection(word: str, where: str) -> tuple[int, int]:
    """Shift and width in bits of an SDWA selector."""
    if word == "DWORD":
        return 0, 32
    kind, _, number = word.partition("_")
    if kind in ("BYTE", "WORD") and number.isdigit():
        width = 8 if kind == "BYTE" else 16
        return int(number) * width, width
    raise AssemblyError(f"{where}: unknown SDWA selector {word!r}.")


def sdwa_reader(read: Reader, instruction: Instruction, position: int, sign_extend: bool = False) -> Reader:
    """Source operand 0 or 1 through its selector, zero-extended or (`sext`) sign-extended."""
    shift, width = _selection(instruction.word(f"src{position}_sel", "DWORD"), instruction.where)
    if width == 32:
        return read
    if not sign_extend:
        return lambda m: (read(m) >> U32(shift)) & U32((1 << width) - 1)
    return lambda m: ((read(m) << U32(32 - shift - width)).view(np.int32) >> (32 - width)).view(U32)


def sdwa_merge(instruction: Instruction, result: Words, previous: Words) -> Words:
    """Put a result into the selected part of the destination register."""
    shift, width = _selection(instruction.word("dst_sel", "DWORD"), instruction.where)
    if width == 32:
        return result
    mask = ((1 << width) - 1) << shift
    placed = (result << U32(shift)) & U32(mask)
    unused = instruction.word("dst_unused", "UNUSED_PAD")
    if unused == "UNUSED_PAD":
        return placed
    if unused == "UNUSED_PRESERVE":
        return (previous & U32(0xFFFFFFFF ^ mask)) | placed
    raise AssemblyError(f"{instruction.where}: dst_unused:{unused} is not emulated.")
