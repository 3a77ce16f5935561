"""Partial results of attention over some of a row's keys, merged by their log-sum-exp.

With (out_a, lse_a) and (out_b, lse_b), each normalised by itself:

    lse = log(exp(lse_a) + exp(lse_b));   out = out_a + w * (out_b - out_a),   w = exp(lse_b - lse)

A sink adds exp(sink) to the row's sum and no value: lse' = log(exp(lse) + exp(sink)), out' = out * exp(lse - lse'). It belongs
to the row, not to a part of its keys, and is added once, at the end. Everything in fp32 (fp64 for fp64 inputs); the caller
rounds, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from primus_turbo_plugin.functional.context_parallel.sums import Written


class Merged:
    """Rows whose keys arrive in parts.

    Args:
        out: [batch, queries, heads, v_dim], any dense strides; shape, layout and device of the result.
        dtype: To accumulate in.
    """

    def __init__(self, out: Tensor, dtype: torch.dtype) -> None:
        self.out = torch.empty_like(out, dtype=dtype)
        self.lse = out.new_empty((out.shape[0], out.shape[2], out.shape[1]), dtype=dtype)
        self._written = Written(out.shape[1])

    def room(self, rows: slice) -> Tensor:
        """Where a part of these rows' outputs may be written: the result itself where there is nothing to merge with yet."""
        whole = self.out[:, rows]
        return torch.empty_like(whole) if self._written.any_of(rows) else whole

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges a part into some rows.

        Args:
            rows: Which.
            out: [batch, rows, heads, v_dim], from `room`, normalised by its own lse; 0 where a row sees nothing.
            lse: [batch, heads, rows]; -inf where a row sees nothing.
        """
        before = self.lse[:, :, rows]
        if self._written.any_of(rows):
            for gap in self._written.gaps(rows):
                self._clear(gap)
            total = torch.logaddexp(before, lse)
            weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
            self.out[:, rows].lerp_(out, weight.transpose(1, 2).unsqueeze(-1))
            before.copy_(total)
        else:
            before.copy_(lse)
        self._written.add(rows)

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse) of all rows, those without any key too.

        Args:
            sinks: [heads], a logit for each head in every row's sum; None for none.
        """
        for gap in self._written.gaps(slice(0, self.out.shape[1])):
            self._clear(gap)
        if sinks is not None:
            self.add_sinks(sinks)
        return self.out, self.lse

    def _clear(self, rows: slice) -> None:
        self.out[:, rows] = 0
        self.lse[:, :, rows] = -torch.inf

    def add_sinks(self, sinks: Tensor) -> None:
        """A logit for each head, [heads], in every row's sum."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype).view(1, -1, 1))
        self.out *= torch.exp(self.lse - total).transpose(1, 2).unsqueeze(-1)
        self.lse = total


def row_deltas(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """sum(dout * out) over v_dim, [batch, heads, queries]: equals sum_keys P * dP of the whole row, dropout included."""
    return (dout.to(dtype) * out).sum(-1).transpose(1, 2).contiguous()


def sink_gradients(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum over rows of exp(sink - lse) * delta, [heads]."""
    share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(share * delta).sum((0, 2))
