"""Inputs and specs that the quantisation tests share."""

from __future__ import annotations

import itertools

import torch

from primus_turbo_plugin.precision.quant_spec import QuantSpec

MX_ELEMENTS = [("mxfp4", "e2m1"), ("mxfp8", "e4m3"), ("mxfp8", "e5m2")]
RULES = ["floor", "even", "ceil", "rceil"]
DTYPES = [torch.bfloat16, torch.float32]

ALL_BLOCKS = [
    ("mxfp4", "1x32"),
    ("mxfp4", "32x32"),
    ("mxfp8", "1x32"),
    ("mxfp8", "32x32"),
    ("fp8", "tensorwise"),
    ("fp8", "rowwise"),
    ("fp8", "1x128"),
    ("fp8", "128x128"),
]


def spec(fmt: str, **fields: object) -> QuantSpec:
    return QuantSpec(format=fmt, **fields)  # type: ignore[arg-type]


def every_spec() -> list[QuantSpec]:
    """All blocks, unrotated and rotated with and without signs, both roundings."""
    rotations = [(0, False), (16, False), (64, True)]
    roundings = ["nearest", "stochastic"]
    return [
        spec(fmt, block=block, hadamard=size, random_signs=signed, rounding=rounding)
        for (fmt, block), (size, signed), rounding in itertools.product(ALL_BLOCKS, rotations, roundings)
    ]


def gaussian(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng)


def wide(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Gaussian numbers spread over 180 binades, mixed within a block."""
    return gaussian(rng, *shape) * 2.0 ** torch.randint(-90, 90, shape, generator=rng)


def wide_rows(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Gaussian numbers whose rows lie at all the exponents at which no block's scale byte is clamped to 0."""
    return gaussian(rng, *shape) * 2.0 ** torch.randint(-100, 120, (shape[0], 1), generator=rng)


def on_grid(rng: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/8 up to 8: full of ties, and of blocks whose amax lies right where a rule changes its mind."""
    return torch.randint(-64, 65, shape, generator=rng) / 8.0


INPUTS = {"gaussian": gaussian, "wide": wide, "wide_rows": wide_rows, "on_grid": on_grid}


def same_tensor(a: object, b: object) -> bool:
    """Bitwise equality of two QuantizedTensors (NaN scales equal each other)."""
    scales = [q.block_scale.view(torch.uint8) for q in (a, b)]  # type: ignore[attr-defined]
    same_codes = torch.equal(a.data, b.data)  # type: ignore[attr-defined]
    return same_codes and torch.equal(*scales) and (a.spec, a.shape) == (b.spec, b.shape)  # type: ignore[attr-defined]
