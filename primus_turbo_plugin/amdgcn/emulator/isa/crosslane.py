"""Cross-lane moves: lane reads and writes, permutations and swaps, lane counting.

Source: CDNA "VOP1", "VOP2", "VOP3A"; RDNA4 of the same names; `ds_bpermute`, `ds_permute`, `ds_swizzle` from "LDS".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, GFX950, GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, scalar_reader, vector_reader
from primus_turbo_plugin.amdgcn.emulator.waits import DS, LGKM
from primus_turbo_plugin.amdgcn.emulator.waves import U32, U64

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def _bind_read_first(instruction: Instruction) -> Execute:
    """D = S0 of the first active lane (lane 0 if none is)."""
    target, source = instruction.operands
    read = vector_reader(source, "u32")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        first = waves.active.argmax(axis=1)
        waves.write_scalar(target.index, waves.spread(read(machine))[np.arange(waves.count), first])

    return execute


def _bind_read_lane(instruction: Instruction) -> Execute:
    """D = S0 of lane S1."""
    target, source, lane = instruction.operands
    read, read_lane = vector_reader(source, "u32"), scalar_reader(lane, "u32")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        chosen = np.broadcast_to(read_lane(machine), waves.count) % U32(waves.lanes)
        waves.write_scalar(target.index, waves.spread(read(machine))[np.arange(waves.count), chosen])

    return execute


def _bind_write_lane(instruction: Instruction) -> Execute:
    """Lane S1 of D = S0, whatever the execution mask."""
    target, value, lane = instruction.operands
    read, read_lane = scalar_reader(value, "u32"), scalar_reader(lane, "u32")

    def execute(machine: Machine) -> None:
        waves = machine.waves
        chosen = np.broadcast_to(read_lane(machine), waves.count) % U32(waves.lanes)
        waves.vgpr[target.index, waves.indices, chosen] = read(machine)

    return execute


def _bind_half_swap(instruction: Instruction) -> Execute:
    """Swap the odd row groups of D with the even ones of S (groups of 16 or 32 lanes)."""
    group = 32 if "permlane32" in instruction.opcode else 16
    first, second = instruction.operands[0].index, instruction.operands[1].index

    def execute(machine: Machine) -> None:
        waves = machine.waves
        one, two = waves.vector(first).copy(), waves.vector(second).copy()
        pairs_one, pairs_two = (array.reshape(len(array), -1, 2, group) for array in (one, two))
        kept = pairs_two[:, :, 0].copy()
        pairs_two[:, :, 0] = pairs_one[:, :, 1]
        pairs_one[:, :, 1] = kept
        waves.write_vector(first, one)
        waves.write_vector(second, two)

    return execute


def _bind_row_permute(instruction: Instruction) -> Execute:
    """v_permlane16: each lane reads, in its own row of 16, the lane its 4-bit selector names; x16: in the other row."""
    target, source, low, high = instruction.operands
    read, read_low, read_high = vector_reader(source, "u32"), scalar_reader(low, "u32"), scalar_reader(high, "u32")
    other_row = 1 if "permlanex16" in instruction.opcode else 0

    def execute(machine: Machine) -> None:
        waves = machine.waves
        lane = np.arange(waves.lanes)
        selectors = read_low(machine).astype(U64) | (read_high(machine).astype(U64) << U64(32))
        within = (selectors[:, None] >> (U64(4) * (lane % 16).astype(U64))) & U64(15)
        index = np.broadcast_to(within.astype(np.int64) + (lane // 16 ^ other_row) * 16, waves.active.shape)
        waves.write_vector(target.index, np.take_along_axis(waves.spread(read(machine)), index, axis=1))

    return execute


def _bind_swap(instruction: Instruction) -> Execute:
    """Exchange two registers."""
    first, second = instruction.operands[0].index, instruction.operands[1].index

    def execute(machine: Machine) -> None:
        one, two = machine.waves.vector(first).copy(), machine.waves.vector(second).copy()
        machine.waves.write_vector(first, two)
        machine.waves.write_vector(second, one)

    return execute


def _bind_mask_count(instruction: Instruction) -> Execute:
    """D = set bits of S0 below this lane (in the lower or upper 32 lanes) + S1."""
    target, mask, addend = instruction.operands
    read_mask, read_addend = vector_reader(mask, "u32"), vector_reader(addend, "u32")
    start = 32 if "_hi_" in instruction.opcode else 0

    def execute(machine: Machine) -> None:
        lane = np.arange(machine.waves.lanes)
        below = np.clip(lane - start, 0, 32).astype(U64)
        kept = read_mask(machine).astype(U64) & ((U64(1) << below) - U64(1))
        octets = np.ascontiguousarray(kept)[..., None].view(np.uint8)
        count = np.unpackbits(octets, axis=-1).sum(axis=-1).astype(U32)
        machine.waves.write_vector(target.index, count + read_addend(machine))

    return execute


def _fills(machine: Machine, instruction: Instruction) -> None:
    """These travel through the LDS path: the result is there after the matching wait."""
    counter = LGKM if machine.arch.is_cdna else DS
    machine.waits.fill([counter], instruction.operands[0].registers(), instruction)


def _bind_permute(instruction: Instruction) -> Execute:
    """ds_bpermute: D = data of lane address / 4 (0 if inactive); ds_permute: lane address / 4 of D = data."""
    target, address, data = instruction.operands
    read_address, read = vector_reader(address, "u32"), vector_reader(data, "u32")
    offset, backward = instruction.number("offset"), "bpermute" in instruction.opcode

    def execute(machine: Machine) -> None:
        waves = machine.waves
        other = ((waves.spread(read_address(machine)).astype(np.int64) + offset) >> 2) % waves.lanes
        value = waves.spread(read(machine))
        if backward:
            result: Array = np.take_along_axis(np.where(waves.active, value, U32(0)), other, axis=1)
        else:
            result = np.zeros(waves.active.shape, U32)
            rows = np.broadcast_to(np.arange(waves.count)[:, None], other.shape)
            result[rows[waves.active], other[waves.active]] = value[waves.active]
        waves.write_vector(target.index, result)
        _fills(machine, instruction)

    return execute


def _swizzle_pattern(offset: int | str, lanes: int) -> Array:
    """Source lane of each lane for `ds_swizzle_b32`."""
    lane = np.arange(lanes)
    if isinstance(offset, str):
        kind, _, rest = offset.removeprefix("swizzle(").rstrip(")").partition(",")
        if kind == "QUAD_PERM":
            return lane // 4 * 4 + np.array([int(item) for item in rest.split(",")])[lane % 4]
        if kind == "SWAP":
            return lane ^ int(rest)
        if kind == "REVERSE":
            return lane ^ (int(rest) - 1)
        if kind == "BROADCAST":
            group, source = (int(item) for item in rest.split(","))
            return lane // group * group + source
        bits = rest.strip().strip('"')
        pattern = [int("".join("1" if c == keep else "0" for c in bits), 2) for keep in ("p", "1", "i")]
        preserve = pattern[0] | pattern[2]
        return lane // 32 * 32 + (((lane % 32) & preserve) | pattern[1]) ^ pattern[2]
    if offset & 0x8000:
        return lane // 4 * 4 + np.array([(offset >> 2 * i) & 3 for i in range(4)])[lane % 4]
    and_mask, or_mask, xor_mask = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
    return lane // 32 * 32 + ((((lane % 32) & and_mask) | or_mask) ^ xor_mask)


def _bind_swizzle(instruction: Instruction) -> Execute:
    """D = data of the lane a fixed pattern names (0 if that lane is inactive)."""
    target, data = instruction.operands
    read = vector_reader(data, "u32")
    pattern = instruction.modifiers.get("offset", 0)
    assert not isinstance(pattern, list), instruction.where

    def execute(machine: Machine) -> None:
        waves = machine.waves
        source = _swizzle_pattern(pattern, waves.lanes)
        value = np.where(waves.active, waves.spread(read(machine)), U32(0))
        waves.write_vector(target.index, value[:, source])
        _fills(machine, instruction)

    return execute


_FAMILY = "cross lane"
_VOP, _LDS = "CDNA, RDNA4: VOP1/VOP3", "CDNA, RDNA4: LDS"
register(
    "v_readfirstlane_b32", _bind_read_first, family=_FAMILY, source=_VOP, meaning="D = S0 of the first active lane"
)
register("v_readlane_b32", _bind_read_lane, family=_FAMILY, source=_VOP, meaning="D = S0 of lane S1")
register("v_writelane_b32", _bind_write_lane, family=_FAMILY, source=_VOP, meaning="lane S1 of D = S0")
register("v_permlane16_swap_b32 v_permlane32_swap_b32", _bind_half_swap, family=_FAMILY, source="CDNA4: VOP1",
         meaning="swap odd row groups of D with even ones of S0", archs=GFX950 | GFX1250)  # fmt: skip
register("v_permlane16_b32 v_permlanex16_b32", _bind_row_permute, family=_FAMILY, source="RDNA4: VOP3",
         meaning="D = S0 of the lane a selector names, same or other row", archs=GFX1250, modifiers=("op_sel",))  # fmt: skip
register("v_swap_b32", _bind_swap, family=_FAMILY, source=_VOP, meaning="exchange D and S0")
register("v_mbcnt_lo_u32_b32 v_mbcnt_hi_u32_b32", _bind_mask_count, family=_FAMILY, source=_VOP,
         meaning="D = bits of S0 below this lane + S1")  # fmt: skip
register("ds_bpermute_b32 ds_permute_b32", _bind_permute, family=_FAMILY, source=_LDS, modifiers=("offset",), loads=True,
         meaning="D = data of another lane; data to another lane", archs=ALL)  # fmt: skip
register("ds_swizzle_b32", _bind_swizzle, family=_FAMILY, source=_LDS, modifiers=("offset",), loads=True,
         meaning="D = data of another lane, fixed pattern")  # fmt: skip
