"""Ops fused with a quantisation give the reference's bytes, on whatever GPU is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference import fused as reference
from primus_turbo_plugin.kernels.triton import fused as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

PAIRS = [
    (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16)),
    (QuantSpec(format="mxfp8"), QuantSpec(format="fp8", block="1x128")),
]
SHAPES = [(256, 4096), (100, 264), (33, 8), (300, 5120), (129, 14336)]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " | ".join(map(str, pair)))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _values(rows: int, cols: int, rng: torch.Generator) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=rng) * torch.logspace(-3, 3, rows).unsqueeze(1)).bfloat16()


def _assert_same(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    for mine, theirs in zip(got, want):
        tensors = [(mine, theirs)] if isinstance(mine, torch.Tensor) else []
        if not tensors:
            tensors = [(mine.data, theirs.data), (mine.block_scale, theirs.block_scale)]
        for a, b in tensors:
            different = int((a.cpu() != b.cpu()).sum())
            assert not different, f"{different} of {a.numel()} differ"


@needs_gpu
@each_pair
@each_shape
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm_equals_the_reference_in_every_byte(pair, shape, zero_centered, rng) -> None:
    x, weight = _values(*shape, rng), torch.randn(shape[1], generator=rng).bfloat16()
    got = turbo.rms_norm_quantize(x.cuda(), weight.cuda(), 1e-5, *pair, zero_centered_gamma=zero_centered)
    _assert_same(got, reference.rms_norm_quantize(x, weight, 1e-5, *pair, zero_centered_gamma=zero_centered))


@needs_gpu
@each_pair
@each_shape
def test_swiglu_equals_the_reference_in_every_byte(pair, shape, rng) -> None:
    x = _values(shape[0], 2 * shape[1], rng)
    _assert_same(turbo.swiglu_quantize(x.cuda(), *pair), reference.swiglu_quantize(x, *pair))


@needs_gpu
@each_pair
@each_shape
def test_sums_equal_the_reference_in_every_bit(pair, shape, rng) -> None:
    x = _values(*shape, rng)
    _assert_same(turbo.quantize_and_sum(x.cuda(), *pair), reference.quantize_and_sum(x, *pair))


@needs_gpu
def test_strided_rows_no_rows_and_sums_alone(rng) -> None:
    x = _values(70, 136, rng)
    weight, on_gpu = torch.ones(128).bfloat16(), x.cuda()
    for rows, cols in ((slice(None), slice(8, 136)), (slice(None), slice(5, 133)), (slice(0, 70, 2), slice(0, 128))):
        got = turbo.rms_norm_quantize(on_gpu[rows, cols], weight.cuda(), 1e-5, *PAIRS[0])
        _assert_same(got, reference.rms_norm_quantize(x[rows, cols], weight, 1e-5, *PAIRS[0]))
    row, col, sums = turbo.quantize_and_sum(x.cuda(), None, None)
    assert row is None
    assert col is None
    assert torch.equal(sums.cpu(), reference.quantize_and_sum(x, None, None)[2])
    _, _, rstd = turbo.rms_norm_quantize(x[:0, :128].cuda(), weight.cuda(), 1e-5, *PAIRS[0])
    assert rstd.shape == (0,)


@needs_gpu
def test_what_the_kernels_cannot_read_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"multiple of 8 columns, got torch.float16 \[4, 16\]"):
        turbo.quantize_and_sum(torch.zeros(4, 16, dtype=torch.float16, device="cuda"), *PAIRS[0])
    with pytest.raises(ShapeError, match=r"hidden must be a multiple of 8, got x \[4, 24\]"):
        turbo.swiglu_quantize(torch.zeros(4, 24, dtype=torch.bfloat16, device="cuda"), *PAIRS[0])


@needs_gpu
def test_sums_beside_a_copy_that_is_not_padded_and_rows_at_an_odd_address(rng) -> None:
    """FP8 with a scale for a column has 33 bytes a row, no whole words; a contiguous x may begin anywhere."""
    whole = QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8")
    x = _values(33, 136, rng)
    for specs in (whole, whole[::-1]):
        _assert_same(turbo.quantize_and_sum(x.cuda(), *specs), reference.quantize_and_sum(x, *specs))
    odd = torch.cat((x.new_zeros(1), x.flatten())).cuda()[1:].view(33, 136)
    _assert_same(turbo.quantize_and_sum(odd, *PAIRS[0]), reference.quantize_and_sum(x, *PAIRS[0]))
