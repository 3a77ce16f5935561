"""QuantSpec: defaults, derived shapes, and refusals that name key, value and remedy."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.formats import FORMAT_BLOCKS, FORMAT_ELEMENTS, Format, ScaleRule
from primus_turbo_plugin.precision.quant_spec import HADAMARD_SIZES, QuantSpec


def test_defaults_follow_the_format() -> None:
    mxfp4, mxfp8, fp8 = (QuantSpec(format=name) for name in ("mxfp4", "mxfp8", "fp8"))  # type: ignore[arg-type]
    assert (mxfp4.element, mxfp4.scale_rule, mxfp4.block) == ("e2m1", ScaleRule.EVEN, "1x32")
    assert (mxfp8.element, mxfp8.scale_rule, mxfp8.block) == ("e4m3", ScaleRule.RCEIL, "1x32")
    assert (fp8.element, fp8.scale_rule, fp8.block) == ("e4m3", None, "tensorwise")
    assert (mxfp4.hadamard, mxfp4.random_signs, mxfp4.rounding) == (0, False, "nearest")


def test_strings_become_enums_and_equal_specs_are_equal_and_hashable() -> None:
    a = QuantSpec(format="mxfp4", scale_rule="floor")  # type: ignore[arg-type]
    b = QuantSpec(format=Format.MXFP4, scale_rule=ScaleRule.FLOOR, element="e2m1", block="1x32")
    assert a.format is Format.MXFP4
    assert a.scale_rule is ScaleRule.FLOOR
    assert a == b
    assert len({a, b}) == 1


def test_bf16_is_not_quantised() -> None:
    assert not QuantSpec.bf16().is_quantized
    assert QuantSpec.bf16() == QuantSpec()
    assert str(QuantSpec()) == "bf16"


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantSpec().hadamard = 16  # type: ignore[misc]


@pytest.mark.parametrize("fmt", [Format.MXFP4, Format.MXFP8, Format.FP8], ids=str)
def test_every_listed_combination_is_accepted_and_has_its_own_description(fmt: Format) -> None:
    rules = [None, *ScaleRule] if fmt is not Format.FP8 else [None]
    names = set()
    combinations = itertools.product(
        FORMAT_ELEMENTS[fmt], rules, FORMAT_BLOCKS[fmt], HADAMARD_SIZES, ("nearest", "stochastic")
    )
    specs = [
        QuantSpec(format=fmt, element=e, scale_rule=r, block=b, hadamard=h, rounding=q)  # type: ignore[arg-type]
        for e, r, b, h, q in combinations
    ]
    names = {str(spec) for spec in specs}
    assert len(names) == len(set(specs))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": "mxpf4"}, ["format", "'mxpf4'", "Did you mean mxfp4?"]),
        ({"format": "mxfp4", "element": "e4m3"}, ["element", "'e4m3'", "mxfp4"]),
        ({"format": "mxfp8", "element": "e2m1"}, ["element", "'e2m1'", "e4m3, e5m2"]),
        ({"format": "mxfp4", "scale_rule": "round"}, ["scale_rule", "'round'", "floor, even, ceil, rceil"]),
        ({"format": "mxfp4", "block": "1x16"}, ["block", "'1x16'", "1x32, 32x32"]),
        ({"format": "mxfp8", "block": "128x128"}, ["block", "'128x128'", "mxfp8"]),
        ({"format": "fp8", "block": "1x32"}, ["block", "'1x32'", "tensorwise, rowwise, 1x128, 128x128"]),
        ({"format": "fp8", "scale_rule": "even"}, ["scale_rule", "even", "choose mxfp8"]),
        ({"format": "mxfp4", "hadamard": 8}, ["hadamard", "8", "0, 16, 32, 64, 128"]),
        ({"format": "mxfp4", "hadamard": True}, ["hadamard", "True"]),
        ({"format": "mxfp4", "hadamard": "16"}, ["hadamard", "'16'"]),
        ({"format": "mxfp4", "random_signs": True}, ["random_signs", "hadamard: 0", "16, 32, 64 or 128"]),
        ({"format": "mxfp4", "rounding": "stochastc"}, ["rounding", "'stochastc'", "Did you mean stochastic?"]),
        ({"hadamard": 16}, ["hadamard: 16", "no effect", "bf16", "mxfp4"]),
        ({"rounding": "stochastic"}, ["rounding: stochastic", "no effect"]),
        ({"element": "e4m3"}, ["element: e4m3", "no effect"]),
        ({"block": "1x32"}, ["block: 1x32", "no effect"]),
        ({"scale_rule": "even"}, ["scale_rule: even", "no effect"]),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_key_value_and_remedy(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        QuantSpec(**arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "contraction", "padded", "scales"),
    [
        ({"format": "mxfp4"}, 100, 128, (70, 4)),
        ({"format": "mxfp4", "block": "32x32"}, 100, 128, (3, 4)),
        ({"format": "mxfp4", "hadamard": 16}, 33, 64, (70, 2)),
        ({"format": "mxfp4", "hadamard": 128}, 130, 256, (70, 8)),
        ({"format": "mxfp8"}, 1, 32, (70, 1)),
        ({"format": "fp8"}, 33, 33, (1, 1)),
        ({"format": "fp8", "block": "rowwise"}, 33, 33, (70, 1)),
        ({"format": "fp8", "block": "rowwise", "hadamard": 16}, 33, 48, (70, 1)),
        ({"format": "fp8", "block": "1x128"}, 130, 256, (70, 2)),
        ({"format": "fp8", "block": "128x128"}, 256, 256, (1, 2)),
        ({"format": "mxfp4"}, 0, 0, (70, 0)),
    ],
    ids=str,
)
def test_padding_and_scale_shapes(
    arguments: dict[str, object], contraction: int, padded: int, scales: tuple[int, int]
) -> None:
    spec = QuantSpec(**arguments)  # type: ignore[arg-type]
    assert spec.padded(contraction) == padded
    assert spec.scale_shape(70, contraction) == scales


@pytest.mark.parametrize(
    "spec", [QuantSpec.bf16(), QuantSpec(format="mxfp4", hadamard=16), QuantSpec(format="fp8")], ids=str
)
def test_copies_and_pickles_are_equal_and_know_what_follows_from_their_fields(spec) -> None:
    for other in (copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), dataclasses.replace(spec)):
        assert other == spec
        assert hash(other) == hash(spec)
        assert (other.is_quantized, other.is_mx) == (spec.is_quantized, spec.is_mx)
        if spec.is_quantized:
            assert other.padded(33) == spec.padded(33)
            assert other.scale_shape(3, 300) == spec.scale_shape(3, 300)


def test_replaced_fields_replace_what_follows_from_them() -> None:
    spec = QuantSpec(format="mxfp4")
    rotated = dataclasses.replace(spec, hadamard=128)
    assert (spec.contraction_multiple, rotated.contraction_multiple) == (32, 128)
    assert len({spec, rotated, QuantSpec(format="mxfp4", block="1x32")}) == 2
