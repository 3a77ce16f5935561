"""Facts about a compiled kernel that are not instructions: the `.amdhsa_` descriptor and the metadata note.

The descriptor says which SGPRs the loader fills and how many registers there are; the note lists the kernel arguments
with their offsets. Meaning: LLVM "User Guide for AMDGPU Backend", code object V5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from primus_turbo_plugin.amdgcn.faults import AssemblyError

_DIRECTIVE = re.compile(r"^\s*\.amdhsa_(\w+)\s+(-?\d+)\s*$", re.MULTILINE)
_NOTE = re.compile(r"\.amdgpu_metadata\n---\n(.*?)\n\.\.\.", re.DOTALL)
_TARGET = re.compile(r'\.amdgcn_target\s+"[\w-]*?--(gfx\w+)')


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One entry of the kernel's argument segment."""

    offset: int
    size: int
    kind: str
    name: str = ""

    @property
    def hidden(self) -> bool:
        return self.kind.startswith("hidden_")


@dataclass(frozen=True, slots=True)
class KernelDescriptor:
    """The descriptor and metadata of one kernel.

    Attributes:
        name: Symbol name.
        arch: Target it was compiled for.
        directives: Every numeric `.amdhsa_` directive.
        arguments: Kernel arguments in order, hidden ones included.
        note: The rest of the kernel's metadata (`vgpr_count`, `vgpr_spill_count`, `group_segment_fixed_size`, ...).
    """

    name: str
    arch: str
    directives: Mapping[str, int]
    arguments: tuple[KernelArgument, ...]
    note: Mapping[str, Any]

    def directive(self, name: str, default: int = 0) -> int:
        return self.directives.get(name, default)

    def fact(self, name: str) -> int:
        return int(self.note.get(name, 0))

    @property
    def vgprs(self) -> int:
        """Vector registers a wave allocates, accumulation registers included."""
        return max(self.fact("vgpr_count"), self.directive("next_free_vgpr"))

    @property
    def agprs(self) -> int:
        """Accumulation registers (CDNA)."""
        return self.fact("agpr_count")

    @property
    def sgprs(self) -> int:
        return self.fact("sgpr_count")

    @property
    def vgpr_spills(self) -> int:
        return self.fact("vgpr_spill_count")

    @property
    def sgpr_spills(self) -> int:
        return self.fact("sgpr_spill_count")

    @property
    def scratch_bytes(self) -> int:
        """Private segment of one lane."""
        return max(self.fact("private_segment_fixed_size"), self.directive("private_segment_fixed_size"))

    @property
    def static_lds_bytes(self) -> int:
        return self.fact("group_segment_fixed_size")

    @property
    def workgroup_size(self) -> int:
        return self.fact("max_flat_workgroup_size")


def parse_descriptor(text: str) -> KernelDescriptor:
    """Read descriptor and metadata out of assembly text with one kernel."""
    note: dict[str, Any] = {}
    if (match := _NOTE.search(text)) is not None:
        kernels = yaml.safe_load(match[1]).get("amdhsa.kernels", [])
        if len(kernels) != 1:
            raise AssemblyError(f"amdgcn: assembly must hold exactly one kernel, got {len(kernels)}.")
        note = {key.removeprefix("."): value for key, value in kernels[0].items()}
    arguments = tuple(
        KernelArgument(arg[".offset"], arg[".size"], arg[".value_kind"], arg.get(".name", ""))
        for arg in note.pop("args", [])
    )
    target = _TARGET.search(text)
    directives = {name: int(value) for name, value in _DIRECTIVE.findall(text)}
    return KernelDescriptor(str(note.get("name", "kernel")), target[1] if target else "", directives, arguments, note)
