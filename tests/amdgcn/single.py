"""Running a few hand-written instructions: what the tests of single instructions share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.architecture import architecture
from primus_turbo_plugin.amdgcn.assembly.instructions import parse_instruction
from primus_turbo_plugin.amdgcn.assembly.program import Program
from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.emulator.lds import LocalMemory
from primus_turbo_plugin.amdgcn.emulator.machine import BoundProgram, Machine
from primus_turbo_plugin.amdgcn.emulator.memory import DeviceMemory
from primus_turbo_plugin.amdgcn.emulator.waits import WaitCounters
from primus_turbo_plugin.amdgcn.emulator.waves import Waves

_HEAD = """
	.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
kernel:
{body}
	s_endpgm
	.section .rodata
	.amdhsa_kernel kernel
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
	.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{arguments}
    .name: kernel
    .max_flat_workgroup_size: {threads}
    .group_segment_fixed_size: {lds}
...
	.end_amdgpu_metadata
"""


def kernel(arch: str, body: str, *, pointers: int = 1, waves: int = 1, lds: int = 0) -> CompiledKernel:
    """A kernel from a few lines of assembly; s[0:1] points to its arguments, s2 (or ttmp9) is the work-group."""
    arguments = "\n".join(
        f"      - {{.offset: {8 * i}, .size: 8, .value_kind: global_buffer}}" for i in range(pointers)
    )
    lines = "\n".join(
        "\t" + line.strip() if not line.strip().endswith(":") else line.strip() for line in body.splitlines()
    )
    threads = waves * architecture(arch).wave
    text = _HEAD.format(arch=arch, body=lines, arguments=arguments, threads=threads, lds=lds)
    return CompiledKernel.from_assembly(text)


def run_lines(
    arch: str,
    lines: str,
    vector: Mapping[int, NDArray[np.uint32]] | None = None,
    scalar: Mapping[int, int] | None = None,
    lds: NDArray[np.uint8] | None = None,
    registers: int = 600,
) -> Waves:
    """Execute instructions on one wave.

    Args:
        lines: One instruction a line.
        vector: Contents of vector registers, [lane].
        scalar: Contents of scalar registers.
        lds: Contents of LDS.
    """
    target = architecture(arch)
    waves = Waves(target, 1, registers)
    for index, words in (vector or {}).items():
        waves.vgpr[index, 0] = words
    for index, word in (scalar or {}).items():
        waves.sgpr[index, 0] = word
    waves.load_exec()
    instructions = tuple(parse_instruction(line.strip(), i + 1) for i, line in enumerate(lines.strip().splitlines()))
    bound = BoundProgram(Program((*instructions, parse_instruction("s_endpgm")), {}), target)
    group = np.zeros(1, np.int64)
    memory = LocalMemory(waves, group, 1, 65536 if lds is None else lds.size, None)
    if lds is not None:
        memory.storage[: lds.size] = lds
    scratch = np.zeros((target.wave, 64), np.uint8)
    machine = Machine(bound, waves, DeviceMemory(), memory, WaitCounters(waves, deferred=False), scratch, group)
    machine.run(1000)
    return waves
