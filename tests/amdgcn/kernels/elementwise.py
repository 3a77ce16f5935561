"""Vector add with a tail, and a kernel that mixes many arithmetic operations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import triton
import triton.language as tl

from primus_turbo_plugin.amdgcn.targets import KernelTarget

ALL = ("gfx942", "gfx950", "gfx1250")


@triton.jit
def vector_add(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(z_ptr + offsets, total, mask=inside)


@triton.jit
def vector_add_without_tail_mask(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    """The off-by-one every tail invites: the mask lets one element too many through."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets <= n
    total = tl.load(x_ptr + offsets, mask=inside) + tl.load(y_ptr + offsets, mask=inside)
    tl.store(z_ptr + offsets, total, mask=inside)


@triton.jit
def arithmetic(x_ptr, y_ptr, i_ptr, f_ptr, k_ptr, n, BLOCK: tl.constexpr):
    """Division, square root, exponentials, integer division and remainder, shifts, comparisons, 64-bit products."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=1.0)
    y = tl.load(y_ptr + offsets, mask=inside, other=1.0)
    i = tl.load(i_ptr + offsets, mask=inside, other=1)
    f = x / y + tl.sqrt(tl.abs(x)) + tl.exp(x * 0.125) - tl.log(tl.abs(y)) + tl.floor(x) + tl.sin(y)
    f = tl.where(x > y, f, f * 0.5 + tl.maximum(x, 0.0)) + tl.rsqrt(tl.abs(y))
    wide = i.to(tl.int64) * 1000003 + offsets
    k = (i // 7) ^ (i % 13) + (i << 3) - (i >> 2) + tl.abs(i) + tl.umulhi(i.to(tl.uint32), 0x9E3779B9).to(
        tl.int32, bitcast=True
    )
    k = k + (wide >> 16).to(tl.int32) + tl.minimum(i, 100)
    tl.store(f_ptr + offsets, f, mask=inside)
    tl.store(k_ptr + offsets, k, mask=inside)


def add_inputs(rng: np.random.Generator) -> dict[str, Any]:
    n = 1000  # not a multiple of the block
    x, y = (rng.standard_normal(n).astype(np.float32) for _ in range(2))
    return {"x_ptr": x, "y_ptr": y, "z_ptr": np.full(n, np.nan, np.float32), "n": n}


def arithmetic_inputs(rng: np.random.Generator) -> dict[str, Any]:
    n = 777
    return {
        "x_ptr": rng.standard_normal(n).astype(np.float32) * 4,
        "y_ptr": (rng.standard_normal(n) * 2).astype(np.float32),
        "i_ptr": rng.integers(-(2**31), 2**31, n, dtype=np.int32),
        "f_ptr": np.full(n, np.nan, np.float32),
        "k_ptr": np.zeros(n, np.int32),
        "n": n,
    }


def arithmetic_reference(args: dict[str, Any]) -> dict[str, Any]:
    x, y, i = args["x_ptr"].astype(np.float64), args["y_ptr"].astype(np.float64), args["i_ptr"]
    f = x / y + np.sqrt(np.abs(x)) + np.exp(x * 0.125) - np.log(np.abs(y)) + np.floor(x) + np.sin(y)
    f = np.where(x > y, f, f * 0.5 + np.maximum(x, 0)) + 1 / np.sqrt(np.abs(y))
    wide = i.astype(np.int64) * 1000003 + np.arange(len(i))
    with np.errstate(over="ignore"):
        quotient = np.trunc(i / 7).astype(np.int32)
        remainder = np.fmod(i, 13)
        high = ((i.view(np.uint32).astype(np.uint64) * 0x9E3779B9) >> 32).astype(np.uint32).view(np.int32)
        k = quotient ^ (remainder + (i << 3) - (i >> 2) + np.abs(i) + high)
        k = k + (wide >> 16).astype(np.int32) + np.minimum(i, 100)
    return {"f_ptr": f.astype(np.float32), "k_ptr": k}


def isa_targets() -> list[KernelTarget]:
    return [
        KernelTarget(
            name="vector_add",
            kernel=vector_add,
            archs=ALL,
            inputs=add_inputs,
            grid=lambda args: math.ceil(args["n"] / 256),
            constants={"BLOCK": 256},
            expected=lambda args: {"z_ptr": args["x_ptr"] + args["y_ptr"]},
        ),
        KernelTarget(
            name="arithmetic",
            kernel=arithmetic,
            archs=ALL,
            inputs=arithmetic_inputs,
            grid=lambda args: math.ceil(args["n"] / 256),
            constants={"BLOCK": 256},
            expected=arithmetic_reference,
            tolerance=1e-6,  # the reference is float64; a value near a pole of 1 / y carries the largest error
        ),
    ]
