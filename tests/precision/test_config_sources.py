"""Where a configuration comes from: arguments over the environment over defaults, and the frozen set of names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig, config_keys
from primus_turbo_plugin.precision.config_sources import (
    FILE_ONLY_KEYS,
    VARIABLES,
    ResolvedConfig,
    add_turbo_arguments,
    flag_of,
    resolve,
)
from primus_turbo_plugin.precision.recipe import Recipe
from primus_turbo_plugin.precision.recipe_overrides import FIELDS

DOCS = Path(__file__).parents[2] / "docs"

FROZEN_KEYS = (
    "precision",
    "modules",
    "bf16_first_layers",
    "bf16_last_layers",
    "linear",
    "norm",
    "attention",
    "attention_precision",
    "kernels",
    "tuning_file",
    "padding",
    "signs_seed",
    "rounding_seed",
    "communication",
)
FROZEN_FLAGS = {
    "--turbo-config",
    "--turbo-precision",
    "--turbo-bf16-first-layers",
    "--turbo-bf16-last-layers",
    "--turbo-linear",
    "--turbo-norm",
    "--turbo-attention",
    "--turbo-attention-precision",
    "--turbo-kernels",
    "--turbo-tuning-file",
    "--turbo-padding",
    "--turbo-signs-seed",
    "--turbo-rounding-seed",
    "--turbo-communication",
}
FROZEN_FIELDS = ("format", "element", "scale_rule", "block", "hadamard", "random_signs", "rounding")
FROZEN_VARIABLES = {"PRIMUS_TURBO_CONFIG", "PRIMUS_TURBO_TRACE", "PRIMUS_TURBO_TUNING"}


def parser() -> argparse.ArgumentParser:
    return add_turbo_arguments(argparse.ArgumentParser(exit_on_error=False))


def resolved(*flags: str, environ: dict[str, str] | None = None) -> ResolvedConfig:
    return resolve(parser().parse_args(flags), environ or {})


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def all_flags() -> set[str]:
    actions = parser()._actions
    return {flag for action in actions for flag in action.option_strings if flag.startswith("--turbo-")}


def test_set_of_names_a_user_can_write_is_frozen() -> None:
    """A new or renamed one is a change users see: change this test, docs/configuration.md and CHANGELOG.md together."""
    assert config_keys() == FROZEN_KEYS
    assert all_flags() == FROZEN_FLAGS
    assert FIELDS == FROZEN_FIELDS
    assert set(VARIABLES) == FROZEN_VARIABLES


def test_every_key_has_a_flag_but_those_listed_as_file_only() -> None:
    assert {flag_of(key) for key in config_keys() if key not in FILE_ONLY_KEYS} | {"--turbo-config"} == FROZEN_FLAGS


def first_cells(page: str, heading: str) -> list[str]:
    """The code-quoted first cells of the table under a heading."""
    text = (DOCS / page).read_text()
    assert heading in text, f"{page} has no heading {heading!r}"
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE)


def test_configuration_page_lists_exactly_the_keys_flags_variables_and_fields_that_exist() -> None:
    assert tuple(first_cells("configuration.md", "## Keys")) == FROZEN_KEYS
    assert {cell.split()[0] for cell in first_cells("configuration.md", "## Flags")} == FROZEN_FLAGS
    assert set(first_cells("configuration.md", "## Environment variables")) == FROZEN_VARIABLES
    assert tuple(first_cells("configuration.md", "## Recipe fields")) == FROZEN_FIELDS


def test_nothing_given_is_the_default() -> None:
    assert resolved() == ResolvedConfig(config=TurboConfig())
    assert resolve() == ResolvedConfig(config=TurboConfig())
    assert resolve(argparse.Namespace(), {}) == ResolvedConfig(config=TurboConfig())


def test_variable_names_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4\nbf16_first_layers: 1")
    found = resolved(environ={"PRIMUS_TURBO_CONFIG": path})
    assert found.config == TurboConfig(precision=Recipe.preset("mxfp4"), bf16_first_layers=1)
    assert dict(found.origins) == {"precision": path, "bf16_first_layers": path}
    assert found.notes == ()


def test_every_flag_sets_its_key() -> None:
    found = resolved(
        "--turbo-precision",
        "{preset: mxfp4, dy: {rounding: stochastic}, wgrad: {random_signs: true}}",
        *["--turbo-bf16-first-layers", "1", "--turbo-bf16-last-layers", "2", "--turbo-norm", "megatron"],
        *["--turbo-attention", "transformer_engine", "--turbo-linear", "turbo", "--turbo-kernels", "torch,reference"],
        *["--turbo-padding", "refuse", "--turbo-signs-seed", "7", "--turbo-rounding-seed", "8"],
        *["--turbo-tuning-file", "tuned.json", "--turbo-communication", "{tp_overlap: true, except_for: fc1}"],
    )
    wanted = {
        "precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}, "wgrad": {"random_signs": True}},
        "bf16_first_layers": 1,
        "bf16_last_layers": 2,
        "norm": "megatron",
        "attention": "transformer_engine",
        "linear": "turbo",
        "kernels": ["torch", "reference"],
        "tuning_file": "tuned.json",
        "padding": "refuse",
        "signs_seed": 7,
        "rounding_seed": 8,
        "communication": {"tp_overlap": True, "except_for": ["fc1"]},
    }
    assert found.config == TurboConfig.from_dict(wanted)
    assert dict(found.origins) == {key: flag_of(key) for key in wanted}
    assert found.notes == ()


def test_kernel_orders_by_op_can_be_written_as_a_flag() -> None:
    assert resolved("--turbo-kernels", "[torch, reference]").config.kernels.get("norm") == ("torch", "reference")
    found = resolved("--turbo-kernels", "{gemm_nt: [torch, reference], default: reference}")
    assert found.config.kernels.get("gemm_nt") == ("torch", "reference")
    assert found.config.kernels.get("norm") == ("reference",)


def test_zero_given_as_a_flag_overrules_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4\nbf16_last_layers: 4")
    found = resolved("--turbo-config", path, "--turbo-bf16-last-layers", "0")
    assert found.config.bf16_last_layers == 0
    assert found.notes == (f"bf16_last_layers: 4 of {path} gives way to --turbo-bf16-last-layers 0",)


def test_flag_beats_file_and_says_so_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4\npadding: refuse\nmodules: {'*.fc2': bf16}")
    found = resolved("--turbo-precision", "mxfp8", environ={"PRIMUS_TURBO_CONFIG": path})
    assert found.config == TurboConfig.from_dict(
        {"precision": "mxfp8", "padding": "refuse", "modules": {"*.fc2": "bf16"}}
    )
    assert dict(found.origins) == {"precision": "--turbo-precision", "padding": path, "modules": path}
    assert found.notes == (f"precision: mxfp4 of {path} gives way to --turbo-precision mxfp8",)


def test_flag_that_agrees_with_the_file_needs_no_note(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4")
    assert resolved("--turbo-config", path, "--turbo-precision", "mxfp4").notes == ()


def test_config_flag_replaces_the_variables_file_whole_and_says_so(tmp_path: Path) -> None:
    weak = write(tmp_path, "precision: mxfp4\npadding: refuse", "weak.yaml")
    strong = write(tmp_path, "precision: mxfp8", "strong.yaml")
    found = resolved("--turbo-config", strong, environ={"PRIMUS_TURBO_CONFIG": weak})
    assert found.config == TurboConfig(precision=Recipe.preset("mxfp8"))
    assert found.notes == (f"PRIMUS_TURBO_CONFIG={weak} is not read: --turbo-config {strong} is stronger",)


def test_same_file_named_twice_is_no_conflict(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp8")
    assert resolved("--turbo-config", path, environ={"PRIMUS_TURBO_CONFIG": path}).notes == ()


def test_bf16_flag_over_patterns_that_quantise_is_ambiguous(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4\nmodules: {'*.fc2': mxfp8}")
    with pytest.raises(ConfigError, match=r"--turbo-precision bf16.*modules\['\*\.fc2'\]: mxfp8.*Remove the pattern"):
        resolved("--turbo-config", path, "--turbo-precision", "bf16")


def test_flag_that_contradicts_the_file_names_both(tmp_path: Path) -> None:
    path = write(tmp_path, "precision: mxfp4")
    with pytest.raises(ConfigError) as error:
        resolved("--turbo-config", path, "--turbo-linear", "megatron")
    for word in (path, "--turbo-linear", "linear: 'megatron'", "precision: mxfp4"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--turbo-precision", "mxfp44"), ["--turbo-precision", "'mxfp44'", "did you mean"]),
        (("--turbo-precision", "{preset: mxfp4"), ["--turbo-precision", "not valid YAML"]),
        (("--turbo-precision", "3"), ["--turbo-precision", "3"]),
        (("--turbo-kernels", ""), ["--turbo-kernels", "kernels"]),
        (("--turbo-kernels", "torch,torch"), ["--turbo-kernels", "twice"]),
        (("--turbo-bf16-first-layers", "-2"), ["--turbo-bf16-first-layers", "-2"]),
        (("--turbo-config", "/nowhere/recipe.yaml"), ["/nowhere/recipe.yaml", "No such file"]),
    ],
)
def test_wrong_flag_is_named(flags: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(*flags)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_wrong_choice_is_refused_by_the_parser() -> None:
    with pytest.raises(argparse.ArgumentError, match="turbo"):
        parser().parse_args(["--turbo-norm", "apex"])


def test_slip_in_the_variables_name_is_an_error_and_a_foreign_variable_is_noted() -> None:
    with pytest.raises(ConfigError, match=r"PRIMUS_TURBO_CONFG .*rename it to PRIMUS_TURBO_CONFIG"):
        resolved(environ={"PRIMUS_TURBO_CONFG": "x.yaml"})
    notes = resolved(environ={"PRIMUS_TURBO_GEMM_BACKEND": "CK", "PATH": "/bin"}).notes
    assert notes == ("PRIMUS_TURBO_GEMM_BACKEND is set, but is no variable of this package: not read",)


def test_tuning_variable_stands_between_the_flag_and_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "tuning_file: of_yaml.json")
    environ = {"PRIMUS_TURBO_CONFIG": path, "PRIMUS_TURBO_TUNING": "of_variable.json"}
    found = resolved(environ=environ)
    assert found.config.tuning_file == "of_variable.json"
    assert dict(found.origins) == {"tuning_file": "PRIMUS_TURBO_TUNING"}
    assert found.notes == (f"tuning_file: of_yaml.json of {path} gives way to PRIMUS_TURBO_TUNING of_variable.json",)
    found = resolved("--turbo-tuning-file", "of_flag.json", environ=environ)
    assert found.config.tuning_file == "of_flag.json"
    assert dict(found.origins) == {"tuning_file": "--turbo-tuning-file"}
    empty = resolved(environ={"PRIMUS_TURBO_TUNING": ""})
    assert (empty.config.tuning_file, empty.notes) == (None, ("PRIMUS_TURBO_TUNING is set but empty: not read",))


def test_tuning_file_reaches_every_modules_plan() -> None:
    config = TurboConfig.from_dict({"tuning_file": "tuned.json", "bf16_first_layers": 1, "precision": "mxfp4"})
    assert {config.plan(f"decoder.layers.{layer}.mlp.linear_fc1", layer, 2).tuning_file for layer in range(2)} == {
        "tuned.json"
    }
    with pytest.raises(ConfigError, match="tuning_file: must be the path of a file; got 3"):
        TurboConfig.from_dict({"tuning_file": 3})


def test_empty_variable_is_noted_and_not_read() -> None:
    found = resolved(environ={"PRIMUS_TURBO_CONFIG": ""})
    assert found.config == TurboConfig()
    assert found.notes == ("PRIMUS_TURBO_CONFIG is set but empty: not read",)


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--turbo-bf16-first-layers 2", ["bf16_first_layers: 2"]),
        ("--turbo-precision mxfp4 --turbo-bf16-first-layers 2", []),
        ("--turbo-precision mxfp4 --turbo-rounding-seed 5 --turbo-signs-seed 6", ["rounding_seed: 5", "signs_seed: 6"]),
    ],
)
def test_setting_that_changes_nothing_is_noted(flags: str, idle: list[str]) -> None:
    notes = resolved(*flags.split()).notes
    assert [note.split(" changes nothing")[0] for note in notes] == idle


def test_variables_of_entry_points_are_handed_on() -> None:
    assert resolved(environ={"PRIMUS_TURBO_TRACE": "out:3-4"}).trace == "out:3-4"
    assert resolved(environ={"PRIMUS_TURBO_TRACE": ""}).trace is None
    assert resolved(environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}).one_hardware_queue
    assert not resolved(environ={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}).one_hardware_queue
    assert resolved(environ={"GPU_MAX_HW_QUEUES": "1"}).one_hardware_queue == ("GPU_MAX_HW_QUEUES",)
