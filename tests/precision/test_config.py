"""TurboConfig: values, YAML and what contradicts itself. Plans are in test_config_plan.py, sources in test_config_sources.py."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus_turbo_plugin import TurboConfig as LazyTurboConfig
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import COMPONENTS, PROVIDERS, ModuleOverride, TurboConfig, config_keys
from primus_turbo_plugin.precision.module_plan import KernelOrders
from primus_turbo_plugin.precision.presets import PRESETS
from primus_turbo_plugin.precision.recipe import Recipe

FULL = """
precision:
  preset: mxfp4
  dy: {rounding: stochastic}
modules:
  "decoder.layers.*.mlp.linear_fc2": {precision: mxfp8, padding: refuse}
  "decoder.layers.[01].*": bf16
  "*.linear_proj": {kernels: {gemm_nt: [reference]}}
bf16_first_layers: 1
bf16_last_layers: 2
linear: turbo
norm: megatron
attention: megatron
kernels: [torch, reference]
padding: pad
signs_seed: 3
rounding_seed: 1234
"""


def test_defaults_are_bf16_with_everything_from_this_package() -> None:
    config = TurboConfig()
    assert not config.precision.linear().is_quantized
    assert [getattr(config, component) for component in COMPONENTS] == ["turbo"] * 3
    assert (config.modules, config.bf16_first_layers, config.bf16_last_layers) == ((), 0, 0)
    assert config.kernels.get("gemm_nt") is None
    assert config.padding == "pad"


def test_package_exports_it_lazily() -> None:
    assert LazyTurboConfig is TurboConfig


def test_every_key_of_a_file_arrives() -> None:
    config = TurboConfig.from_yaml_text(FULL)
    assert config.precision == Recipe.preset("mxfp4", dy={"rounding": "stochastic"})
    assert [item.pattern for item in config.modules] == [
        "decoder.layers.*.mlp.linear_fc2",
        "decoder.layers.[01].*",
        "*.linear_proj",
    ]
    assert config.modules[0] == ModuleOverride(
        pattern="decoder.layers.*.mlp.linear_fc2", precision=Recipe.preset("mxfp8"), padding="refuse"
    )
    assert config.modules[1].precision == Recipe.preset("bf16")
    assert config.modules[2].kernels == KernelOrders(by_op=(("gemm_nt", ("reference",)),))
    assert config.modules[2].precision is None
    assert (config.bf16_first_layers, config.bf16_last_layers) == (1, 2)
    assert (config.linear, config.norm, config.attention) == ("turbo", "megatron", "megatron")
    assert config.kernels == KernelOrders(default=("torch", "reference"))
    assert (config.padding, config.signs_seed, config.rounding_seed) == ("pad", 3, 1234)


def test_file_that_is_empty_or_only_comments_gives_the_defaults(tmp_path: Path) -> None:
    for text in ("", "# nothing yet\n", "{}"):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        assert TurboConfig.from_yaml(path) == TurboConfig()


def test_full_file_round_trips_through_yaml() -> None:
    config = TurboConfig.from_yaml_text(FULL)
    assert TurboConfig.from_yaml_text(config.to_yaml()) == config
    assert TurboConfig.from_dict(config.to_dict()) == config
    assert hash(TurboConfig.from_dict(config.to_dict())) == hash(config)


_names = st.sampled_from(["reference", "torch", "triton", "gluon"])
_order = st.lists(_names, min_size=1, max_size=3, unique=True)
_orders = st.one_of(_order, st.dictionaries(st.sampled_from(["default", "gemm_nt", "norm"]), _order, min_size=1))
_recipes = st.one_of(
    st.sampled_from([*PRESETS, "mxfp4"]),
    st.fixed_dictionaries(
        {"preset": st.just("mxfp4_none")},
        optional={
            "scale_rule": st.sampled_from(["floor", "even", "ceil", "rceil"]),
            "wgrad": st.fixed_dictionaries({"hadamard": st.sampled_from([0, 16, 128])}),
            "dy": st.just({"rounding": "stochastic"}),
        },
    ),
)
_overrides = st.fixed_dictionaries(
    {"precision": _recipes}, optional={"padding": st.sampled_from(["pad", "refuse"]), "kernels": _orders}
)
_configs = st.fixed_dictionaries(
    {},
    optional={
        "precision": _recipes,
        "modules": st.dictionaries(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), _overrides, max_size=3
        ),
        "bf16_first_layers": st.integers(0, 9),
        "bf16_last_layers": st.integers(0, 9),
        "norm": st.sampled_from(PROVIDERS),
        "attention": st.sampled_from(PROVIDERS),
        "kernels": _orders,
        "padding": st.sampled_from(["pad", "refuse"]),
        "signs_seed": st.integers(0, 2**63 - 1),
        "rounding_seed": st.integers(0, 2**63 - 1),
    },
)


@settings(max_examples=60, deadline=None)
@given(_configs)
def test_any_configuration_round_trips_through_yaml(mapping: dict[str, Any]) -> None:
    config = TurboConfig.from_dict(mapping)
    again = TurboConfig.from_yaml_text(config.to_yaml())
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_yaml() == config.to_yaml()


def test_order_of_patterns_is_part_of_the_configuration() -> None:
    one = TurboConfig.from_dict({"modules": {"*.a": "bf16", "*": "mxfp8"}})
    two = TurboConfig.from_dict({"modules": {"*": "mxfp8", "*.a": "bf16"}})
    assert one != two


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TurboConfig().padding = "refuse"  # type: ignore[misc]
    with pytest.raises(TypeError):
        TurboConfig(Recipe.preset("mxfp4"))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precison: mxfp4", ["unknown key 'precison'", "did you mean 'precision'"]),
        ("bf16_first_layer: 2", ["'bf16_first_layer'", "did you mean 'bf16_first_layers'"]),
        ("1: 2", ["unknown key 1"]),
        ("precision: mxfp3", ["precision", "'mxfp3'", "mxfp4", "did you mean"]),
        ("precision: {wgrad: {hadamard: 32}}", ["precision", "'preset' is missing", "mxfp4"]),
        ("precision: {preset: mxfp4, wgrad: {hadamard: 24}}", ["precision", "mxfp4", "wgrad", "hadamard", "24"]),
        ("precision: [mxfp4]", ["precision", "mapping", "['mxfp4']"]),
        ("precision:", ["precision", "None"]),
        ("modules: [a]", ["modules", "mapping"]),
        ("modules: {'*.fc2': {precison: bf16}}", ["modules['*.fc2']", "'precison'", "did you mean 'precision'"]),
        ("modules: {'*.fc2': {}}", ["modules['*.fc2']", "sets nothing"]),
        ("modules: {'*.fc2': mxfp9}", ["modules['*.fc2'].precision", "mxfp9"]),
        ("modules: {'*.fc2': {padding: perhaps}}", ["modules['*.fc2'].padding", "perhaps", "pad", "refuse"]),
        ("modules: {'': bf16}", ["modules", "non-empty"]),
        ("modules: {7: bf16}", ["modules", "7", "string"]),
        ("bf16_first_layers: -1", ["bf16_first_layers", "-1", ">= 0"]),
        ("bf16_last_layers: two", ["bf16_last_layers", "'two'", "integer"]),
        ("bf16_last_layers: true", ["bf16_last_layers", "True"]),
        ("bf16_last_layers: 1.0", ["bf16_last_layers", "1.0"]),
        ("linear: te", ["linear", "'te'", "turbo, megatron, transformer_engine"]),
        ("norm: null", ["norm", "None"]),
        ("attention: Turbo", ["attention", "'Turbo'", "did you mean 'turbo'"]),
        ("padding: padd", ["padding", "'padd'", "did you mean 'pad'"]),
        ("kernels: []", ["kernels", "[]"]),
        ("kernels: [torch, torch]", ["kernels", "twice", "torch"]),
        ("kernels: {gemm_nt: 3}", ["kernels.gemm_nt", "3"]),
        ("kernels: [torch, 3]", ["kernels", "3"]),
        ("rounding_seed: x", ["rounding_seed", "'x'"]),
        ("- mxfp4", ["mapping", "['mxfp4']"]),
        ("mxfp4", ["mapping", "'mxfp4'"]),
        ("precision: mxfp4\nprecision: bf16", ["line 2", "'precision'", "twice"]),
        ("modules: {'*.a': bf16, '*.a': mxfp8}", ["line 1", "'*.a'", "twice"]),
        ("precision: {", ["not valid YAML", "line 1"]),
        ("precision: !!python/object/apply:os.system [ls]", ["not valid YAML"]),
        ("{precision: mxfp4, linear: megatron}", ["linear: 'megatron'", "precision: mxfp4", "linear: turbo"]),
        (
            "{linear: transformer_engine, modules: {'*.fc2': mxfp8}}",
            ["linear: 'transformer_engine'", "modules['*.fc2']: mxfp8"],
        ),
    ],
)
def test_mistake_in_a_file_is_one_line_that_names_file_key_value_and_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        TurboConfig.from_yaml(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert [word for word in words if word not in message] == [], message
    assert "\n" not in message


def test_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        TurboConfig.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="directory"):
        TurboConfig.from_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        TurboConfig.from_yaml(tmp_path / "binary.yaml")


def test_values_given_in_python_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"norm.*'te'"):
        TurboConfig(norm="te")
    with pytest.raises(ConfigError, match=r"bf16_first_layers.*-1"):
        TurboConfig(bf16_first_layers=-1)
    with pytest.raises(ConfigError, match=r"linear: 'megatron'.*mxfp4"):
        TurboConfig(precision=Recipe.preset("mxfp4"), linear="megatron")


def test_other_providers_linear_is_fine_in_bf16() -> None:
    config = TurboConfig.from_yaml_text("{linear: transformer_engine, modules: {'*.fc2': {precision: bf16}}}")
    assert config.linear == "transformer_engine"


def test_settings_that_quantise_are_listed_as_they_are_written() -> None:
    assert TurboConfig.from_yaml_text(FULL).quantized_by() == (
        "precision: mxfp4*",
        "modules['decoder.layers.*.mlp.linear_fc2']: mxfp8",
    )
    assert TurboConfig().quantized_by() == ()


def test_keys_are_the_fields() -> None:
    assert config_keys() == tuple(item.name for item in dataclasses.fields(TurboConfig))


def test_importing_the_configuration_imports_neither_megatron_nor_a_kernel() -> None:
    code = (
        "import sys, primus_turbo_plugin.precision.config_sources\n"
        "print([name for name in sys.modules if name.startswith(('megatron', 'primus_turbo_plugin.kernels', 'rich'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_environment_is_read_by_entry_points_only() -> None:
    """A variable read deep inside would be an undocumented setting, and one that differs between ranks."""
    root = Path(__file__).parents[2] / "primus_turbo_plugin"
    rooms = ("precision", "devices", "diagnostics", "kernels", "functional", "modules", "communication", "specs")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]
    assert len(files) > 30
    assert [str(path) for path in files if "os.environ" in path.read_text() or "os.getenv" in path.read_text()] == []
