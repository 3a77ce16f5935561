"""How table-driven arithmetic instructions execute.

An instruction is declared by name, *signature* and a function of arrays:

    vector("v_add_u32 v_add_nc_u32", "u32 = u32 u32", add, "D = S0 + S1")
    scalar("s_add_u32", "u32 scc = u32 u32", add_with_carry, "D = S0 + S1; SCC = carry")

Signature types are those of `values`, plus `dst` (the old destination, as a source), `vcc` (VCC read implicitly as a lane
mask) and, for scalar instructions, `scc`. Everything else - sign modifiers, halves, DPP, SDWA, clamp, output scaling, the
execution mask, dual issue - is handled here once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from primus_turbo_plugin.amdgcn.assembly.instructions import Instruction
from primus_turbo_plugin.amdgcn.assembly.operands import EXEC, VCC, Kind, Operand
from primus_turbo_plugin.amdgcn.emulator.isa.lanes import (
    DPP_CONTROLS,
    DPP_MODIFIERS,
    SDWA_MODIFIERS,
    Dpp,
    sdwa_merge,
    sdwa_reader,
    uses_dpp,
    uses_sdwa,
)
from primus_turbo_plugin.amdgcn.emulator.isa.registry import ALL, Execute, register
from primus_turbo_plugin.amdgcn.emulator.isa.values import (
    Array,
    Reader,
    double_words_of,
    op_sel,
    scalar_reader,
    typed,
    vector_reader,
    words_of,
)
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Bools, Words
from primus_turbo_plugin.amdgcn.faults import AssemblyError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.emulator.machine import Machine

Function = Callable[..., Any]
_VCC = Operand(Kind.SCALAR, VCC, 2, text="vcc")
_HALVES = ("u16", "i16", "f16", "bf16")
_WIDE = ("u64", "i64", "f64")


def split_signature(signature: str) -> tuple[list[str], list[str]]:
    """`"u32 mask = u32 u32"` to result and source types."""
    results, _, sources = signature.partition("=")
    return results.split(), sources.split()


_INTEGER_RANGE = {
    "u32": (0, 2**32 - 1),
    "i32": (-(2**31), 2**31 - 1),
    "u16": (0, 2**16 - 1),
    "i16": (-(2**15), 2**15 - 1),
}


def saturated(function: Function, kind: str) -> Function:
    """An integer function evaluated without overflow, its result clamped to the range of the type."""

    def clamped(*values: Array) -> Array:
        return np.clip(function(*(value.astype(np.int64) for value in values)), *_INTEGER_RANGE[kind])

    return clamped


class VectorOperation:
    """A vector instruction bound to its operands; `compute` and `write` are apart because dual issue reads both
    halves before writing either."""

    def __init__(self, instruction: Instruction, signature: str, function: Function) -> None:
        self.instruction = instruction
        results, sources = split_signature(signature)
        saturate = results[0] in _INTEGER_RANGE and instruction.flag("clamp")
        self.function = saturated(function, results[0]) if saturate else function
        self.results = results
        self.dpp: Dpp | None = None
        self._dpp_pending = uses_dpp(instruction)
        self.sdwa = uses_sdwa(instruction)
        explicit = [kind for kind in sources if kind not in ("dst", "vcc")]
        self.upper_result = op_sel(instruction, len(explicit) - explicit.count("mask"))
        operands = list(instruction.operands)
        if len(operands) == len(results) + len(explicit) - 1 and explicit[-1] == "mask":
            operands.append(_VCC)
        if len(operands) != len(results) + len(explicit):
            raise AssemblyError(
                f"{instruction.where}: {len(results) + len(explicit)} operands expected, got {len(operands)}."
            )
        self.targets = operands[: len(results)]
        remaining = operands[len(results) :]
        self.readers: list[Reader] = []
        position = 0
        for kind in sources:
            if kind == "vcc":
                self.readers.append(vector_reader(_VCC, "mask"))
            elif kind == "dst":
                self.readers.append(vector_reader(self.targets[0], results[0], self.upper_result))
            else:
                self.readers.append(self._source(remaining[position], kind, position))
                position += 1

    def _source(self, operand: Operand, kind: str, position: int) -> Reader:
        if self.sdwa and position < 2 and kind != "mask":
            read = sdwa_reader(vector_reader(operand, "u32"), self.instruction, position, operand.sign_extend)
            return lambda m: typed(read(m), kind)
        if operand.sign_extend:
            raise AssemblyError(f"{self.instruction.where}: sext() needs an SDWA selector on a vector operand.")
        return vector_reader(operand, kind, op_sel(self.instruction, position))

    def compute(self, machine: Machine) -> list[Array]:
        if self._dpp_pending:
            self.dpp = Dpp.of(self.instruction, machine.waves.lanes)
            self.readers[0] = self.dpp.reader(self.readers[0])
            self._dpp_pending = False
        value = self.function(*[read(machine) for read in self.readers])
        return list(value) if isinstance(value, tuple) else [value]

    def write(self, machine: Machine, values: list[Array]) -> None:
        lanes = None if self.dpp is None else self.dpp.written(machine)
        for target, kind, value in zip(self.targets, self.results, values, strict=True):
            if kind == "mask":
                self._write_mask(machine, target, value, lanes)
            elif kind in _WIDE:
                words = double_words_of(np.broadcast_to(value, machine.waves.active.shape))
                machine.waves.write_vector(target.index, (words & np.uint64(0xFFFFFFFF)).astype(U32), lanes)
                machine.waves.write_vector(target.index + 1, (words >> np.uint64(32)).astype(U32), lanes)
            else:
                machine.waves.write_vector(target.index, self._words(machine, target, kind, value), lanes)

    def _write_mask(self, machine: Machine, target: Operand, value: Array, lanes: Bools | None) -> None:
        if target.kind is Kind.ABSENT:
            return
        mask = np.broadcast_to(value, machine.waves.active.shape) & machine.waves.active
        machine.waves.write_lane_mask(target.index, mask if lanes is None else mask & lanes)

    def _words(self, machine: Machine, target: Operand, kind: str, value: Array) -> Words:
        words = words_of(self._scaled(kind, value), kind)
        if self.sdwa:
            return sdwa_merge(self.instruction, words, machine.waves.vector(target.index))
        if kind not in _HALVES:
            return words
        upper = target.half == "h" or self.upper_result
        if machine.arch.is_cdna and not upper:
            return words  # CDNA clears the other half
        previous = machine.waves.vector(target.index)
        if upper:
            return (previous & U32(0xFFFF)) | (words << U32(16))
        return (previous & U32(0xFFFF0000)) | words

    def _scaled(self, kind: str, value: Array) -> Array:
        """Output modifiers of floating-point results: `mul:2`, `mul:4`, `div:2`, then `clamp` to [0, 1]."""
        modifiers = self.instruction.modifiers
        if kind not in ("f32", "f16") or not modifiers:
            return value
        if "mul" in modifiers:
            value = value * value.dtype.type(self.instruction.number("mul"))
        if "div" in modifiers:
            value = value / value.dtype.type(self.instruction.number("div"))
        if "clamp" in modifiers:
            value = np.clip(np.nan_to_num(value, nan=0.0), value.dtype.type(0), value.dtype.type(1))
        return value

    def __call__(self, machine: Machine) -> None:
        self.write(machine, self.compute(machine))


def vector(
    names: str,
    signature: str,
    function: Function,
    meaning: str,
    *,
    family: str,
    source: str = "CDNA, RDNA4: VOP1/VOP2/VOP3",
    archs: frozenset[str] = ALL,
    saturates: bool = False,
) -> None:
    """Declare a vector instruction; `saturates`: it is integer arithmetic that `clamp` keeps from wrapping."""

    def bind(instruction: Instruction) -> Execute:
        return VectorOperation(instruction, signature, function)

    results, _ = split_signature(signature)
    extra = ("clamp", "mul", "div") if results[0] in ("f32", "f16") else ("clamp",) if saturates else ()
    modifiers = (*DPP_MODIFIERS, *DPP_CONTROLS, *SDWA_MODIFIERS, "op_sel", *extra)
    register(names, bind, family=family, source=source, meaning=meaning, archs=archs, modifiers=modifiers)


def compare(names: str, kind: str, function: Function, meaning: str) -> None:
    """Declare a comparison: `v_cmp_x` writes a lane mask, `v_cmpx_x` the execution mask."""

    def bind(instruction: Instruction) -> Execute:
        if not instruction.opcode.startswith("v_cmpx"):
            return VectorOperation(instruction, f"mask = {kind} {kind}", function)
        narrowed = Instruction(**{name: getattr(instruction, name) for name in Instruction.__slots__})
        mask = Operand(Kind.SCALAR, EXEC, 2, text="exec")
        operands = instruction.operands if len(instruction.operands) == 2 else instruction.operands[1:]
        narrowed.operands = (mask, *operands)
        return VectorOperation(narrowed, f"mask = {kind} {kind}", function)

    register(
        names, bind, family="vector compare", source="CDNA, RDNA4: VOPC", meaning=meaning,
        modifiers=(*DPP_MODIFIERS, *DPP_CONTROLS, "op_sel", "src0_sel", "src1_sel"),
    )  # fmt: skip


class ScalarOperation:
    """A scalar instruction bound to its operands."""

    def __init__(self, instruction: Instruction, signature: str, function: Function) -> None:
        self.function = function
        self.results, sources = split_signature(signature)
        writes = [kind for kind in self.results if kind != "scc"]
        operands = list(instruction.operands)
        explicit = [kind for kind in sources if kind not in ("dst", "scc")]
        if len(operands) != len(writes) + len(explicit):
            raise AssemblyError(
                f"{instruction.where}: {len(writes) + len(explicit)} operands expected, got {len(operands)}."
            )
        self.targets = operands[: len(writes)]
        remaining = iter(operands[len(writes) :])
        self.readers: list[Reader] = []
        for kind in sources:
            if kind == "scc":
                self.readers.append(lambda m: m.waves.scc[m.waves.chosen])
            elif kind == "dst":
                self.readers.append(scalar_reader(self.targets[0], writes[0]))
            else:
                self.readers.append(scalar_reader(next(remaining), kind))

    def __call__(self, machine: Machine) -> None:
        waves = machine.waves
        value = self.function(*[read(machine) for read in self.readers])
        values = value if isinstance(value, tuple) else (value,)
        targets = iter(self.targets)
        for kind, item in zip(self.results, values, strict=True):
            if kind == "scc":
                waves.scc[waves.chosen] = item
                continue
            target = next(targets)
            if target.kind is Kind.ABSENT:
                continue
            if kind in _WIDE and (target.count == 2 or target.index == VCC):
                waves.write_scalar64(target.index, double_words_of(item))
            else:
                waves.write_scalar(target.index, words_of(item, kind))


def scalar(
    names: str,
    signature: str,
    function: Function,
    meaning: str,
    *,
    family: str = "scalar alu",
    source: str = "CDNA, RDNA4: SOP1/SOP2/SOPC/SOPK",
    archs: frozenset[str] = ALL,
) -> None:
    """Declare a scalar instruction."""
    register(
        names,
        lambda instruction: ScalarOperation(instruction, signature, function),
        family=family,
        source=source,
        meaning=meaning,
        archs=archs,
        modifiers=("op_sel",),
    )
