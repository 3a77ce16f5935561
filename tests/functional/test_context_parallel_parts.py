"""Pieces of context parallelism that need no other rank: merging, sums, messages, names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.context_parallel import parse_algorithm, reason_against_dealing_out
from primus_turbo_plugin.functional.context_parallel.merge import Merged, row_deltas, sink_gradients
from primus_turbo_plugin.functional.context_parallel.messages import add_to, empty_message, fill, parts_of
from primus_turbo_plugin.functional.context_parallel.sums import Summed, Written


def softmax_part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(out [1, rows, heads, dim], lse [1, heads, rows]) of scores [1, heads, rows, keys]; -inf is not seen."""
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    return (weights @ values).transpose(1, 2), lse


def test_parts_merge_to_the_softmax_of_all_keys(rng: torch.Generator) -> None:
    """Parts that cover some rows, rows that see nothing in a part or at all, sinks, scores whose exponential overflows."""
    scores = 300 * torch.randn(1, 2, 6, 12, generator=rng, dtype=torch.float64)
    scores[:, :, 2, :4] = -torch.inf
    scores[:, :, 3] = -torch.inf
    values = torch.randn(1, 2, 12, 5, generator=rng, dtype=torch.float64)
    sinks = 300 * torch.randn(2, generator=rng, dtype=torch.float64)
    scores[:, :, :3, 8:] = -torch.inf  # the third part is of rows 3 ... 5 only
    for sink in (None, sinks):
        merged = Merged(torch.empty(1, 6, 2, 5, dtype=torch.float64), torch.float64)
        for rows, keys in ((slice(0, 6), slice(0, 4)), (slice(0, 6), slice(4, 8)), (slice(3, 6), slice(8, 12))):
            room = merged.room(rows)
            out, lse = softmax_part(scores[:, :, rows, keys], values[:, :, keys])
            merged.add(rows, room.copy_(out), lse)
        got, got_lse = merged.finish(sink)
        extended, with_values = scores, values
        if sink is not None:
            extended = torch.cat((scores, sink.view(1, 2, 1, 1).expand(1, 2, 6, 1)), -1)
            with_values = torch.cat((values, torch.zeros(1, 2, 1, 5, dtype=torch.float64)), 2)
        want, want_lse = softmax_part(extended, with_values)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_lse, want_lse, rtol=1e-12, atol=1e-12)


def test_rows_without_any_part_are_zero_and_the_result_is_written_in_place() -> None:
    merged = Merged(torch.full((1, 4, 1, 2), torch.nan), torch.float32)
    room = merged.room(slice(1, 3))
    assert room.data_ptr() == merged.out[:, 1:3].data_ptr(), "nothing to merge with: no copy"
    merged.add(slice(1, 3), room.fill_(2.0), torch.zeros(1, 1, 2))
    assert merged.room(slice(2, 4)).data_ptr() != merged.out[:, 2:4].data_ptr()
    out, lse = merged.finish(None)
    assert out[0, :, 0, 0].tolist() == [0, 2, 2, 0]
    assert lse[0, 0].tolist() == [-torch.inf, 0, 0, -torch.inf]


def test_gradients_of_sinks_and_deltas_match_autograd(rng: torch.Generator) -> None:
    scores = torch.randn(1, 2, 6, 5, generator=rng, dtype=torch.float64)
    sinks = torch.randn(2, generator=rng, dtype=torch.float64, requires_grad=True)
    values = torch.randn(1, 2, 5, 3, generator=rng, dtype=torch.float64)
    dout = torch.randn(1, 6, 2, 3, generator=rng, dtype=torch.float64)
    lse = torch.logaddexp(scores.logsumexp(-1), sinks.view(1, 2, 1))
    out = (torch.exp(scores - lse.unsqueeze(-1)) @ values).transpose(1, 2)
    (want,) = torch.autograd.grad(out, sinks, dout)
    got = sink_gradients(sinks.detach(), lse.detach(), row_deltas(dout, out.detach(), torch.float64))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_sums_of_parts_that_overlap_touch_and_leave_gaps(rng: torch.Generator) -> None:
    like = torch.empty(2, 10, 3, 4)
    for given in (None, torch.full((2, 10, 3, 4), torch.nan)):
        summed, want = Summed(like, torch.float32, given), torch.zeros(2, 10, 3, 4)
        for start, stop in ((2, 5), (5, 6), (4, 8), (0, 1)):
            part = torch.randn(2, stop - start, 3, 4, generator=rng)
            summed.add(slice(start, stop), part)
            want[:, start:stop] += part
        assert torch.equal(summed.finish(), want)
    whole = torch.ones(2, 10, 3, 4)
    summed = Summed(like, torch.float32)
    summed.add(slice(0, 10), whole)
    assert summed.finish() is whole, "one part is all there is: no copy"
    assert torch.equal(Summed(like, torch.float32).finish(), torch.zeros(2, 10, 3, 4))


def test_written_rows_are_known() -> None:
    written = Written(8)
    written.add(slice(2, 4))
    assert [written.any_of(slice(*rows)) for rows in ((0, 2), (1, 3), (3, 5), (4, 8))] == [False, True, True, False]
    assert written.gaps(slice(1, 6)) == [slice(1, 2), slice(4, 6)]


@pytest.mark.parametrize("many", [False, True])
def test_a_message_holds_the_runs_tokens_end_to_end(rng: torch.Generator, many: bool) -> None:
    """Of strided tensors of different dims, few runs and many."""
    runs = tuple((3 * i, 3 * i + 2) for i in range(9)) if many else ((1, 4), (9, 20))
    tokens = torch.cat([torch.arange(start, stop) for start, stop in runs])
    k = torch.randn(30, 2, 3, 5, generator=rng).transpose(0, 1)
    v = torch.randn(2, 30, 3, 8, generator=rng)[..., 1:5]
    message = fill(empty_message(k, v, len(tokens), k.dtype), k, v, runs)
    for got, want in zip(parts_of(message, k, v), (k, v)):
        assert torch.equal(got, want[:, tokens])
    sums = torch.zeros(2, 30, 3, 5), torch.ones(2, 30, 3, 4)
    add_to(*sums, message, runs)
    assert torch.equal(sums[0][:, tokens], k[:, tokens])
    assert torch.equal(sums[1][:, tokens], 1 + v[:, tokens])
    assert float(sums[0].abs().sum()) == pytest.approx(float(k[:, tokens].abs().sum()), rel=1e-5)


def test_megatrons_spellings() -> None:
    spellings = {
        None: "p2p",
        "p2p": "p2p",
        "all_gather": "all_gather",
        "allgather": "all_gather",
        "a2a": "a2a",
        "a2a+p2p": "a2a+p2p",
    }
    assert {given: parse_algorithm(given) for given in spellings} == spellings
    with pytest.raises(ConfigError, match="got 'ring'"):
        parse_algorithm("ring")


def test_heads_that_can_be_dealt_out() -> None:
    cases = [(8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 8), (12, 6, 3)]
    assert all(reason_against_dealing_out(*case) is None for case in cases)
    for case in [(6, 6, 4), (12, 3, 4), (12, 6, 4)]:
        reason = reason_against_dealing_out(*case)
        assert reason is not None
        assert "Set cp_comm_type to p2p" in reason
