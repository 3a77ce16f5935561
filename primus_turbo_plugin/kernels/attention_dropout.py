"""Dropout of attention probabilities by a counter: every backend draws the same bits, in any order, as often as it likes.

Score (batch b, head h, query i, key j) is dropped where its 32 bits lie below p * 2^32:

    (w0, w1, _, _) = philox4x32_10(counter = (h, b, 0, 0), key = (lo(seed), hi(seed)))
    bits = mix(mix(i * 0x9E3779B1 + w0) ^ mix(j * 0x85EBCA77 + w1)),   mix(x): x ^= x >> 16; x *= 0x7FEB352D;
                                                                         x ^= x >> 15; x *= 0x846CA68B; x ^= x >> 16

modulo 2^32 throughout. i and j are places in the whole batch's token dimension: with packed sequences the token's own place,
under context parallelism its place among all ranks' tokens in their natural order. So a split over ranks draws what one
rank would.

Source: Salmon et al., SC 2011 (Philox); C. Wellons, hash-prospector, 2018 (the mixer, "lowbias32").
"""

from __future__ import annotations

import torch
from torch import Tensor

from primus_turbo_plugin.precision.rounding import halves, philox4x32_scalar

_MASK32 = 0xFFFFFFFF
_MIX = (0x7FEB352D, 0x846CA68B)
_QUERY_STEP = 0x9E3779B1
_KEY_STEP = 0x85EBCA77


def drop_threshold(probability: float) -> int:
    """Bits below this are dropped: 0 for none, 2^32 for all."""
    return min(max(round(probability * 2**32), 0), 2**32)


def keep_mask(probability: float, seed: int, *, batch: range, heads: range, queries: Tensor, keys: Tensor) -> Tensor:
    """What is kept of a block of scores.

    Args:
        probability: Of dropping.
        seed: 64 bits.
        batch: Batch indices of the block.
        heads: Head indices of the block.
        queries: int64 `[rows]`, places of its queries.
        keys: int64 `[columns]`, places of its keys.

    Returns:
        bool `[batch, heads, rows, columns]`, on the device of `queries`.
    """
    words = [[philox4x32_scalar((h, b, 0, 0), halves(seed))[:2] for h in heads] for b in batch]
    word = torch.tensor(words, dtype=torch.int64, device=queries.device).reshape(len(batch), len(heads), 2)
    rows = _mix(queries * _QUERY_STEP + word[..., :1])  # [batch, heads, rows]
    columns = _mix(keys * _KEY_STEP + word[..., 1:])  # [batch, heads, columns]
    return _mix(rows.unsqueeze(-1) ^ columns.unsqueeze(-2)) >= drop_threshold(probability)


def _mix(x: Tensor) -> Tensor:
    x = x & _MASK32
    x = x ^ (x >> 16)
    x = (x * _MIX[0]) & _MASK32
    x = x ^ (x >> 15)
    x = (x * _MIX[1]) & _MASK32
    return x ^ (x >> 16)
