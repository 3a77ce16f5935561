"""The schedule of ring attention as data: in which step a rank multiplies which of its queries with whose keys, what travels.

Step i of rank r works on keys of rank r - i (step 0: its own). What it needs of them, and nothing else, has been sent to it by
their owner, one message a step. A causal mask hides half of the scores: of ranks before it a rank is sent only the first
chunk, and with those behind it only its second chunk's queries see anything. A window shortens messages to the keys
within its reach, and leaves out the steps where nothing is.

Everything here is integers, pure and the same on every rank: a sender knows what its receiver will compute.

    positions       query i of a run sees key j of another where  low <= j - i <= high,  low = distance - left,
                    high = distance + right,  distance = the query run's position - the key run's
    trimming        rows and keys outside the visible band are cut off; what remains can be written as a window around
                    the bottom-right diagonal, which is how kernels take it (kernels/attention.py)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.context_parallel.sequences import Run, Sequence, held

Limits = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries times keys, each a run of tokens; every row sees a key, and every key is seen.

    Attributes:
        q_start: The first query, among the rank's own.
        q_len: How many.
        k_start: The first key, among its owner's tokens; in a `Call`, among those that are in the message.
        k_len: How many.
        limits: (left, right) reach around a query's position, the last query standing at the last key; None is no limit.
    """

    q_start: int
    q_len: int
    k_start: int
    k_len: int
    limits: Limits

    @property
    def q_stop(self) -> int:
        return self.q_start + self.q_len

    @property
    def k_stop(self) -> int:
        return self.k_start + self.k_len


@dataclass(frozen=True, slots=True)
class Call:
    """Blocks that one kernel call computes: alike in their limits, and rising in queries and in keys without overlap."""

    blocks: tuple[Block, ...]

    @property
    def limits(self) -> Limits:
        return self.blocks[0].limits


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        owner: Whose keys are used.
        incoming: Runs (start, stop) of the owner's tokens that are needed, in the order in which they lie in the message.
        calls: What is computed.
        receiver: Who needs keys of this rank in this step.
        outgoing: Runs of this rank's tokens that it needs.
    """

    owner: int
    incoming: tuple[tuple[int, int], ...]
    calls: tuple[Call, ...]
    receiver: int
    outgoing: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=256)
def ring_schedule(
    queries: tuple[Sequence, ...], keys: tuple[Sequence, ...], limits: Limits, rank: int, size: int, packed: bool = True
) -> tuple[Step, ...]:
    """The steps of a rank.

    Args:
        queries: The sequences, as `sequences_of` gives them.
        keys: Likewise, of keys and values.
        limits: (left, right) reach around a query's position, causality included; None is no limit.
        rank: In the group.
        size: Of the group.
        packed: Whether a kernel call may take several blocks, as packed sequences.

    Raises:
        ShapeError: A sequence has not as many keys as queries.
    """
    _check_equal(queries, keys)
    steps = []
    for distance in range(size):
        owner, receiver = (rank - distance) % size, (rank + distance) % size
        blocks = _blocks(queries, keys, limits, rank, owner, size)
        incoming = () if distance == 0 else _runs(blocks)
        outgoing = () if distance == 0 else _runs(_blocks(queries, keys, limits, receiver, rank, size))
        if distance:
            blocks = [replace(block, k_start=_place(block.k_start, incoming)) for block in blocks]
        calls = _calls(blocks) if packed else tuple(Call((block,)) for block in blocks)
        steps.append(Step(owner, incoming, calls, receiver, outgoing))
    return tuple(steps)


def rows_of(runs: Iterable[tuple[int, int]]) -> int:
    """How many tokens the runs hold together."""
    return sum(stop - start for start, stop in runs)


def visible(query: Run, key: Run, limits: Limits) -> Block | None:
    """The part of two runs in which any query sees any key."""
    distance, (left, right) = query.position - key.position, limits
    low = None if left is None else distance - left
    high = None if right is None else distance + right
    first = 0 if high is None else max(0, -high)
    last = query.length - 1 if low is None else min(query.length - 1, key.length - 1 - low)
    k_first = 0 if low is None else max(0, low + first)
    k_last = key.length - 1 if high is None else min(key.length - 1, high + last)
    if first > last or k_first > k_last:
        return None
    rows, columns, shift = last - first + 1, k_last - k_first + 1, first - k_first
    diagonal = columns - rows  # the key at which row 0 stands
    reach_left = None if low is None or low + shift + rows - 1 <= 0 else diagonal - (low + shift)
    reach_right = None if high is None or high + shift >= columns - 1 else high + shift - diagonal
    return Block(query.start + first, rows, key.start + k_first, columns, (reach_left, reach_right))


def _check_equal(queries: tuple[Sequence, ...], keys: tuple[Sequence, ...]) -> None:
    if len(queries) != len(keys):
        raise ShapeError(f"attention: cu_seqlens name {len(queries)} sequences of queries, {len(keys)} of keys.")
    for index, (query, key) in enumerate(zip(queries, keys)):
        if query.length != key.length:
            raise ShapeError(
                f"attention: context parallelism needs as many keys as queries; sequence {index} has {key.length} and "
                f"{query.length}."
            )


def _blocks(
    queries: tuple[Sequence, ...], keys: tuple[Sequence, ...], limits: Limits, rank: int, owner: int, size: int
) -> list[Block]:
    blocks: list[Block] = []
    for query, key in zip(queries, keys):
        blocks += _blocks_of_sequence(held(query, rank, size), held(key, owner, size), limits)
    return blocks


def _blocks_of_sequence(queries: tuple[Run, ...], keys: tuple[Run, ...], limits: Limits) -> list[Block]:
    same_tokens = [(run.position, run.length) for run in queries] == [(run.position, run.length) for run in keys]
    if queries and same_tokens and limits == (None, 0):
        # Causality asks only who comes first, and a rank's own tokens lie in the order of their positions.
        total = sum(run.length for run in queries)
        return [Block(queries[0].start, total, keys[0].start, total, (None, 0 if total > 1 else None))]
    pairs = [visible(query, key, limits) for query in queries for key in keys]
    return _joined([block for block in pairs if block is not None])


def _joined(blocks: list[Block]) -> list[Block]:
    """Fewer and larger blocks: of those without limits, neighbours with the same keys become one, then with the same queries."""

    def over_rows(a: Block, b: Block) -> Block | None:
        if (a.k_start, a.k_len, a.q_stop) == (b.k_start, b.k_len, b.q_start):
            return replace(a, q_len=a.q_len + b.q_len)
        return None

    def over_keys(a: Block, b: Block) -> Block | None:
        if (a.q_start, a.q_len, a.k_stop) == (b.q_start, b.q_len, b.k_start):
            return replace(a, k_len=a.k_len + b.k_len)
        return None

    for join in (over_rows, over_keys):
        kept: list[Block] = []
        for block in blocks:
            for index, earlier in enumerate(kept):
                whole = join(earlier, block) if block.limits == earlier.limits == (None, None) else None
                if whole is not None:
                    kept[index] = whole
                    break
            else:
                kept.append(block)
        blocks = kept
    return blocks


def _runs(blocks: list[Block]) -> tuple[tuple[int, int], ...]:
    """The keys that any block reads, as disjoint rising runs (start, stop)."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks, key=lambda block: block.k_start):
        if runs and block.k_start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], block.k_stop))
        else:
            runs.append((block.k_start, block.k_stop))
    return tuple(runs)


def _place(token: int, runs: tuple[tuple[int, int], ...]) -> int:
    """Where a token of one of the runs lies once they are put end to end."""
    before = 0
    for start, stop in runs:
        if start <= token < stop:
            return before + token - start
        before += stop - start
    raise AssertionError(f"token {token} is in none of {runs}")


def _calls(blocks: list[Block]) -> tuple[Call, ...]:
    calls: list[list[Block]] = []
    for block in blocks:
        for call in calls:
            if (
                call[-1].limits == block.limits
                and call[-1].q_stop <= block.q_start
                and call[-1].k_stop <= block.k_start
            ):
                call.append(block)
                break
        else:
            calls.append([block])
    return tuple(Call(tuple(call)) for call in calls)
