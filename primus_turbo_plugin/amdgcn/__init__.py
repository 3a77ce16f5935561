"""Kernels for AMD GPUs without an AMD GPU: compile them, run them, and read what the compiler made of them.

A developer's tool for any Triton or Gluon author; it needs numpy, and Triton only to compile.

    from primus_turbo_plugin import amdgcn

    compiled = amdgcn.compile(kernel, "gfx950", {"x": x, "y": y, "n": n}, {"BLOCK": 256}, num_warps=4)
    amdgcn.launch(compiled, grid, {"x": x, "y": y, "n": n})       # y now holds what a gfx950 would compute
    print(amdgcn.render(amdgcn.isa_report(compiled)))             # registers, occupancy, hot loop

What is emulated is called emulated, and what is estimated a static estimate; neither is a measurement.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "AddressTable": "emulator.host_objects",
    "CompiledKernel": "compiled",
    "compile": "compiler",
    "launch": "emulator.launch",
    "LaunchReport": "emulator.launch",
    "KernelTarget": "targets",
    "emulate_target": "targets",
    "to_bf16": "targets",
    "from_bf16": "targets",
    "IsaReport": "report.isa",
    "isa_report": "report.isa",
    "IsaGate": "report.gate",
    "check_gate": "report.gate",
    "render": "report.render",
    "coverage": "emulator.isa.registry",
}

__all__ = [
    "AddressTable",
    "CompiledKernel",
    "IsaGate",
    "IsaReport",
    "KernelTarget",
    "LaunchReport",
    "check_gate",
    "compile",
    "coverage",
    "emulate_target",
    "from_bf16",
    "isa_report",
    "launch",
    "render",
    "to_bf16",
]

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
    from primus_turbo_plugin.amdgcn.compiler import compile
    from primus_turbo_plugin.amdgcn.emulator.host_objects import AddressTable
    from primus_turbo_plugin.amdgcn.emulator.isa.registry import coverage
    from primus_turbo_plugin.amdgcn.emulator.launch import LaunchReport, launch
    from primus_turbo_plugin.amdgcn.report.gate import IsaGate, check_gate
    from primus_turbo_plugin.amdgcn.report.isa import IsaReport, isa_report
    from primus_turbo_plugin.amdgcn.report.render import render
    from primus_turbo_plugin.amdgcn.targets import KernelTarget, emulate_target, from_bf16, to_bf16


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
