"""Hadamard rotation of a GEMM operand along its contraction axis.

    rotate(x) = x D H / sqrt(n)        on every run of n elements; H Sylvester (natural order), D = diag(signs) or 1

H is symmetric and H H = n, so rotate(a) rotate(b)^T = a b^T: the product of two operands rotated alike is unchanged, while an
outlier is spread over n elements. Computed in fp32 as log2(n) butterfly stages of stride 1, 2, 4, ..., then one multiplication
by 1 / sqrt(n): the order of the additions is part of the definition, so that every kernel can give the same bits.
"""

from __future__ import annotations

import math

import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.precision.rounding import halves, philox4x32_scalar

_SIGNS_DOMAIN = 0x5167
"""Upper counter word of the signs' own Philox stream."""


def hadamard_matrix(n: int) -> torch.Tensor:
    """The Sylvester Hadamard matrix over sqrt(n), fp32 `[n, n]`: orthonormal and symmetric. n is a power of two."""
    assert n.bit_count() == 1, n
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / math.sqrt(n)


def rotation_signs(n: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Seeded signs of a size-n rotation, fp32 `[n]` of +1 and -1. Both operands of a GEMM must use the same seed."""
    words = (philox4x32_scalar((i, 0, n, _SIGNS_DOMAIN), halves(seed))[0] for i in range(n))
    return torch.tensor([1.0 - 2.0 * (word >> 31) for word in words], device=device)


def rotate(x: torch.Tensor, n: int, signs: torch.Tensor | None = None, dim: int = -1) -> torch.Tensor:
    """x D H / sqrt(n) on every run of n elements along `dim`.

    Args:
        x: fp32 `[rows, cols]`, the length of `dim` a multiple of n.
        n: Size of the transform, a power of two.
        signs: fp32 `[n]` of +1 and -1, or None for the plain transform.
        dim: The contraction axis.

    Returns:
        fp32, the shape of `x`, contiguous.

    Raises:
        ShapeError: x is not 2D, or the length of `dim` is not a multiple of n.
    """
    y = _split(x, n, dim, "rotate")
    if signs is not None:
        y = y * signs[:, None]
    return _join(_butterflies(y).mul_(1.0 / math.sqrt(n)), x, dim)


def unrotate(y: torch.Tensor, n: int, signs: torch.Tensor | None = None, dim: int = -1) -> torch.Tensor:
    """Inverse of `rotate` (up to fp32 rounding): y H D / sqrt(n). Arguments as `rotate`."""
    x = _butterflies(_split(y, n, dim, "unrotate")).mul_(1.0 / math.sqrt(n))
    if signs is not None:
        x *= signs[:, None]
    return _join(x, y, dim)


def _split(x: torch.Tensor, n: int, dim: int, where: str) -> torch.Tensor:
    """x as `[runs, n, m]`, contiguous, with the axis to transform in the middle: the butterflies then run over long rows."""
    if x.dim() != 2 or x.shape[dim] % n:
        raise ShapeError(
            f"{where}: axis {dim} of a 2D tensor must be a multiple of {n}, got {list(x.shape)}. Zero-pad it."
        )
    if dim in (0, -2):
        return x.contiguous().view(x.shape[0] // n, n, x.shape[1])
    return x.reshape(-1, n).t().contiguous().unsqueeze(0)  # [1, n, runs]


def _join(y: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    return (y if dim in (0, -2) else y[0].t()).reshape(x.shape).contiguous()


def _butterflies(y: torch.Tensor) -> torch.Tensor:
    """Unnormalised Walsh-Hadamard transform of the middle axis of `[runs, n, m]`, into a new tensor."""
    runs, n, m = y.shape
    result, spare = torch.empty_like(y), torch.empty_like(y)
    stride = 1
    while stride < n:
        source = y.view(runs, n // (2 * stride), 2, stride, m)
        pairs = result.view_as(source)
        torch.add(source[:, :, 0], source[:, :, 1], out=pairs[:, :, 0])
        torch.sub(source[:, :, 0], source[:, :, 1], out=pairs[:, :, 1])
        y, result, spare = result, spare, result
        stride *= 2
    return y
