"""Hadamard rotation of a GEMM operand along its contraction axis.

    rotate(x) = x D H / sqrt(n)        on every run of n elements; H Sylvester (natural order), D = diag(signs) or 1

H is symmetric and H H = n, so rotate(a) rotate(b)^T = a b^T: the product of two operands rotated alike is unchanged, while an
outlier is spread over n elements. Computed in fp32 as log2(n) butterfly stages of stride 1, 2, 4, ..., then one multiplication
by 1 / sqrt(n): the order of the additions is part of the definition, so that every kernel can give the same bits.
"""

from __future__ import annotations

import math

import torch

from primus_turbo_plugin.precision.rounding import philox4x32_scalar

_SIGNS_DOMAIN = 0x5167
"""Upper counter word that keeps the signs apart from any rounding words of the same seed."""


def hadamard_matrix(n: int) -> torch.Tensor:
    """The Sylvester Hadamard matrix over sqrt(n), fp32 `[n, n]`: orthonormal and symmetric. `n` is a power of two."""
    assert n > 0 and n & (n - 1) == 0, n
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(n)


def rotation_signs(n: int, seed: int) -> torch.Tensor:
    """Seeded signs of a size-n rotation, fp32 `[n]` of +1 and -1. Both operands of a GEMM must use the same seed."""
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    words = [philox4x32_scalar((i, 0, n, _SIGNS_DOMAIN), key)[0] for i in range(n)]
    return torch.tensor([1.0 - 2.0 * (word >> 31) for word in words])


def rotate(x: torch.Tensor, n: int, signs: torch.Tensor | None = None, dim: int = -1) -> torch.Tensor:
    """x D H / sqrt(n) on every run of n elements along `dim`.

    Args:
        x: fp32, the length of `dim` a multiple of n.
        n: Size of the transform, a power of two.
        signs: fp32 `[n]` of +1 and -1, or None for the plain transform.
        dim: The contraction axis.

    Returns:
        fp32, the shape of `x`.
    """
    x = x.transpose(dim, -1)
    y = x.reshape(*x.shape[:-1], x.shape[-1] // n, n)
    if signs is not None:
        y = y * signs
    y = _butterflies(y) * (1.0 / math.sqrt(n))
    return y.reshape(x.shape).transpose(dim, -1)


def unrotate(y: torch.Tensor, n: int, signs: torch.Tensor | None = None, dim: int = -1) -> torch.Tensor:
    """Inverse of `rotate` (up to fp32 rounding): y H D / sqrt(n)."""
    x = rotate(y, n, None, dim).transpose(dim, -1)
    if signs is not None:
        x = (x.reshape(*x.shape[:-1], -1, n) * signs).reshape(x.shape)
    return x.transpose(dim, -1)


def _butterflies(y: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of the last dimension."""
    shape, n = y.shape, y.shape[-1]
    stride = 1
    while stride < n:
        pairs = y.reshape(*shape[:-1], n // (2 * stride), 2, stride)
        low, high = pairs.unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).reshape(shape)
        stride *= 2
    return y
