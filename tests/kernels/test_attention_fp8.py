"""FP8 attention: codes and scales against ml_dtypes and arithmetic, errors against float64, gradients against autograd."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Packing, ZigZag
from primus_turbo_plugin.kernels.reference import attention
from primus_turbo_plugin.kernels.reference.attention_fp8 import (
    MIN_EXPONENT,
    P_SCALE,
    decoded,
    quantize_blocks,
    rounded_probabilities,
    runs_of,
)
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS, AttentionPrecision
from primus_turbo_plugin.precision.formats import E4M3, E5M2, ElementType
from tests.functional.attention_oracle import attention_float64
from tests.tolerances import fp8_attention_bar

FP8 = AttentionPrecision(format="fp8")
ELEMENTS = {"e4m3": (E4M3, ml_dtypes.float8_e4m3fn), "e5m2": (E5M2, ml_dtypes.float8_e5m2)}


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def tensors(rng: torch.Generator, tokens: int, dim: int = 64, heads: int = 4, groups: int = 2) -> list[Tensor]:
    """q, k, v, dout."""
    shapes = [(tokens, n, dim) for n in (heads, groups, groups, heads)]
    return [torch.randn(1, *shape, generator=rng).bfloat16() for shape in shapes]


def both_passes(x: list[Tensor], options: AttentionOptions) -> dict[str, Tensor]:
    out, lse = attention.attention_fwd(*x[:3], options)
    grads = attention.attention_bwd(x[3], *x[:3], out, lse, options)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))


@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_are_the_nearest_numbers_under_the_smallest_sufficient_power_of_two(
    name: str, rng: torch.Generator
) -> None:
    element, dtype = ELEMENTS[name]
    runs = [(0, 300), (310, 90)]
    x = torch.randn(2, 420, 3, 40, generator=rng) * torch.exp(4 * torch.randn(2, 420, 3, 1, generator=rng))
    x[0, :5] = 0.0
    codes, scales = quantize_blocks(x, runs, element)
    assert torch.equal(torch.exp2(torch.log2(scales).round()), scales)
    for start, length in runs:
        for first in range(start, start + length, BLOCK_TOKENS):
            rows = slice(first, min(first + BLOCK_TOKENS, start + length))
            amax, scale = x[:, rows].abs().amax((1, 3)), scales[:, rows]
            assert bool((scale == scale[:, :1]).all())
            assert bool((amax <= element.max_value * scale[:, 0]).all())
            assert bool((amax > element.max_value * scale[:, 0] / 2).all())
    with np.errstate(over="ignore"):
        want = (x / scales[..., None]).numpy().astype(dtype).astype("f4") + 0.0
    inside = torch.zeros(420, dtype=torch.bool)
    for start, length in runs:
        inside[start : start + length] = True
    assert np.array_equal(codes.float().numpy()[:, inside], want[:, inside])
    assert not codes.view(torch.uint8).eq(0x80).any()  # no -0
    assert not codes[:, ~inside].float().any()


def test_the_largest_numbers_do_not_saturate_and_the_smallest_do_not_underflow_early() -> None:
    for amax, exponent in ((448.0, 0), (449.0, 1), (224.0, -1), (1.75, -8), (1.76, -7), (2.0, -7), (0.0, MIN_EXPONENT)):
        _, scales = quantize_blocks(torch.full((1, 1, 1, 1), amax), [(0, 1)])
        assert scales.item() == 2.0**exponent, amax
    for amax, exponent in ((57344.0, 0), (57345.0, 1), (3.4e38, 113)):
        _, scales = quantize_blocks(torch.full((1, 1, 1, 1), amax), [(0, 1)], E5M2)
        assert scales.item() == 2.0**exponent, amax
    _, scales = quantize_blocks(torch.full((1, 1, 1, 1), 1e-30), [(0, 1)])
    assert scales.item() == 2.0**MIN_EXPONENT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_number_that_is_none_shows_it(bad: float, rng: torch.Generator) -> None:
    x = tensors(rng, 300)
    x[1][0, 200, 0, 5] = bad
    codes, scales = quantize_blocks(x[1], [(0, 300)])
    assert bool(scales[0, 128:256, 0].isnan().all())
    assert int(scales.isnan().sum()) == 128
    assert not codes[0, 128:256, 0].float().any()
    out, _ = attention.attention_fwd(*x[:3], AttentionOptions(scale=0.125, precision=FP8))
    assert bool(out[0, :, :2].isnan().all())
    assert not out[0, :, 2:].isnan().any()


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_decoded_numbers_are_bf16_and_quantise_to_themselves(element: ElementType, rng: torch.Generator) -> None:
    """Also in blocks that begin elsewhere, as where ring attention cuts them, but for the smallest."""
    x = torch.randn(1, 500, 2, 48, generator=rng)
    once = decoded(x, [(0, 500)], element)
    assert torch.equal(once, once.bfloat16().float())
    assert torch.equal(decoded(once, [(0, 500)], element), once)
    moved = decoded(once[:, 37:], [(0, 463)], element)
    step = once.abs().max() / element.max_value * 2.0 ** (1 - element.bias - element.mantissa_bits)
    assert float((moved - once[:, 37:]).abs().max()) <= step.item()


def test_probabilities_round_alike_whatever_power_of_two_they_are_relative_to(rng: torch.Generator) -> None:
    p = torch.rand(10000, generator=rng)
    want = torch.from_numpy((p * P_SCALE).numpy().astype(ml_dtypes.float8_e4m3fn).astype("f4")) / P_SCALE
    assert torch.equal(rounded_probabilities(p), want)
    normal = p > 2.0**-10
    assert torch.equal(rounded_probabilities(p / 16)[normal] * 16, want[normal])


def test_blocks_start_with_their_sequence() -> None:
    """Packed sequences, and chunks in zig-zag order."""
    ends = torch.tensor([0, 100, 130, 400], dtype=torch.int32)
    starts = torch.tensor([0, 120, 160, 440], dtype=torch.int32)
    packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends, cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts)
    assert runs_of(AttentionMask(packing=packing), 500, 500) == ([(0, 100), (120, 30), (160, 270)],) * 2
    place = AttentionMask(causal=True, zigzag=ZigZag(rank=1, size=2))
    assert runs_of(place, 300, 600) == ([(0, 150), (150, 150)], [(0, 600)])


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2", "bf16"])
def test_errors_are_those_of_independent_roundings(gradients: str, rng: torch.Generator) -> None:
    for mask in (AttentionMask(), AttentionMask(causal=True), AttentionMask(causal=True, window=(200, 0))):
        x = tensors(rng, 500)
        options = AttentionOptions(scale=0.125, mask=mask)
        want = both_passes([t.double() for t in x], options)
        precision = AttentionPrecision(format="fp8", gradients=gradients)
        got = both_passes(x, AttentionOptions(scale=0.125, mask=mask, precision=precision))
        for name in ("out", "dq", "dk", "dv"):
            error, bar = relative(got[name], want[name]), fp8_attention_bar(name, gradients)
            assert bar / 2 < error < bar, (name, mask.causal, error)


def test_gradients_are_those_of_attention_at_the_decoded_numbers(rng: torch.Generator) -> None:
    """Autograd in float64 through attention at the decoded q, k and v, for the decoded dout. What is left is delta's share of the
    rounded probabilities: off by their error, 2.6 % of a row's sum of 64 products or more."""
    x = [t.double() for t in tensors(rng, 200)]
    options = AttentionOptions(scale=0.125, precision=FP8)
    got = both_passes(x, options)
    leaves = [decoded(t, [(0, 200)]).double().requires_grad_() for t in x[:3]]
    allowed = torch.ones(1, 1, 200, 200, dtype=torch.bool)
    out, _ = attention_float64(*(t.transpose(0, 1) for t in leaves), scale=0.125, allowed=allowed)
    grads = torch.autograd.grad(out, leaves, decoded(x[3], [(0, 200)]).double().transpose(0, 1))
    assert relative(got["out"], out.transpose(0, 1)) < 1.2 * 0.0264
    assert relative(got["dv"], grads[2]) < 1e-6
    for name, want in zip(("dq", "dk"), grads):
        assert relative(got[name], want) < 6e-3, name


def test_a_scale_for_every_block_beats_one_for_the_tensor_where_tokens_differ(rng: torch.Generator) -> None:
    """Two tokens of v and dout 2^16 times as large as the rest: with one scale the others sink into E4M3's last bits, with a
    scale a block only those in the same block do. (Up to about 2^12 a float's exponent is enough, and the two are alike.)"""
    x = tensors(rng, 640)
    for large in (x[2], x[3]):
        large[:, 400:402] *= 2.0**16
    options = AttentionOptions(scale=0.125, mask=AttentionMask(causal=True))
    want = both_passes([t.double() for t in x], options)
    errors = []
    for block in (BLOCK_TOKENS, 1 << 30):
        rounded = [decoded(t, [(0, 640)], E4M3, block).double() for t in x]
        got = both_passes(rounded, options)
        errors.append([relative(got[name][:, :384], want[name][:, :384]) for name in ("out", "dq")])
    (block_out, block_dq), (tensor_out, tensor_dq) = errors
    assert block_out < fp8_attention_bar("out") < tensor_out / 3
    assert block_dq < fp8_attention_bar("dq") < tensor_dq / 3


def test_a_row_that_sees_nothing_gives_zero(rng: torch.Generator) -> None:
    x = tensors(rng, 150)
    hidden = torch.zeros(1, 1, 150, 150, dtype=torch.bool)
    hidden[:, :, 7] = True
    got = both_passes(x, AttentionOptions(scale=0.125, mask=AttentionMask(masked=hidden), precision=FP8))
    assert not got["out"][:, 7].any()
    assert not got["dq"][:, 7].any()
    assert bool(got["lse"][..., 7].eq(-torch.inf).all())
    assert all(bool(got[name].isfinite().all()) for name in ("out", "dq", "dk", "dv"))
