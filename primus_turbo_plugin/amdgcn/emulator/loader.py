"""Loader: what registers and memory hold when a kernel's first instruction runs.

Source: LLVM "User Guide for AMDGPU Backend", initial kernel execution state; code object V5 for hidden arguments. CDNA
passes work-group ids in SGPRs after the user SGPRs; gfx1250 in trap temporaries (ttmp9 = x, ttmp7 = y and z, ttmp8 = wave).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from primus_turbo_plugin.amdgcn.architecture import Architecture
from primus_turbo_plugin.amdgcn.assembly.descriptor import KernelDescriptor
from primus_turbo_plugin.amdgcn.assembly.operands import TTMP
from primus_turbo_plugin.amdgcn.emulator.memory import DeviceMemory
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints, Waves
from primus_turbo_plugin.amdgcn.faults import EmulationError

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """The kernel argument segment.

    Attributes:
        image: Its bytes.
        address: Where it is in device memory.
        dispatch: Address of the dispatch packet.
    """

    image: bytes
    address: int
    dispatch: int


# Services of the host runtime that do not exist here; a kernel that uses one faults at address 0.
_NULL = frozenset(
    f"hidden_{name}"
    for name in ("none", "hostcall_buffer", "printf_buffer", "multigrid_sync_arg", "heap_v1", "default_queue",
                 "completion_action", "private_base", "shared_base", "queue_ptr", "dynamic_lds_size")
)  # fmt: skip


def hidden_value(kind: str, grid: Grid, threads: int) -> int:
    """Value of a hidden argument."""
    counts = {"x": grid[0], "y": grid[1], "z": grid[2]}
    name, _, axis = kind.removeprefix("hidden_").rpartition("_")
    if name == "block_count":
        return counts[axis]
    if name == "group_size":
        return threads if axis == "x" else 1
    if kind == "hidden_grid_dims":
        return 3
    if name in ("remainder", "global_offset") or kind in _NULL:
        return 0
    raise EmulationError(f"kernel argument of kind {kind!r} is not emulated.")


def pack_arguments(descriptor: KernelDescriptor, values: Sequence[int | bytes], grid: Grid, threads: int) -> bytes:
    """Lay out the argument segment.

    Args:
        descriptor: Says where each argument goes.
        values: One per visible argument: an address, or the bytes of a scalar. Trailing ones may be missing (scratch
            pointers the compiler adds) and are null.
        grid: Work-groups.
        threads: Work-items of a group.
    """
    visible = [arg for arg in descriptor.arguments if not arg.hidden]
    if len(values) > len(visible):
        raise EmulationError(f"kernel {descriptor.name!r} takes {len(visible)} arguments, got {len(values)}.")
    size = max(
        [descriptor.directive("kernarg_size"), *(arg.offset + arg.size for arg in descriptor.arguments)], default=0
    )
    image = bytearray(size + 256)
    for argument, value in zip(visible, values, strict=False):
        data = struct.pack("<Q", value) if isinstance(value, int) else value
        if len(data) != argument.size:
            raise EmulationError(
                f"kernel {descriptor.name!r}: argument at offset {argument.offset} takes {argument.size} bytes, got {len(data)}."
            )
        image[argument.offset : argument.offset + argument.size] = data
    for argument in descriptor.arguments:
        if argument.hidden:
            data = hidden_value(argument.kind, grid, threads).to_bytes(argument.size, "little")
            image[argument.offset : argument.offset + argument.size] = data
    return bytes(image)


def dispatch_packet(grid: Grid, threads: int, scratch: int, lds: int, arguments: int) -> bytes:
    """An AQL kernel dispatch packet (HSA runtime specification)."""
    sizes = (threads, 1, 1)
    items = [count * size for count, size in zip(grid, sizes, strict=True)]
    return struct.pack("<HHHHHHIIIIIQQQQ", 2, 3, *sizes, 0, *items, scratch, lds, 0, arguments, 0, 0)


def load_arguments(
    memory: DeviceMemory,
    descriptor: KernelDescriptor,
    values: Sequence[int | bytes],
    grid: Grid,
    threads: int,
    lds: int,
) -> KernelArguments:
    """Place the argument segment and the dispatch packet in device memory."""
    image = pack_arguments(descriptor, values, grid, threads)
    address = memory.add(np.frombuffer(image, np.uint8), "kernel arguments")
    packet = dispatch_packet(grid, threads, descriptor.scratch_bytes, lds, address)
    return KernelArguments(image, address, memory.add(np.frombuffer(packet, np.uint8), "dispatch packet"))


def _user_registers(descriptor: KernelDescriptor, arguments: KernelArguments) -> list[int]:
    """User SGPRs in order; pointers take two."""
    words: list[int] = []

    def pair(value: int) -> None:
        words.extend((value & 0xFFFFFFFF, value >> 32))

    if descriptor.directive("user_sgpr_dispatch_ptr"):
        pair(arguments.dispatch)
    if descriptor.directive("user_sgpr_queue_ptr"):
        pair(0)
    if descriptor.directive("user_sgpr_kernarg_segment_ptr"):
        pair(arguments.address)
    if descriptor.directive("user_sgpr_dispatch_id"):
        pair(0)
    length = descriptor.directive("user_sgpr_kernarg_preload_length")
    offset = descriptor.directive("user_sgpr_kernarg_preload_offset")
    words.extend(struct.unpack_from(f"<{length}I", arguments.image, 4 * offset))
    return words


def initialise(waves: Waves, arch: Architecture, descriptor: KernelDescriptor, arguments: KernelArguments, groups: Ints,
               grid: Grid, waves_per_group: int, cluster_size: int = 1) -> None:  # fmt: skip
    """Set the registers of a batch.

    Args:
        groups: Linear work-group number of each work-group in the batch.
        grid: Clusters, which are work-groups where `cluster_size` is 1.
        cluster_size: Work-groups of a cluster, consecutive numbers.
    """
    for index, word in enumerate(_user_registers(descriptor, arguments)):
        waves.sgpr[index] = word
    place = np.repeat(groups % cluster_size, waves_per_group)
    group = np.repeat(groups // cluster_size, waves_per_group)
    wave = np.tile(np.arange(waves_per_group), len(groups))
    x, y, z = group % grid[0], group // grid[0] % grid[1], group // (grid[0] * grid[1])
    if arch.is_cdna:
        index = descriptor.directive("user_sgpr_count")
        for axis, value in (("x", x), ("y", y), ("z", z)):
            if descriptor.directive(f"system_sgpr_workgroup_id_{axis}", 1 if axis == "x" else 0):
                waves.sgpr[index] = value
                index += 1
    else:
        waves.sgpr[TTMP + 9] = x
        waves.sgpr[TTMP + 7] = y | (z << 16)
        waves.sgpr[TTMP + 8] = wave << 25
        waves.sgpr[TTMP + 6] = place | (cluster_size - 1) << 12  # place in the cluster along x, and the largest
    waves.vgpr[0] = (wave[:, None] * waves.lanes + np.arange(waves.lanes)).astype(U32)
