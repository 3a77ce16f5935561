"""Recipes: presets, overrides at every level, and what contradicts itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.reference.gemm import gemm_nt
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.presets import ALIASES, PRESETS, SUMMARIES
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import LinearPrecision, Recipe
from primus_turbo_plugin.precision.rounding import RoundingKey

SLOTS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")

_MX4 = "mxfp4(e2m1, 1x32, even)"
_MX4_2D = "mxfp4(e2m1, 32x32, even)"
_MX4_H16 = "mxfp4(e2m1, 1x32, even, H16)"
_MX8 = "mxfp8(e4m3, 1x32, rceil)"
_MX8_E5 = "mxfp8(e5m2, 1x32, rceil)"
_F8_128 = "fp8(e4m3, 1x128)"

# Written out by hand from the recipes' descriptions, in the order of SLOTS.
EXPECTED: dict[str, tuple[str, ...]] = {
    "bf16": ("bf16",) * 6,
    "mxfp8": (_MX8,) * 6,
    "mxfp8_hybrid": (_MX8, _MX8, _MX8_E5, _MX8, _MX8_E5, _MX8),
    "fp8_tensorwise": ("fp8(e4m3, tensorwise)",) * 6,
    "fp8_rowwise": ("fp8(e4m3, rowwise)",) * 6,
    "fp8_block128": (_F8_128, "fp8(e4m3, 128x128)", _F8_128, "fp8(e4m3, 128x128)", _F8_128, _F8_128),
    "mxfp4_wgrad": (_MX4, _MX4_2D, _MX4, _MX4_2D, _MX4_H16, _MX4_H16),
    "mxfp4_all": (_MX4_H16,) * 6,
    "mxfp4_none": (_MX4,) * 6,
}


def slots_of(recipe: Recipe | LinearPrecision) -> dict[str, str]:
    linear = recipe.linear() if isinstance(recipe, Recipe) else recipe
    return {slot: str(linear.spec(*slot.split("."))) for slot in SLOTS}


def spec_of(recipe: Recipe, slot: str) -> QuantSpec:
    return recipe.linear().spec(*slot.split("."))


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_gives_each_operand_what_its_description_says(name: str) -> None:
    assert slots_of(Recipe.preset(name)) == dict(zip(SLOTS, EXPECTED[name]))


def test_every_preset_is_checked_here_and_described() -> None:
    assert set(PRESETS) == set(EXPECTED) == set(SUMMARIES)


def test_mxfp4_means_the_wgrad_preset() -> None:
    assert dict(ALIASES) == {"mxfp4": "mxfp4_wgrad"}
    assert Recipe.preset("mxfp4").linear() == Recipe.preset("mxfp4_wgrad").linear()


def test_no_preset_rounds_stochastically_or_draws_random_signs() -> None:
    for name in PRESETS:
        linear = Recipe.preset(name).linear()
        assert not linear.is_stochastic
        assert not linear.has_random_signs
        assert linear.is_quantized == (name != "bf16")


def test_bf16_is_not_quantised_anywhere() -> None:
    assert LinearPrecision.bf16() == Recipe.preset("bf16").linear()
    assert not LinearPrecision.bf16().is_quantized


def test_linear_carries_padding_and_seeds() -> None:
    linear = Recipe.preset("mxfp4").linear(padding="refuse", signs_seed=3, rounding_seed=5)
    assert (linear.padding, linear.signs_seed, linear.rounding_seed) == ("refuse", 3, 5)
    assert linear != Recipe.preset("mxfp4").linear()


@pytest.mark.parametrize("level", ["", "x", "fprop", "fprop.x"])
def test_override_reaches_exactly_the_operands_of_its_level(level: str) -> None:
    reached = {
        "": set(SLOTS),
        "x": {"fprop.x", "wgrad.x"},
        "fprop": {"fprop.x", "fprop.w"},
        "fprop.x": {"fprop.x"},
    }[level]
    overrides: dict[str, Any] = {"scale_rule": "floor"}
    for part in reversed(level.split(".") if level else []):
        overrides = {part: overrides}
    changed = Recipe.preset("mxfp4_none", **overrides)
    plain = Recipe.preset("mxfp4_none")
    assert {slot for slot in SLOTS if spec_of(changed, slot) != spec_of(plain, slot)} == reached
    assert {str(spec_of(changed, slot).scale_rule) for slot in reached} == {"floor"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "mxfp8"),
        ("element", "e5m2"),
        ("scale_rule", "ceil"),
        ("block", "32x32"),
        ("rounding", "stochastic"),
    ],
)
@pytest.mark.parametrize("slot", SLOTS)
def test_every_switch_can_be_set_for_every_operand_of_every_gemm(slot: str, field: str, value: str) -> None:
    gemm, operand = slot.split(".")
    recipe = Recipe.preset("mxfp8", **{gemm: {operand: {field: value}}})
    if field == "format":
        recipe = Recipe.preset("mxfp4_none", **{gemm: {operand: {field: value}}})
    assert str(getattr(spec_of(recipe, slot), field)) == value
    others = [other for other in SLOTS if other != slot]
    assert len({spec_of(recipe, other) for other in others}) == 1


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("signs", [False, True])
def test_rotation_can_be_set_for_one_gemm(gemm: str, size: int, signs: bool) -> None:
    linear = Recipe.preset("mxfp4_none", **{gemm: {"hadamard": size, "random_signs": signs}}).linear()
    for other in ("fprop", "dgrad", "wgrad"):
        wanted = (size, signs) if other == gemm else (0, False)
        assert [(spec.hadamard, spec.random_signs) for spec in linear.gemm(other)] == [wanted, wanted]
    assert linear.has_random_signs == signs


def test_more_specific_override_wins_whatever_the_order_in_the_file() -> None:
    levels = {"scale_rule": "floor", "x": {"scale_rule": "ceil"}, "wgrad": {"x": {"scale_rule": "rceil"}}}
    for order in itertools.permutations(levels):
        recipe = Recipe.from_value({"preset": "mxfp4_none", **{key: levels[key] for key in order}})
        rules = {slot: str(spec_of(recipe, slot).scale_rule) for slot in ("fprop.w", "fprop.x", "wgrad.x")}
        assert rules == {"fprop.w": "floor", "fprop.x": "ceil", "wgrad.x": "rceil"}


def test_overrides_written_in_any_order_make_equal_recipes_with_equal_hashes() -> None:
    one = Recipe.from_value({"preset": "mxfp4", "x": {"scale_rule": "ceil"}, "fprop": {"w": {"scale_rule": "even"}}})
    two = Recipe.from_value({"fprop": {"w": {"scale_rule": "even"}}, "x": {"scale_rule": "ceil"}, "preset": "mxfp4"})
    assert one == two
    assert hash(one) == hash(two)
    assert one != Recipe.preset("mxfp4")


def test_value_round_trips() -> None:
    value = {
        "preset": "mxfp4",
        "dy": {"rounding": "stochastic"},
        "wgrad": {"hadamard": 32, "x": {"scale_rule": "floor"}},
    }
    recipe = Recipe.from_value(value)
    assert recipe.to_value() == value
    assert Recipe.from_value(recipe.to_value()) == recipe
    assert Recipe.preset("mxfp4_all").to_value() == "mxfp4_all"


def test_name_shows_that_a_preset_was_changed() -> None:
    assert Recipe.preset("mxfp4").name == "mxfp4"
    assert Recipe.preset("mxfp4", wgrad={"hadamard": 32}).name == "mxfp4*"


def test_gemm_can_be_taken_from_another_preset() -> None:
    recipe = Recipe.preset("bf16", fprop="mxfp4_none", wgrad={"preset": "mxfp4_all", "hadamard": 32})
    assert slots_of(recipe) == dict(zip(SLOTS, (_MX4, _MX4, "bf16", "bf16", *(_MX4_H16.replace("H16", "H32"),) * 2)))


def test_format_resets_an_operand_to_its_defaults_and_keeps_what_is_set_beside_it() -> None:
    recipe = Recipe.preset("mxfp4", wgrad={"format": "mxfp8", "scale_rule": "floor"})
    assert str(spec_of(recipe, "wgrad.x")) == "mxfp8(e4m3, 1x32, floor)"  # the preset's H16 is gone


def _study(gemms: tuple[str, ...], stabiliser: str) -> Recipe:
    changes: dict[str, Any] = {
        "none": {},
        "stochastic": {operand: {"rounding": "stochastic"} for operand in ("x", "w", "dy")},
        "random H16": {"hadamard": 16, "random_signs": True},
        "H16": {"hadamard": 16},
        "H32": {"hadamard": 32},
    }[stabiliser]
    operands = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    overrides = {
        gemm: {
            "preset": "mxfp4_none",
            **{k: v for k, v in changes.items() if k not in ("x", "w", "dy") or k in operands[gemm]},
        }
        for gemm in gemms
    }
    return Recipe.preset("bf16", **overrides)


@pytest.mark.parametrize("gemms", [("fprop",), ("fprop", "dgrad"), ("fprop", "dgrad", "wgrad")])
@pytest.mark.parametrize("stabiliser", ["none", "stochastic", "random H16", "H16", "H32"])
def test_every_cell_of_the_stabiliser_study_can_be_written(gemms: tuple[str, ...], stabiliser: str) -> None:
    linear = _study(gemms, stabiliser).linear()
    for gemm in ("fprop", "dgrad", "wgrad"):
        for spec in linear.gemm(gemm):
            assert spec.is_quantized == (gemm in gemms)
            if gemm in gemms:
                assert spec.hadamard == {"random H16": 16, "H16": 16, "H32": 32}.get(stabiliser, 0)
                assert spec.random_signs == (stabiliser == "random H16")
                assert spec.rounding == ("stochastic" if stabiliser == "stochastic" else "nearest")


def test_weights_alone_can_be_quantised() -> None:
    linear = Recipe.preset("bf16", w="mxfp4_none").linear()
    assert [str(spec) for spec in linear.gemm("fprop")] == ["bf16", _MX4]
    assert not any(spec.is_quantized for spec in linear.gemm("wgrad"))


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        # a rotation that is not the same on both operands changes the product
        ("mxfp4_none", {"wgrad": {"x": {"hadamard": 16}}}, ["wgrad", "rotated alike", "hadamard 16", "hadamard 0"]),
        ("mxfp4", {"wgrad": {"x": {"hadamard": 32}}}, ["wgrad", "hadamard 16", "hadamard 32"]),
        ("mxfp4", {"wgrad": {"dy": {"random_signs": True}}}, ["wgrad", "random_signs true", "random_signs false"]),
        ("mxfp4", {"wgrad": {"x": "bf16"}}, ["wgrad", "not quantised"]),
        ("mxfp4_all", {"x": {"hadamard": 0}}, ["fprop", "rotated alike"]),
        # a 2D block's scale serves both directions
        ("mxfp4", {"dgrad": {"hadamard": 16}}, ["dgrad.w", "32x32", "hadamard 16", "block: 1x32"]),
        ("mxfp4", {"fprop": {"hadamard": 16}}, ["fprop.w", "32x32", "1x32"]),
        ("mxfp4_all", {"w": {"block": "32x32"}}, ["32x32", "hadamard 16"]),
        ("fp8_block128", {"fprop": {"hadamard": 16}}, ["fprop.w", "128x128", "block: 1x128"]),
        ("mxfp4", {"fprop": {"w": {"scale_rule": "floor"}}}, ["w:", "fprop", "dgrad", "scale_rule"]),
        ("mxfp4", {"dgrad": {"w": {"rounding": "stochastic"}}}, ["w:", "rounding"]),
        (
            "mxfp8",
            {"fprop": {"x": {"block": "32x32"}}, "wgrad": {"x": {"block": "32x32", "element": "e5m2"}}},
            ["x:", "element"],
        ),
        # switches that would do nothing
        ("bf16", {"hadamard": 16}, ["hadamard", "16", "bf16"]),
        ("bf16", {"fprop": {"x": {"rounding": "stochastic"}}}, ["fprop.x", "rounding", "bf16"]),
        ("mxfp4_none", {"random_signs": True}, ["random_signs", "hadamard"]),
        ("fp8_tensorwise", {"scale_rule": "even"}, ["scale_rule", "fp8"]),
        # values that do not go together
        ("mxfp4", {"element": "e4m3"}, ["element", "e2m1", "e4m3"]),
        ("mxfp4", {"x": {"block": "1x128"}}, ["block", "1x128", "1x32"]),
        ("fp8_rowwise", {"block": "1x32"}, ["block", "1x32", "tensorwise"]),
        ("mxfp4_none", {"hadamard": 24}, ["hadamard", "24", "16"]),
        # names
        ("mxfp5", {}, ["mxfp5", "mxfp4", "did you mean"]),
        ("mxfp4", {"hadamrd": 16}, ["hadamrd", "did you mean 'hadamard'"]),
        ("mxfp4", {"wgrd": {"hadamard": 16}}, ["wgrd", "did you mean 'wgrad'"]),
        ("mxfp4", {"wgrad": {"w": {"block": "1x32"}}}, ["wgrad", "'w'", "dy", "x"]),
        ("mxfp4", {"x": {"fprop": {"block": "1x32"}}}, ["recipe.x", "'fprop'"]),
        ("mxfp4", {"fprop": "mxpf8"}, ["recipe.fprop.preset", "mxpf8", "mxfp8"]),
        ("mxfp4", {"scale_rule": "evn"}, ["scale_rule", "evn", "did you mean 'even'"]),
        ("mxfp4", {"format": "mx4"}, ["format", "mx4"]),
        # types
        ("mxfp4", {"hadamard": "16"}, ["hadamard", "'16'", "integer"]),
        ("mxfp4", {"hadamard": True}, ["hadamard", "True"]),
        ("mxfp4_all", {"random_signs": 1}, ["random_signs", "true or false", "1"]),
        ("mxfp4", {"fprop": 3}, ["recipe.fprop", "3"]),
        ("mxfp4", {"fprop": {"preset": "mxfp8", "format": "mxfp8"}}, ["preset", "format"]),
        # ambiguity
        (
            "mxfp4_none",
            {"x": {"scale_rule": "ceil"}, "fprop": {"scale_rule": "floor"}},
            ["'x'", "'fprop'", "scale_rule"],
        ),
        ("mxfp4_none", {"w": {"block": "32x32"}, "dgrad": "mxfp8"}, ["'w'", "'dgrad'", "preset"]),
        # weights are rounded stochastically only where named
        ("mxfp4_none", {"rounding": "stochastic"}, ["rounding", "whole recipe", "weights"]),
        ("mxfp4_none", {"dgrad": {"rounding": "stochastic"}}, ["rounding", "'dgrad'", "weights"]),
    ],
)
def test_contradiction_is_an_error_that_names_key_value_and_remedy(
    preset: str, overrides: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        Recipe.preset(preset, **overrides)
    message = str(error.value)
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("mxfp4_none", {"x": {"scale_rule": "ceil"}, "fprop": {"scale_rule": "ceil"}}),  # they agree
        ("mxfp4_none", {"x": {"scale_rule": "ceil"}, "fprop": {"scale_rule": "floor", "x": {"scale_rule": "ceil"}}}),
        ("mxfp4_none", {"dy": {"rounding": "stochastic"}, "wgrad": "bf16"}),  # nothing left to disagree about
        ("mxfp4_none", {"rounding": "stochastic", "w": {"rounding": "nearest"}}),
        ("mxfp4_none", {"w": {"rounding": "stochastic"}}),
        ("mxfp4", {"w": {"rounding": "stochastic"}}),  # a 2D block, both directions alike
        ("mxfp4_none", {"rounding": "stochastic", "fprop": "bf16", "dgrad": "bf16"}),  # no quantised weights left
        ("mxfp4", {"dgrad": {"hadamard": 16, "w": {"block": "1x32"}}}),  # what the error recommends
        ("mxfp4", {"fprop": {"w": {"block": "1x32", "scale_rule": "floor"}}}),
        ("fp8_tensorwise", {"hadamard": 16}),
        ("fp8_rowwise", {"wgrad": {"hadamard": 128, "random_signs": True}}),
    ],
)
def test_unusual_but_possible_recipe_is_accepted(preset: str, overrides: dict[str, Any]) -> None:
    assert Recipe.preset(preset, **overrides).linear().is_quantized


def test_linear_precision_checks_what_is_built_by_hand_too() -> None:
    rotated, plain = QuantSpec(format="mxfp4", hadamard=16), QuantSpec(format="mxfp4")
    six = dict.fromkeys((slot.replace(".", "_") for slot in SLOTS), plain)
    with pytest.raises(ConfigError, match=r"dgrad.*rotated alike"):
        LinearPrecision(**{**six, "dgrad_dy": rotated})
    with pytest.raises(ConfigError, match="padding"):
        LinearPrecision(**six, padding="maybe")
    with pytest.raises(ConfigError, match="rounding_seed"):
        LinearPrecision(**six, rounding_seed=-1)


def test_asking_for_an_operand_a_gemm_does_not_have_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"'w'.*'wgrad'.*fprop\.w"):
        LinearPrecision.bf16().spec("wgrad", "w")
    with pytest.raises(ConfigError, match="did you mean 'wgrad'"):
        LinearPrecision.bf16().gemm("wgrd")


def _random_overrides(rng: torch.Generator) -> dict[str, Any]:
    """Overrides at random levels, most of them sensible alone and not together."""

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    def fields() -> dict[str, Any]:
        values = {
            "preset": pick(*PRESETS),
            "scale_rule": pick("floor", "even", "ceil", "rceil"),
            "block": pick("1x32", "32x32", "rowwise", "128x128"),
            "hadamard": pick(0, 16, 32, 64),
            "random_signs": pick(True, False),
            "rounding": pick("nearest", "stochastic"),
        }
        return {key: value for key, value in values.items() if pick(True, False, False, False)}

    operands = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
    overrides: dict[str, Any] = {}
    for gemm in pick((), ("fprop",), ("wgrad",), ("dgrad", "wgrad"), tuple(operands)):
        overrides[gemm] = {**fields(), **({pick(*operands[gemm]): fields()} if pick(True, False) else {})}
    if pick(True, False, False):
        overrides[pick("x", "w", "dy")] = fields()
    return overrides


def test_whatever_recipe_is_accepted_computes_the_product(rng: torch.Generator) -> None:
    """The checks leave no combination through that multiplies something else: 3 GEMMs of random recipes against fp64."""
    x, w, dy = (torch.randn(shape, generator=rng) for shape in ((64, 128), (96, 128), (64, 96)))
    copies = {
        "fprop": ((x, False), (w, False), x @ w.T),
        "dgrad": ((dy, False), (w, True), dy @ w),
        "wgrad": ((dy, True), (x, True), dy.T @ x),
    }
    accepted = refused = 0
    while accepted < 40:
        preset = list(PRESETS)[int(torch.randint(len(PRESETS), (), generator=rng))]
        try:
            linear = Recipe.preset(preset, **_random_overrides(rng)).linear(signs_seed=7)
        except ConfigError:
            refused += 1
            continue
        accepted += 1
        for gemm, ((a, a_columns), (b, b_columns), wanted) in copies.items():
            operands = []
            for index, (tensor, columnwise, spec) in enumerate(zip((a, b), (a_columns, b_columns), linear.gemm(gemm))):
                key = RoundingKey(seed=1, draw=accepted, tensor=index, rank=0)
                plain = tensor.T.contiguous() if columnwise else tensor
                quantized = spec.is_quantized
                operands.append(
                    quantize(tensor, spec, columnwise=columnwise, key=key, signs_seed=7) if quantized else plain
                )
            got = gemm_nt(*operands, out_dtype=torch.float32)
            error = (got - wanted).norm() / wanted.norm()
            # The coarsest (E2M1, ceil, 32x32, stochastic) reaches 0.36; operands that do not belong together give about 1.4.
            assert error < 0.5, f"{gemm} of {linear}: {error:.2f}"
    assert refused, "the sampler no longer reaches contradictions"
