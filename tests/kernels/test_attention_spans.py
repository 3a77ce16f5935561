"""kernels/attention_spans.py: every query in one span, at its own position, whatever the split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.attention import AttentionMask, Packing, ZigZag
from primus_turbo_plugin.kernels.attention_spans import natural_order, query_positions, spans


def megatron_share(x: Tensor, rank: int, size: int) -> Tensor:
    """What `get_batch_on_this_cp_rank` of Megatron keeps of a sequence: chunks rank and 2 * size - 1 - rank."""
    chunks = x.chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def packed(lengths: list[int], rooms: list[int] | None = None) -> Packing:
    def cumulative(values: list[int]) -> Tensor:
        return torch.tensor([0, *values]).cumsum(0)

    padded = None if rooms is None else cumulative(rooms)
    ends = cumulative(lengths)
    return Packing(cu_seqlens_q=ends, cu_seqlens_k=ends, cu_seqlens_q_padded=padded, cu_seqlens_k_padded=padded)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("rooms", [None, [24], [24, 48, 0, 24]], ids=str)
def test_gathered_keys_come_back_in_their_own_order(size: int, rooms: list[int] | None) -> None:
    total = 48 if rooms is None else sum(rooms)
    whole = torch.arange(total)
    sequences = whole.split(rooms or [total])
    tail = torch.full((5,), -1)  # tokens behind the last packed sequence
    shares = [
        torch.cat([megatron_share(s, rank, size) for s in sequences if len(s)] + ([tail] if rooms else []))
        for rank in range(size)
    ]
    packing = None if rooms is None else packed(rooms)
    order = natural_order(packing, len(shares[0]), size)
    assert torch.equal(torch.cat(shares)[order], whole)
    for rank in range(size):
        positions = query_positions(packing, len(shares[0]), ZigZag(rank=rank, size=size))
        assert torch.equal(positions, shares[rank].clamp(min=0))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_query_of_a_split_sequence_has_one_span_and_its_own_position(size: int) -> None:
    rooms, lengths = [16, 8, 32], [13, 8, 17]
    packing = packed(lengths, rooms)
    starts = [0, 16, 24]
    seen: list[tuple[int, int]] = []
    for rank in range(size):
        local = torch.cat([megatron_share(torch.arange(r) + s, rank, size) for r, s in zip(rooms, starts)])
        zigzag = ZigZag(rank=rank, size=size) if size > 1 else None
        for span in spans(AttentionMask(packing=packing, zigzag=zigzag), len(local), 56):
            sequence = starts.index(span.k_start)
            assert span.k_len == lengths[sequence]
            for offset in range(span.q_len):
                position = span.position + offset
                assert local[span.q_start + offset] == starts[sequence] + position
                seen.append((sequence, position))
    assert sorted(seen) == [(sequence, p) for sequence, length in enumerate(lengths) for p in range(length)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (3, 1), (-1, 2), (2, -1)])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 9), (9, 3)])
def test_the_visible_range_is_the_smallest_that_holds_every_key_seen(
    causal: bool, window: tuple[int, int], queries: int, keys: int
) -> None:
    mask = AttentionMask(causal=causal, window=window)
    (span,) = spans(mask, queries, keys)
    left, right = mask.limits
    for first in range(queries):
        for last in range(first + 1, queries + 1):
            positions = [i + keys - queries for i in range(first, last)]
            seen = [
                j
                for j in range(keys)
                if any((left is None or j >= p - left) and (right is None or j <= p + right) for p in positions)
            ]
            low, high = span.visible(first, last, mask)
            assert list(range(low, high)) == seen or (not seen and low == high)


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "message"),
    [
        (AttentionMask(zigzag=ZigZag(rank=0, size=2)), 3, 6, "sequence 0 has 6 tokens. Pad it to a multiple of 4"),
        (AttentionMask(zigzag=ZigZag(rank=0, size=2)), 4, 9, "as many keys as queries"),
        (AttentionMask(zigzag=ZigZag(rank=0, size=2), packing=packed([4, 6])), 5, 10, "sequence 1 has 6 tokens"),
        (AttentionMask(packing=packed([4, 6], [4, 5])), 10, 10, "padded to"),
    ],
)
def test_lengths_that_cannot_be_split_are_named(mask: AttentionMask, queries: int, keys: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        list(spans(mask, queries, keys))
