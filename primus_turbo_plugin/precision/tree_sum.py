"""Sums whose order is part of the definition, so that every kernel gives the same bits.

    tree_sum(x) = pairs of neighbours are added, then pairs of those sums, ... ; the length is padded with zeros to a power of two

The error bound is log2(n) u sum|x| instead of (n - 1) u sum|x| (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
A sum of sums of 2^k neighbours is the same tree, so a kernel may sum tiles of a power of two apart, and a later one their sums.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum of x along `dim`, in x's dtype, by pairs of neighbours; 0 for an empty axis.

    Args:
        x: Any shape, a floating dtype.
        dim: The axis that disappears.
    """
    x = x.movedim(dim, -1)
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    while x.shape[-1] > 1:
        even = x.shape[-1] // 2 * 2
        sums = x[..., 0:even:2] + x[..., 1:even:2]
        x = sums if even == x.shape[-1] else torch.cat((sums, x[..., even:] + 0.0), dim=-1)
    return x[..., 0]
