"""Attention in float64, written from the definition and apart from the package: one dense score matrix a sequence.

Used by the tests of kernels, functional and modules. Positions, masks and softmax are spelled out; a row that sees nothing is
divided by one instead of by zero, so that gradients stay finite.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def allowed_keys(queries: int, keys: int, *, causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Tensor:
    """bool [queries, keys]: the last query stands at the last key."""
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        position = i + keys - queries
        for j in range(keys):
            ahead = j - position
            behind_ok = window[0] < 0 or -ahead <= window[0]
            ahead_ok = (window[1] < 0 or ahead <= window[1]) and not (causal and ahead > 0)
            allowed[i, j] = behind_ok and ahead_ok
    return allowed


def dropout_keep(seed: int, probability: float, shape: tuple[int, int, int, int]) -> Tensor:
    """bool [batch, heads, queries, keys]: what the counter of kernels/attention_dropout.py keeps, in numpy's own arithmetic."""
    batch, heads, queries, keys = shape
    keep = np.empty(shape, dtype=bool)
    for b in range(batch):
        for h in range(heads):
            w0, w1 = _philox(h, b, seed % 2**32, seed >> 32)
            rows = _mixed(np.arange(queries, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(w0))
            columns = _mixed(np.arange(keys, dtype=np.uint32) * np.uint32(0x85EBCA77) + np.uint32(w1))
            keep[b, h] = _mixed(rows[:, None] ^ columns) >= round(probability * 2**32)
    return torch.from_numpy(keep)


def _philox(c0: int, c1: int, k0: int, k1: int) -> tuple[int, int]:
    c2 = c3 = 0
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right % 2**32, left >> 32 ^ c3 ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def attention_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    allowed: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    keep: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out [queries, batch, heads, v_dim], lse [batch, heads, queries]) of q [queries, batch, heads, dim] and so on."""
    heads_per_group = q.shape[2] // k.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    outs, lses = [], []
    for head in range(q.shape[2]):
        group = head // heads_per_group
        scores = torch.einsum("sbd,tbd->bst", q[:, :, head], k[:, :, group]) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias.double().expand(q.shape[1], q.shape[2], *scores.shape[1:])[:, head]
        seen = allowed.expand(q.shape[1], q.shape[2], *scores.shape[1:])[:, head]
        candidates = torch.where(seen, scores, -torch.inf)
        if sinks is not None:
            candidates = torch.cat((candidates, sinks[head].double().expand(*scores.shape[:2], 1)), -1)
        peak = candidates.detach().amax(-1, keepdim=True)
        peak = torch.where(peak.isinf(), 0.0, peak)
        weights = seen * torch.exp(torch.where(seen, scores - peak, 0.0))
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head].double() - peak)
        lses.append((torch.log(total) + peak).squeeze(-1))
        weights = weights / torch.where(total == 0, 1.0, total)
        if keep is not None:
            weights = weights * keep[:, head].double() / (1 - dropout)
        outs.append(torch.einsum("bst,tbd->sbd", weights, v[:, :, group]))
    return torch.stack(outs, 2), torch.stack(lses, 1)


def packed_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[tuple[int, int, int, int]],
    *,
    causal: bool,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    """[tokens, heads, v_dim] of packed [tokens, heads, dim]; lengths are (q_start, q_len, k_start, k_len) of each sequence."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for q_start, q_len, k_start, k_len in lengths:
        rows, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        allowed = allowed_keys(q_len, k_len, causal=causal, window=window)
        if q_len and k_len:
            part, _ = attention_float64(
                q[rows, None], k[keys, None], v[keys, None], scale=scale, allowed=allowed[None, None]
            )
            out = torch.cat((out[:q_start], part.squeeze(1), out[q_start + q_len :]))
    return out


def relative_error(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want|, in float64.

    Where want is below a half, of inputs of about one, its terms have cancelled and their rounding errors have not: then the
    scale is a half.
    """
    if want.numel() == 0:
        return 0.0
    return (got.double() - want.double()).abs().max().item() / max(want.abs().max().item(), 0.5)
