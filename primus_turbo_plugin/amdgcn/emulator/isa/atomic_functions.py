"""Read-modify-write functions shared by LDS and global atomics.

Lanes are served in lane order, waves in wave order; hardware promises no order, so kernels must not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.emulator.isa.values import Array, bf16_to_f32, f32_to_bf16
from primus_turbo_plugin.amdgcn.emulator.waves import U32, Ints


@dataclass(frozen=True, slots=True)
class AtomicFunction:
    """A function of (old, data) on elements of one type; packed types hold two values per element."""

    dtype: type[np.generic]
    apply: Callable[[Array, Array], Array]


def _packed_bf16(old: Array, data: Array) -> Array:
    low = f32_to_bf16(bf16_to_f32(old & U32(0xFFFF)) + bf16_to_f32(data & U32(0xFFFF)))
    high = f32_to_bf16(bf16_to_f32(old >> U32(16)) + bf16_to_f32(data >> U32(16)))
    return low | (high << U32(16))


def _packed_f16(old: Array, data: Array) -> Array:
    total = old[..., None].view(np.float16) + data[..., None].view(np.float16)
    return np.ascontiguousarray(total).view(U32)[..., 0]


ATOMICS: dict[str, AtomicFunction] = {
    "add_u32": AtomicFunction(np.uint32, lambda old, data: old + data),
    "sub_u32": AtomicFunction(np.uint32, lambda old, data: old - data),
    "min_i32": AtomicFunction(np.int32, np.minimum),
    "max_i32": AtomicFunction(np.int32, np.maximum),
    "min_u32": AtomicFunction(np.uint32, np.minimum),
    "max_u32": AtomicFunction(np.uint32, np.maximum),
    "and_b32": AtomicFunction(np.uint32, lambda old, data: old & data),
    "or_b32": AtomicFunction(np.uint32, lambda old, data: old | data),
    "xor_b32": AtomicFunction(np.uint32, lambda old, data: old ^ data),
    "swap_b32": AtomicFunction(np.uint32, lambda old, data: data),
    "add_f32": AtomicFunction(np.float32, lambda old, data: old + data),
    "min_f32": AtomicFunction(np.float32, np.fmin),
    "max_f32": AtomicFunction(np.float32, np.fmax),
    "pk_add_bf16": AtomicFunction(np.uint32, _packed_bf16),
    "pk_add_f16": AtomicFunction(np.uint32, _packed_f16),
    "add_u64": AtomicFunction(np.uint64, lambda old, data: old + data),
    "add_f64": AtomicFunction(np.float64, lambda old, data: old + data),
}


def apply_in_order(storage: NDArray[np.uint8], offsets: Ints, data: Array, function: AtomicFunction) -> Array:
    """Apply an atomic for a list of lanes and return what each found.

    Args:
        storage: Bytes.
        offsets: Byte offset of each lane, aligned to the element.
        data: Operand of each lane, as unsigned words of the element's size.
    """
    view = storage.view(function.dtype)
    index = offsets // view.itemsize
    operand = np.ascontiguousarray(data).view(function.dtype)
    old = np.empty(len(index), function.dtype)
    remaining = np.arange(len(index))
    while remaining.size:  # one round per repeated address
        _, first = np.unique(index[remaining], return_index=True)
        lanes = remaining[np.sort(first)]
        old[lanes] = view[index[lanes]]
        view[index[lanes]] = function.apply(old[lanes], operand[lanes])
        remaining = np.setdiff1d(remaining, lanes, assume_unique=True)
    return old.view(data.dtype)
