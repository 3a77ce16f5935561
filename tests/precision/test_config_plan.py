"""What each module of a model gets: patterns, pinned layers, kernel orders, shape checks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan, check_shapes, contraction_multiple
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import LinearPrecision, Recipe

LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def paths(num_layers: int) -> list[tuple[str, int]]:
    return [(f"decoder.layers.{layer}.{name}", layer) for layer in range(num_layers) for name in LINEARS]


def recipes_of(config: TurboConfig, num_layers: int) -> dict[str, str]:
    return {path: config.plan(path, layer, num_layers).recipe for path, layer in paths(num_layers)}


def test_module_built_without_a_configuration_is_bf16() -> None:
    plan = ModulePlan.default()
    assert plan.path == ""
    assert plan.precision == LinearPrecision.bf16()
    assert plan.kernels.get("gemm_nt") is None


def test_plan_carries_path_precision_padding_seeds_and_kernels() -> None:
    config = TurboConfig.from_dict(
        {
            "precision": "mxfp4",
            "padding": "refuse",
            "signs_seed": 4,
            "rounding_seed": 5,
            "kernels": {"gemm_nt": ["torch"]},
        }
    )
    plan = config.plan("decoder.layers.3.mlp.linear_fc1", 3, 8)
    assert plan.path == "decoder.layers.3.mlp.linear_fc1"
    assert plan.layer_number == 3
    assert plan.precision == Recipe.preset("mxfp4").linear(padding="refuse", signs_seed=4, rounding_seed=5)
    assert plan.kernels["gemm_nt"] == ("torch",)
    assert (plan.recipe, plan.reason) == ("mxfp4", "precision")


def test_first_and_last_layers_stay_in_bf16_and_all_between_do_not() -> None:
    config = TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": 2, "bf16_last_layers": 3})
    for path, layer in paths(9):
        plan = config.plan(path, layer, 9)
        pinned = layer in (0, 1, 6, 7, 8)
        assert plan.precision.is_quantized == (not pinned), path
        assert plan.reason == ("bf16_first_layers" if layer < 2 else "bf16_last_layers" if layer > 5 else "precision")


def test_layer_pinned_to_bf16_stays_bf16_whatever_patterns_say() -> None:
    """A layer pinned to BF16 that runs quantised gives NaN from the first step; it happened elsewhere."""
    config = TurboConfig.from_dict(
        {
            "precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}},
            "modules": {"*": "mxfp4_all", "decoder.layers.*.mlp.linear_fc2": "mxfp8"},
            "bf16_first_layers": 1,
            "bf16_last_layers": 1,
        }
    )
    for path, layer in paths(4):
        plan = config.plan(path, layer, 4)
        if layer in (0, 3):
            bf16 = LinearPrecision.bf16()
            assert (plan.precision.fprop_x, plan.precision.is_stochastic) == (bf16.fprop_x, False)
            assert not plan.precision.is_quantized
            assert plan.recipe == "bf16"
        else:
            assert plan.recipe == ("mxfp8" if path.endswith("fc2") else "mxfp4_all")


def test_module_outside_the_layers_is_never_pinned_by_layer() -> None:
    config = TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": 1})
    assert config.plan("mtp.layers.0.eh_proj").recipe == "mxfp4"
    assert config.plan("mtp.layers.0.eh_proj").reason == "precision"


def test_last_matching_pattern_that_sets_a_key_decides_it() -> None:
    config = TurboConfig.from_dict(
        {
            "precision": "mxfp4",
            "modules": {
                "decoder.layers.*": {"precision": "mxfp8", "padding": "refuse"},
                "*.mlp.*": {"kernels": ["reference"]},
                "*.linear_fc2": "bf16",
            },
        }
    )
    qkv, fc1, fc2 = (config.plan(f"decoder.layers.5.{LINEARS[i]}", 5, 8) for i in (0, 2, 3))
    assert (qkv.recipe, fc1.recipe, fc2.recipe) == ("mxfp8", "mxfp8", "bf16")
    assert (qkv.reason, fc2.reason) == ("modules['decoder.layers.*']", "modules['*.linear_fc2']")
    assert qkv.kernels.get("norm") is None
    assert fc1.kernels["norm"] == fc2.kernels["norm"] == ("reference",)
    assert {plan.precision.padding for plan in (qkv, fc1, fc2)} == {"refuse"}
    outside = config.plan("output_layer")
    assert (outside.recipe, outside.precision.padding) == ("mxfp4", "pad")


def test_two_orders_of_the_same_patterns_differ() -> None:
    narrow_last = TurboConfig.from_dict({"modules": {"*": "mxfp8", "*.linear_fc2": "bf16"}})
    narrow_first = TurboConfig.from_dict({"modules": {"*.linear_fc2": "bf16", "*": "mxfp8"}})
    path = "decoder.layers.0.mlp.linear_fc2"
    assert narrow_last.plan(path, 0, 2).recipe == "bf16"
    assert narrow_first.plan(path, 0, 2).recipe == "mxfp8"


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("decoder.layers.*.mlp.linear_fc2", {(layer, "mlp.linear_fc2") for layer in range(12)}),
        ("decoder.layers.1.*", {(1, name) for name in LINEARS}),  # not layers 10 and 11
        ("decoder.layers.1?.*", {(layer, name) for layer in (10, 11) for name in LINEARS}),
        ("decoder.layers.[02].mlp.*", {(layer, name) for layer in (0, 2) for name in LINEARS[2:]}),
        ("*.linear_q?v", {(layer, LINEARS[0]) for layer in range(12)}),
        ("decoder.layers.3.mlp.linear_fc1", {(3, "mlp.linear_fc1")}),
        ("Decoder.*", set()),
        ("linear_fc1", set()),
    ],
)
def test_pattern_matches_these_modules_and_no_others(pattern: str, matched: set[tuple[int, str]]) -> None:
    config = TurboConfig.from_dict({"modules": {pattern: "mxfp8"}})
    quantised = {path for path, recipe in recipes_of(config, 12).items() if recipe == "mxfp8"}
    assert quantised == {f"decoder.layers.{layer}.{name}" for layer, name in matched}
    assert config.unmatched_patterns(path for path, _ in paths(12)) == (() if matched else (pattern,))


def test_unmatched_patterns_are_listed_in_order() -> None:
    config = TurboConfig.from_dict({"modules": {"*.fc9": "bf16", "decoder.*": "mxfp8", "encoder.*": "bf16"}})
    known = [path for path, _ in paths(2)]
    assert config.unmatched_patterns(known) == ("*.fc9", "encoder.*")
    assert config.unmatched_patterns([]) == ("*.fc9", "decoder.*", "encoder.*")


def test_pattern_that_names_a_pinned_layer_and_wants_it_quantised_is_an_error() -> None:
    config = TurboConfig.from_dict({"modules": {"decoder.layers.0.*": "mxfp4"}, "bf16_first_layers": 1})
    with pytest.raises(ConfigError) as error:
        config.plan("decoder.layers.0.mlp.linear_fc1", 0, 4)
    for word in ("decoder.layers.0.mlp.linear_fc1", "modules['decoder.layers.0.*']", "mxfp4", "bf16_first_layers"):
        assert word in str(error.value)
    assert config.plan("decoder.layers.1.mlp.linear_fc1", 1, 4).recipe == "bf16"


@pytest.mark.parametrize(("first", "last"), [(2, 2), (4, 0), (0, 9)])
def test_pinning_every_layer_of_a_quantised_recipe_is_an_error(first: int, last: int) -> None:
    """An MXFP4 run that is BF16 throughout, without a word, is a fault users reported elsewhere."""
    config = TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": first, "bf16_last_layers": last})
    with pytest.raises(ConfigError, match=rf"bf16_first_layers: {first} .*bf16_last_layers: {last} .*4 layers.*mxfp4"):
        config.plan("decoder.layers.0.mlp.linear_fc1", 0, 4)


@pytest.mark.parametrize(("layer", "num_layers"), [(4, 4), (-1, 4), (0, None)])
def test_layer_number_outside_the_model_is_an_error(layer: int, num_layers: int | None) -> None:
    """Megatron's own layer numbers start at 1: taken for ours, they would pin the wrong layers."""
    config = TurboConfig.from_dict({"precision": "mxfp4", "bf16_last_layers": 1})
    with pytest.raises(ConfigError, match=r"layer number"):
        config.plan("decoder.layers.4.mlp.linear_fc1", layer, num_layers)


def test_plan_survives_pickle_deepcopy_and_hash() -> None:
    """Megatron deep-copies layer specs, and processes are started with pickled ones."""
    config = TurboConfig.from_dict(
        {"precision": "mxfp4_all", "kernels": {"gemm_nt": ["torch"], "default": ["reference"]}}
    )
    plan = config.plan("decoder.layers.0.mlp.linear_fc1", 0, 4)
    for twin in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert hash(twin) == hash(plan)


@pytest.mark.parametrize(
    ("value", "gemm", "norm", "own"),
    [
        (["triton", "reference"], ("triton", "reference"), ("triton", "reference"), []),
        ("reference", ("reference",), ("reference",), []),
        ({"gemm_nt": ["torch"]}, ("torch",), None, ["gemm_nt"]),
        ({"gemm_nt": "torch", "default": ["reference"]}, ("torch",), ("reference",), ["gemm_nt"]),
    ],
)
def test_kernel_order_of_an_op_is_its_own_else_the_default_else_the_registrys(
    value: Any, gemm: tuple[str, ...], norm: tuple[str, ...] | None, own: list[str]
) -> None:
    orders = KernelOrders.from_value(value)
    assert (orders.get("gemm_nt"), orders.get("norm"), list(orders)) == (gemm, norm, own)
    assert KernelOrders.from_value(orders.to_value()) == orders
    assert bool(orders)


def test_no_kernel_order_is_falsy_and_has_no_entry() -> None:
    assert not KernelOrders()
    assert "gemm_nt" not in KernelOrders()
    with pytest.raises(KeyError):
        KernelOrders()["gemm_nt"]


@pytest.mark.parametrize(
    ("specs", "multiple"),
    [
        ((QuantSpec.bf16(),), 1),
        ((QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", block="32x32")), 32),
        ((QuantSpec(format="mxfp4", hadamard=16),), 32),
        ((QuantSpec(format="mxfp4", hadamard=128), QuantSpec(format="mxfp8", hadamard=128)), 128),
        ((QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")), 128),
        ((QuantSpec(format="fp8", block="rowwise"), QuantSpec.bf16()), 1),
        ((QuantSpec(format="fp8", block="tensorwise", hadamard=64),), 64),
    ],
)
def test_contraction_must_be_a_multiple_of_block_and_rotation(specs: tuple[QuantSpec, ...], multiple: int) -> None:
    assert contraction_multiple(*specs) == multiple


def refusing(precision: str = "mxfp4") -> ModulePlan:
    config = TurboConfig.from_dict({"precision": precision, "padding": "refuse"})
    return config.plan("decoder.layers.3.mlp.linear_fc1", 3, 8)


def test_refused_shape_names_recipe_module_multiple_size_and_remedy() -> None:
    with pytest.raises(ShapeError) as error:
        check_shapes(refusing(), 4100, 4096)
    for word in (
        "recipe 'mxfp4'",
        "decoder.layers.3.mlp.linear_fc1",
        "multiple of 32",
        "got 4100",
        "fprop",
        "padding: pad",
        "{'decoder.layers.3.mlp.linear_fc1': bf16}",
    ):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("in_features", "out_features", "tp", "split", "refused"),
    [
        (64, 96, 1, None, None),
        (65, 96, 1, None, "fprop"),
        (64, 100, 1, None, "dgrad"),
        (64, 96, 2, "out", "dgrad"),  # 48 rows of w on each rank
        (64, 128, 2, "out", None),
        (64, 48, 2, "in", "dgrad"),  # not divided: 48 itself
        (96, 64, 2, "in", "fprop"),
        (96, 64, 2, "out", None),
        (128, 64, 4, "in", None),
        (0, 0, 1, None, None),
    ],
)
def test_shapes_are_judged_as_each_rank_sees_them(
    in_features: int, out_features: int, tp: int, split: Any, refused: str | None
) -> None:
    if refused is None:
        check_shapes(refusing(), in_features, out_features, tp=tp, split=split)
    else:
        with pytest.raises(ShapeError, match=f"contraction of {refused}"):
            check_shapes(refusing(), in_features, out_features, tp=tp, split=split)


def test_padding_plan_and_unquantised_plan_take_any_shape() -> None:
    check_shapes(TurboConfig.from_dict({"precision": "mxfp4"}).plan("m"), 33, 7)
    check_shapes(refusing("bf16"), 33, 7)
    check_shapes(refusing("fp8_tensorwise"), 33, 7)


def test_tensor_parallel_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(ShapeError, match=r"linear_fc1.*N = 100.*tensor-parallel size 8"):
        check_shapes(refusing("bf16"), 64, 100, tp=8, split="out")


def test_only_the_gemms_that_are_quantised_restrict_the_shape() -> None:
    plan = TurboConfig.from_dict({"precision": {"preset": "mxfp4", "dgrad": "bf16"}, "padding": "refuse"}).plan("m")
    check_shapes(plan, 64, 100)
    with pytest.raises(ShapeError, match="fprop"):
        check_shapes(plan, 100, 64)
