"""Where a `TurboConfig` comes from: arguments, the environment, defaults, and who wins.

    --turbo-<key>          a single setting                       strongest
    --turbo-config FILE    a YAML file
    PRIMUS_TURBO_CONFIG    a YAML file, where --turbo-config is not given
    defaults                                                      weakest

    PRIMUS_TURBO_TUNING    the tuning file, stronger than a YAML file's `tuning_file`, weaker than --turbo-tuning-file

A file is taken whole: --turbo-config replaces the file PRIMUS_TURBO_CONFIG names. Every setting that gives way to a
stronger one is noted, and the notes are printed with the start-up report. Entry points pass the environment in.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import COMPONENTS, PROVIDERS, TurboConfig, config_keys
from primus_turbo_plugin.precision.config_file import parse_yaml, read_yaml
from primus_turbo_plugin.precision.presets import ALIASES, PRESETS
from primus_turbo_plugin.precision.recipe import PADDINGS

#: Environment variables of this package -> meaning.
VARIABLES: Mapping[str, str] = {
    "PRIMUS_TURBO_TRACE": "folder (and steps) for a trace of the collectives; `primus-turbo trace` sets it",
    "PRIMUS_TURBO_CONFIG": "path of a YAML configuration file",
    "PRIMUS_TURBO_TUNING": "path of a file of tuned kernel configurations",
}
_PREFIX = "PRIMUS_TURBO_"
_QUEUE_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """A configuration and where its settings came from.

    Attributes:
        config: The result.
        origins: (key, where it was set) for every key that was set, as `--turbo-precision` or a file's name.
        notes: What a user should know: settings that gave way to stronger ones, variables that are not ours.
        trace: Value of PRIMUS_TURBO_TRACE, if it is set.
        one_hardware_queue: Variables that let copies and GEMMs run one after the other only: CUDA_DEVICE_MAX_CONNECTIONS=1 on
            NVIDIA, GPU_MAX_HW_QUEUES=1 on AMD.
    """

    config: TurboConfig
    origins: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    trace: str | None = None
    one_hardware_queue: tuple[str, ...] = ()


def add_turbo_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the `--turbo-*` flags; a flag left out is None, so that weaker sources may set it. Returns `parser`."""
    group = parser.add_argument_group("primus-turbo", "precision and kernels (docs/configuration.md)")
    presets = ", ".join([*ALIASES, *PRESETS])
    group.add_argument(
        "--turbo-config", metavar="FILE", help="YAML file with any of these settings and per-module overrides"
    )
    group.add_argument(
        "--turbo-precision", metavar="RECIPE", help=f"a preset ({presets}), or a YAML mapping with overrides"
    )
    group.add_argument("--turbo-bf16-first-layers", metavar="N", type=int, help="the first N layers run in BF16")
    group.add_argument("--turbo-bf16-last-layers", metavar="N", type=int, help="the last N layers run in BF16")
    for component in COMPONENTS:
        group.add_argument(f"--turbo-{component}", choices=PROVIDERS, help=f"who provides the {component} modules")
    group.add_argument(
        "--turbo-attention-precision",
        metavar="FORMAT",
        help="core attention's numbers: bf16 (as the tensors come), fp8, or a YAML mapping: '{format: fp8, gradients: e5m2}'",
    )
    group.add_argument(
        "--turbo-kernels",
        metavar="ORDER",
        help="backends, first choice first: 'triton,reference', or a YAML mapping by op",
    )
    group.add_argument(
        "--turbo-tuning-file", metavar="FILE", help="tuned kernel configurations that `primus-turbo tune` wrote"
    )
    group.add_argument(
        "--turbo-padding",
        choices=PADDINGS,
        help="contractions that are no multiple of the block: pad (exact) or refuse",
    )
    group.add_argument("--turbo-signs-seed", metavar="N", type=int, help="seed of random rotation signs")
    group.add_argument("--turbo-rounding-seed", metavar="N", type=int, help="seed of stochastic rounding")
    group.add_argument(
        "--turbo-communication",
        metavar="YAML",
        help="overlap of collectives with GEMMs: true, false, or a YAML mapping: '{tp_overlap: true, transport: sdma}'",
    )
    return parser


def flag_of(key: str) -> str:
    """The flag that sets `key`: `--turbo-bf16-first-layers`."""
    return "--turbo-" + key.replace("_", "-")


_USES = {
    "bf16_first_layers": "quantises",
    "bf16_last_layers": "quantises",
    "rounding_seed": "rounds stochastically",
    "signs_seed": "has random_signs",
}

#: Keys that have no flag, because a command line cannot hold them readably.
FILE_ONLY_KEYS = ("modules",)


def _flag_value(key: str, value: Any) -> Any:
    """A flag's text as YAML would have held it."""
    if key == "kernels" and not set("{[") & set(value):
        return [name.strip() for name in value.split(",")]
    if key in ("kernels", "precision", "communication", "attention_precision"):
        return parse_yaml(value, flag_of(key))
    return value


def _from_flags(args: argparse.Namespace) -> dict[str, Any]:
    names = {key: f"turbo_{key}" for key in config_keys() if key not in FILE_ONLY_KEYS}
    given = {key: getattr(args, name, None) for key, name in names.items()}
    return {key: _flag_value(key, value) for key, value in given.items() if value is not None}


def _check_variables(environ: Mapping[str, str]) -> list[str]:
    """Notes about variables that look like ours and are not; a likely slip of the pen is an error."""
    notes = []
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        known = [
            variable.removeprefix(_PREFIX) for variable in VARIABLES
        ]  # the common prefix must not count as likeness
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), known, n=1, cutoff=0.7)
        if close:
            meant = _PREFIX + close[0]
            raise ConfigError(f"environment: {name} is no variable of this package: rename it to {meant}, or unset it")
        notes.append(f"{name} is set, but is no variable of this package: not read")
    return notes


def _file(
    args: argparse.Namespace | None, environ: Mapping[str, str], notes: list[str]
) -> tuple[str, dict[str, Any]] | None:
    """The name and content of the one file that counts."""
    from_flag = getattr(args, "turbo_config", None)
    from_variable = environ.get("PRIMUS_TURBO_CONFIG")
    if from_flag is None and not from_variable:
        if from_variable == "":
            notes.append("PRIMUS_TURBO_CONFIG is set but empty: not read")
        return None
    if from_flag is not None and from_variable and Path(from_flag) != Path(from_variable):
        notes.append(f"PRIMUS_TURBO_CONFIG={from_variable} is not read: --turbo-config {from_flag} is stronger")
    name = from_flag if from_flag is not None else str(from_variable)
    return name, read_yaml(name)


def resolve(args: argparse.Namespace | None = None, environ: Mapping[str, str] | None = None) -> ResolvedConfig:
    """The configuration that arguments and environment add up to.

    Args:
        args: What a parser with `add_turbo_arguments` parsed; flags that are absent or None count as not given.
        environ: The environment, which only entry points read; None means none.

    Raises:
        ConfigError: A source is unreadable or wrong, or two sources contradict each other where precedence says nothing.
    """
    environ = environ or {}
    notes = _check_variables(environ)
    file = _file(args, environ, notes)
    flags = _from_flags(args) if args is not None else {}
    config, origins, merged = TurboConfig(), {}, {}
    if file is not None:
        where, merged = file[0], file[1]
        config = TurboConfig.from_dict(merged, where=where)
        origins = dict.fromkeys(merged, where)
    config = _tuning_of_variable(config, environ, origins, notes)
    from_flags = {key: TurboConfig.from_dict({key: value}, where=flag_of(key)) for key, value in flags.items()}
    for key, one in from_flags.items():
        old, new = getattr(config, key), getattr(one, key)
        if key in origins and old != new:
            notes.append(f"{key}: {_shown(old)} of {origins[key]} gives way to {flag_of(key)} {_shown(new)}")
        origins[key] = flag_of(key)
    _check_bf16_flag(config, from_flags)
    try:
        config = dataclasses.replace(config, **{key: getattr(one, key) for key, one in from_flags.items()})
    except ConfigError as error:
        raise ConfigError(f"{' with '.join(dict.fromkeys(origins.values()))}: {error}") from error
    notes += _idle_settings(config)
    return ResolvedConfig(
        config=config,
        origins=tuple(sorted(origins.items())),
        notes=tuple(notes),
        trace=environ.get("PRIMUS_TURBO_TRACE") or None,
        one_hardware_queue=tuple(name for name in _QUEUE_VARIABLES if environ.get(name) == "1"),
    )


def _tuning_of_variable(
    config: TurboConfig, environ: Mapping[str, str], origins: dict[str, str], notes: list[str]
) -> TurboConfig:
    """`PRIMUS_TURBO_TUNING` over the file's `tuning_file`."""
    path = environ.get("PRIMUS_TURBO_TUNING")
    if not path:
        notes += ["PRIMUS_TURBO_TUNING is set but empty: not read"] if path == "" else []
        return config
    if config.tuning_file not in (None, path):
        old = f"tuning_file: {config.tuning_file} of {origins['tuning_file']}"
        notes.append(f"{old} gives way to PRIMUS_TURBO_TUNING {path}")
    origins["tuning_file"] = "PRIMUS_TURBO_TUNING"
    return dataclasses.replace(config, tuning_file=path)


def _idle_settings(config: TurboConfig) -> list[str]:
    """Settings that change nothing, given the others: seldom what a user meant, so they are said aloud."""
    linears = [recipe.linear() for recipe in config.recipes()]
    is_quantized = any(linear.is_quantized for linear in linears) or bool(config.attention_quantized_by())
    in_use = {
        "bf16_first_layers": is_quantized,
        "bf16_last_layers": is_quantized,
        "rounding_seed": any(linear.is_stochastic for linear in linears),
        "signs_seed": any(linear.has_random_signs for linear in linears),
    }
    return [
        f"{key}: {getattr(config, key)} changes nothing: no recipe in use {_USES[key]}"
        for key, used in in_use.items()
        if getattr(config, key) and not used
    ]


def _shown(value: Any) -> str:
    return str(value.to_value()) if hasattr(value, "to_value") else str(value)


def _check_bf16_flag(file_config: TurboConfig, from_flags: Mapping[str, TurboConfig]) -> None:
    """`--turbo-precision bf16` over a file whose patterns quantise: everything, or everything else? Nobody can tell."""
    if "precision" not in from_flags or from_flags["precision"].precision.linear().is_quantized:
        return
    patterns = [item for item in file_config.quantized_by() if item.startswith("modules")]
    if patterns:
        raise ConfigError(
            f"--turbo-precision bf16: {patterns[0]} of the configuration file stays quantised, which the flag may or may "
            "not mean. Remove the pattern, or write 'precision: bf16' into the file."
        )
