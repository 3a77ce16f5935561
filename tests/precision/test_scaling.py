"""Scale rules: the table of the law, exact arithmetic on arbitrary fp32 numbers, and the FP8 scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_turbo_plugin.precision.formats import E2M1, E4M3, E5M2, ELEMENT_TYPES, ElementType, ScaleRule
from primus_turbo_plugin.precision.scaling import e8m0_reciprocal, e8m0_scale, fp8_scale
from tests.support import exact_mx

RULES = list(ScaleRule)
# amax, FLOOR, EVEN, CEIL, RCEIL for FP4
TABLE = [
    (0, 0, 0, 0, 0),
    (1, 125, 125, 125, 125),
    (1.5, 125, 125, 126, 125),
    (1.74, 125, 125, 126, 126),
    (1.75, 125, 126, 126, 126),
    (3.49, 126, 126, 127, 127),
    (3.5, 126, 127, 127, 127),
    (4, 127, 127, 127, 127),
    (6, 127, 127, 128, 127),
    (6.01, 127, 127, 128, 128),
    (7, 127, 128, 128, 128),
    (8, 128, 128, 128, 128),
]
finite_fp32 = st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False)


def scale_of(amax: float, rule: ScaleRule, element: ElementType) -> int:
    return int(e8m0_scale(torch.tensor([amax], dtype=torch.float32), rule, element))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"amax={row[0]}")
def test_fp4_scale_bytes_are_those_of_the_law(row: tuple[float, int, int, int, int]) -> None:
    rules = (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.CEIL, ScaleRule.RCEIL)
    assert tuple(scale_of(row[0], rule, E2M1) for rule in rules) == row[1:]


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
@pytest.mark.parametrize("rule", RULES, ids=str)
@settings(max_examples=300, deadline=None)
@given(amax=finite_fp32)
def test_any_finite_amax_gives_the_exactly_computed_byte(amax: float, rule: ScaleRule, element: ElementType) -> None:
    assert scale_of(amax, rule, element) == exact_mx.scale_byte(amax, str(rule), element.name)


@pytest.mark.parametrize("element", list(ELEMENT_TYPES.values()), ids=lambda e: e.name)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_bytes_are_exact_right_at_every_power_of_two_and_its_neighbours(rule: ScaleRule, element: ElementType) -> None:
    """Every binade of fp32, at the places where a rule changes its mind, and one ulp to either side."""
    mantissas = [0, 0x200000, 0x400000, 0x600000, 0x700000, 0x780000, 0x7FFFFF]
    bits = {e << 23 | m for e in range(255) for m in mantissas}
    bits |= {int(torch.tensor(2.0**e * element.max_value).view(torch.int32)) for e in range(-126, 112)}
    bits = {b + d for b in bits for d in (-1, 0, 1) if 0 <= b + d < 0x7F800000}
    amax = torch.tensor(sorted(bits), dtype=torch.int32).view(torch.float32)
    expected = [exact_mx.scale_byte(value, str(rule), element.name) for value in amax.tolist()]
    assert e8m0_scale(amax, rule, element).tolist() == expected


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_nan_and_inf_give_the_nan_byte(rule: ScaleRule) -> None:
    """Deliberately unlike libraries that saturate an Inf: a training run must see it."""
    assert [scale_of(value, rule, E2M1) for value in (math.nan, math.inf)] == [255, 255]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda e: e.name)
def test_ceil_and_rceil_never_saturate_and_the_others_by_less_than_a_binade(
    rule: ScaleRule, element: ElementType, rng: torch.Generator
) -> None:
    amax = (1 - torch.rand(4096, generator=rng)) * 2.0 ** torch.randint(-60, 60, (4096,), generator=rng)
    scaled = amax * e8m0_reciprocal(e8m0_scale(amax, rule, element))
    bound = element.max_value if rule in (ScaleRule.CEIL, ScaleRule.RCEIL) else 2.0 ** (element.emax + 1)
    assert scaled.max() <= bound
    assert scaled.min() >= element.max_value / 4  # and no more than two binades are wasted


def test_gaussian_blocks_saturate_as_often_as_the_law_says(rng: torch.Generator) -> None:
    amax = torch.randn(200_000, 32, generator=rng).abs().amax(-1)
    shares = {rule: (amax * e8m0_reciprocal(e8m0_scale(amax, rule, E2M1)) > 6).float().mean().item() for rule in RULES}
    assert shares[ScaleRule.FLOOR] == pytest.approx(0.296, abs=0.006)
    assert shares[ScaleRule.EVEN] == pytest.approx(0.127, abs=0.005)
    assert shares[ScaleRule.CEIL] == shares[ScaleRule.RCEIL] == 0


def test_reciprocal_is_the_exact_inverse_of_every_scale_a_rule_can_give() -> None:
    byte = torch.arange(254, dtype=torch.int32)
    inverse = e8m0_reciprocal(byte).double()
    assert torch.equal(inverse * 2.0 ** (byte.double() - 127), torch.ones(254, dtype=torch.float64))
    assert e8m0_reciprocal(torch.tensor([255], dtype=torch.int32)).item() == 0


def test_fp8_scale_is_amax_over_max_in_fp32(rng: torch.Generator) -> None:
    amax = torch.rand(1000, generator=rng) * 100 + 0.01
    for element in (E4M3, E5M2):
        expected = (amax.double() / element.max_value).float()
        assert torch.equal(fp8_scale(amax, element), expected)


def test_fp8_scale_of_zero_is_one_and_of_tiny_amax_the_smallest_normal_number() -> None:
    amax = torch.tensor([0.0, 1e-44, 2.0**-120])
    assert fp8_scale(amax, E4M3).tolist() == [1.0, 2.0**-126, 2.0**-126]


def test_fp8_scale_of_nan_and_inf_is_nan() -> None:
    assert fp8_scale(torch.tensor([math.nan, math.inf]), E4M3).isnan().all()
