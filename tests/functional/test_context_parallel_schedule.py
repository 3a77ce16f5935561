"""The ring's schedule by definition: every visible (query, key) pair is computed once, from a token that has travelled."""

from __future__ import annotations

import random

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.context_parallel.messages import token_index
from primus_turbo_plugin.functional.context_parallel.schedule import (
    Call,
    Limits,
    Step,
    ring_schedule,
    rows_of,
    visible,
)
from primus_turbo_plugin.functional.context_parallel.sequences import (
    Run,
    Sequence,
    gathered_order,
    held,
    places,
    sequences_of,
)
from primus_turbo_plugin.kernels.attention import Packing

LIMITS: tuple[Limits, ...] = (
    (None, None),
    (None, 0),
    (0, 0),
    (1, 0),
    (5, 0),
    (40, 0),
    (3, 2),
    (0, 7),
    (None, 4),
    (6, None),
)


def positions_of(sequences: tuple[Sequence, ...], tokens: int, rank: int, size: int) -> list[tuple[int, int] | None]:
    """(sequence, position) of each of a rank's tokens, spelled out chunk by chunk; None for padding."""
    found: list[tuple[int, int] | None] = [None] * tokens
    local = 0
    for index, sequence in enumerate(sequences):
        chunk = sequence.room // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            for offset in range(chunk):
                position = number * chunk + offset
                found[local] = (index, position) if position < sequence.length else None
                local += 1
    return found


def pairs_of(call: Call) -> list[tuple[int, int]]:
    """(query, key at hand) pairs of a kernel call, by the bottom-right rule of kernels/attention.py."""
    pairs = []
    for block in call.blocks:
        left, right = block.limits
        for i in range(block.q_len):
            stands = i + block.k_len - block.q_len
            for j in range(block.k_len):
                if (left is None or j >= stands - left) and (right is None or j <= stands + right):
                    pairs.append((block.q_start + i, block.k_start + j))
    return pairs


def random_sequences(size: int, rng: random.Random) -> tuple[Sequence, ...]:
    sequences, start = [], 0
    for _ in range(rng.randint(1, 4)):
        room = 2 * size * rng.choice([0, 1, 1, 2, 3, 5])
        length = room if rng.random() < 0.5 else rng.randint(0, room)
        sequences.append(Sequence(start, room, length))
        start += room
    return tuple(sequences)


def check_steps(sequences: tuple[Sequence, ...], limits: Limits, size: int, packed: bool) -> None:
    tokens = sum(s.room for s in sequences) // size
    where = [positions_of(sequences, tokens, rank, size) for rank in range(size)]
    left, right = limits
    plans = [ring_schedule(sequences, sequences, limits, rank, size, packed) for rank in range(size)]
    for rank, steps in enumerate(plans):
        got: list[tuple[int, tuple[int, int]]] = []
        assert [step.owner for step in steps] == [(rank - i) % size for i in range(size)]
        for number, step in enumerate(steps):
            partner = plans[step.receiver][number]
            assert (partner.owner, partner.incoming) == (rank, step.outgoing), "a message must fit both its ends"
            at_hand = token_index(step.incoming).tolist() if number else list(range(tokens))
            assert number == 0 or len(at_hand) == rows_of(step.incoming)
            seen: set[int] = set()
            for call in step.calls:
                check_call(call, packed)
                for query, key in pairs_of(call):
                    token = where[step.owner][at_hand[key]]
                    assert token is not None, "padding is seen"
                    got.append((query, token))
                    seen.add(key)
            assert not number or seen == set(range(len(at_hand))), "a token travels that nobody sees"
        want = []
        for query, token in enumerate(where[rank]):
            if token is None:
                continue
            for position in range(sequences[token[0]].length):
                if (left is None or position >= token[1] - left) and (right is None or position <= token[1] + right):
                    want.append((query, (token[0], position)))
        assert sorted(got) == want


def check_call(call: Call, packed: bool) -> None:
    assert packed or len(call.blocks) == 1
    for block in call.blocks:
        assert block.limits == call.limits
        assert all(reach is None or reach >= 0 for reach in block.limits)
        assert block.q_len > 0
        assert block.k_len > 0
    for before, block in zip(call.blocks, call.blocks[1:]):
        assert before.q_stop <= block.q_start, "a row would be written twice"
        assert before.k_stop <= block.k_start


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_visible_pair_of_a_dense_batch_is_computed_once(size: int, limits: Limits) -> None:
    for chunk in (1, 4):
        check_steps((Sequence(0, 2 * size * chunk, 2 * size * chunk),), limits, size, packed=False)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_every_visible_pair_of_packed_sequences_is_computed_once(
    size: int, limits: Limits, rng: torch.Generator
) -> None:
    chance = random.Random(rng.initial_seed())
    for _ in range(4):
        check_steps(random_sequences(size, chance), limits, size, packed=True)


def dense(size: int, chunk: int, limits: Limits, rank: int) -> tuple[Step, ...]:
    sequences = (Sequence(0, 2 * size * chunk, 2 * size * chunk),)
    return ring_schedule(sequences, sequences, limits, rank, size, False)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_causal_step_is_one_call_of_half_the_scores(size: int) -> None:
    """The load is balanced: after the first step every rank computes 2 * chunk^2 scores a step."""
    chunk = 16
    for rank in range(size):
        first, *others = dense(size, chunk, (None, 0), rank)
        assert [block.limits for call in first.calls for block in call.blocks] == [(None, 0)]
        for step in others:
            (call,) = step.calls
            (block,) = call.blocks
            assert block.q_len * block.k_len == 2 * chunk**2
            assert block.limits == (None, None)
            assert rows_of(step.incoming) == (chunk if step.owner < rank else 2 * chunk)


def test_all_keys_seen_is_one_call_a_step() -> None:
    assert all(len(step.calls) == 1 for step in dense(4, 8, (None, None), 1))


def test_a_window_computes_and_sends_what_is_in_its_reach() -> None:
    """16 keys behind in chunks of 64: two neighbours, 16 tokens of each, whatever the size."""
    for size in (4, 8):
        for rank in range(size):
            _, *others = dense(size, 64, (16, 0), rank)
            sent = [rows_of(step.incoming) for step in others if step.calls]
            assert sum(sent) == 16 * (2 - (rank in (0,)) - (rank == size - 1))
            scores = sum(b.q_len * b.k_len for step in others for call in step.calls for b in call.blocks)
            assert scores <= 2 * 16 * 16


def test_packed_sequences_share_a_call() -> None:
    sequences = tuple(Sequence(16 * i, 16, 16) for i in range(20))
    for step in ring_schedule(sequences, sequences, (None, 0), 1, 4):
        assert len(step.calls) == 1
        assert len(step.calls[0].blocks) == 20


def test_runs_that_touch_are_one() -> None:
    whole = Sequence(0, 32, 32)
    assert held(whole, 3, 4) == (Run(12, 0, 8),)
    assert held(whole, 0, 4) == (Run(0, 0, 4), Run(28, 4, 4))
    assert held(Sequence(32, 32, 14), 1, 4) == (Run(4, 8, 4),)


def test_trimming_keeps_what_a_window_around_the_diagonal_can_say() -> None:
    block = visible(Run(64, 0, 64), Run(0, 0, 64), (16, 0))
    assert block is not None
    assert (block.q_start, block.q_len, block.k_start, block.k_len, block.limits) == (0, 16, 48, 16, (0, None))
    assert visible(Run(0, 0, 64), Run(64, 0, 64), (16, 0)) is None


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_places_and_the_gathered_order_are_inverse(size: int) -> None:
    sequences = (Sequence(0, 4 * size, 3), Sequence(4 * size, 2 * size, 2 * size))
    tokens = 6 + 1  # one behind the last sequence
    gathered = torch.cat([places(sequences, tokens, rank, size) for rank in range(size)])
    assert gathered[gathered_order(sequences, tokens, size)].tolist() == list(range(6 * size))


def test_lengths_are_read_once_and_again_when_written_to() -> None:
    ends = torch.tensor([0, 8, 16], dtype=torch.int32)
    packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends)
    assert sequences_of(packing, 8, 2, "q") == (Sequence(0, 8, 8), Sequence(8, 8, 8))
    ends[1] = 4
    assert sequences_of(packing, 8, 2, "q") == (Sequence(0, 4, 4), Sequence(4, 12, 12))


def test_lengths_that_do_not_fit_are_named() -> None:
    def packing(ends: list[int], padded: list[int] | None = None) -> Packing:
        starts = None if padded is None else torch.tensor(padded)
        return Packing(cu_seqlens_q=torch.tensor(ends), cu_seqlens_k=torch.tensor(ends), cu_seqlens_q_padded=starts)

    with pytest.raises(ShapeError, match=r"sequence 1 has 6 tokens\. Pad it to a multiple of 4"):
        sequences_of(packing([0, 4, 10]), 8, 2, "q")
    with pytest.raises(ShapeError, match=r"cu_seqlens_q must rise from 0 .* 8 tokens, got \[0, 12\]"):
        sequences_of(packing([0, 12]), 4, 2, "q")
    with pytest.raises(ShapeError, match=r"got \[0, 6\] padded to \[0, 4\]"):
        sequences_of(packing([0, 6], [0, 4]), 4, 2, "q")
    with pytest.raises(ShapeError, match="sequence 0 has 4 and 8"):
        ring_schedule((Sequence(0, 8, 8),), (Sequence(0, 8, 4),), (None, 0), 0, 2)
