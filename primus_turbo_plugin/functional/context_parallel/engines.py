"""What an algorithm of context parallelism provides, and the plainest of them: attention on one rank.

Tensors are `[batch, tokens, heads, dim]` views with any strides, as kernels take them; `tokens` are those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionOptions

Saved = tuple[Tensor | None, ...]


class Gradients(NamedTuple):
    """In any float dtype; the caller rounds."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


class Engine(Protocol):
    """Forward and backward of attention over tokens that several ranks share."""

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
        """Writes `out` `[batch, tokens, heads, v_dim]` and returns what the backward needs. The mask of `options` says who sees
        whom in the whole sequences; a mask tensor and a bias have this rank's queries and all keys."""
        ...

    def backward(self, dout: Tensor, saved: Saved, options: AttentionOptions) -> Gradients:
        """Gradients of this rank's tensors; those of bias and sinks are parts, to be summed over the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """No ranks to share with: one kernel call. Under an all-to-all, each rank's heads see the whole sequence this way."""

    kernels: Any

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
        _, lse = self.kernels.attention_fwd(q, k, v, options, bias=bias, sinks=sinks, out=out)
        return q, k, v, out, lse, bias, sinks

    def backward(self, dout: Tensor, saved: Saved, options: AttentionOptions) -> Gradients:
        q, k, v, out, lse, bias, sinks = saved
        assert q is not None
        return Gradients(
            *self.kernels.attention_bwd(
                dout, q, k, v, out, lse, options, bias=bias, sinks=sinks, kv_grad_dtype=inner_dtype(q)
            )
        )


def inner_dtype(x: Tensor) -> torch.dtype:
    """What partial results are kept in: fp32, or fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)
