"""Where the tokens of each rank stand: Megatron's zig-zag split of every sequence, as integers on the host.

Each sequence, padding included, is cut into 2 * size chunks of equal length; rank r holds chunks r and 2 * size - 1 - r, one
behind the other, sequence after sequence. Under a causal mask this gives every rank the same number of visible scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.attention import Packing

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence among all ranks' tokens.

    Attributes:
        start: Its first token, in the natural order.
        room: Its length with the padding behind it.
        length: Without.
    """

    start: int
    room: int
    length: int


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence that a rank holds, with consecutive positions and next to each other; padding left out.

    Attributes:
        position: Of the first, counted from the sequence's start.
        start: Where the first stands among the rank's own tokens.
        length: How many.
    """

    position: int
    start: int
    length: int


def held(sequence: Sequence, rank: int, size: int) -> tuple[Run, ...]:
    """What a rank holds of a sequence: two runs; one for the rank whose chunks touch, or where the rest is padding."""
    chunk = sequence.room // (2 * size)
    runs: list[Run] = []
    for half, number in enumerate((rank, 2 * size - 1 - rank)):
        run = Run(number * chunk, sequence.start // size + half * chunk, min(chunk, sequence.length - number * chunk))
        if run.length <= 0:
            continue
        if runs and runs[-1].position + runs[-1].length == run.position:
            runs[-1] = Run(runs[-1].position, runs[-1].start, runs[-1].length + run.length)
        else:
            runs.append(run)
    return tuple(runs)


def sequences_of(packing: Packing | None, tokens: int, size: int, side: str) -> tuple[Sequence, ...]:
    """The sequences of a batch.

    Args:
        packing: Packed lengths; None for a dense batch, all of whose rows are one sequence here.
        tokens: Of one rank.
        size: Context-parallel size.
        side: "q" or "k": whose lengths.

    Raises:
        ShapeError: The lengths don't fit the tokens, or a sequence doesn't divide into 2 * size chunks.
    """
    if packing is None:
        sequences: tuple[Sequence, ...] = (Sequence(0, tokens * size, tokens * size),)
    else:
        ends = _numbers(packing.cu_seqlens_q if side == "q" else packing.cu_seqlens_k)
        padded = packing.cu_seqlens_q_padded if side == "q" else packing.cu_seqlens_k_padded
        starts = ends if padded is None else _numbers(padded)
        rooms = [stop - start for start, stop in pairwise(starts)]
        lengths = [stop - start for start, stop in pairwise(ends)]
        fits = len(starts) == len(ends) and all(0 <= length <= room for length, room in zip(lengths, rooms))
        if not ends or ends[0] != 0 or starts[0] != 0 or not fits or starts[-1] > tokens * size:
            raise ShapeError(
                f"attention: cu_seqlens_{side} must rise from 0 and fit cu_seqlens_{side}_padded and {tokens * size} tokens, "
                f"got {list(ends)}{f' padded to {list(starts)}' if padded is not None else ''}."
            )
        sequences = tuple(Sequence(start, room, length) for start, room, length in zip(starts, rooms, lengths))
    for index, sequence in enumerate(sequences):
        if size > 1 and sequence.room % (2 * size):
            raise ShapeError(
                f"attention: context parallelism over {size} ranks cuts each sequence into {2 * size} chunks, and sequence "
                f"{index} has {sequence.room} tokens. Pad it to a multiple of {2 * size}."
            )
    return sequences


@functools.lru_cache(maxsize=256)
def places(sequences: tuple[Sequence, ...], tokens: int, rank: int, size: int, device: torch.device = CPU) -> Tensor:
    """int32 `[tokens]`: where each of a rank's tokens stands among all ranks' in the natural order; 0 for tokens
    behind the last sequence."""
    result = torch.zeros(tokens, dtype=torch.int32)
    for sequence in sequences:
        chunk, own = sequence.room // (2 * size), sequence.start // size
        for half, number in enumerate((rank, 2 * size - 1 - rank)):
            first = sequence.start + number * chunk
            result[own + half * chunk : own + (half + 1) * chunk] = torch.arange(first, first + chunk)
    return result.to(device)


@functools.lru_cache(maxsize=64)
def gathered_order(sequences: tuple[Sequence, ...], tokens: int, size: int, device: torch.device = CPU) -> Tensor:
    """int64 `[tokens in sequences]`: where each token stands among all ranks' tokens put end to end in rank order.

    `gathered[gathered_order(...)]` is in the natural order. Tokens behind the last sequence are left out.
    """
    end = max((sequence.start + sequence.room for sequence in sequences), default=0)
    order = torch.empty(end, dtype=torch.int64)
    for rank in range(size):
        for sequence in sequences:
            chunk, own = sequence.room // (2 * size), rank * tokens + sequence.start // size
            for half, number in enumerate((rank, 2 * size - 1 - rank)):
                first = sequence.start + number * chunk
                order[first : first + chunk] = torch.arange(own + half * chunk, own + (half + 1) * chunk)
    return order.to(device)


_READ = WeakIdKeyDictionary()


def _numbers(lengths: Tensor) -> tuple[int, ...]:
    """The values of a tensor of lengths. All layers of a model get the same one: only the first makes the host wait for a GPU."""
    version = -1 if lengths.is_inference() else lengths._version
    known = _READ.get(lengths)
    if known is None or known[0] != version or version < 0:
        known = _READ[lengths] = (version, tuple(lengths.tolist()))
    return known[1]
