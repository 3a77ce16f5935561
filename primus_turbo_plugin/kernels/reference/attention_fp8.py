"""The numbers of FP8 attention, bit by bit (torch): codes and scales of q, k, v and dout, and rounded probabilities.

Math      a block: `BLOCK_TOKENS` tokens of one head of one sequence, counted from the sequence's start (under zig-zag order from
          the chunk's). scale = the smallest power of two 2^e with amax <= max * 2^e, e >= MIN_EXPONENT; code = nearest even of x
          / scale. amax Inf or NaN: scale NaN, codes 0, so that whoever multiplies with the block sees it. No code is -0
          P: 2^(S log2(e) - c), c = ceil(max S log2(e)) of the row, so that P is in (0, 1] and a power of two away from any
          other choice of c; rounded to E4M3 as 256 P. The sum of a row, and so its lse, takes P before it is rounded
          backward: the gradients of attention at the decoded q, k, v for the decoded dout, with the forward's lse, and
          delta = sum dout * out. That is the forward's own derivative, rounding counting as the identity; P is not rounded again
Numerics  a decoded number is code * 2^e: four significant bits, exact in bf16. Decoded numbers quantise to themselves, in the
          same blocks or in smaller ones
Why 256   the largest power of two below E4M3's 448: a probability keeps its three bits down to 2^-14 and vanishes below 2^-18
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions
from primus_turbo_plugin.kernels.attention_spans import spans
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS
from primus_turbo_plugin.precision.formats import E4M3, ELEMENT_TYPES, ElementType

P_SCALE = 256.0
MIN_EXPONENT = -60
"""Keeps the product of two scales and any sensible softmax scale a normal fp32 number."""

Runs = list[tuple[int, int]]
"""(first token, number of tokens) of each sequence or chunk."""


def runs_of(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[Runs, Runs]:
    """The runs of queries and of keys in which blocks are counted."""
    found = list(spans(mask, num_queries, num_keys))
    keys = [(0, num_keys)]
    if mask.packing is not None:
        starts, ends = mask.packing.starts_k.tolist(), mask.packing.cu_seqlens_k.tolist()
        keys = [(start, stop - first) for start, (first, stop) in zip(starts, pairwise(ends))]
    return [(span.q_start, span.q_len) for span in found], keys


def quantize_blocks(
    x: Tensor, runs: Runs, element: ElementType = E4M3, block_tokens: int = BLOCK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x.

    Args:
        x: [batch, tokens, heads, dim].
        runs: Where sequences lie; tokens in none of them are padding and get code 0 and scale 1.
        element: E4M3 or E5M2.
        block_tokens: Tokens that share a scale.

    Returns:
        codes, FP8 of x's shape, and scales, fp32 [batch, tokens, heads], each block's repeated for its tokens.
    """
    values = x.detach().float()
    codes = torch.zeros(x.shape, dtype=element.torch_dtype, device=x.device)
    scales = torch.ones(x.shape[:3], device=x.device)
    for start, length in runs:
        for first in range(start, start + length, block_tokens):
            rows = slice(first, min(first + block_tokens, start + length))
            part = values[:, rows]
            scale = block_scale(part.abs().amax((1, 3)), element)[:, None]  # [batch, 1, heads]
            scales[:, rows] = scale
            scaled = torch.where(scale.isnan()[..., None], 0.0, part / scale[..., None])
            codes[:, rows] = (scaled.to(element.torch_dtype).float() + 0.0).to(element.torch_dtype)
    return codes, scales


def block_scale(amax: Tensor, element: ElementType) -> Tensor:
    """The power of two that brings an amax into the element's range; see the top of this file."""
    bits = amax.float().view(torch.int32)
    # Both elements' largest number is 1.75 * 2^emax: up to that mantissa the exponent will do, above it one more.
    exponent = ((bits + 0x1FFFFF) >> 23) - 127 - element.emax
    scale = torch.ldexp(torch.ones_like(amax, dtype=torch.float32), exponent.clamp(min=MIN_EXPONENT))
    return torch.where(amax.isfinite(), scale, torch.nan)


def decoded(x: Tensor, runs: Runs, element: ElementType = E4M3, block_tokens: int = BLOCK_TOKENS) -> Tensor:
    """x as its codes say, fp32."""
    codes, scales = quantize_blocks(x, runs, element, block_tokens)
    return codes.float() * scales.unsqueeze(-1)


def decoded_inputs(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the kernels multiply them; as they are where nothing is quantised."""
    if not options.precision.is_quantized:
        return q, k, v
    queries, keys = runs_of(options.mask, q.shape[1], k.shape[1])
    return decoded(q, queries), decoded(k, keys), decoded(v, keys)


def decoded_gradient(dout: Tensor, options: AttentionOptions, num_keys: int) -> Tensor:
    """dout likewise."""
    precision = options.precision
    if not precision.is_quantized or precision.gradients == "bf16":
        return dout
    queries, _ = runs_of(options.mask, dout.shape[1], num_keys)
    return decoded(dout, queries, ELEMENT_TYPES[precision.gradients])


def rounded_probabilities(probabilities: Tensor) -> Tensor:
    """To E4M3 under the fixed scale."""
    scaled = (probabilities.float() * P_SCALE).to(E4M3.torch_dtype)
    return (scaled.float() / P_SCALE).to(probabilities.dtype)
