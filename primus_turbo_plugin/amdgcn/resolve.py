"""Finding the kernels a command line names.

path/to/file.py           every target of the file's `isa_targets()`
package.module            the same for an importable module
name                      a target of this package's own kernels (`BUILT_IN`), or `all` of them
...:name                  one of those targets, or else a `@triton.jit` / `@gluon.jit` function of that name, whose
                          arguments then come from the command line
kernel.amdgcn, kernel.s   assembly text
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.compiler import compile as compile_kernel
from primus_turbo_plugin.amdgcn.compiler import require_triton
from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.errors import ConfigError

_ASSEMBLY = (".amdgcn", ".s", ".asm")

BUILT_IN = (
    "primus_turbo_plugin.kernels.gluon.gemm_gfx950_targets",
    "primus_turbo_plugin.kernels.gluon.gemm_gfx1250_targets",
    "primus_turbo_plugin.kernels.triton.attention_targets",
    "primus_turbo_plugin.kernels.triton.attention_fp8_targets",
)
"""Modules of this package whose targets are known by name. Imported only when a bare name is asked for."""


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A compiled kernel with the name it was asked for by, and its target where it came from one."""

    name: str
    compiled: CompiledKernel
    target: KernelTarget | None = None

    @property
    def gate(self) -> IsaGate | None:
        return None if self.target is None else self.target.gate


def load_module(name: str) -> ModuleType:
    """Import a module by name or by path.

    Raises:
        ConfigError: There is no such file or module.
    """
    path = Path(name)
    if path.suffix != ".py":
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"amdgcn: no module {name!r} ({error}). Give a module name, a .py file or an assembly file."
            ) from error
    if not path.is_file():
        raise ConfigError(f"amdgcn: there is no file {name!r}.")
    unique = f"_amdgcn_targets_{path.stem}_{abs(hash(path.resolve()))}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None, "a .py suffix always has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return module


def targets_of(module: ModuleType) -> dict[str, KernelTarget]:
    """The module's targets by name; empty if it has no `isa_targets`."""
    found: dict[str, KernelTarget] = {}
    for target in getattr(module, "isa_targets", list)():
        if target.name in found:
            raise ConfigError(f"amdgcn: {module.__name__}.isa_targets() returns {target.name!r} twice.")
        found[target.name] = target
    return found


def is_bare_name(where: str) -> bool:
    """Whether this can only be the name of a built-in target: neither a path, nor a module, nor one of their targets."""
    return where.isidentifier() and importlib.util.find_spec(where) is None


def built_in_targets() -> dict[str, KernelTarget]:
    """The targets of this package's own kernels, by name.

    Raises:
        UnsupportedError: Triton, which the kernels are written in, is missing.
    """
    require_triton()
    found: dict[str, KernelTarget] = {}
    for name in BUILT_IN:
        found |= targets_of(importlib.import_module(name))
    return found


def find_targets(where: str) -> list[KernelTarget]:
    """The targets a command line names, for commands that need targets.

    Raises:
        ConfigError: None is found.
    """
    if is_bare_name(where):
        known = built_in_targets()
        if where == "all":
            return list(known.values())
        if where not in known:
            names = ", ".join(known)
            raise ConfigError(f"amdgcn: no module and no built-in target {where!r}. Built-in targets: {names}.")
        return [known[where]]
    module_name, _, name = where.partition(":")
    targets = targets_of(load_module(module_name))
    if not name:
        if not targets:
            raise ConfigError(f"amdgcn: {module_name!r} has no isa_targets(). Define it, or name a kernel with :name.")
        return list(targets.values())
    if name not in targets:
        raise ConfigError(f"amdgcn: {module_name!r} has no target {name!r}; it has {', '.join(targets) or 'none'}.")
    return [targets[name]]


def find_kernels(
    where: str, archs: list[str], args: Mapping[str, Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> list[NamedKernel]:
    """Compile what a command line names, for each architecture it is meant for.

    Args:
        where: See the module's docstring.
        archs: Architectures asked for; none means all a target is meant for.
        args: Run-time arguments for a bare kernel.
        constants: Its compile-time constants.
        options: Its compile options.
    """
    if where.endswith(_ASSEMBLY):
        text = Path(where).read_text()
        return [NamedKernel(Path(where).name, CompiledKernel.from_assembly(text, arch=archs[0] if archs else None))]
    module_name, _, name = where.partition(":")
    module = None if is_bare_name(where) else load_module(module_name)
    targets = {} if module is None else targets_of(module)
    if module is not None and name and name not in targets:
        kernel = getattr(module, name, None)
        if kernel is None or not hasattr(kernel, "fn"):
            known = ", ".join(targets) or "none"
            raise ConfigError(
                f"amdgcn: {module_name!r} has neither a target nor a kernel {name!r}; its targets are: {known}."
            )
        if not archs:
            raise ConfigError("amdgcn: a bare kernel needs --arch.")
        return [NamedKernel(name, compile_kernel(kernel, arch, args, constants, **options), None) for arch in archs]
    if args or constants or options:
        raise ConfigError("amdgcn: --arg, --const and --option are for bare kernels; a target has its own.")
    chosen = find_targets(where)
    compiled = [
        NamedKernel(target.name, target.compile(arch), target)
        for target in chosen
        for arch in target.archs
        if not archs or arch in archs
    ]
    if not compiled:
        raise ConfigError(f"amdgcn: no target of {where!r} is for {', '.join(archs)}.")
    return compiled
