"""Stochastic rounding of whole tensors: unbiased, repeatable, and independent between tensors, ranks, draws and copies."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.reference.quantize import quantize, quantize_both
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.kernels.quantize_cases import ALL_BLOCKS, gaussian, same_tensor, spec

KEY = RoundingKey(seed=11, draw=22, tensor=33, rank=0)
each_block = pytest.mark.parametrize(("fmt", "block"), ALL_BLOCKS, ids=lambda value: value)


@each_block
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_the_mean_over_draws_is_the_number_itself(
    columnwise: bool, fmt: str, block: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbiased: the error of the mean falls as 1 / sqrt(draws), element by element, far below that of rounding to nearest."""
    x, draws = gaussian(rng, 64, 64), 200
    rule = {"scale_rule": "ceil"} if fmt.startswith("mx") else {}  # no saturation, which would be a bias of its own
    stochastic = spec(fmt, block=block, rounding="stochastic", **rule)
    keys = (dataclasses.replace(KEY, draw=draw) for draw in range(draws))
    samples = torch.stack([quantize(x, stochastic, key=key, columnwise=columnwise).dequantize() for key in keys])
    source = x.t() if columnwise else x
    nearest = quantize(x, spec(fmt, block=block, **rule), columnwise=columnwise).dequantize()
    neighbours = []
    for word in (0, 0xFFFFFFFF):  # always away from zero, always towards it
        monkeypatch.setattr(reference, "_words", lambda job, tile, word=word: torch.full(tile.shape, word))
        neighbours.append(quantize(x, stochastic, key=KEY, columnwise=columnwise).dequantize())
    step = (neighbours[0] - neighbours[1]).abs()
    assert ((samples == neighbours[0]) | (samples == neighbours[1])).all()
    # Six standard deviations; and where the fp32 division by an FP8 scale lands on a code, that division's rounding.
    error = samples.double().mean(0) - source
    assert (error.abs() <= 6 * 0.5 * step / draws**0.5 + 2.0**-21 * source.abs() + 1e-9).all()
    assert error.norm() < 0.3 * (nearest - source).norm()


@each_block
def test_the_same_key_gives_the_same_bits_and_any_other_key_does_not(
    fmt: str, block: str, rng: torch.Generator
) -> None:
    x, stochastic = gaussian(rng, 64, 128), spec(fmt, block=block, rounding="stochastic")
    first = quantize(x, stochastic, key=KEY)
    assert same_tensor(first, quantize(x, stochastic, key=KEY))
    for field in ("seed", "draw", "tensor", "rank"):
        other = dataclasses.replace(KEY, **{field: getattr(KEY, field) + 1})
        changed = (quantize(x, stochastic, key=other).data != first.data).float().mean()
        assert changed > 0.1, field


def test_equal_rows_and_equal_column_tiles_are_rounded_differently() -> None:
    """A fault seen elsewhere: random words shared between rows or column tiles make all copies of a row err alike."""
    x = torch.full((256, 256), 0.3)
    x[:, ::32] = 6.0  # every block has the same scale, 0.3 lies between two codes
    values = quantize(x, spec("mxfp4", rounding="stochastic"), key=KEY).dequantize()
    free = values[:, [c for c in range(256) if c % 32]]
    assert free.unique(dim=0).shape[0] == 256
    assert free.t().unique(dim=0).shape[0] == free.shape[1]


def test_the_two_copies_of_a_tensor_are_rounded_independently() -> None:
    """Shared words would correlate the errors of dgrad and wgrad."""
    x = torch.full((128, 128), 0.3)
    x[::32, :] = x[:, ::32] = 6.0
    stochastic = spec("mxfp4", block="32x32", rounding="stochastic")
    row, col = quantize_both(x, stochastic, stochastic, key=KEY)
    assert row is not None
    assert col is not None
    free = x == torch.tensor(0.3)
    assert torch.equal(row.block_scale, col.block_scale.t())
    a = (row.dequantize() - x)[free]
    for b in (col.dequantize().t(), col.dequantize()):  # at the same place of x, and at the same place of the operand
        assert abs(torch.corrcoef(torch.stack((a, (b - x)[free])))[0, 1]) < 5 / free.sum() ** 0.5


def test_nearest_rounding_ignores_the_key(rng: torch.Generator) -> None:
    x = gaussian(rng, 32, 64)
    assert same_tensor(quantize(x, spec("mxfp4"), key=KEY), quantize(x, spec("mxfp4")))


def test_torchs_generators_are_neither_read_nor_moved(rng: torch.Generator) -> None:
    """Recompute and resume rely on it: only the key decides."""
    x, stochastic = gaussian(rng, 32, 64), spec("mxfp4", rounding="stochastic")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = quantize(x, stochastic, key=KEY)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same_tensor(first, quantize(x, stochastic, key=KEY))


def test_special_values_survive_stochastic_rounding() -> None:
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    q = quantize(x, spec("mxfp4", rounding="stochastic"), key=KEY)
    assert (q.block_scale == 0xFF).tolist() == [[False, False], [True, False], [False, True]]
    assert not q.data.any()
