"""Reduce-scatter, of the products of a GEMM as they are made, or under an unrelated GEMM.

Every rank multiplies all rows with its part of the contraction. The products of rows that belong to a peer are made first and
put into the peer's slot, which has a place for every sender, while the next are multiplied. The owner adds them in rank order
in fp32 and rounds once: the same bits in every run, whoever was faster.

Two ranks only: a sum of two has no order, so the owner's own product need not be rounded and read back. It is the GEMM that
adds what has arrived, in its accumulators.
"""

from __future__ import annotations

from collections.abc import Sequence

from primus_turbo_plugin.communication.schedules.program import (
    COMPUTE,
    Fork,
    Gemm,
    Join,
    Op,
    Program,
    Put,
    Rows,
    Signal,
    Sum,
    Wait,
)
from primus_turbo_plugin.communication.schedules.rows import chunks_of, offsets


def gemm_reduce_scatter(
    rank: int, rows: Sequence[int], *, chunks: int = 1, lanes: int | None = None, align: int = 1, add: bool = False
) -> Program:
    """y = RS(x @ w.T), chunk by chunk.

    Args:
        rank: Whose program.
        rows: Rows that every rank ends up with; any numbers, 0 included.
        chunks: In how many pieces each owner's rows are multiplied and travel.
        lanes: Copy lanes; None is one a peer.
        align: Chunks are cut at multiples of so many rows.
        add: Let the GEMM of the own rows add what has arrived; of two ranks only.
    """
    world_size, start = len(rows), offsets(rows)
    assert not add or world_size == 2, (add, world_size)
    num_lanes = max(1, min(world_size - 1, world_size if lanes is None else lanes))
    ops: list[Op] = []
    for chunk in range(chunks):
        for step in range(1, world_size):
            peer, lane = (rank + step) % world_size, (step - 1) % num_lanes
            a, b = chunks_of(rows[peer], chunks, align)[chunk]
            place = (start[peer] + a, start[peer] + b)
            if b > a:
                ops.append(Gemm(Rows("input", *place), Rows("partial", *place)))
            if b > a or chunk == 0:
                ops += [Fork(lane), *_send(rank, rows, peer, "partial", (a, b), lane, chunk)]
    if add:
        ops += _multiply_and_add(rank, rows, chunks, align)
    else:
        own = (start[rank], start[rank + 1])
        ops.append(Gemm(Rows("input", *own), Rows("partial", *own)))
        for chunk, (a, b) in enumerate(chunks_of(rows[rank], chunks, align)):
            ops += _receive(rank, rows, (a, b), chunk, own="partial")
    ops += [Join(lane) for lane in range(num_lanes)]
    return _program(rank, rows, ops, (), num_lanes, chunks, partial_rows=start[-1])


def reduce_scatter(rank: int, rows: Sequence[int], *, lanes: int | None = None) -> Program:
    """RS(x) of rows that exist already, while the caller computes something else between start and finish."""
    world_size = len(rows)
    num_lanes = max(1, min(world_size - 1, world_size if lanes is None else lanes))
    ops: list[Op] = [Fork(lane) for lane in range(num_lanes)]
    for step in range(1, world_size):
        peer, lane = (rank + step) % world_size, (step - 1) % num_lanes
        ops += _send(rank, rows, peer, "input", (0, rows[peer]), lane, 0)
    finish = _receive(rank, rows, (0, rows[rank]), 0, own="input")
    finish += [Join(lane) for lane in range(num_lanes)]
    return _program(rank, rows, ops, finish, num_lanes, 1, partial_rows=0)


def ring_gemm_reduce_scatter(rank: int, rows: Sequence[int]) -> Program:
    """y = RS(x @ w.T) with neighbours only.

    The sum for an owner sets out at its right neighbour and comes round the ring, so it is added in ring order, not in rank
    order: the same bits in every run, but others than those of `gemm_reduce_scatter`. Partial sums must travel in fp32.
    """
    world_size, start = len(rows), offsets(rows)
    right = (rank + 1) % world_size
    ops: list[Op] = []
    for step in range(world_size):
        owner = (rank - 1 - step) % world_size
        place = (start[owner], start[owner + 1])
        if rows[owner]:
            ops.append(Gemm(Rows("input", *place), Rows("partial", *place)))
        last = owner == rank
        target = Rows("output", 0, rows[rank]) if last else Rows("partial", *place)
        if step:
            ops.append(Wait(COMPUTE, (rank - 1) % world_size, owner))
            ops.append(Sum((Rows("slot", *place), Rows("partial", *place)), target))
        elif last:
            ops.append(Sum((Rows("partial", *place),), target))
        if not last:
            ops.append(Fork(0))
            if rows[owner]:
                ops.append(Put(0, Rows("partial", *place), right, Rows("slot", *place), owner, step))
            ops.append(Signal(0, right, owner))
    ops.append(Join(0))
    return Program(
        rank=rank,
        world_size=world_size,
        start=tuple(ops),
        finish=(),
        slot_rows=(start[-1],) * world_size,
        num_lanes=1,
        num_flags=world_size,
        partial_rows=start[-1],
        output_rows=rows[rank],
    )


def _send(
    rank: int,
    rows: Sequence[int],
    peer: int,
    buffer: str,
    chunk_rows: tuple[int, int],
    lane: int,
    chunk: int,
) -> list[Op]:
    """Rows of `peer`, counted from its first, into its slot, and the signal."""
    (a, b), first = chunk_rows, offsets(rows)[peer]
    ops: list[Op] = []
    if b > a:
        place = _block(rank, peer, rows) + a
        source = Rows(buffer, first + a, first + b)  # type: ignore[arg-type]
        ops.append(Put(lane, source, peer, Rows("slot", place, place + b - a), chunk, chunk))
    return [*ops, Signal(lane, peer, chunk)]


def _receive(rank: int, rows: Sequence[int], chunk_rows: tuple[int, int], chunk: int, *, own: str) -> list[Op]:
    """Waits for everybody's part of these rows and adds them in rank order."""
    (a, b), first, world_size = chunk_rows, offsets(rows)[rank], len(rows)
    if b == a and chunk:
        return []
    ops: list[Op] = [Wait(COMPUTE, (rank - step) % world_size, chunk) for step in range(1, world_size)]
    if b == a:
        return ops
    sources = tuple(
        Rows(own, first + a, first + b)  # type: ignore[arg-type]
        if sender == rank
        else Rows("slot", _block(sender, rank, rows) + a, _block(sender, rank, rows) + b)
        for sender in range(world_size)
    )
    return [*ops, Sum(sources, Rows("output", a, b))]


def _multiply_and_add(rank: int, rows: Sequence[int], chunks: int, align: int) -> list[Op]:
    first, sender = offsets(rows)[rank], 1 - rank
    ops: list[Op] = []
    for chunk, (a, b) in enumerate(chunks_of(rows[rank], chunks, align)):
        if b > a or chunk == 0:
            ops.append(Wait(COMPUTE, sender, chunk))
        if b > a:
            place = _block(sender, rank, rows)
            arrived = Rows("slot", place + a, place + b)
            ops.append(Gemm(Rows("input", first + a, first + b), Rows("output", a, b), arrived))
    return ops


def _block(sender: int, owner: int, rows: Sequence[int]) -> int:
    """First row of the sender's place in the owner's slot, which has one for every rank but the owner."""
    return (sender - (sender > owner)) * rows[owner]


def _program(
    rank: int,
    rows: Sequence[int],
    start: Sequence[Op],
    finish: Sequence[Op],
    num_lanes: int,
    chunks: int,
    partial_rows: int,
) -> Program:
    world_size = len(rows)
    return Program(
        rank=rank,
        world_size=world_size,
        start=tuple(start),
        finish=tuple(finish),
        slot_rows=tuple(max(0, world_size - 1) * own for own in rows),
        num_lanes=num_lanes,
        num_flags=chunks,
        partial_rows=partial_rows,
        output_rows=rows[rank],
    )
