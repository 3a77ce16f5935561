"""Kernel targets: a kernel with everything needed to compile, report on, emulate and check it.

A Python file or module that wants to be usable from `primus-turbo isa` and `primus-turbo emulate` defines

    def isa_targets() -> Iterable[KernelTarget]

Nothing in a target runs until it is asked for, so the function may be cheap even where the kernels are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.compiler import compile as compile_kernel
from primus_turbo_plugin.amdgcn.emulator.isa.formats import E4M3, E5M2
from primus_turbo_plugin.amdgcn.emulator.isa.values import bf16_to_f32, f32_to_bf16
from primus_turbo_plugin.amdgcn.emulator.launch import LaunchReport, launch
from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.errors import ConfigError

Arguments = dict[str, Any]


def to_bf16(values: Any) -> NDArray[np.uint16]:
    """Round to bfloat16 bit patterns, which numpy can hold as uint16."""
    return f32_to_bf16(np.asarray(values, np.float32)).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 bit patterns as float32."""
    return bf16_to_f32(bits)


@dataclass(frozen=True, kw_only=True)
class KernelTarget:
    """One kernel with one set of compile-time choices.

    Attributes:
        name: Unique in its file.
        kernel: The `@triton.jit` or `@gluon.jit` function.
        archs: Targets it is meant for.
        inputs: Makes the run-time arguments: arrays (outputs included, filled with anything) and scalars.
        grid: Work-groups, or a function of the arguments.
        constants: `constexpr` arguments.
        options: `num_warps`, `num_stages`, ...; may be a function of the architecture.
        types: Types of arguments whose numpy dtype does not say it, such as `"*bf16"` for uint16 arrays.
        expected: The right outputs by argument name, computed from the arguments before the launch. Values compare as
            numbers; bfloat16 and 8-bit floats are decoded first.
        tolerance: Allowed error, relative to the largest expected magnitude; 0 compares bits.
        gate: What the compiled code must look like.
    """

    name: str
    kernel: Any
    archs: tuple[str, ...]
    inputs: Callable[[np.random.Generator], Arguments]
    grid: int | Sequence[int] | Callable[[Arguments], int | Sequence[int]]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    expected: Callable[[Arguments], Mapping[str, Any]] | None = None
    tolerance: float = 0.0
    gate: IsaGate | None = None

    def arguments(self, seed: int = 0) -> Arguments:
        """Fresh arguments, the same for the same seed."""
        return self.inputs(np.random.default_rng(seed))

    def compile(self, arch: str, seed: int = 0) -> CompiledKernel:
        """Compile for a target, specialised for its arguments.

        Raises:
            ConfigError: The target is not meant for this architecture.
        """
        if arch not in self.archs:
            raise ConfigError(f"amdgcn: target {self.name!r} is for {', '.join(self.archs)}, got {arch!r}.")
        options = self.options(arch) if callable(self.options) else self.options
        typed = {name: self.types.get(name, value) for name, value in self.arguments(seed).items()}
        return compile_kernel(self.kernel, arch, typed, self.constants, **options)


@dataclass(frozen=True, slots=True)
class EmulationResult:
    """Outcome of emulating a target.

    Attributes:
        report: What the emulator saw.
        errors: Worst error of each output, relative to its largest magnitude.
        failures: What is wrong, one line each; empty if the kernel is right.
        arguments: The arguments after the launch.
    """

    report: LaunchReport
    errors: dict[str, float]
    failures: list[str]
    arguments: Arguments

    @property
    def passed(self) -> bool:
        return not self.failures


def decoded(array: Any, kind: str) -> NDArray[Any]:
    """An argument's contents as numbers numpy can compare."""
    if hasattr(array, "detach"):
        array = array.detach()
        return np.asarray(array.float() if array.dtype.is_floating_point else array)
    element = kind.removeprefix("*")
    if element == "bf16" and array.dtype == np.uint16:
        return from_bf16(array)
    if element in ("fp8e4nv", "fp8e5") and array.dtype == np.uint8:
        return (E4M3 if element == "fp8e4nv" else E5M2).decode(array)
    return np.asarray(array)


def compare(got: NDArray[Any], want: NDArray[Any], tolerance: float) -> tuple[float, str | None]:
    """Worst relative error and a complaint naming the first bad element, or None.

    Elements must agree in being NaN; the scale is the largest finite expected magnitude.
    """
    if got.shape != want.shape:
        return float("inf"), f"has shape {got.shape}, expected {want.shape}"
    if tolerance == 0 and got.dtype.kind in "iub":
        bad = got != want
        error = float(np.mean(bad)) if bad.size else 0.0
    else:
        one, two = got.astype(np.float64), want.astype(np.float64)
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        finite = np.isfinite(two)
        scale = float(np.abs(two[finite]).max(initial=0.0)) or 1.0
        with np.errstate(invalid="ignore"):
            distance = np.where(same, 0.0, np.abs(one - two) / scale)
        distance = np.where(np.isnan(distance), np.inf, distance)
        bad = distance > tolerance
        error = float(distance.max(initial=0.0))
    if not bad.any():
        return error, None
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    return (
        error,
        f"{int(bad.sum())} of {bad.size} elements are wrong, first at {where}: got {got[where]}, expected {want[where]}",
    )


def emulate_target(
    target: KernelTarget,
    arch: str,
    *,
    seed: int = 0,
    defer: bool = True,
    race: bool = True,
    compiled: CompiledKernel | None = None,
) -> EmulationResult:
    """Emulate a target and compare it with its reference.

    Args:
        compiled: Use this code instead of compiling (edited assembly, for example).

    Raises:
        EmulationError: See `launch`.
    """
    code = compiled or target.compile(arch, seed)
    arguments = target.arguments(seed)
    expected = target.expected(copy.deepcopy(arguments)) if target.expected is not None else {}
    grid = target.grid(arguments) if callable(target.grid) else target.grid
    report = launch(code, grid, arguments, defer=defer, race=race)
    errors, failures = {}, []
    for name, want in expected.items():
        got = decoded(arguments[name], code.signature.get(name, ""))
        errors[name], complaint = compare(got, np.asarray(want), target.tolerance)
        if complaint is not None:
            failures.append(f"{target.name} on {arch}: output {name!r} {complaint}")
    return EmulationResult(report, errors, failures, arguments)
