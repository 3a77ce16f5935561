"""Attention, forward and backward (torch reference; the oracle of every other backend).

Math      S = scale * q @ k.T;  S = softcap * tanh(S / softcap);  S = S + bias;  S = -inf where not seen
          lse = log(sum_keys exp(S) + exp(sink));  P = exp(S - lse);  Z = P * keep / (1 - p);  out = Z @ v
          dv = Z.T @ dout;  dZ = dout @ v.T;  dP = dZ * keep / (1 - p);  delta = sum_keys P * dP;  dS = P * (dP - delta)
          dsink = -sum exp(sink - lse) * delta;  dbias = dS;  dq = scale * dS' @ k;  dk = scale * dS'.T @ q,
          dS' = dS * (1 - tanh^2(S / softcap))
Layout    q, dq [batch, queries, heads, dim];  k, v and their gradients [batch, keys, groups, dim | v_dim];
          out, dout [batch, queries, heads, v_dim];  lse [batch, heads, queries];  any strides, read in place
Cost      4 * B * H * pairs * D FLOPs forward, 10 backward, pairs = (query, key) that a block of rows sees: a window
          costs in proportion to its width. A block of rows holds a bounded number of scores: memory grows with
          keys, not with pairs
Numerics  everything inside in fp32 (fp64 for fp64 inputs), one rounding at the end; a row sees all its keys at once, so
          that softmax needs no rescaling and delta no rounded output. A row that sees nothing: out = 0, lse = -inf,
          gradients 0. FP8 (`options.precision`): the same on the numbers of attention_fp8.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest, Dropout
from primus_turbo_plugin.kernels.attention_dropout import keep_mask
from primus_turbo_plugin.kernels.attention_spans import spans
from primus_turbo_plugin.kernels.reference.attention_fp8 import (
    decoded,
    decoded_gradient,
    decoded_inputs,
    rounded_probabilities,
    runs_of,
)
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.precision.formats import ELEMENT_TYPES

_LOG2E = 1.4426950408889634
_BLOCK_SCORES = 1 << 18  # of a block, 1 MiB in fp32: stays in cache. On 2 CPU cores up to twice as fast as 2^22 (s 512)
_GPU_BLOCKS = 256  # a GPU's blocks are so much larger: there the launches cost
_MIN_ROWS = 16  # of a block, however many keys they see: smaller products are all overhead
_MIN_WINDOW_ROWS = 64  # under a window a block has about as many rows as the window has keys, but not fewer than this


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
    """out = softmax(scale * q @ k.T + bias, with a sink in the denominator) @ v.

    Args:
        q: [batch, queries, heads, dim], any strides.
        k: [batch, keys, groups, dim], any strides.
        v: [batch, keys, groups, v_dim], any strides.
        options: Scale, mask, softcap, dropout.
        bias: [batch | 1, heads | 1, queries | 1, keys | 1], added to the scores.
        sinks: [heads], a logit that takes part in each row's softmax and carries no value.
        out: Where to write, [batch, queries, heads, v_dim], any strides, in q's dtype or fp32 (a partial result to be merged);
            made if None.

    Returns:
        out, and lse [batch, heads, queries] in the inner precision.
    """
    inner = _inner_dtype(q)
    is_fp8 = options.precision.is_quantized
    if out is None:
        out = q.new_empty(*q.shape[:3], v.shape[3])
    out.zero_()
    q, k, v = decoded_inputs(q, k, v, options)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=inner, device=q.device)
    keys, values = _grouped(k, inner), _grouped(v, inner)
    sink = None if sinks is None else sinks.to(inner).view(1, -1, 1)
    for block in _blocks(q, k, options.mask):
        if not block.num_keys:
            if sink is not None:
                lse[:, :, block.rows] = sink
            continue
        scores, _ = _scores(block, q, keys, options, bias)
        peak = scores.amax(-1)
        if sink is not None:
            peak = torch.maximum(peak, sink)
        if is_fp8:
            peak = torch.ceil(peak * _LOG2E) / _LOG2E
        shift = torch.where(peak == -torch.inf, 0.0, peak)
        probabilities = torch.exp(scores - shift.unsqueeze(-1))
        total = probabilities.sum(-1)
        if sink is not None:
            total = total + torch.exp(sink - shift)
        if is_fp8:
            probabilities = rounded_probabilities(probabilities)
        probabilities /= torch.where(total == 0, 1.0, total).unsqueeze(-1)
        if options.dropout is not None:
            probabilities = _dropped(probabilities, options.dropout, block)
        context = _by_group(probabilities, k.shape[2]) @ values[:, :, block.keys]
        out[:, block.rows] = context.view(*scores.shape[:3], v.shape[3]).transpose(1, 2).to(out.dtype)
        lse[:, :, block.rows] = shift + torch.log(total)
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `attention_fwd`.

    Args:
        dout: [batch, queries, heads, v_dim], gradient of out.
        q: As in the forward.
        k: As in the forward.
        v: As in the forward.
        out: The forward's result; read under FP8 only, elsewhere a row has all its probabilities at hand to compute delta from.
        lse: The forward's second result.
        options: As in the forward, with the same dropout.
        bias: As in the forward.
        sinks: As in the forward.
        delta: [batch, heads, queries], sum_keys P * dP = sum(dout * out) of each row. Needed where the keys at hand are only
            some of the row's, lse and out those of all of them; None: computed here.
        q_grad_dtype: dtype of dq; None for q's. Partial sums are wanted in fp32.
        kv_grad_dtype: dtype of dk and dv; None for k's. Likewise, of several ranks.

    Returns:
        dq; dk; dv; dbias in bias's shape and dsinks [heads], both in lse's dtype, None without them.
    """
    inner = lse.dtype
    dq = torch.zeros_like(q, dtype=q_grad_dtype)
    kv_dtype = kv_grad_dtype or k.dtype
    if options.precision.is_quantized:
        q, k, v = decoded_inputs(q, k, v, options)
        dout = decoded_gradient(dout, options, k.shape[1])
        if delta is None:
            delta = (out.to(inner) * dout.to(inner)).sum(-1).transpose(1, 2)
    keys, values = _grouped(k, inner), _grouped(v, inner)
    dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=inner)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=inner)
    groups = k.shape[2]
    for block in _blocks(q, k, options.mask):
        if not block.num_keys:
            continue
        scores, slope = _scores(block, q, keys, options, bias)
        block_lse = lse[:, :, block.rows]
        block_lse = torch.where(block_lse == -torch.inf, torch.inf, block_lse)  # a row that sees nothing has P = 0
        probabilities = torch.exp(scores - block_lse.unsqueeze(-1))
        dcontext = _by_group(_heads_first(dout, block.rows, inner), groups)
        dprobabilities = (dcontext @ values[:, :, block.keys].transpose(-1, -2)).view(scores.shape)
        kept = probabilities
        if options.dropout is not None:
            kept = _dropped(probabilities, options.dropout, block)
            dprobabilities = _dropped(dprobabilities, options.dropout, block)
        dvalues[:, :, block.keys] += _by_group(kept, groups).transpose(-1, -2) @ dcontext
        row_delta = (probabilities * dprobabilities).sum(-1) if delta is None else delta[:, :, block.rows]
        dscores = probabilities * (dprobabilities - row_delta.unsqueeze(-1))
        if sinks is not None:
            share = torch.exp(sinks.to(inner).view(1, -1, 1) - block_lse)
            dsinks -= (share * row_delta).sum((0, 2))
        if dbias is not None:
            part = _block_of(dbias, block)
            part += dscores.sum_to_size(part.shape)
        dscores = _by_group(dscores * options.scale if slope is None else dscores * slope * options.scale, groups)
        dq_block = (dscores @ keys[:, :, block.keys]).view(*scores.shape[:3], q.shape[3])
        dq[:, block.rows] = dq_block.transpose(1, 2).to(dq.dtype)
        dkeys[:, :, block.keys] += dscores.transpose(-1, -2) @ _by_group(_heads_first(q, block.rows, inner), groups)
    return dq, dkeys.transpose(1, 2).to(kv_dtype), dvalues.transpose(1, 2).to(kv_dtype), dbias, dsinks


def attention_decoded(x: Tensor, options: AttentionOptions, element: str) -> Tensor:
    """What FP8 attention makes of x [batch, queries, heads, dim], a tensor of this rank's tokens: quantised and decoded.

    Args:
        x: Queries, or keys, values or gradients that lie as queries do.
        options: With the mask, zig-zag order included, that says where sequences and chunks lie.
        element: `e4m3` or `e5m2`.

    Returns:
        As x; fp16 comes back as bf16, which holds every decoded number.
    """
    size = 1 if options.mask.zigzag is None else options.mask.zigzag.size
    queries, _ = runs_of(options.mask, x.shape[1], x.shape[1] * size)
    found = decoded(x, queries, ELEMENT_TYPES[element])
    return found.to(torch.bfloat16 if x.dtype == torch.float16 else x.dtype)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of queries and the run of keys that any of them sees; `position` is the first row's, counted in these keys, `place`
    its place among all ranks' tokens."""

    rows: slice
    keys: slice
    position: int
    place: int

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


def _blocks(q: Tensor, k: Tensor, mask: AttentionMask) -> Iterator[_Block]:
    """Cuts a problem into blocks of about `_BLOCK_SCORES` scores. Pure arithmetic on integers."""
    left, right = mask.limits
    scores_per_head = _BLOCK_SCORES * (1 if q.device.type == "cpu" else _GPU_BLOCKS) // max(1, q.shape[0] * q.shape[2])
    for span in spans(mask, q.shape[1], k.shape[1]):
        most_rows, most_keys = span.q_len, span.k_len
        if left is not None and right is not None:
            most_rows = max(_MIN_WINDOW_ROWS, left + right + 1)
            most_keys = min(span.k_len, left + right + most_rows)
        rows = min(most_rows, max(_MIN_ROWS, scores_per_head // max(1, most_keys)))
        for first in range(0, span.q_len, rows):
            last = min(first + rows, span.q_len)
            low, high = span.visible(first, last, mask)
            yield _Block(
                slice(span.q_start + first, span.q_start + last),
                slice(span.k_start + low, span.k_start + high),
                span.position + first - low,
                span.place + first,
            )


def _scores(
    block: _Block, q: Tensor, keys: Tensor, options: AttentionOptions, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [batch, heads, rows, keys] of a block, -inf where not seen, and the softcap's slope (None without)."""
    queries = _heads_first(q, block.rows, keys.dtype)
    scores = _by_group(queries, keys.shape[1]) @ keys[:, :, block.keys].transpose(-1, -2)
    scores = scores.view(*queries.shape[:3], block.num_keys) * options.scale
    slope = None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = capped * options.softcap, 1 - capped.square()
    if bias is not None:
        scores = scores + _block_of(bias, block).to(scores.dtype)
    hidden = _hidden(block, options.mask, scores.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores, slope


def _hidden(block: _Block, mask: AttentionMask, device: torch.device) -> Tensor | None:
    """bool, broadcastable to [batch, heads, rows, keys], True where not seen; None where every row sees every key."""
    left, right = mask.limits
    beyond_right = right is not None and block.position + right < block.num_keys - 1
    beyond_left = left is not None and block.position + block.num_rows - 1 - left > 0
    hidden = None
    if beyond_left or beyond_right:
        rows = torch.arange(block.position, block.position + block.num_rows, device=device)
        ahead = torch.arange(block.num_keys, device=device) - rows.unsqueeze(-1)  # [rows, keys]: key - query
        if beyond_right:
            hidden = ahead > right
        if beyond_left:
            hidden = ahead < -left if hidden is None else hidden | (ahead < -left)  # type: ignore[operator]
    if mask.masked is not None:
        masked = _block_of(mask.masked, block)
        hidden = masked if hidden is None else hidden | masked
    return hidden


def _dropped(x: Tensor, dropout: Dropout, block: _Block) -> Tensor:
    """x [batch, heads, rows, keys] times what is kept, scaled."""
    queries = torch.arange(block.place, block.place + block.num_rows, device=x.device)
    keys = torch.arange(block.keys.start, block.keys.stop, device=x.device)
    if dropout.query_places is not None:
        queries = dropout.query_places[block.rows].long()
    if dropout.key_places is not None:
        keys = dropout.key_places[block.keys].long()
    batch, heads = range(x.shape[0]), range(dropout.first_head, dropout.first_head + x.shape[1])
    kept = keep_mask(dropout.probability, int(dropout.seed), batch=batch, heads=heads, queries=queries, keys=keys)
    return x * kept * dropout.scale


def _block_of(x: Tensor, block: _Block) -> Tensor:
    """The block's part of a tensor [batch | 1, heads | 1, queries | 1, keys | 1]."""
    x = x[:, :, block.rows] if x.shape[2] > 1 else x
    return x[..., block.keys] if x.shape[3] > 1 else x


def _heads_first(x: Tensor, rows: slice, inner: torch.dtype) -> Tensor:
    """[batch, seq, heads, dim] -> contiguous [batch, heads, rows, dim] in the inner precision."""
    return x[:, rows].transpose(1, 2).to(inner).contiguous()


def _grouped(x: Tensor, inner: torch.dtype) -> Tensor:
    return _heads_first(x, slice(0, x.shape[1]), inner)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[batch, heads, rows, n] -> [batch, groups, heads / groups * rows, n]: one product serves all heads that share keys."""
    batch, heads, rows, width = x.shape
    return x.reshape(batch, groups, heads // groups * rows, width)


def _inner_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def supports(request: AttentionRequest) -> str | None:
    """Everything."""
    return None


BACKEND = Backend(name="reference", request=AttentionRequest, kernels=sys.modules[__name__], supports=supports)
