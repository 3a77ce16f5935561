"""Attention as a differentiable function over plain tensors, on one rank or over the ranks that share a sequence.

fprop   out = softmax(scale * q @ k.T + bias, with sinks) @ v; formulas, backward included: kernels/reference/attention.py
Saved   q, k, v as they came (strided views stay views), out and lse (fp32 [batch, heads, queries]), bias, sinks and the
        seed of the dropout. No probabilities
Context parallelism: context_parallel/
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.autocast import compute_dtype, no_autocast
from primus_turbo_plugin.functional.context_parallel import ContextParallel, shared_attention
from primus_turbo_plugin.kernels.attention import (
    AttentionMask,
    AttentionOptions,
    AttentionRequest,
    Dropout,
)
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.precision.attention import AttentionPrecision

Layout = Literal["sbhd", "bshd", "thd"]
_EVERY_KEY = AttentionMask()
_OWN_PRECISION = AttentionPrecision()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout = "sbhd",
    mask: AttentionMask | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    dropout: Dropout | None = None,
    deterministic: bool = False,
    precision: AttentionPrecision | None = None,
    context: ContextParallel | None = None,
    kernels: Sequence[str] | None = None,
) -> Tensor:
    """softmax(scale * q @ k.T + bias) @ v, with grouped keys, any mask, packed sequences, sinks and dropout.

    Under autocast q, k and v are cast to its dtype; nothing inside is cast again.

    Args:
        q: `layout` names the dimensions: sequence, batch, heads, dim, with `t` the tokens of all packed sequences. Any
            strides.
        k: Likewise, with `groups` heads, a divisor of q's.
        v: Likewise, with `groups` heads and any dim.
        layout: "thd" exactly when `mask.packing` is given.
        mask: Which query sees which key; None for all.
        scale: On the scores; None for 1 / sqrt(dim).
        bias: [batch | 1, heads | 1, queries | 1, keys | 1], added to the scaled scores.
        sinks: [heads], a logit in each row's softmax that carries no value.
        softcap: scores become softcap * tanh(scores / softcap); 0 is off.
        dropout: Of the probabilities.
        deterministic: Only kernels that give the same bits every run will do.
        precision: In which numbers q, k, v, probabilities and gradients are multiplied; None for their own.
        context: Ranks that share the sequences, each holding chunks r and 2 * size - 1 - r of every one, and how they attend. A
            mask tensor or bias then has this rank's queries and all keys, in the sequences' own order.
        kernels: Backends that may serve it, first choice first; None for the registry's order.

    Returns:
        As q, with v's dim, contiguous in `layout`.

    Raises:
        ShapeError: Shapes or dtypes do not fit each other, or a sequence does not divide into the group's chunks.
        UnsupportedError: No backend of `kernels` can do it.
    """
    options = AttentionOptions(
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
        mask=mask or _EVERY_KEY,
        softcap=softcap,
        dropout=dropout,
        deterministic=deterministic,
        precision=precision or _OWN_PRECISION,
    )
    q, k, v = _cast(q), _cast(k), _cast(v)
    _check(q, k, v, layout, options, bias, sinks, 1 if context is None else context.size)
    if context is not None and context.size > 1:
        with no_autocast(q):
            return shared_attention(
                q, k, v, bias, sinks, layout=layout, options=options, context=context, kernels=kernels
            )
    return _on_one_rank(q, k, v, bias, sinks, layout, options, kernels)[0]


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    layout: Layout = "sbhd",
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    kernels: Sequence[str] | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` on one rank, and the rows' log-sum-exp: for merging results over parts of the keys, or a loss on it.

    Args:
        q, k, v, layout, bias, sinks, kernels: As of `attention`.
        options: The rest of what `attention` takes.

    Returns:
        out, and lse `[batch, heads, queries]` (a batch of one where packed) in fp32, fp64 for fp64 inputs; -inf for a row that
        sees nothing. No gradient flows through lse.

    Raises:
        ShapeError, UnsupportedError: As `attention`.
    """
    q, k, v = _cast(q), _cast(k), _cast(v)
    _check(q, k, v, layout, options, bias, sinks, 1)
    return _on_one_rank(q, k, v, bias, sinks, layout, options, kernels)


def _on_one_rank(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    layout: Layout, options: AttentionOptions, kernels: Sequence[str] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse)."""
    tokens = 1 if layout == "bshd" else 0
    facts = AttentionRequest.facts(q, k, v, options, bias=bias, sinks=sinks, tokens=tokens)
    name = _select(tuple(facts.items()), None if kernels is None else tuple(kernels))
    call = _Call(layout, options, _KERNELS[name])
    with no_autocast(q):
        out, lse = _Attention.apply(q, k, v, bias, sinks, call)
    return out, lse


_KERNELS: dict[str, Any] = {}
"""Kernels by backend, as selected so far: torch.compile reads them from here, since it cannot follow the registry's search."""


@torch.compiler.assume_constant_result  # type: ignore[misc,untyped-decorator,unused-ignore]
def _select(facts: tuple[tuple[str, Any], ...], order: tuple[str, ...] | None) -> str:
    """Name of the backend that serves a request; while compiling it is found once and guarded by what `facts` came from."""
    return _selected(default_registry(), facts, order)


@functools.lru_cache(maxsize=256)
def _selected(registry: KernelRegistry, facts: tuple[tuple[str, Any], ...], order: tuple[str, ...] | None) -> str:
    backend = registry.select("attention", AttentionRequest(**dict(facts)), order)
    _KERNELS[backend.name] = backend.kernels
    return backend.name


@dataclass(frozen=True, slots=True)
class _Call:
    """What forward and backward of one call share."""

    layout: Layout
    options: AttentionOptions
    kernels: Any


class _Attention(Function):
    """Saves q, k, v, out, lse, bias, sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        _, lse = call.kernels.attention_fwd(
            _batch_first(q, call.layout),
            _batch_first(k, call.layout),
            _batch_first(v, call.layout),
            call.options,
            bias=bias,
            sinks=sinks,
            out=_batch_first(out, call.layout),
        )
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        with no_autocast(dout):
            dq, dk, dv, dbias, dsinks = call.kernels.attention_bwd(
                _batch_first(dout, call.layout),
                _batch_first(q, call.layout),
                _batch_first(k, call.layout),
                _batch_first(v, call.layout),
                _batch_first(out, call.layout),
                lse,
                call.options,
                bias=bias,
                sinks=sinks,
            )
        dbias = dbias if bias is None else dbias.to(bias.dtype)
        dsinks = dsinks if sinks is None else dsinks.to(sinks.dtype)
        dq, dk, dv = (_as_laid_out(grad, call.layout) for grad in (dq, dk, dv))
        return dq, dk, dv, dbias, dsinks, None


def _cast(x: Tensor) -> Tensor:
    dtype = compute_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def _batch_first(x: Tensor, layout: Layout) -> Tensor:
    """A `[batch, seq, heads, dim]` view."""
    if layout == "thd":
        return x.unsqueeze(0)
    return x.transpose(0, 1) if layout == "sbhd" else x


def _sizes(x: Tensor, layout: Layout) -> tuple[int, int, int, int]:
    """(batch, seq, heads, dim)."""
    if layout == "thd":
        return 1, *x.shape  # type: ignore[return-value]
    first, second, heads, dim = x.shape
    return (second, first, heads, dim) if layout == "sbhd" else (first, second, heads, dim)


def _as_laid_out(x: Tensor, layout: Layout) -> Tensor:
    """The inverse of `_batch_first`."""
    if layout == "thd":
        return x.squeeze(0)
    return x.transpose(0, 1) if layout == "sbhd" else x


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: AttentionOptions,
    bias: Tensor | None,
    sinks: Tensor | None,
    context_size: int,
) -> None:
    mask, dropout = options.mask, options.dropout
    _check_shapes(q, k, v, layout, packed=mask.packing is not None)
    batch, queries, heads, _ = _sizes(q, layout)
    scores = [batch, heads, queries, _sizes(k, layout)[1] * context_size]
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeError(f"attention: sinks must be [heads] = [{heads}], got {list(sinks.shape)}.")
    for name, value in (("mask", mask.masked), ("bias", bias)):
        if value is None:
            continue
        if mask.packing is not None:
            raise ShapeError(
                f"attention: packed sequences take no {name} tensor, their lengths say who sees whom. Pass {name}=None."
            )
        if value.dim() != 4 or any(size not in (1, full) for size, full in zip(value.shape, scores)):
            raise ShapeError(
                f"attention: the {name} must broadcast to [batch, heads, queries, keys] = {scores}, got {list(value.shape)}."
            )
    if mask.masked is not None and mask.masked.dtype != torch.bool:
        raise ShapeError(f"attention: the mask must be bool, True where a key is not seen, got {mask.masked.dtype}.")
    if dropout is not None:
        _check_dropout(dropout, q)


def _check_dropout(dropout: Dropout, q: Tensor) -> None:
    seed = dropout.seed
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
        raise ShapeError(
            f"attention: dropout.seed must be one int64 on {q.device}, got {seed.dtype} {list(seed.shape)} on {seed.device}."
        )
    if not 0.0 <= dropout.probability <= 1.0:
        raise ShapeError(f"attention: dropout.probability must be in 0 ... 1, got {dropout.probability}.")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, packed: bool) -> None:
    if (layout == "thd") != packed:
        raise ShapeError(
            f"attention: layout 'thd' and packed lengths go together, got layout {layout!r} and {'' if packed else 'no '}lengths."
        )
    if not q.dim() == k.dim() == v.dim() == len(layout):
        raise ShapeError(f"attention: layout {layout!r} needs {len(layout)} dimensions, got {_shapes(q, k, v)}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ShapeError(f"attention: q, k and v must share a float dtype, got {q.dtype}, {k.dtype}, {v.dtype}.")
    q_batch, _, q_heads, q_dim = _sizes(q, layout)
    k_batch, _, groups, k_dim = _sizes(k, layout)
    if k.shape[:-1] != v.shape[:-1] or q_batch != k_batch or q_dim != k_dim:
        raise ShapeError(
            f"attention ({layout}): batch, keys, groups and the dim of q and k must agree, got {_shapes(q, k, v)}."
        )
    if groups == 0 or q_heads % groups:
        raise ShapeError(f"attention ({layout}): the heads of k and v must divide those of q, got {_shapes(q, k, v)}.")


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
