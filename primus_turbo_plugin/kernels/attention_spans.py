"""An attention problem as spans: runs of queries with consecutive positions, each over one run of keys.

A dense batch is one span, a packed batch one a sequence. Under context parallelism there are twice as many, since a
rank holds chunks r and 2 * size - 1 - r of every sequence (Megatron's zig-zag split, which gives each rank the same
amount of causal work) but all of its keys. A query in no span is padding: it gives zero and hands no gradient on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.attention import AttentionMask, Packing, ZigZag


@dataclass(frozen=True, slots=True)
class Span:
    """A run of queries over a run of keys.

    Attributes:
        q_start: The first query.
        q_len: How many, at least one.
        k_start: The first key.
        k_len: How many.
        position: Where the first query stands, counted from the first key.
        place: Where the first query lies among all tokens of all context-parallel ranks, in their natural order.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    position: int
    place: int

    def visible(self, first: int, last: int, mask: AttentionMask) -> tuple[int, int]:
        """The range of keys outside which none of the queries `first ... last - 1` sees any; both counted from the start."""
        left, right = mask.limits
        low = 0 if left is None else min(self.k_len, max(0, self.position + first - left))
        high = self.k_len if right is None else min(self.k_len, self.position + last + right)
        return low, max(low, high)


def spans(mask: AttentionMask, num_queries: int, num_keys: int) -> Iterator[Span]:
    """The spans of a problem, those without queries left out. Reads packed lengths on the host.

    Args:
        mask: The problem.
        num_queries: Of q's second dimension: this rank's share.
        num_keys: Of k's second dimension: all keys.

    Raises:
        ShapeError: The lengths don't fit the tensors, or don't divide by the context-parallel split.
    """
    for sequence in _sequences(mask, num_queries, num_keys):
        if mask.zigzag is None:
            yield from sequence.span(0, sequence.q_len, sequence.k_len - sequence.q_len, sequence.place)
            continue
        chunk = sequence.q_room // 2  # of this rank's two
        for half, number in enumerate(_chunks(mask.zigzag)):
            position = number * chunk
            yield from sequence.span(
                half * chunk, min(chunk, sequence.q_len - position), position, sequence.place + position
            )


def natural_order(packing: Packing | None, tokens_per_rank: int, size: int) -> Tensor:
    """Where each key stands among keys gathered in rank order; `gathered[natural_order(...)]` restores their own order.

    Args:
        packing: Packed sequences; None for a dense batch.
        tokens_per_rank: Keys of one rank.
        size: Context-parallel size.

    Returns:
        int64 `[keys]` on the CPU; with packing, tokens behind the last sequence are left out.

    Raises:
        ShapeError: A sequence doesn't divide into 2 * size chunks.
    """
    starts = [0, tokens_per_rank * size]
    if packing is not None:
        starts, _ = _lengths("kv", packing.cu_seqlens_k, packing.cu_seqlens_k_padded, tokens_per_rank * size)
    places = {
        number: (rank, half)
        for rank in range(size)
        for half, number in enumerate(_chunks(ZigZag(rank=rank, size=size)))
    }
    runs = [torch.empty(0, dtype=torch.int64)]
    for index, (start, stop) in enumerate(pairwise(starts)):
        _check_split(f"sequence {index}", stop - start, size)
        chunk = (stop - start) // (2 * size)
        for number in range(2 * size):
            rank, half = places[number]
            first = rank * tokens_per_rank + start // size + half * chunk
            runs.append(torch.arange(first, first + chunk))
    return torch.cat(runs)


def query_positions(packing: Packing | None, tokens_per_rank: int, zigzag: ZigZag) -> Tensor:
    """Where each of a rank's tokens stands in the sequences' own order; 0 for tokens behind the last sequence.

    Returns:
        int64 `[tokens_per_rank]` on the CPU.
    """
    order = natural_order(packing, tokens_per_rank, zigzag.size)
    positions = torch.zeros(tokens_per_rank * zigzag.size, dtype=torch.int64)
    positions[order] = torch.arange(len(order))
    return positions[zigzag.rank * tokens_per_rank : (zigzag.rank + 1) * tokens_per_rank]


def _chunks(zigzag: ZigZag) -> tuple[int, int]:
    return zigzag.rank, 2 * zigzag.size - 1 - zigzag.rank


@dataclass(frozen=True, slots=True)
class _Sequence:
    """`q_start` and `q_room` (length with padding) are this rank's; `place`, `q_len` and the keys are the whole sequence's."""

    q_start: int
    q_room: int
    place: int
    q_len: int
    k_start: int
    k_len: int

    def span(self, offset: int, length: int, position: int, place: int) -> Iterator[Span]:
        if length > 0:
            yield Span(self.q_start + offset, length, self.k_start, self.k_len, position, place)


def _sequences(mask: AttentionMask, num_queries: int, num_keys: int) -> Iterator[_Sequence]:
    size = mask.zigzag.size if mask.zigzag is not None else 1
    if mask.packing is None:
        q_starts, q_lens = [0, num_queries * size], [num_queries * size]
        k_starts, k_lens = [0, num_keys], [num_keys]
    else:
        packing = mask.packing
        q_starts, q_lens = _lengths("q", packing.cu_seqlens_q, packing.cu_seqlens_q_padded, num_queries * size)
        k_starts, k_lens = _lengths("kv", packing.cu_seqlens_k, packing.cu_seqlens_k_padded, num_keys)
    if len(q_lens) != len(k_lens):
        raise ShapeError(f"attention: cu_seqlens name {len(q_lens)} sequences of queries, {len(k_lens)} of keys.")
    for index, (q_len, k_len) in enumerate(zip(q_lens, k_lens)):
        room = q_starts[index + 1] - q_starts[index]
        _check_split(f"sequence {index}", room, size)
        if mask.zigzag is not None and q_len != k_len:
            raise ShapeError(
                f"attention: context parallelism needs as many keys as queries; sequence {index} has {k_len} and {q_len}."
            )
        yield _Sequence(q_starts[index] // size, room // size, q_starts[index], q_len, k_starts[index], k_len)


def _lengths(side: str, cu_seqlens: Tensor, padded: Tensor | None, num_tokens: int) -> tuple[list[int], list[int]]:
    """Where the sequences start, and behind the last; how long each is."""
    ends: list[int] = cu_seqlens.tolist()
    starts: list[int] = ends if padded is None else padded.tolist()
    lengths = [stop - start for start, stop in pairwise(ends)]
    rooms = [stop - start for start, stop in pairwise(starts)]
    fits = len(starts) == len(ends) and all(0 <= length <= room for length, room in zip(lengths, rooms))
    if not ends or ends[0] != 0 or starts[0] != 0 or not fits or starts[-1] > num_tokens:
        raise ShapeError(
            f"attention: cu_seqlens_{side} must rise from 0 and fit cu_seqlens_{side}_padded and {num_tokens} tokens, "
            f"got {ends}{f' padded to {starts}' if padded is not None else ''}."
        )
    return starts, lengths


def _check_split(what: str, length: int, size: int) -> None:
    if size > 1 and length % (2 * size):
        raise ShapeError(
            f"attention: context parallelism over {size} ranks cuts each sequence into {2 * size} chunks, and {what} has "
            f"{length} tokens. Pad it to a multiple of {2 * size}."
        )
