"""What the tests of the emulated Gluon GEMMs share: each architecture's kernels and targets, and ways to run and break them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.kernels.gluon import (
    gemm_gfx950,
    gemm_gfx950_plan,
    gemm_gfx1250,
    gemm_gfx1250_plan,
)
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall


@dataclass
class Room:
    """An architecture's GEMMs.

    Attributes:
        arch: Its name.
        gemm: The module with `gemm_call`, `grouped_call` and `depth_call`.
        targets_module: The module with `isa_targets`.
        small: Smallest tile of 16-bit elements; of 4-bit ones `small4`, of 8-bit ones `small8`.
    """

    arch: str
    gemm: ModuleType
    targets_module: str
    small: Any
    small8: Any
    small4: Any

    @cached_property
    def targets(self) -> dict[str, KernelTarget]:
        from importlib import import_module

        return {target.name: target for target in import_module(self.targets_module).isa_targets()}

    def run(self, call: KernelCall) -> torch.Tensor:
        """Emulates a call; its output."""
        compiled = amdgcn.compile(call.kernel, self.arch, call.args, call.constants, **call.options)
        amdgcn.launch(compiled, call.grid, call.args)
        output: torch.Tensor = call.args["c_ptr"]
        return output

    def mutated(self, name: str, pattern: str, replacement: str, count: int = 0) -> amdgcn.CompiledKernel:
        """A target's code with every match (or the first `count`) replaced; there must be one."""
        compiled = self.targets[name].compile(self.arch)
        text, found = re.subn(pattern, replacement, compiled.asm, count=count)
        assert found, f"the code has nothing like {pattern!r}"
        return compiled.with_assembly(text)


_GLUON = "primus_turbo_plugin.kernels.gluon"
GFX950 = Room(
    "gfx950",
    gemm_gfx950,
    f"{_GLUON}.gemm_gfx950_targets",
    *(gemm_gfx950_plan.tiles_for(element)[-1] for element in ("bf16", "e4m3", "e2m1")),
)
GFX1250 = Room(
    "gfx1250",
    gemm_gfx1250,
    f"{_GLUON}.gemm_gfx1250_targets",
    *(gemm_gfx1250_plan.tiles_for(element, element)[-1] for element in ("bf16", "e4m3", "e2m1")),
)
ROOMS = {room.arch: room for room in (GFX950, GFX1250)}
