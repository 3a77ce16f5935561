"""Flash attention, forward and backward (Triton backend).

The operators are in attention_ops.py, launches in attention_launch.py, portable kernels in attention_fwd.py,
attention_dkdv.py and attention_dq.py, Hopper's in attention_hopper*.py, FP8's in attention_fp8_*.py. What a call does not need
costs nothing: windows, sinks, softcap, dropout, packing and zig-zag order are compiled in where asked for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.devices import CAPABILITIES
from primus_turbo_plugin.kernels.attention import AttentionOptions, AttentionRequest
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.triton import attention_fp8_ops, attention_ops
from primus_turbo_plugin.kernels.triton.targets import refusal

_MAX_DIM = 256


@torch.no_grad()
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out = softmax(scale * q @ k.T, with a sink in the denominator) @ v; arguments as kernels/reference/attention.py has them.

    Returns:
        out, and lse fp32 [batch, heads, queries].
    """
    assert bias is None, "supports() refuses a bias"
    if out is None:
        out = q.new_empty(*q.shape[:3], v.shape[3])
    if options.precision.is_quantized:
        return out, attention_fp8_ops.attention_fp8_fwd(q, k, v, out, *_fields(options, sinks))
    counter = attention_ops.counter_for(q)
    return out, attention_ops.attention_fwd(q, k, v, out, *_fields(options, sinks), counter)


@torch.no_grad()
def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    *,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    delta: Tensor | None = None,
    q_grad_dtype: torch.dtype | None = None,
    kv_grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """Gradients of `attention_fwd`; arguments as kernels/reference/attention.py has them.

    Returns:
        dq, dk, dv, None (for a bias) and dsinks, fp32 [heads] or None.
    """
    assert bias is None, "supports() refuses a bias"
    if options.precision.is_quantized:
        q_grad_dtype, kv_grad_dtype = q_grad_dtype or q.dtype, kv_grad_dtype or k.dtype
        dout, q, k, v = attention_fp8_ops.decoded_for_gradients(dout, q, k, v, options)
    counter = attention_ops.counter_for(q)
    dq, dk, dv, row_delta = attention_ops.attention_bwd(
        dout, q, k, v, out, lse, delta, q_grad_dtype, kv_grad_dtype, *_fields(options, sinks), counter
    )
    dsinks = None
    if sinks is not None:
        # A row that sees nothing, not even a sink, is padding.
        share = torch.exp(sinks.float().view(1, -1, 1) - torch.where(lse == -torch.inf, torch.inf, lse))
        dsinks = -(share * row_delta).sum((0, 2))
    return dq, dk, dv, None, dsinks


@torch.no_grad()
def attention_decoded(x: Tensor, options: AttentionOptions, element: str) -> Tensor:
    """x [batch, queries, heads, dim], quantised and decoded to bf16; arguments as kernels/reference/attention.py has them."""
    return attention_fp8_ops.decoded_queries(x, options, element)


def supports(request: AttentionRequest) -> str | None:
    """None, or why this kernel cannot do it."""
    reason = refusal(request.device)
    if reason is not None:
        return reason
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 and fp16, not {str(request.dtype).removeprefix('torch.')}"
    if max(request.head_dim, request.v_head_dim) > _MAX_DIM:
        return f"head dims go up to {_MAX_DIM}, got {request.head_dim} and {request.v_head_dim}"
    if request.bias:
        return "adds no bias to the scores"
    return None


def _fields(options: AttentionOptions, sinks: Tensor | None) -> tuple[Any, ...]:
    """The operators' view of `options`, in the order of `attention_ops._PROBLEM`."""
    mask, dropout = options.mask, options.dropout
    packing, zigzag = mask.packing, mask.zigzag
    left, right = (-1 if reach is None else reach for reach in mask.limits)
    dropping = (None, None, None) if dropout is None else (dropout.seed, dropout.query_places, dropout.key_places)
    lengths: tuple[Tensor | None, ...] = (None, None, None, None)
    if packing is not None:
        lengths = (packing.cu_seqlens_q, packing.starts_q, packing.cu_seqlens_k, packing.starts_k)
    return (
        sinks, mask.masked, *dropping, *lengths, options.scale, left, right, options.softcap,
        0.0 if dropout is None else dropout.probability, 0 if dropout is None else dropout.first_head,
        0 if zigzag is None else zigzag.rank, 1 if zigzag is None else zigzag.size,
    )  # fmt: skip


FP8_UNITS = {arch: ("fp8",) for arch, row in CAPABILITIES.items() if row.fp8_encoding is not None}
"""gfx942's too: its FNUZ numbers are OCP's of half the value (attention_fp8_quantize.py)."""

BACKEND = Backend(
    name="triton",
    request=AttentionRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=FP8_UNITS,
)
