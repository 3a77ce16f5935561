"""Tensor data mover (gfx1250): tiles of up to five dimensions between memory and LDS.

Source: the descriptor layout documented in Triton's AMD backend (`TDMUtility.cpp`) and LLVM `int_amdgcn_tensor_load_to_lds`.
Dimension 0 is the innermost and contiguous. Elements outside the tensor load as zero and are not stored. Loads can insert
`pad_amount` bytes into LDS after every `pad_interval` bytes. An operation whose count field is zero is predicated off, which
still counts on `tensorcnt`.

Multicast: a transfer with a mask lands in the LDS of every work-group of the cluster that the mask names. Triton's kernels let
each receiver issue it; here each issue writes all receivers, as late as its own wait, and is in flight there from its own issue.

Not emulated: gather/scatter rows, iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import Operand
from primus_turbo_plugin.amdgcn.emulator.isa.lds_atomics import arrive
from primus_turbo_plugin.amdgcn.emulator.isa.registry import GFX1250, Execute, register
from primus_turbo_plugin.amdgcn.emulator.waits import TENSOR
from primus_turbo_plugin.amdgcn.emulator.waves import Ints
from primus_turbo_plugin.amdgcn.faults import EmulationError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine


def _field(words: list[int], start: int, width: int) -> int:
    """Bits of a descriptor group, numbered across its dwords."""
    whole = sum(word << (32 * i) for i, word in enumerate(words))
    return (whole >> start) & ((1 << width) - 1)


@dataclass(frozen=True, slots=True)
class TileDescriptor:
    """A decoded descriptor; dimensions innermost first.

    Attributes:
        enabled: The operation does something.
        lds_address: Bytes.
        global_address: Bytes.
        element_bytes: Size of an element.
        tensor: Elements of the tensor from the tile's origin on, per dimension.
        tile: Elements of the tile per dimension in use.
        strides: Elements between neighbours per dimension.
        pad_interval: Bytes of data between paddings, 0 for none.
        pad_amount: Bytes of each padding.
        barrier: LDS address of the barrier object to arrive at, or None.
        receivers: Places in the cluster of the work-groups whose LDS is written; none: the issuer's own.
    """

    enabled: bool
    lds_address: int
    global_address: int
    element_bytes: int
    tensor: tuple[int, ...]
    tile: tuple[int, ...]
    strides: tuple[int, ...]
    pad_interval: int
    pad_amount: int
    barrier: int | None
    receivers: tuple[int, ...] = ()

    @classmethod
    def decode(cls, g0: list[int], g1: list[int], g2: list[int], g3: list[int]) -> TileDescriptor:
        if _field(g0, 31, 1) or _field(g1, 19, 1):
            raise EmulationError("tensor transfers with gather/scatter or iteration are not emulated.")
        padded = _field(g1, 20, 1)
        sizes = (_field(g1, 112, 16), _field(g1, 128, 16), _field(g1, 144, 16), _field(g2, 112, 16), _field(g3, 80, 16))
        used = next((i for i, size in enumerate(sizes) if size == 0), len(sizes))
        return cls(
            enabled=_field(g0, 0, 2) != 0,
            lds_address=g0[1],
            global_address=_field(g0, 64, 57),
            element_bytes=1 << _field(g1, 16, 2),
            tensor=(_field(g1, 48, 32), _field(g1, 80, 32), g2[0], g2[1], _field(g3, 48, 32)),
            tile=sizes[:used],
            strides=(1, _field(g1, 160, 48), _field(g1, 208, 48), _field(g2, 64, 48), _field(g3, 0, 48)),
            pad_interval=(2 << _field(g1, 22, 3)) * 4 if padded else 0,
            pad_amount=(_field(g1, 25, 7) + 1) * 4 if padded else 0,
            barrier=_field(g1, 32, 16) << 3 if _field(g1, 18, 1) else None,
            receivers=tuple(i for i in range(16) if _field(g1, i, 1)),
        )

    def coordinates(self) -> tuple[Ints, Ints, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]]:
        """For each element of the tile in LDS order: its number, its offset in memory (elements), and whether the tensor
        has it."""
        number = np.arange(int(np.prod(self.tile)))
        memory = np.zeros_like(number)
        inside = np.ones(len(number), bool)
        remaining = number
        for dimension, size in enumerate(self.tile):
            index = remaining % size
            remaining = remaining // size
            memory = memory + index * self.strides[dimension]
            inside &= index < self.tensor[dimension]
        return number, memory, inside


def _groups(machine: Machine, operands: tuple[Operand, ...], wave: int) -> list[list[int]]:
    """The descriptor's scalar registers; absent groups are zero."""
    result = []
    for position, size in enumerate((4, 8, 4, 4)):
        if position < len(operands) and operands[position].is_scalar:
            first = operands[position].index
            result.append([int(machine.waves.sgpr[first + i, wave]) for i in range(size)])
        else:
            result.append([0] * size)
    return result


def _load(machine: Machine, wave: int, tile: TileDescriptor) -> None:
    """Read the tile now; it lands in LDS at the wait, or a while later if it signals a barrier object."""
    number, memory, inside = tile.coordinates()
    size = tile.element_bytes
    linear = number * size
    padding = linear // tile.pad_interval * tile.pad_amount if tile.pad_interval else 0
    lds = tile.lds_address + linear + padding
    data = np.zeros((len(number), size), np.uint8)
    data[inside] = machine.memory.read(tile.global_address + memory[inside] * size, size)
    machine.lds.check_flat(lds, size, "tensor transfer")
    groups = machine.cluster_groups(wave, tile.receivers)
    races, me, pc = machine.lds.races, np.array([wave]), machine.pc
    if races is not None:
        for group in groups:
            units = races.units_of_group(group, wave, lds, size)
            races.write(pc, *units, in_flight=machine.waits.deferred, multicast=bool(tile.receivers))

    def land(_: Ints) -> None:
        for group in groups:
            machine.lds.bytes_of_group(group)[lds[:, None] + np.arange(size)] = data
            if races is not None and machine.waits.deferred:
                units, who = races.units_of_group(group, wave, lds, size)
                if tile.barrier is None:
                    races.landed(units, who)
                else:
                    races.publish(units)
        if tile.barrier is not None:
            arrive(machine, wave, tile.barrier, 1)

    if tile.barrier is not None and len(groups) > 1:
        raise EmulationError("tensor transfers that signal barrier objects of several work-groups are not emulated.")
    if tile.barrier is not None:
        machine.later(lambda: land(me))
        machine.waits.count(TENSOR)
    else:
        machine.waits.transfer(TENSOR, land)


def _store(machine: Machine, wave: int, tile: TileDescriptor) -> None:
    """Write the tile to memory now; the LDS it came from must be left alone until the wait.

    Stores ignore padding: the compiler widens the tile instead.
    """
    number, memory, inside = tile.coordinates()
    size = tile.element_bytes
    lds = tile.lds_address + number[inside] * size
    machine.lds.check_flat(lds, size, "tensor transfer")
    data = machine.lds.group_bytes(wave)[lds[:, None] + np.arange(size)]
    machine.memory.write(tile.global_address + memory[inside] * size, data)
    races = machine.lds.races
    if races is not None:
        units, who = races.units(np.array([wave]), lds[None], np.ones((1, len(lds)), bool), size)
        races.leaving(machine.pc, units, who)
        machine.waits.transfer(TENSOR, lambda _: races.left(units, who), into_lds=False)
    else:
        machine.waits.count(TENSOR)
    if tile.barrier is not None:
        arrive(machine, wave, tile.barrier, 1)


def _bind(instruction: Instruction) -> Execute:
    """One transfer per wave, described by scalar registers; the execution mask plays no part."""
    store = instruction.opcode == "tensor_store_from_lds"

    def execute(machine: Machine) -> None:
        waves = machine.waves
        chosen = waves.indices
        for wave in chosen:
            waves.choose(np.array([wave]))
            tile = TileDescriptor.decode(*_groups(machine, instruction.operands, int(wave)))
            if not tile.enabled:
                machine.waits.count(TENSOR)
            elif store:
                _store(machine, int(wave), tile)
            else:
                _load(machine, int(wave), tile)
        waves.choose(chosen)

    return execute


register("tensor_load_to_lds", _bind, family="tensor data mover", source="LLVM, Triton: gfx1250",
         meaning="LDS tile = memory tile", archs=GFX1250)  # fmt: skip
register("tensor_store_from_lds", _bind, family="tensor data mover", source="LLVM, Triton: gfx1250",
         meaning="memory tile = LDS tile", archs=GFX1250)  # fmt: skip
