"""kernels/attention_dropout.py: against numpy's arithmetic, and as a source of randomness."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.kernels.attention_dropout import drop_threshold, keep_mask
from tests.functional.attention_oracle import dropout_keep


def _mask(probability: float, seed: int, batch: range, heads: range, queries: range, keys: range) -> torch.Tensor:
    places = [torch.arange(r.start, r.stop) for r in (queries, keys)]
    return keep_mask(probability, seed, batch=batch, heads=heads, queries=places[0], keys=places[1])


def test_the_bits_are_those_of_the_definition(rng: torch.Generator) -> None:
    seed = int(torch.randint(2**62, (1,), generator=rng))
    got = _mask(0.3, seed, range(2), range(3), range(40), range(50))
    assert torch.equal(got, dropout_keep(seed, 0.3, (2, 3, 40, 50)))


def test_any_block_is_a_part_of_the_whole(rng: torch.Generator) -> None:
    """What lets kernels tile, and ranks split, as they like."""
    seed = int(torch.randint(2**62, (1,), generator=rng))
    whole = _mask(0.5, seed, range(3), range(4), range(64), range(64))
    part = _mask(0.5, seed, range(1, 3), range(2, 3), range(10, 30), range(33, 64))
    assert torch.equal(part, whole[1:3, 2:3, 10:30, 33:64])


def test_batches_heads_rows_columns_and_seeds_are_independent(rng: torch.Generator) -> None:
    """Correlations of 2^18 bits of neighbours are within 5 standard deviations of 0, and the mean of the probability."""
    seed = int(torch.randint(2**62, (1,), generator=rng))
    a = _mask(0.25, seed, range(2), range(2), range(512), range(513)).double() - 0.75
    b = _mask(0.25, seed + 1, range(2), range(2), range(512), range(513)).double() - 0.75
    pairs = {
        "batch": (a[0], a[1]), "head": (a[:, 0], a[:, 1]), "row": (a[:, :, 1:], a[:, :, :-1]),
        "column": (a[..., 1:], a[..., :-1]), "diagonal": (a[:, :, 1:, 1:], a[:, :, :-1, :-1]), "seed": (a, b),
        "transposed": (a[..., :512], a[..., :512].transpose(-1, -2)),
    }  # fmt: skip
    variance = 0.25 * 0.75
    for name, (x, y) in pairs.items():
        spread = 5 * 2**0.5 / x.numel() ** 0.5  # a transposed pair counts each product twice
        assert abs((x * y).mean().item() / variance) < spread, name
    assert abs(a.mean().item()) < 5 * (variance / a.numel()) ** 0.5
    for axis in (-1, -2):  # no row or column is favoured: means scatter as they should
        assert a.mean(axis).std().item() == pytest.approx((variance / 512) ** 0.5, rel=0.1)


@pytest.mark.parametrize(("probability", "threshold"), [(0.0, 0), (0.5, 2**31), (1.0, 2**32)])
def test_nothing_and_everything_can_be_dropped(probability: float, threshold: int) -> None:
    assert drop_threshold(probability) == threshold
    kept = _mask(probability, 5, range(1), range(1), range(64), range(64))
    assert kept.all() or probability > 0
    assert not kept.any() or probability < 1
