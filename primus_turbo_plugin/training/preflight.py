"""Checks made before anything is set up or written: what is wrong, and what to do, in one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.config_sources import ResolvedConfig, resolve
from primus_turbo_plugin.training import dataset_splits, sizes
from primus_turbo_plugin.training.checkpoint_files import check_load
from primus_turbo_plugin.training.refusals import refusals
from primus_turbo_plugin.training.sizes import Size
from primus_turbo_plugin.training.spec_argument import check_spec
from primus_turbo_plugin.training.writable import check_file, check_folder

# Jobs of Megatron's own scripts that this one doesn't do: argument -> flag.
_OTHER_JOBS = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "perform_rl_step": "--perform-rl-step",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "logits_load_dir": "--logits-load-dir",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
}

_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "train_samples",
    "eval_interval",
    "log_interval",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
# Sources of data beside --mock-data; the last three go together.
_SOURCES = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
_MEGATRONS_SPLIT = "969, 30, 1"  # when --split isn't given


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
    if args.spec is not None:
        check_spec(args.spec)
    _check_positive(args)
    _check_parallelism(args, turbo)
    _check_experts(args)
    _check_cuda_graphs(args)
    _check_batch(args)
    _check_data(args)
    _check_paths(args)
    if args.load is not None and args.rank == 0:
        step = getattr(args, "ckpt_step", None)
        check_load(args.load, step=step, may_be_empty=args.load == args.save)
    return turbo


def _check_job(args: argparse.Namespace) -> None:
    if args.fp16 and args.bf16:
        raise ConfigError("--fp16 and --bf16: there can be one of them.")
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


def _check_positive(args: argparse.Namespace) -> None:
    for name in _POSITIVE:
        value = getattr(args, name, None)
        if value is not None and not (name == "train_iters" and args.skip_train):
            sizes.at_least(_size(args, name))


def _size(args: argparse.Namespace, name: str) -> Size:
    return Size(f"--{name.replace('_', '-')}", getattr(args, name))


def _check_parallelism(args: argparse.Namespace, turbo: ResolvedConfig) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * pp * cp):
        raise ConfigError(
            f"{args.world_size} processes cannot hold tensor x pipeline x context parallel = {tp} x {pp} x {cp}. "
            f"Start a multiple of {tp * pp * cp} (--nproc), or lower one of them."
        )
    if args.num_attention_heads is not None:
        grouped = args.group_query_attention and not args.multi_latent_attention and args.num_query_groups is not None
        ours = turbo.config.attention == "turbo" and args.turbo_spec != "megatron" and args.spec is None
        sizes.attention(
            _size(args, "num_attention_heads"),
            _size(args, "num_query_groups") if grouped else None,
            _size(args, "tensor_model_parallel_size"),
            groups_are_cut=ours,
        )
    if args.seq_length is not None:
        sizes.sequence(_size(args, "seq_length"), tp, cp, sequence_parallel=args.sequence_parallel)


def _check_experts(args: argparse.Namespace) -> None:
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.device == "cpu" and args.num_experts and etp > 1:
        raise ConfigError(
            f"--expert-tensor-parallel-size {etp}: gathers a different number of tokens from every rank, which gloo cannot. "
            "Pass --expert-tensor-parallel-size 1 with --device cpu."
        )


def _check_cuda_graphs(args: argparse.Namespace) -> None:
    if args.device != "cpu":
        return
    asked = [] if getattr(args, "cuda_graph_impl", "none") == "none" else [f"--cuda-graph-impl {args.cuda_graph_impl}"]
    flags = ("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph")
    asked += [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, False)]
    if asked:
        raise ConfigError(f"{', '.join(asked)}: a CPU captures no graphs. Leave it out with --device cpu.")


def _check_batch(args: argparse.Namespace) -> None:
    if args.micro_batch_size is None or args.global_batch_size is None:
        return
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    sizes.batch(_size(args, "global_batch_size"), _size(args, "micro_batch_size"), args.world_size // model)


def _check_paths(args: argparse.Namespace) -> None:
    if args.turbo_metrics is not None and args.rank == args.world_size - 1:
        check_file("--turbo-metrics", args.turbo_metrics)
    for name in ("save", "tensorboard_dir", "data_cache_path"):
        folder = getattr(args, name, None)
        if args.rank == 0 and folder is not None and "://" not in folder:
            check_folder(_size(args, name).flag, folder)


def _check_data(args: argparse.Namespace) -> None:
    given = [flag for flag in ("--mock-data", *_SOURCES) if getattr(args, flag[2:].replace("-", "_"), None)]
    if len(given) > 1 and not set(given) <= set(_SOURCES[1:]):
        raise ConfigError(f"{', '.join(given)}: there can be one source of data. Keep one of them.")
    if args.mock_data:
        return
    blend, per_split = _blends(args)
    if blend is None and per_split is None:
        raise ConfigError("no dataset: give --data-path PREFIX (files PREFIX.bin and PREFIX.idx), or --mock-data.")
    whole = _local_prefixes([blend])
    single = _local_prefixes(per_split or [])
    for prefix in [*whole, *single]:
        missing = [name for name in (f"{prefix}.idx", f"{prefix}.bin") if not Path(name).is_file()]
        if missing:
            raise ConfigError(
                f"dataset {prefix}: {' and '.join(missing)} not found. --data-path takes the files' common prefix, "
                "as Megatron-LM's tools/preprocess_data.py or examples/quickstart.py write them."
            )
    dataset_splits.check_splits(whole, args.split or _MEGATRONS_SPLIT)
    dataset_splits.check_not_empty(single)


def _blends(args: argparse.Namespace) -> Any:
    """Datasets that are split, and those of each split by itself: (prefixes, weights), or None."""
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        with refusals("dataset"):
            return get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ConfigError(f"dataset: {error.filename} cannot be read ({error.strerror}).") from error


def _local_prefixes(blends: Iterable[Any]) -> list[str]:
    """Those in object stores are left to Megatron."""
    return [prefix for blend in blends if blend is not None for prefix in blend[0] if "://" not in prefix]
