"""All-to-all attention (DeepSpeed-Ulysses): heads are dealt out; each rank attends with its share over all tokens of the group.

fprop       all-to-all of q, k, v: from all heads of this rank's tokens to this rank's heads of all tokens, put into the
            natural order; attention; all-to-all of the output back
backward    all-to-all of dout; attention's backward; all-to-all of dq, dk, dv back
Heads       rank t of p has query heads t * h / p ... and the groups they share. With fewer groups than ranks, p / groups ranks
            have the same one: it is sent to each, and its gradients are summed in fp32, in rank order, and then rounded
Levels      what attends is another engine: one kernel call, or, under a2a+p2p, the ring of the ranks with this place in every
            group. The chunks of p consecutive ranks are, put in order, the two of a rank in a ring that is p times shorter
Saved       q, k, v, out of this rank's heads, lse; the mask tensor's rows of all tokens
Source      Jacobs et al., DeepSpeed Ulysses, 2023 (arXiv:2309.14509)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from primus_turbo_plugin.communication.all_to_all import all_to_all
from primus_turbo_plugin.communication.collectives import Group, Pending, all_gather
from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.context_parallel.algorithm import reason_against_dealing_out
from primus_turbo_plugin.functional.context_parallel.engines import Engine, Gradients, Saved
from primus_turbo_plugin.functional.context_parallel.sequences import Sequence, gathered_order, sequences_of
from primus_turbo_plugin.kernels.attention import AttentionOptions


@dataclass(frozen=True, slots=True)
class AllToAll:
    """See the top of this file.

    Attributes:
        inner: What attends, once the heads are dealt out.
        group: The ranks among which they are.
        heads: Query heads, all of them.
        groups: Key heads, likewise.
        rings: How many such groups share the sequences.

    Raises:
        ShapeError: The heads can't be dealt out evenly.
    """

    inner: Engine
    group: Group
    heads: int
    groups: int
    rings: int = 1

    def __post_init__(self) -> None:
        reason = reason_against_dealing_out(self.heads, self.groups, self.group.size())
        if reason is not None:
            raise ShapeError(f"attention: {reason}")

    @property
    def copies(self) -> int:
        """How many ranks have the same group of keys."""
        return max(1, self.group.size() // self.groups)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        bias: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> Saved:
        if bias is not None:
            raise ShapeError(
                "attention: an all-to-all hands each rank all queries of its heads, and the bias is not handed on. "
                "Set cp_comm_type to p2p or all_gather."
            )
        order = self._order(q, options)
        coming = [self._deal_out(x) for x in (q, k, v)]
        mask = self._all_rows(options.mask.masked, order)
        queries, keys, values = (_in_order(x, order) for x in coming)
        own_out = queries.new_empty(*queries.shape[:3], v.shape[3])
        own_sinks = None if sinks is None else sinks[self._own_heads]
        saved = self.inner.forward(queries, keys, values, self._own(options, mask), None, own_sinks, own_out)
        out.copy_(self._send_back(own_out, q.shape[1], order)())
        return *saved, mask

    def backward(self, dout: Tensor, saved: Saved, options: AttentionOptions) -> Gradients:
        *inner, mask = saved
        dtype, tokens = dout.dtype, dout.shape[1]
        order = self._order(dout, options)
        douts = _in_order(self._deal_out(dout), order)
        grads = self.inner.backward(douts, tuple(inner), self._own(options, mask))
        # A sum that is whole is rounded before it travels; a part of one once the parts are summed.
        dk, dv = (x if self.copies > 1 else x.to(dtype) for x in (grads.k, grads.v))
        finish = [
            self._send_back(grads.q.to(dtype), tokens, order),
            self._send_back(dk, tokens, order, self.copies),
            self._send_back(dv, tokens, order, self.copies),
        ]
        dsinks = None
        if grads.sinks is not None:
            dsinks = grads.sinks.new_zeros(self.heads)
            dsinks[self._own_heads] = grads.sinks
        dq, dk, dv = (wait() for wait in finish)
        return Gradients(dq, dk, dv, None, dsinks)

    @property
    def _own_heads(self) -> slice:
        each = self.heads // self.group.size()
        return slice(self.group.rank() * each, (self.group.rank() + 1) * each)

    def _own(self, options: AttentionOptions, mask: Tensor | None) -> AttentionOptions:
        """The options for this rank's heads."""
        heads = self._own_heads
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, heads]
        dropout = options.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + heads.start)
        return replace(options, mask=replace(options.mask, masked=mask), dropout=dropout)

    def _deal_out(self, x: Tensor) -> Pending[Tensor]:
        """[batch, tokens, heads, dim], this rank's tokens -> [ranks, tokens, batch, heads / ranks, dim], this rank's heads."""
        size = self.group.size()
        if x.shape[2] < size:
            x = x.repeat_interleave(size // x.shape[2], 2)
        return all_to_all(x.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4), self.group)

    def _send_back(self, x: Tensor, tokens: int, order: Tensor, copies: int = 1) -> Callable[[], Tensor]:
        """The inverse, started: a function that waits for it. Copies of a head are summed in rank order; tokens outside every
        sequence get 0."""
        size = self.group.size()
        gathered = x.new_zeros(size * tokens, x.shape[0], *x.shape[2:])
        gathered[order] = x.transpose(0, 1)
        coming = all_to_all(gathered.unflatten(0, (size, tokens)), self.group)

        def finish() -> Tensor:
            heads = coming.wait().permute(2, 1, 0, 3, 4).flatten(2, 3)  # [batch, tokens, ranks * heads, dim]
            if copies == 1:
                return heads
            parts = heads.unflatten(2, (-1, copies)).unbind(3)
            return functools.reduce(torch.add, parts)

        return finish

    def _all_rows(self, mask: Tensor | None, order: Tensor) -> Tensor | None:
        """A mask tensor with the rows of all tokens of the group; each rank has its own."""
        if mask is None or mask.shape[2] == 1:
            return mask
        rows = all_gather(mask.permute(2, 0, 1, 3).to(torch.uint8), self.group).wait()
        return rows[order].permute(1, 2, 0, 3).bool()

    def _order(self, x: Tensor, options: AttentionOptions) -> Tensor:
        size, tokens, rings = self.group.size(), x.shape[1], self.rings
        sequences = sequences_of(options.mask.packing, tokens, size * rings, "q")
        # Of each sequence this group has a rings-th, laid out among its ranks as a shorter sequence would be.
        own = tuple(Sequence(s.start // rings, s.room // rings, s.room // rings) for s in sequences)
        return gathered_order(own, tokens, size, x.device)


def _in_order(coming: Pending[Tensor], order: Tensor) -> Tensor:
    """[ranks, tokens, batch, heads, dim] -> [batch, all tokens, heads, dim] in the natural order."""
    return coming.wait().flatten(0, 1)[order].transpose(0, 1)
