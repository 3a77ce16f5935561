"""Attention over a context-parallel group as an autograd function: checks, the engine, one rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.functional.autocast import no_autocast
from primus_turbo_plugin.functional.context_parallel.algorithm import ContextParallel
from primus_turbo_plugin.functional.context_parallel.engines import Engine, OneRank
from primus_turbo_plugin.functional.context_parallel.gather import AllGather
from primus_turbo_plugin.functional.context_parallel.ring import Ring
from primus_turbo_plugin.functional.context_parallel.ulysses import AllToAll
from primus_turbo_plugin.kernels.attention import AttentionOptions, AttentionRequest
from primus_turbo_plugin.kernels.registry import default_registry

Layout = Literal["sbhd", "bshd", "thd"]


def shared_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, *,
    layout: Layout, options: AttentionOptions, context: ContextParallel, kernels: Sequence[str] | None,
) -> Tensor:  # fmt: skip
    """Attention of this rank's queries over sequences that the ranks of `context` share. Arguments as of `attention`, which
    checks them.

    Returns:
        As q, with v's dim, contiguous in `layout`.

    Raises:
        ShapeError: A sequence does not divide into the group's chunks, or the heads can't be dealt out.
        UnsupportedError: No backend of `kernels` can do it.
    """
    q_view, k_view, v_view = (_batch_first(x, layout) for x in (q, k, v))
    request = _request(q_view, k_view, v_view, options, context, bias, sinks)
    backend = default_registry().select("attention", request, kernels)
    engine = _engine(context, backend.kernels, q_view.shape[2], k_view.shape[2])
    out: Tensor = _SharedAttention.apply(q, k, v, bias, sinks, _Shared(layout, options, engine))
    return out


@dataclass(frozen=True, slots=True)
class _Shared:
    """What forward and backward of one call share."""

    layout: Layout
    options: AttentionOptions
    engine: Engine


class _SharedAttention(Function):
    """Saves what the engine says: q, k, v, out, lse of what it attended with."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: _Shared
    ) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        laid_out = (q, k, v, out)
        views = [_batch_first(x, call.layout) for x in laid_out]
        q_view, k_view, v_view, out_view = views
        saved = call.engine.forward(q_view, k_view, v_view, call.options, bias, sinks, out_view)
        # Inputs and the output are saved as autograd knows them, not as views made behind its back.
        ctx.viewed = [next((i for i, view in enumerate(views) if view is x), None) for x in saved]
        ctx.save_for_backward(*(x if i is None else laid_out[i] for i, x in zip(ctx.viewed, saved)))
        ctx.call = call
        ctx.dtypes = [None if x is None else x.dtype for x in (q, k, v, bias, sinks)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        call: _Shared = ctx.call
        with no_autocast(dout):
            saved = tuple(
                x if i is None else _batch_first(x, call.layout) for i, x in zip(ctx.viewed, ctx.saved_tensors)
            )
            grads = call.engine.backward(_batch_first(dout, call.layout), saved, call.options)
            rounded = [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)]
        dq, dk, dv = (_as_laid_out(grad, call.layout) for grad in rounded[:3] if grad is not None)
        return dq, dk, dv, rounded[3], rounded[4], None


def _engine(context: ContextParallel, kernels: Any, heads: int, groups: int) -> Engine:
    if context.algorithm == "all_gather":
        return AllGather(kernels, context.group)
    ring, dealt = context.ring_group, context.all_to_all_group
    inner: Engine = OneRank(kernels) if ring is None else Ring(kernels, ring)
    if dealt is None:
        return inner
    return AllToAll(inner, dealt, heads, groups, 1 if ring is None else ring.size())


def _request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    context: ContextParallel,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> AttentionRequest:
    """What the engine will ask of a kernel."""
    request = AttentionRequest.of(q, k, v, options, bias=bias, sinks=sinks)
    if context.algorithm == "all_gather":
        return replace(request, context_parallel=True)
    if context.all_to_all_group is not None:
        size = context.all_to_all_group.size()
        request = replace(request, heads=max(1, request.heads // size), groups=max(1, request.groups // size))
    if context.ring_group is not None:
        request = replace(request, partial=True, sinks=False, unequal_lengths=True)
    return request


def _batch_first(x: Tensor, layout: Layout) -> Tensor:
    """A `[batch, tokens, heads, dim]` view."""
    if layout == "thd":
        return x.unsqueeze(0)
    return x.transpose(0, 1) if layout == "sbhd" else x


def _as_laid_out(x: Tensor, layout: Layout) -> Tensor:
    """The inverse of `_batch_first`."""
    if layout == "thd":
        return x.squeeze(0)
    return x.transpose(0, 1) if layout == "sbhd" else x
