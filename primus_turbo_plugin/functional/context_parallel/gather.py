"""All-gather: every rank gathers all keys and values, and attends with its own queries.

fprop       one all-gather of k and v;  out = attention(q, all k, all v), queries standing at this rank's chunks
backward    the all-gather again, rather than keep `size` times the memory;  dk, dv of all tokens in fp32, summed by one
            reduce-scatter and rounded once
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group, all_gather, reduce_scatter
from primus_turbo_plugin.functional.context_parallel.engines import Gradients, Saved, inner_dtype
from primus_turbo_plugin.functional.context_parallel.sequences import gathered_order, sequences_of
from primus_turbo_plugin.kernels.attention import AttentionOptions, ZigZag


@dataclass(frozen=True, slots=True)
class AllGather:
    """See the top of this file."""

    kernels: Any
    group: Group

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
        keys, values = self._whole(k, v, options)
        _, lse = self.kernels.attention_fwd(q, keys, values, self.placed(options), bias=bias, sinks=sinks, out=out)
        return q, k, v, out, lse, bias, sinks

    def backward(self, dout: Tensor, saved: Saved, options: AttentionOptions) -> Gradients:
        q, k, v, out, lse, bias, sinks = saved
        assert q is not None
        assert k is not None
        assert v is not None
        keys, values = self._whole(k, v, options)
        dq, dk, dv, dbias, dsinks = self.kernels.attention_bwd(
            dout, q, keys, values, out, lse, self.placed(options), bias=bias, sinks=sinks, kv_grad_dtype=inner_dtype(q)
        )
        return Gradients(dq, *self._shares(dk, dv, k, options), dbias, dsinks)

    def placed(self, options: AttentionOptions) -> AttentionOptions:
        """The options with this rank's place in them."""
        return replace(
            options, mask=replace(options.mask, zigzag=ZigZag(rank=self.group.rank(), size=self.group.size()))
        )

    def _whole(self, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """All keys and values in the natural order."""
        both = torch.cat((k, v), -1).transpose(0, 1)  # [keys, batch, groups, dim + v_dim]
        gathered = all_gather(both, self.group).wait()
        ordered = gathered[self._order(k, options)].transpose(0, 1)
        keys, values = ordered.split((k.shape[-1], v.shape[-1]), -1)
        return keys, values

    def _shares(self, dk: Tensor, dv: Tensor, k: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        """This rank's dk and dv: the sum over the group of what each rank found for its queries."""
        ordered = torch.cat((dk, dv), -1).transpose(0, 1)  # [keys, batch, groups, dim + v_dim], fp32
        gathered = ordered.new_zeros(k.shape[1] * self.group.size(), *ordered.shape[1:])
        gathered[self._order(k, options)] = ordered
        share = reduce_scatter(gathered, self.group).wait().transpose(0, 1)
        dk, dv = share.split((dk.shape[-1], dv.shape[-1]), -1)
        return dk, dv

    def _order(self, k: Tensor, options: AttentionOptions) -> Tensor:
        sequences = sequences_of(options.mask.packing, k.shape[1], self.group.size(), "k")
        return gathered_order(sequences, k.shape[1], self.group.size(), k.device)
