"""One bias an expert, as a row for each token of that expert: where it is not simply added (`grouped_linear` does that).

fprop   rows[t] = bias[e],  e the expert of token t
dgrad   dbias[e] = sum of drows over the tokens of e, in fp32 in their order and rounded once: the same bits every run
Saved   the experts' offsets
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.groups import Groups


def expert_bias_rows(bias: Tensor, groups: Groups) -> Tensor:
    """bias[e] for every token of expert e.

    Args:
        bias: [experts, features].
        groups: Which of T tokens belong to which expert.

    Returns:
        [T, features] in the bias's dtype.

    Raises:
        ShapeError: Not one bias for each expert.
    """
    if bias.dim() != 2 or bias.shape[0] != groups.count:
        raise ShapeError(
            f"expert_bias_rows: bias must be [{groups.count}, features], as many as groups, got {list(bias.shape)}. "
            "Stack one bias an expert."
        )
    rows: Tensor = _Rows.apply(bias, groups)
    return rows


class _Rows(Function):
    """See the module's docstring."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        return bias.index_select(0, groups.of_rows())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None]:
        groups: Groups = ctx.groups
        if not drows.shape[0]:
            return drows.new_zeros(groups.count, drows.shape[1]), None
        wide = drows if drows.dtype == torch.float64 else drows.float()
        sums = torch.segment_reduce(wide, "sum", offsets=groups.offsets, axis=0, unsafe=True, initial=0)
        return sums.to(drows.dtype), None
