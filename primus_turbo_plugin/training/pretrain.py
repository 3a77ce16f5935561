"""Pretrains a GPT with Megatron's own training loop. `examples/pretrain_gpt.py` is this module as a script.

cli(argv)        the script: starts processes (`--nproc`) or is one of them (torchrun); one line for a mistake
  train(argv)    one process: parse, check, build, hand over to `megatron.training.pretrain`
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError, TurboError, UnsupportedError
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.training import arguments, launch
from primus_turbo_plugin.training.cpu_device import megatron_on_cpu
from primus_turbo_plugin.training.wheels import without_engine


def cli(argv: Sequence[str]) -> int:
    """Run the job as a script would: start what has to be started; a mistake in the input is one line.

    Returns:
        The exit code.
    """
    with one_line_errors(show_traceback="--turbo-traceback" in argv) as outcome:
        _dispatch(argv)
    return outcome.exit_code


@dataclass
class Outcome:
    """How the block under `one_line_errors` ended."""

    exit_code: int = 0


@contextlib.contextmanager
def one_line_errors(*, show_traceback: bool) -> Iterator[Outcome]:
    """Print an expected error as one line on stderr instead of raising it; anything else keeps its traceback."""
    outcome = Outcome()
    try:
        yield outcome
    except launch.RanksFailed as error:
        failure = error.failure
        if show_traceback or not failure.expected:
            print(failure.trace, file=sys.stderr)
        print(f"error: {failure.message if failure.expected else error}", file=sys.stderr)
        outcome.exit_code = 1
    except TurboError as error:
        if show_traceback:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        outcome.exit_code = 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        outcome.exit_code = 130


def _dispatch(argv: Sequence[str]) -> None:
    require_training_loop()
    run = arguments.run_arguments(argv)
    rest = arguments.without_launcher(argv)
    if "RANK" in os.environ:
        if run.nproc is not None:
            raise ConfigError("--nproc: processes are started already (RANK is set, as by torchrun); leave it out")
        train(rest)
    elif run.nproc is None or {"-h", "--help"} & set(argv):
        _train_alone(rest)
    elif run.nproc < 1:
        raise ConfigError(f"--nproc: at least 1, got {run.nproc}")
    elif run.device != "cpu":
        raise ConfigError(f"--nproc is for --device cpu; for {run.device} use torchrun --nproc-per-node {run.nproc}")
    else:
        with launch.start_ranks("primus_turbo_plugin.training.pretrain:train", rest, run.nproc) as ranks:
            ranks.wait()


def require_training_loop() -> None:
    """Refuse early where the installed megatron-core has no training loop.

    Raises:
        UnsupportedError: With the two ways out.
    """
    if importlib.util.find_spec("megatron.training") is None:
        import megatron.core

        raise UnsupportedError(
            f"megatron-core {megatron.core.__version__} is installed without megatron.training. "
            "Use Python >= 3.12 and pip install 'megatron-core>=0.19', "
            "or run Megatron-LM's own pretrain_gpt.py with --spec primus_turbo_plugin.megatron_lm gpt_spec."
        )


def _train_alone(argv: Sequence[str]) -> None:
    """The only rank, in this very process: the one to put a debugger on."""
    with tempfile.TemporaryDirectory(prefix="turbo-rank-") as folder:
        environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        environment[launch.STORE_VARIABLE] = str(Path(folder) / "store")
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            train(argv)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def train(argv: Sequence[str]) -> None:
    """One process's part of the job.

    Raises:
        TurboError: The input is wrong, or something asked for cannot be had; the message says what to do.
    """
    device = arguments.run_arguments(argv).device
    _check_device(device)
    importlib.import_module("primus_turbo_plugin.training.preload")  # quietly; where we were forked, it is done already
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron_on_cpu(training_loop=True) if device == "cpu" else without_engine())
        _train(argv, device)


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda: torch sees no GPU. Pass --device cpu, or install a torch built for your GPU."
        )


def _train(argv: Sequence[str], device: str) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from primus_turbo_plugin.training import gpt_data, gpt_model, gpt_step, preflight
    from primus_turbo_plugin.training.refusals import refusals
    from primus_turbo_plugin.training.resume_rng import keep_rng
    from primus_turbo_plugin.training.tp_overlap import own_buffers

    asked = arguments.parse(argv, device)
    turbo = preflight.check(asked)
    args = arguments.parse_and_set_up(argv, device)
    _say_what_is_off(args)
    with refusals("model configuration"):
        model = gpt_model.model_config(args, turbo)
        config = pretrain_cfg_container_from_args(args, model)
    _record_metrics(args)
    datasets, forward_step = keep_rng(gpt_data.train_valid_test_datasets, gpt_step.forward_step)
    with own_buffers(args, turbo):
        pretrain(
            config,
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            get_embedding_ranks=gpt_model.embedding_ranks,
            store=_store(args),
        )
    _shut_down()


def _say_what_is_off(args: argparse.Namespace) -> None:
    if args.rank != 0 or args.device == "cpu" or args.position_embedding_type != "rope":
        return
    if not (args.apply_rope_fusion or compat.transformer_engine_is_installed()):
        print(
            "rotary embedding: not fused (the fused kernel is Transformer Engine's, which is not installed)", flush=True
        )


def _store(args: argparse.Namespace) -> Any:
    """Where our own processes meet; under torchrun its environment variables say so, and Megatron reads them."""
    import torch

    path = os.environ.get(launch.STORE_VARIABLE)
    return None if path is None else torch.distributed.FileStore(path, args.world_size)


def _record_metrics(args: argparse.Namespace) -> None:
    """Let Megatron's training loop report to the file as well; it asks for a writer on the last rank only."""
    if args.turbo_metrics is None or args.rank != args.world_size - 1:
        return
    from megatron.training import global_vars

    from primus_turbo_plugin.training.metrics import MetricsFile

    # Megatron has a getter for its writer, but its setter makes a TensorBoard one only.
    try:
        writer = MetricsFile(args.turbo_metrics, also=global_vars.get_tensorboard_writer())
    except OSError as error:
        raise ConfigError(f"--turbo-metrics {args.turbo_metrics}: cannot be written ({error.strerror}).") from error
    global_vars._GLOBAL_TENSORBOARD_WRITER = writer


def _shut_down() -> None:
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
