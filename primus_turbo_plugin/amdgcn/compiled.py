"""A compiled kernel: its assembly and what is known about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from primus_turbo_plugin.amdgcn.architecture import Architecture, architecture
from primus_turbo_plugin.amdgcn.assembly.descriptor import KernelDescriptor, parse_descriptor
from primus_turbo_plugin.amdgcn.assembly.program import Program, parse_program
from primus_turbo_plugin.amdgcn.faults import AssemblyError


@dataclass(frozen=True)
class CompiledKernel:
    """What `compile` returns and everything else takes.

    Attributes:
        asm: AMDGCN assembly text.
        arch: Target name.
        num_warps: Waves per work-group.
        shared: LDS bytes of a work-group.
        signature: Type of each run-time argument in kernel order; empty for foreign assembly.
        constants: Arguments fixed at compile time, by name.
        divisible: Names of the arguments the code assumes to be divisible by 16.
        metadata: Whatever else the compiler recorded.
    """

    asm: str
    arch: str
    num_warps: int
    shared: int
    signature: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_assembly(
        cls, text: str, *, arch: str | None = None, num_warps: int | None = None, shared: int | None = None
    ) -> CompiledKernel:
        """Wrap assembly from anywhere (hipcc, hand-written); facts not given are read from its metadata."""
        descriptor = parse_descriptor(text)
        name = arch or descriptor.arch
        if not name:
            raise AssemblyError("amdgcn: the text names no target; pass arch=.")
        waves = num_warps or max(descriptor.workgroup_size // architecture(name).wave, 1)
        return cls(text, name, waves, descriptor.static_lds_bytes if shared is None else shared)

    @cached_property
    def descriptor(self) -> KernelDescriptor:
        return parse_descriptor(self.asm)

    @cached_property
    def program(self) -> Program:
        return parse_program(self.asm)

    @property
    def architecture(self) -> Architecture:
        return architecture(self.arch)

    @property
    def name(self) -> str:
        return self.descriptor.name

    def with_assembly(self, asm: str) -> CompiledKernel:
        """The same kernel with edited assembly, for experiments and negative controls."""
        return replace(self, asm=asm)
