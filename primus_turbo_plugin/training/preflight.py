"""Checks made before anything is set up or written: what is wrong, and what to do, in one line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.config_sources import ResolvedConfig, resolve
from primus_turbo_plugin.training.checkpoint_files import check_load
from primus_turbo_plugin.training.refusals import refusals

# Jobs of Megatron's own scripts that this one doesn't do: argument -> flag.
_OTHER_JOBS = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "perform_rl_step": "--perform-rl-step",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "logits_load_dir": "--logits-load-dir",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
}


def check(args: argparse.Namespace) -> ResolvedConfig:
    """All checks, cheapest first.

    Returns:
        The turbo configuration that flags, file and environment add up to.

    Raises:
        ConfigError: The first mistake found.
        UnsupportedError: Another job than pretraining a GPT is asked for.
    """
    turbo = resolve(args, os.environ)
    _check_job(args)
    _check_parallelism(args)
    _check_experts(args)
    _check_batch(args)
    _check_data(args)
    if args.load is not None and args.rank == 0:
        step = getattr(args, "ckpt_step", None)
        check_load(args.load, step=step, may_be_empty=args.load == args.save)
    return turbo


def _check_job(args: argparse.Namespace) -> None:
    for name, flag in _OTHER_JOBS.items():
        if getattr(args, name, None):
            spec = "hybrid_spec" if name == "hybrid_layer_pattern" else "gpt_spec"
            raise UnsupportedError(
                f"{flag}: this script pretrains GPT models only. Use Megatron-LM's script for that job, with "
                f"--spec primus_turbo_plugin.megatron_lm {spec}."
            )
    if args.dataloader_type == "external":
        raise UnsupportedError(
            "--dataloader-type external: this script brings no loader of its own. Use single or cyclic."
        )


def _check_parallelism(args: argparse.Namespace) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * pp * cp):
        raise ConfigError(
            f"{args.world_size} processes cannot hold tensor x pipeline x context parallel = {tp} x {pp} x {cp}. "
            f"Start a multiple of {tp * pp * cp} (--nproc), or lower one of them."
        )
    heads = args.num_attention_heads
    if heads is not None and heads % tp:
        allowed = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} does not divide --num-attention-heads {heads}. "
            f"Take one of {', '.join(map(str, allowed))}, or another number of heads."
        )
    shards = (tp if args.sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    if args.seq_length is not None and args.seq_length % shards:
        raise ConfigError(
            f"--seq-length {args.seq_length} must be a multiple of {shards}, because the sequence is cut "
            f"for tensor ({tp}) and context ({cp}) parallelism. Take {_next_multiple(args.seq_length, shards)}."
        )


def _check_experts(args: argparse.Namespace) -> None:
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.device == "cpu" and args.num_experts and etp > 1:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp}: gathers a different number of tokens from every rank, which gloo cannot. "
            "Pass --expert-tensor-parallel-size 1 with --device cpu."
        )


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


def _check_batch(args: argparse.Namespace) -> None:
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if args.micro_batch_size is None or args.global_batch_size is None:
        return
    step = args.micro_batch_size * (args.world_size // model)
    if args.global_batch_size % step:
        raise ConfigError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {args.world_size // model} data-parallel ranks = {step}. "
            f"Take {_next_multiple(args.global_batch_size, step)}."
        )


def _check_data(args: argparse.Namespace) -> None:
    if args.mock_data:
        return
    prefixes = _data_prefixes(args)
    if not prefixes:
        raise ConfigError("no dataset: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx), or --mock-data.")
    for prefix in prefixes:
        if "://" in prefix:
            continue
        missing = [name for name in (f"{prefix}.idx", f"{prefix}.bin") if not Path(name).is_file()]
        if missing:
            raise ConfigError(
                f"dataset {prefix}: {' and '.join(missing)} not found. --data-path takes the files' common prefix, "
                "as Megatron-LM's tools/preprocess_data.py or examples/quickstart.py write them."
            )


def _data_prefixes(args: argparse.Namespace) -> list[str]:
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        with refusals("dataset"):
            blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ConfigError(f"dataset: {error.filename} cannot be read ({error.strerror}).") from error
    blends = [b for b in (blend, *(per_split or [])) if b is not None]
    return [prefix for prefixes, _ in blends for prefix in prefixes]
