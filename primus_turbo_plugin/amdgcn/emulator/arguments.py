"""Host arrays and scalars as kernel arguments.

Arrays (numpy, torch on CPU, anything with the buffer protocol through numpy) are copied into device memory before the
launch and back after it. Views that overlap share one buffer, so aliasing behaves as on a device.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.emulator.host_objects import AddressTable, descriptor_values, is_descriptor
from primus_turbo_plugin.amdgcn.emulator.memory import DeviceMemory
from primus_turbo_plugin.errors import ShapeError

# Bytes of an element for the types Triton signatures name.
_SIZES = {
    "i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp16": 2, "bf16": 2, "fp32": 4,
    "fp64": 8, "fp8e4nv": 1, "fp8e5": 1, "fp8e4b8": 1, "fp8e5b16": 1, "fp8e4b15": 1, "u1": 1, "f16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
_PACK = {
    "i1": "<b", "u1": "<B", "i8": "<b", "u8": "<B", "i16": "<h", "u16": "<H", "i32": "<i", "u32": "<I", "i64": "<q",
    "u64": "<Q", "fp16": "<e", "f16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d",
}  # fmt: skip


@dataclass(slots=True)
class HostSpan:
    """The memory an array covers: first byte, bytes, element size, and the array that keeps it alive."""

    start: int
    size: int
    item: int
    owner: Any

    @property
    def end(self) -> int:
        return self.start + self.size

    def bytes(self) -> NDArray[np.uint8]:
        """The span as writable bytes."""
        if self.size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer((ctypes.c_uint8 * self.size).from_address(self.start), np.uint8)


def is_array(value: Any) -> bool:
    """Whether an argument is memory rather than a number."""
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def span_of(value: Any, name: str) -> HostSpan:
    """Memory of a numpy array or a CPU tensor.

    Raises:
        ShapeError: The tensor is not on the CPU, or has negative strides.
    """
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise ShapeError(
                f"amdgcn: argument {name!r} must be a CPU tensor, got device {value.device}. Call .cpu() first."
            )
        item = value.element_size()
        strides, shape, start = [s * item for s in value.stride()], list(value.shape), value.data_ptr()
    else:
        item, strides, shape, start = value.itemsize, list(value.strides), list(value.shape), value.ctypes.data
    if any(stride < 0 for stride in strides):
        raise ShapeError(f"amdgcn: argument {name!r} must not have negative strides. Copy it first.")
    if 0 in shape:
        return HostSpan(start, 0, item, value)
    size = item + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return HostSpan(start, size, item, value)


class DeviceArrays:
    """Buffers of one launch: overlapping spans merged, copied in now and out by `copy_back`."""

    def __init__(self, memory: DeviceMemory, spans: Mapping[str, HostSpan]) -> None:
        self._memory = memory
        self._regions: list[tuple[HostSpan, int]] = []
        self._address: dict[str, int] = {}
        merged: list[tuple[HostSpan, list[str]]] = []
        for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
            if merged and span.start < merged[-1][0].end:
                region, names = merged[-1]
                region.size = max(region.end, span.end) - region.start
                names.append(name)
            else:
                merged.append((HostSpan(span.start, span.size, span.item, span.owner), [name]))
        for region, names in merged:
            address = memory.add(region.bytes(), "/".join(names), phase=region.start % 256)
            self._regions.append((region, address))
            for name in names:
                self._address[name] = address + spans[name].start - region.start

    def address(self, name: str) -> int:
        return self._address[name]

    def copy_back(self) -> None:
        """Write the buffers' contents into the host arrays."""
        for region, address in self._regions:
            if region.size:
                region.bytes()[:] = self._memory.bytes_at(address, region.size)


def named_arguments(compiled: CompiledKernel, args: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
    """Match arguments to the kernel's run-time parameters.

    Args:
        args: By name (compile-time constants may be among them and are checked), or in order without the constants.

    Raises:
        ShapeError: Names or number do not fit.
    """
    names = list(compiled.signature)
    if not isinstance(args, Mapping):
        values = list(args)
        if not names:
            names = [f"arg{i}" for i in range(len(values))]
        if len(values) != len(names):
            raise ShapeError(
                f"amdgcn: kernel {compiled.name!r} takes {len(names)} run-time arguments {names}, got {len(values)}."
            )
        return dict(zip(names, values, strict=True))
    for name, value in args.items():
        if name in compiled.constants:
            if not is_array(value) and compiled.constants[name] != value:
                fixed = compiled.constants[name]
                raise ShapeError(
                    f"amdgcn: kernel {compiled.name!r}: {name} was fixed to {fixed!r} at compile time, got {value!r}."
                )
        elif names and name not in compiled.signature:
            raise ShapeError(f"amdgcn: kernel {compiled.name!r} has no run-time argument {name!r}; it has {names}.")
    missing = [name for name in names if name not in args]
    if missing:
        raise ShapeError(f"amdgcn: kernel {compiled.name!r}: missing arguments {missing}.")
    return {name: args[name] for name in (names or args)}


def _check_array(compiled: CompiledKernel, name: str, span: HostSpan) -> None:
    declared = compiled.signature.get(name)
    if declared is None:
        return
    if not declared.startswith("*"):
        raise ShapeError(f"amdgcn: argument {name!r} is a {declared}, got an array.")
    element = declared.removeprefix("*k").removeprefix("*")
    if span.item != _SIZES.get(element, span.item):
        raise ShapeError(f"amdgcn: argument {name!r} is {declared}, got an array with {span.item}-byte elements.")
    if name in compiled.divisible and span.start % 16:
        raise ShapeError(f"amdgcn: {name!r} was compiled as 16-byte aligned, got an array at an address that is not.")


def _scalar(compiled: CompiledKernel, name: str, value: Any) -> bytes:
    declared = compiled.signature.get(name, "fp32" if isinstance(value, float) else "i32")
    if declared.startswith("*"):
        if value is None:
            return struct.pack("<Q", 0)
        raise ShapeError(f"amdgcn: argument {name!r} is {declared}, got {value!r}; pass an array.")
    if name in compiled.divisible and int(value) % 16:
        raise ShapeError(
            f"amdgcn: {name!r} was compiled as divisible by 16, got {value!r}. Compile it as plain {declared}."
        )
    if declared == "bf16":
        return struct.pack("<f", value)[2:]
    number = float(value) if declared.startswith(("fp", "f")) else int(value)
    return struct.pack(_PACK[declared], number)


def place_arguments(
    compiled: CompiledKernel, args: Mapping[str, Any] | Sequence[Any], memory: DeviceMemory
) -> tuple[list[int | bytes], DeviceArrays]:
    """Argument values for the loader, and the arrays to copy back."""
    named = named_arguments(compiled, args)
    spans = {name: span_of(value, name) for name, value in named.items() if is_array(value)}
    for name, span in spans.items():
        _check_array(compiled, name, span)
    for name, value in named.items():
        if is_descriptor(value):
            spans[f"{name}.base"] = span_of(value.base, f"{name}.base")
        elif isinstance(value, AddressTable):
            spans |= {f"{name}[{i}]": span_of(array, f"{name}[{i}]") for i, array in enumerate(value.arrays)}
    arrays = DeviceArrays(memory, spans)
    transfers = iter(compiled.metadata.get("tensordesc_meta") or ())
    values: list[int | bytes] = []
    for name, value in named.items():
        if name in spans:
            values.append(arrays.address(name))
        elif is_descriptor(value):
            base = arrays.address(f"{name}.base")
            values += descriptor_values(value, base, next(transfers, None), compiled.num_warps)
        elif isinstance(value, AddressTable):
            addresses = [arrays.address(f"{name}[{i}]") for i in range(len(value.arrays))]
            values.append(memory.add(np.array(addresses, np.int64).view(np.uint8), name))
        else:
            values.append(_scalar(compiled, name, value))
    return values, arrays
