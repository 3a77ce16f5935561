"""All-gather, with a GEMM over the gathered rows or under an unrelated one.

Rank r's rows lie in its input; they are put at their place among all rows in the slot of every peer. The GEMM multiplies the
rank's own rows first, straight from the input, and then what has arrived, nearest sender first.

    lanes = world_size - 1   every peer at once: for ranks that have a link of their own to each peer
    lanes = 1                one peer after the other at full speed: for ranks behind a switch, where all at once would also
                             arrive all at once, with nothing to multiply before that
    ring                     each rank talks to its right neighbour only, and passes on what came from the left
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
    Wait,
)
from primus_turbo_plugin.communication.schedules.rows import chunks_of, offsets


def all_gather_gemm(
    rank: int,
    rows: Sequence[int],
    *,
    chunks: int = 1,
    lanes: int | None = None,
    align: int = 1,
    keep: bool = False,
    merge: int = 1,
) -> Program:
    """y = AG(x) @ w.T, chunk by chunk, or some senders' rows at once.

    Args:
        rank: Whose program.
        rows: Rows of every rank; any numbers, 0 included.
        chunks: In how many pieces each rank's rows travel and are multiplied.
        lanes: Copy lanes; None is one a peer.
        align: Chunks are cut at multiples of so many rows (a block of scales must not be torn).
        keep: Put the own rows into the own slot as well, so that it holds all rows for a later GEMM.
        merge: Multiply the rows of so many senders at once, for GEMMs that would be too small; with one chunk only.
    """
    assert merge == 1 or chunks == 1, (merge, chunks)
    start = offsets(rows)
    own = rows[rank]
    ops, num_lanes = _push(rank, rows, chunks=chunks, lanes=lanes, align=align, keep=keep)
    ops.append(Gemm(Rows("input", 0, own), Rows("output", start[rank], start[rank] + own)))
    for chunk in range(chunks):
        for senders in _neighbours(_senders(rank, len(rows)), merge):
            pieces = [chunks_of(rows[sender], chunks, align)[chunk] for sender in senders]
            ops += [Wait(COMPUTE, sender, chunk) for sender, (a, b) in zip(senders, pieces) if chunk == 0 or b > a]
            place = (start[senders[-1]] + pieces[-1][0], start[senders[0]] + pieces[0][1])
            ops.append(Gemm(Rows("slot", *place), Rows("output", *place)))
    ops += [Join(lane) for lane in range(num_lanes)]
    return _program(rank, rows, ops, (), num_lanes, chunks, output_rows=start[-1])


def _neighbours(senders: Sequence[int], most: int) -> list[list[int]]:
    """Runs of at most so many senders whose rows lie side by side, last first."""
    runs: list[list[int]] = []
    for sender in senders:
        if runs and len(runs[-1]) < most and sender == runs[-1][-1] - 1:
            runs[-1].append(sender)
        else:
            runs.append([sender])
    return runs


def all_gather(rank: int, rows: Sequence[int], *, lanes: int | None = None) -> Program:
    """AG(x) into the slot while the caller computes something else between start and finish. Arguments as above."""
    ops, num_lanes = _push(rank, rows, chunks=1, lanes=lanes, align=1, keep=True)
    finish: list[Op] = [Wait(COMPUTE, sender, 0) for sender in _senders(rank, len(rows))]
    finish += [Join(lane) for lane in range(num_lanes)]
    return _program(rank, rows, ops, finish, num_lanes, 1)


def ring_all_gather_gemm(
    rank: int, rows: Sequence[int], *, chunks: int = 1, align: int = 1, keep: bool = False
) -> Program:
    """y = AG(x) @ w.T with neighbours only; arguments as `all_gather_gemm`."""
    world_size, start, own = len(rows), offsets(rows), rows[rank]
    left = (rank - 1) % world_size
    ops = _pass_on(rank, rows, chunks=chunks, align=align, keep=keep)
    ops.append(Gemm(Rows("input", 0, own), Rows("output", start[rank], start[rank] + own)))
    for sender in _senders(rank, world_size):
        for chunk, (a, b) in enumerate(chunks_of(rows[sender], chunks, align)):
            if chunk == 0 or b > a:
                ops.append(Wait(COMPUTE, left, sender * chunks + chunk))
            place = (start[sender] + a, start[sender] + b)
            ops.append(Gemm(Rows("slot", *place), Rows("output", *place)))
    ops.append(Join(0))
    return _program(rank, rows, ops, (), 1, world_size * chunks, output_rows=start[-1])


def ring_all_gather(rank: int, rows: Sequence[int]) -> Program:
    """AG(x) into the slot, with neighbours only, while the caller computes something else between start and finish."""
    left = (rank - 1) % len(rows)
    finish: list[Op] = [Wait(COMPUTE, left, sender) for sender in _senders(rank, len(rows))]
    ops = _pass_on(rank, rows, chunks=1, align=1, keep=True)
    return _program(rank, rows, ops, [*finish, Join(0)], 1, len(rows))


def _pass_on(rank: int, rows: Sequence[int], *, chunks: int, align: int, keep: bool) -> list[Op]:
    """Own rows to the right neighbour, then whatever has come from the left."""
    world_size, start = len(rows), offsets(rows)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    ops: list[Op] = [Fork(0)]
    for step in range(world_size - 1):
        origin = (rank - step) % world_size
        for chunk, (a, b) in enumerate(chunks_of(rows[origin], chunks, align)):
            if chunk and a == b:
                continue
            flag, place = origin * chunks + chunk, (start[origin] + a, start[origin] + b)
            if step:
                ops.append(Wait(0, left, flag))
            if b > a:
                source = Rows("slot", *place) if step else Rows("input", a, b)
                ops.append(Put(0, source, right, Rows("slot", *place), flag, step * chunks + chunk))
            ops.append(Signal(0, right, flag))
    return ops + (_keep_own(rank, rows, 0) if keep else [])


def _push(
    rank: int, rows: Sequence[int], *, chunks: int, lanes: int | None, align: int, keep: bool
) -> tuple[list[Op], int]:
    """Own rows into every peer's slot, each chunk followed by its signal; the first signal is sent even without rows."""
    world_size, start = len(rows), offsets(rows)
    num_lanes = max(1, min(world_size - 1, world_size if lanes is None else lanes))
    ops: list[Op] = [Fork(lane) for lane in range(num_lanes)]
    for chunk, (a, b) in enumerate(chunks_of(rows[rank], chunks, align)):
        for step in range(1, world_size):
            peer, lane = (rank + step) % world_size, (step - 1) % num_lanes
            if b > a:
                target = Rows("slot", start[rank] + a, start[rank] + b)
                ops.append(Put(lane, Rows("input", a, b), peer, target, chunk, chunk))
            if chunk == 0 or b > a:
                ops.append(Signal(lane, peer, chunk))
    return ops + (_keep_own(rank, rows, num_lanes - 1) if keep else []), num_lanes


def _keep_own(rank: int, rows: Sequence[int], lane: int) -> list[Op]:
    first, own = offsets(rows)[rank], rows[rank]
    if not own:
        return []
    return [Put(lane, Rows("input", 0, own), rank, Rows("slot", first, first + own), -1, -1)]


def _senders(rank: int, world_size: int) -> list[int]:
    """Peers in the order in which their rows arrive first."""
    return [(rank - step) % world_size for step in range(1, world_size)]


def _program(
    rank: int,
    rows: Sequence[int],
    start: Sequence[Op],
    finish: Sequence[Op],
    num_lanes: int,
    num_flags: int,
    output_rows: int = 0,
) -> Program:
    return Program(
        rank=rank,
        world_size=len(rows),
        start=tuple(start),
        finish=tuple(finish),
        slot_rows=(sum(rows),) * len(rows),
        num_lanes=num_lanes,
        num_flags=num_flags,
        output_rows=output_rows,
    )
