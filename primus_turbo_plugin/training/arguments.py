"""The command line of the GPT job: all of Megatron's arguments, the `--turbo-*` ones, and the device."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config_sources import add_turbo_arguments
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.training.refusals import refusals

DEVICES = ("cpu", "cuda")
SPECS = ("turbo", "megatron")

# What Megatron's arguments must default to where there is no GPU: its fused CUDA kernels, Apex and Transformer Engine are
# absent. Each can still be given on the command line; Megatron then says what is missing.
CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "num_workers": 0,  # the cores are busy with the model, and memory-mapped tokens cost nothing to read
}

# What Megatron defaults to and only Transformer Engine has.
ENGINE_ONLY_DEFAULTS: dict[str, Any] = {"apply_rope_fusion": False}

# Megatron 0.19 has none, and divides by it even with --eval-iters 0; its earlier releases' default.
_EVAL_INTERVAL = 1000


def parser_extension(device: str) -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    """What Megatron's parser gets in addition; for `megatron.training`'s `extra_args_provider`."""

    def extend(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_turbo_arguments(parser)
        add_run_arguments(parser)
        if parser.get_default("eval_interval") is None:
            parser.set_defaults(eval_interval=_EVAL_INTERVAL)
        if not compat.transformer_engine_is_installed():
            parser.set_defaults(**ENGINE_ONLY_DEFAULTS)
        if device == "cpu":
            parser.set_defaults(**CPU_DEFAULTS)
        parser.error = lambda message: _refuse(parser, message)  # type: ignore[method-assign]
        return parser

    return extend


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where and how the job runs."""
    group = parser.add_argument_group("primus-turbo run", "where and how this job runs (docs/quickstart.md)")
    group.add_argument("--device", choices=DEVICES, default="cuda", help="cpu, or cuda (ROCm is cuda to torch)")
    group.add_argument(
        "--nproc", type=int, metavar="N", help="start N processes on this machine; leave it out under torchrun"
    )
    group.add_argument(
        "--turbo-spec",
        choices=SPECS,
        default="turbo",
        help="layers of this package (mix with --turbo-linear and so on), or those Megatron would take by itself",
    )
    group.add_argument(
        "--turbo-metrics", metavar="FILE", help="append every step's loss and other metrics as JSON lines"
    )
    group.add_argument("--turbo-traceback", action="store_true", help="show the traceback of a refused setting as well")


def run_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The run arguments alone, before Megatron is imported; the others are left to `parse`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = lambda message: _refuse(parser, message)  # type: ignore[method-assign]
    add_run_arguments(parser)
    return parser.parse_known_args(list(argv))[0]


def without_launcher(argv: Sequence[str]) -> list[str]:
    """`argv` without `--nproc N`."""
    rest: list[str] = []
    skip = False
    for argument in argv:
        if not skip and argument != "--nproc" and not argument.startswith("--nproc="):
            rest.append(argument)
        skip = argument == "--nproc"
    return rest


def parse(argv: Sequence[str], device: str) -> argparse.Namespace:
    """Parse without validating: what the user asked for, defaults filled in, nothing set up yet.

    Raises:
        ConfigError: An argument is unknown or has an impossible value; names the nearest one that exists.
    """
    from megatron.training.arguments import parse_args

    sys.argv = [sys.argv[0], *argv]
    with refusals("arguments"):
        args: argparse.Namespace = parse_args(parser_extension(device))
    return args


def parse_and_set_up(argv: Sequence[str], device: str) -> argparse.Namespace:
    """Parse, let Megatron validate, and set its global arguments, timers, tokenizer and writers.

    Raises:
        ConfigError: Megatron refuses a setting.
    """
    from megatron.training.arguments import parse_and_validate_args

    sys.argv = [sys.argv[0], *argv]
    with refusals("arguments"):
        args: argparse.Namespace = parse_and_validate_args(parser_extension(device))
    return args


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    prefix = "unrecognized arguments: "
    if not message.startswith(prefix):
        raise ConfigError(f"{message}. See --help.")
    known = [flag for action in parser._actions for flag in action.option_strings]
    first = message[len(prefix) :].split()[0].split("=")[0]
    near = difflib.get_close_matches(first, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see --help for those that exist."
    raise ConfigError(f"{first}: no such argument; {hint}")
