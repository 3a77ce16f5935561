"""Every schedule, for every number of ranks and any rows, under every order its waits allow; and that the checker sees faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.schedules import Program
from primus_turbo_plugin.communication.schedules.check import CallOf, check, check_calls, gathered, scattered
from primus_turbo_plugin.communication.schedules.program import COMPUTE, Fork, Gemm, Join, Put, Signal, Wait, incoming
from primus_turbo_plugin.communication.schedules.rows import chunks_of, even_shares

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def worlds(draw: Any) -> tuple[int, ...]:
    """Rows of every rank: alike, nearly alike (a total that does not divide), fewer than ranks, none, or arbitrary."""
    size = draw(st.integers(1, 16))
    if draw(st.booleans()):
        return even_shares(draw(st.integers(0, 3 * size)), size)
    return tuple(draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))


def _of_all(make: Callable[..., Program], rows: Sequence[int], **choices: Any) -> list[Program]:
    return [make(rank, rows, **choices) for rank in range(len(rows))]


@QUICK
@given(worlds(), st.integers(1, 4), st.integers(1, 16), st.integers(1, 3), st.booleans())
def test_all_gather_gemm(rows: tuple[int, ...], chunks: int, lanes: int, align: int, keep: bool) -> None:
    programs = _of_all(schedules.all_gather_gemm, rows, chunks=chunks, lanes=lanes, align=align, keep=keep)
    assert check(programs, rows, gathered(rows), calls=3) == []


@QUICK
@given(worlds(), st.integers(1, 16), st.integers(1, 16), st.booleans())
def test_all_gather_gemm_of_several_senders_at_once(rows: tuple[int, ...], lanes: int, merge: int, keep: bool) -> None:
    programs = _of_all(schedules.all_gather_gemm, rows, lanes=lanes, merge=merge, keep=keep)
    assert check(programs, rows, gathered(rows), calls=3) == []
    most = max(-(-rank // merge) + -(-(len(rows) - 1 - rank) // merge) for rank in range(len(rows)))
    assert max(sum(isinstance(op, Gemm) for op in p.ops()) for p in programs) <= 1 + most + 1


@QUICK
@given(worlds(), st.integers(1, 3), st.booleans())
def test_ring_all_gather_gemm(rows: tuple[int, ...], chunks: int, keep: bool) -> None:
    programs = _of_all(schedules.ring_all_gather_gemm, rows, chunks=chunks, keep=keep)
    assert check(programs, rows, gathered(rows), calls=3) == []
    assert all(put.peer in (rank, (rank + 1) % len(rows)) for rank, p in enumerate(programs) for put in p.puts)


@QUICK
@given(worlds(), st.integers(1, 16))
def test_bulk_all_gather_leaves_all_rows_in_the_slot(rows: tuple[int, ...], lanes: int) -> None:
    _check_bulk_gather(rows, _of_all(schedules.all_gather, rows, lanes=lanes))


@QUICK
@given(worlds())
def test_bulk_ring_leaves_all_rows_in_the_slot(rows: tuple[int, ...]) -> None:
    programs = _of_all(schedules.ring_all_gather, rows)
    _check_bulk_gather(rows, programs)
    assert all(put.peer in (rank, (rank + 1) % len(rows)) for rank, p in enumerate(programs) for put in p.puts)


def _check_bulk_gather(rows: tuple[int, ...], programs: list[Program]) -> None:
    assert check(programs, rows, None, calls=3) == []
    for rank in range(len(rows)):
        places = sorted((put.target.start, put.target.stop) for _, put in incoming(tuple(programs), rank))
        places += [(put.target.start, put.target.stop) for put in programs[rank].puts if put.peer == rank]
        covered = [row for start, stop in sorted(places) for row in range(start, stop)]
        assert covered == list(range(sum(rows)))


@QUICK
@given(worlds(), st.integers(1, 4), st.integers(1, 16), st.integers(1, 3))
def test_gemm_reduce_scatter(rows: tuple[int, ...], chunks: int, lanes: int, align: int) -> None:
    programs = _of_all(schedules.gemm_reduce_scatter, rows, chunks=chunks, lanes=lanes, align=align)
    assert check(programs, [sum(rows)] * len(rows), scattered(rows), calls=3) == []


@QUICK
@given(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.integers(1, 4))
def test_two_ranks_may_add_in_the_gemm(rows: tuple[int, int], chunks: int) -> None:
    programs = _of_all(schedules.gemm_reduce_scatter, rows, chunks=chunks, add=True)
    assert check(programs, [sum(rows)] * 2, scattered(rows, add=True)) == []


@QUICK
@given(worlds(), st.integers(1, 16))
def test_bulk_reduce_scatter(rows: tuple[int, ...], lanes: int) -> None:
    programs = _of_all(schedules.reduce_scatter, rows, lanes=lanes)
    assert check(programs, [sum(rows)] * len(rows), scattered(rows, gemm=False), calls=3) == []


def _leaves(token: Any) -> list[tuple[int, Any]]:
    """(rank, x) of every product in nested sums."""
    return [(token[1], token[2])] if token[0] == "y" else [leaf for part in token[1:] for leaf in _leaves(part)]


@QUICK
@given(worlds())
def test_ring_reduce_scatter_adds_every_rank_once(rows: tuple[int, ...]) -> None:
    size, first = len(rows), [sum(rows[:rank]) for rank in range(len(rows))]
    programs = _of_all(schedules.ring_gemm_reduce_scatter, rows)

    class Right:
        """Equal to a token with the right terms, in ring order from the owner's right neighbour on."""

        def __init__(self, call: int, rank: int, row: int) -> None:
            order = [(rank + 1 + step) % size for step in range(size)]
            self.wanted = [(sender, ("x", call, sender, first[rank] + row)) for sender in order]

        def __eq__(self, token: object) -> bool:
            return _leaves(token) == self.wanted

        __hash__ = None  # type: ignore[assignment]

    assert check(programs, [sum(rows)] * size, Right, calls=3) == []


@st.composite
def call_sequences(draw: Any) -> list[CallOf]:
    """Calls as a layer's channel sees them: fused and bulk, of changing rows, chunks and lanes."""
    size = draw(st.integers(2, 6))
    gathers = draw(st.booleans())
    calls = []
    for _ in range(draw(st.integers(2, 6))):
        rows = tuple(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)))
        lanes, chunks, bulk = draw(st.integers(1, size)), draw(st.integers(1, 3)), draw(st.booleans())
        everywhere = [sum(rows)] * size
        if gathers and bulk:
            calls.append(CallOf(_of_all(schedules.all_gather, rows, lanes=lanes), rows, None))
        elif gathers:
            programs = _of_all(schedules.all_gather_gemm, rows, chunks=chunks, lanes=lanes, keep=draw(st.booleans()))
            calls.append(CallOf(programs, rows, gathered(rows)))
        elif bulk:
            programs = _of_all(schedules.reduce_scatter, rows, lanes=lanes)
            calls.append(CallOf(programs, everywhere, scattered(rows, gemm=False)))
        else:
            add = size == 2 and draw(st.booleans())
            programs = _of_all(schedules.gemm_reduce_scatter, rows, chunks=chunks, lanes=lanes, add=add)
            calls.append(CallOf(programs, everywhere, scattered(rows, add=add)))
    return calls


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(call_sequences())
def test_calls_of_any_kind_may_follow_each_other_over_two_slots(calls: list[CallOf]) -> None:
    assert check_calls(calls) == []


@pytest.mark.parametrize("world_size", range(1, 17))
def test_no_world_size_is_left_out(world_size: int) -> None:
    """Hypothesis may not draw each of them in a run."""
    rows = even_shares(world_size + 1, world_size)
    assert check(_of_all(schedules.all_gather_gemm, rows, chunks=2), rows, gathered(rows), calls=3) == []
    programs = _of_all(schedules.gemm_reduce_scatter, rows, chunks=2)
    assert check(programs, [sum(rows)] * world_size, scattered(rows), calls=3) == []


@given(st.integers(0, 50), st.integers(1, 9), st.integers(1, 8))
def test_chunks_cover_all_rows_at_multiples(rows: int, count: int, align: int) -> None:
    pieces = chunks_of(rows, count, align)
    assert len(pieces) == count
    assert [row for a, b in pieces for row in range(a, b)] == list(range(rows))
    assert all(a % align == 0 or a == rows for a, _ in pieces)


def test_nearest_sender_is_multiplied_first_and_the_own_rows_before_it() -> None:
    program = schedules.all_gather_gemm(1, (4, 4, 4))
    sources = [(op.source.buffer, op.source.start) for op in program.ops() if type(op).__name__ == "Gemm"]
    assert sources == [("input", 0), ("slot", 0), ("slot", 8)]


def _without(kind: type, lane: int | None = None) -> Callable[[Program], Program]:
    """The program with every operation of a kind (on a lane) left out."""

    def change(program: Program) -> Program:
        def keep(op: Any) -> bool:
            return not (isinstance(op, kind) and (lane is None or op.lane == lane))

        return dataclasses.replace(
            program, start=tuple(filter(keep, program.start)), finish=tuple(filter(keep, program.finish))
        )

    return change


def _signal_first(program: Program) -> Program:
    """Every signal before the rows it tells of."""
    ops = list(program.start)
    for i in range(len(ops) - 1):
        if isinstance(ops[i], Put) and isinstance(ops[i + 1], Signal):
            ops[i], ops[i + 1] = ops[i + 1], ops[i]
    return dataclasses.replace(program, start=tuple(ops))


_MUTANTS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "missing wait": (_without(Wait, COMPUTE), "race"),
    "signal before data": (_signal_first, "race"),
    "missing fork": (_without(Fork), "race"),
    "input reused early": (_without(Join), "race"),
    "missing signal": (_without(Signal), "deadlock"),
    "missing put": (_without(Put), "result"),
}


@pytest.mark.parametrize("collective", ["gather", "scatter"])
@pytest.mark.parametrize("mutant", [*_MUTANTS, "one slot"])
def test_the_checker_finds(mutant: str, collective: str) -> None:
    rows = (3, 3, 3)
    make = schedules.all_gather_gemm if collective == "gather" else schedules.gemm_reduce_scatter
    expected = gathered(rows) if collective == "gather" else scattered(rows)
    inputs = rows if collective == "gather" else [9] * 3
    programs = _of_all(make, rows, chunks=2)
    if mutant == "one slot":
        faults = check(programs, inputs, expected, slots=1)
        kind = "race"
    else:
        change, kind = _MUTANTS[mutant]
        faults = check([change(p) for p in programs], inputs, expected)
    assert any(fault.startswith(kind) for fault in faults), faults[:3]
