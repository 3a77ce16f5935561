"""What the JIT derives from the arguments of a launch.

The rules are those of Triton's JIT (`native_specialize_impl` and the AMD backend's `get_tensor_specialization`), written
out here because the JIT's own code needs a device; a test compares them with the installed Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primus_turbo_plugin.amdgcn.emulator.arguments import is_array, span_of
from primus_turbo_plugin.amdgcn.emulator.host_objects import AddressTable, descriptor_type, is_descriptor
from primus_turbo_plugin.errors import ConfigError

_DTYPES = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2fnuz": "fp8e5b16",
    "float4_e2m1fn_x2": "u8", "float8_e8m0fnu": "u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Specialization:
    """Types and facts of a kernel's parameters.

    Attributes:
        names: All parameters in order.
        types: Type of each run-time parameter.
        constants: Value of each compile-time parameter, specialised integers included.
        divisible: Parameters known to be divisible by 16 (pointers: aligned to 16 bytes).
        small: Pointers known to address less than 2 GiB.
    """

    names: list[str]
    types: dict[str, str]
    constants: dict[str, Any]
    divisible: frozenset[str]
    small: frozenset[str]

    def signature_with_constants(self) -> dict[str, str]:
        return {name: self.types.get(name, "constexpr") for name in self.names}

    def runtime_signature(self) -> dict[str, str]:
        return {name: self.types[name] for name in self.names if name in self.types}

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Triton's attribute form: parameter position to a list of [name, value]."""
        result: dict[tuple[int, ...], list[list[Any]]] = {}
        for position, name in enumerate(self.names):
            facts = [["tt.divisibility", 16]] if name in self.divisible else []
            facts += [["tt.pointer_range", 32]] if name in self.small else []
            if name in self.types:
                result[(position,)] = facts
        return result


def _integer_type(value: int) -> str:
    if -(2**31) <= value < 2**31:
        return "i32"
    return "u64" if value >= 2**63 else "i64"


def _array_type(value: Any, name: str) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"amdgcn: argument {name!r} has dtype {dtype}, which has no Triton type. Known: {', '.join(_DTYPES)}."
        )
    return "*" + _DTYPES[dtype]


def _from_type(text: str) -> tuple[str, bool]:
    """`"*bf16"`, `"i32:16"`, ... to type and divisibility; pointers are aligned unless `:1`."""
    kind, _, divisor = text.partition(":")
    aligned = kind.startswith("*") if not divisor else int(divisor) % 16 == 0
    return kind, aligned


def _parameters(kernel: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(kernel.fn).parameters)


def _annotation(kernel: Any, name: str, attribute: str) -> bool:
    """A per-parameter fact of the JIT function (`do_not_specialize`, ...), by name; False where the version has none."""
    parameter = next((item for item in getattr(kernel, "params", []) if item.name == name), None)
    return bool(getattr(parameter, attribute, False))


def specialize(
    kernel: Any, args: Mapping[str, Any], constants: Mapping[str, Any], pointer_range_32: bool
) -> Specialization:
    """Derive types and facts.

    Args:
        kernel: The JIT function.
        args: Run-time arguments: example values or type strings.
        constants: Compile-time arguments.
        pointer_range_32: Arrays are below 2 GiB.

    Raises:
        ConfigError: A parameter is missing or unknown, or a value has no type.
    """
    parameters = _parameters(kernel)
    unknown = [name for name in (*args, *constants) if name not in parameters]
    if unknown:
        names = ", ".join(parameters)
        raise ConfigError(
            f"amdgcn: kernel {kernel.fn.__name__!r} has no parameter {', '.join(unknown)}; it has {names}."
        )
    types: dict[str, str] = {}
    fixed: dict[str, Any] = {}
    divisible: set[str] = set()
    small: set[str] = set()
    for name, parameter in parameters.items():
        if name in constants:
            fixed[name] = constants[name]
        elif name in args and _annotation(kernel, name, "is_constexpr"):
            fixed[name] = args[name]
        elif name in args:
            plain = _annotation(kernel, name, "do_not_specialize")
            unaligned = _annotation(kernel, name, "do_not_specialize_on_alignment")
            kind, is_divisible, value_fixed = _one(args[name], name, plain)
            if value_fixed:
                fixed[name] = args[name]
                continue
            types[name] = kind
            if is_divisible and not plain and not unaligned:
                divisible.add(name)
            if kind.startswith("*") and pointer_range_32:
                small.add(name)
        elif parameter.default is not inspect.Parameter.empty:
            fixed[name] = parameter.default
        else:
            raise ConfigError(
                f"amdgcn: kernel {kernel.fn.__name__!r}: parameter {name!r} is neither in args nor in constants."
            )
    return Specialization(list(parameters), types, fixed, frozenset(divisible), frozenset(small))


def _one(value: Any, name: str, plain: bool) -> tuple[str, bool, bool]:
    """Type, divisibility and whether the value becomes a constant."""
    if value is None:
        return "constexpr", False, True
    if isinstance(value, str):
        kind, aligned = _from_type(value)
        return kind, aligned, False
    if is_array(value):
        return _array_type(value, name), span_of(value, name).start % 16 == 0, False
    if is_descriptor(value):
        return descriptor_type(value, _array_type(value.base, name).removeprefix("*")), False, False
    if isinstance(value, AddressTable):
        return "*i64", True, False
    if isinstance(value, bool):
        return "u1", False, False
    if isinstance(value, int):
        return _integer_type(value), value % 16 == 0, value == 1 and not plain
    if isinstance(value, float):
        return "fp32", False, False
    raise ConfigError(f"amdgcn: argument {name!r} has type {type(value).__name__}, which a kernel cannot take.")
