"""Shapes of the models that tests and benchmarks are named after.

A linear is `w [out_features, in_features]`, its activation `[tokens, in_features]`, its output gradient `[tokens, out_features]`.
Source: the Llama 3 8B and 70B configurations (hidden 4096 / 8192, feed-forward 14336 / 28672, 32 / 64 heads of 128, 8 key-value
heads). fc1 holds the gate and the up projection.
"""

from __future__ import annotations

from dataclasses import dataclass

BENCHMARK_TOKENS = 16_384
"""Tokens of a micro-batch in the benchmarks: 2 sequences of 8192."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear of a model."""

    name: str
    out_features: int
    in_features: int


LLAMA3_8B = (
    LinearShape("llama3_8b.qkv", 6144, 4096),
    LinearShape("llama3_8b.proj", 4096, 4096),
    LinearShape("llama3_8b.fc1", 28672, 4096),
    LinearShape("llama3_8b.fc2", 4096, 14336),
)
LLAMA3_70B = (
    LinearShape("llama3_70b.qkv", 10240, 8192),
    LinearShape("llama3_70b.proj", 8192, 8192),
    LinearShape("llama3_70b.fc1", 57344, 8192),
    LinearShape("llama3_70b.fc2", 8192, 28672),
)
LINEARS = LLAMA3_8B + LLAMA3_70B

UGLY = ((1, 8), (5, 123), (33, 40), (100, 264), (129, 520))
"""Sizes that fit no tile: one row, odd lengths, one past a block."""
