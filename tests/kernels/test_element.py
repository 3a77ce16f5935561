"""Element rounding: every finite bf16 against ml_dtypes and gfloat, ties, saturation, packing, stochastic rounding."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_turbo_plugin.kernels.reference.element import pack_fp4, round_to_codes, unpack_fp4
from primus_turbo_plugin.precision.formats import E2M1, E4M3, E5M2, ElementType, element_table
from primus_turbo_plugin.precision.rounding import RoundingKey, random_words
from tests.support import exact_mx

ELEMENTS = [E2M1, E4M3, E5M2]
each_element = pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)


def codes_of(values: list[float] | torch.Tensor, element: ElementType = E2M1) -> list[int]:
    return round_to_codes(torch.as_tensor(values, dtype=torch.float32).clone(), element).tolist()


def every_finite_bf16() -> torch.Tensor:
    bits = torch.arange(0x10000, dtype=torch.int32)
    values = (bits << 16).view(torch.float32)
    return values[values.isfinite()]


def value_of(codes: torch.Tensor, element: ElementType) -> torch.Tensor:
    return element_table(element)[codes.long(), 0]


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (7, 6), (1e9, 6)]
)
def test_ties_go_to_even_and_large_numbers_saturate(value: float, rounded: float) -> None:
    """The ties table of the law: ties-away rounding would give 0.5, 1.5, 3 and 6 for 0.25, 1.25, 2.5 and 5."""
    codes = torch.tensor(codes_of([value, -value]), dtype=torch.uint8)
    assert value_of(codes, E2M1).tolist() == [rounded, -rounded]


def test_minus_a_quarter_rounds_to_minus_zero() -> None:
    assert codes_of([-0.25, 0.0, -0.0]) == [8, 0, 8]


@each_element
def test_every_value_of_the_format_is_its_own_code(element: ElementType) -> None:
    codes = torch.arange(element.max_code + 1, dtype=torch.uint8)
    assert codes_of(value_of(codes, element), element) == codes.tolist()


@each_element
def test_every_finite_bf16_rounds_as_in_ml_dtypes(element: ElementType) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    np = pytest.importorskip("numpy")
    dtype = {"e2m1": ml_dtypes.float4_e2m1fn, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    x = every_finite_bf16()
    saturated = x.clamp(-element.max_value, element.max_value).numpy()  # ml_dtypes overflows FP8 to NaN or Inf
    expected = saturated.astype(dtype[element.name]).view(np.uint8).tolist()
    assert codes_of(x, element) == expected


@each_element
def test_every_finite_bf16_rounds_as_in_gfloat(element: ElementType) -> None:
    gfloat = pytest.importorskip("gfloat", reason="gfloat is not installed")
    formats = pytest.importorskip("gfloat.formats")
    info = getattr(formats, f"format_info_ocp_{element.name}")
    x = every_finite_bf16()
    expected = gfloat.round_ndarray(info, x.double().numpy(), gfloat.RoundMode.TiesToEven, sat=True)
    rounded = value_of(round_to_codes(x.clone(), element), element)
    assert torch.equal(rounded.double(), torch.from_numpy(expected))


@each_element
def test_the_fp32_neighbours_of_every_tie_go_to_the_nearer_side(element: ElementType) -> None:
    """bf16 cannot see a wrong sticky bit: one ulp of fp32 to either side of each midpoint decides."""
    values = [float(v) for v in exact_mx.VALUES[element.name]]
    ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(values)])
    below = torch.nextafter(ties, torch.zeros_like(ties))
    above = torch.nextafter(ties, torch.full_like(ties, math.inf))
    count = len(ties)
    assert codes_of(below, element) == list(range(count))
    assert codes_of(above, element) == list(range(1, count + 1))
    assert codes_of(ties, element) == [code + code % 2 for code in range(count)]


@each_element
@settings(max_examples=300, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_any_fp32_rounds_as_in_exact_arithmetic(value: float, element: ElementType) -> None:
    expected = exact_mx.code(Fraction(value), math.copysign(1, value) < 0, element.name)
    assert codes_of([value], element) == [expected]


def test_packing_puts_the_even_element_in_the_low_nibble() -> None:
    """4 then 1 is the byte 0x26, along either axis."""
    codes = torch.tensor([[6, 2, 15, 0]], dtype=torch.uint8)
    assert pack_fp4(codes, 1).tolist() == [[0x26, 0x0F]]
    assert pack_fp4(codes.t().contiguous(), 0).tolist() == [[0x26], [0x0F]]


def test_unpacking_undoes_packing_of_every_pair_of_codes() -> None:
    first, second = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack((first.flatten(), second.flatten()), 1).to(torch.uint8)
    assert torch.equal(unpack_fp4(pack_fp4(codes, 1)), codes)
    assert pack_fp4(codes, 1).unique().numel() == 256


@each_element
def test_stochastic_rounding_lands_on_a_neighbour_and_is_right_on_average(element: ElementType) -> None:
    """Unbiased within five standard deviations, at every place between two neighbours, below and above the smallest normal."""
    largest = element.max_code
    low = torch.tensor([0, 1, largest // 2, largest - 2, largest - 1], dtype=torch.uint8)
    a, b = value_of(low, element), value_of(low + 1, element)
    share = torch.tensor([0.0, 0.03, 0.25, 0.5, 0.9])
    x = (a[:, None] + share * (b - a)[:, None]).flatten()
    trials = 20_000
    words = random_words(RoundingKey(seed=1, draw=2, tensor=3, rank=0), range(trials), range(x.numel()), x.numel())
    codes = round_to_codes(x.repeat(trials, 1), element, words)
    assert ((codes == low.repeat_interleave(5)) | (codes == low.repeat_interleave(5) + 1)).all()
    up = (codes != low.repeat_interleave(5)).double().mean(0).view(5, 5)
    spread = (share * (1 - share) / trials).sqrt()
    assert ((up - share).abs() <= 5 * spread + 1e-6).all()


@each_element
def test_stochastic_rounding_leaves_representable_values_alone(element: ElementType) -> None:
    codes = torch.arange(element.max_code + 1, dtype=torch.uint8)
    x = value_of(codes, element)
    for words in (torch.zeros(len(x), dtype=torch.int64), torch.full((len(x),), 0xFFFFFFFF)):
        assert torch.equal(round_to_codes(torch.cat((x, -x)), element, words.repeat(2))[: len(x)], codes)


def test_stochastic_rounding_uses_the_upper_24_bits_of_a_word_as_a_fraction() -> None:
    """Documented, since kernels must reproduce it: up exactly when (word >> 8) / 2^24 < fraction."""
    x = torch.full((4,), (0.25 + 2.0**-20) * 0.5)  # a quarter of the way from 0 to 0.5, and 16 / 2^24
    words = torch.tensor([0x40000FFF, 0x40000F00, 0x40001000, 0])
    assert round_to_codes(x, E2M1, words).tolist() == [1, 1, 0, 1]
