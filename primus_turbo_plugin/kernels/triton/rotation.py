"""Device functions: the Hadamard rotation as fp32 butterflies (Triton).

Math      x D H / sqrt(n) on every run of n values: stages of stride 1, 2, 4, ..., low + high and low - high, then one
          multiplication: the order that precision.rotation defines, so the bits are the same. A matrix product on tensor cores
          would add in another order.
"""

# Triton's compiler grows tuples by concatenation only:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_tile(v, signs_ptr, SIZE: tl.constexpr, LOG2_SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """Rotate an fp32 tile `[outer, contraction]` along its last axis.

    Args:
        v: fp32, contraction a multiple of SIZE.
        signs_ptr: fp32 `[SIZE]`, or None.
        SIZE: Size of the transform.
        LOG2_SIZE: Its logarithm.
        FACTOR: 1 / sqrt(SIZE).
    """
    runs: tl.constexpr = v.shape[0] * v.shape[1] // SIZE
    y = tl.reshape(v, (runs, SIZE))
    if signs_ptr is not None:
        y = y * tl.load(signs_ptr + tl.arange(0, SIZE))[None, :]
    for stage in tl.static_range(LOG2_SIZE):
        y = tl.permute(tl.reshape(y, (runs, SIZE >> (stage + 1), 2, 1 << stage)), (0, 1, 3, 2))
        low, high = tl.split(y)
        y = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        y = tl.reshape(y, (runs, SIZE))
    return tl.reshape(y * FACTOR, v.shape)


@triton.jit
def rotate_stages(values, STAGES: tl.constexpr):
    """The first STAGES butterfly stages of an unnormalised transform across a tuple of tensors: no data moves between threads."""
    N: tl.constexpr = len(values)
    for stage in tl.static_range(STAGES):
        out = ()
        for i in tl.static_range(N):
            if (i >> stage) & 1:
                out = out + (values[i - (1 << stage)] - values[i],)
            else:
                out = out + (values[i] + values[i + (1 << stage)],)
        values = out
    return values
