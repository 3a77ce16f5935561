"""Where Megatron-Core itself, not torch, assumes a GPU (or Transformer Engine, which only installs beside one)."""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from primus_turbo_plugin.training.cpu_device.patching import Shim


def _cpu_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _move_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return maybe_move_tensor_to_cpu


# --- checkpoints ---------------------------------------------------------------------------------------------------


def _forked_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    queues: list[Any] = []

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "fork") -> Any:
        if not queues:
            queues.append(multiprocessing.get_context("fork").Manager().Queue())
        return queues[0]

    return get_write_results_queue


# --- megatron.training -------------------------------------------------------------------------------------------


def _allow_no_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    position = names.index("allow_no_cuda")

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= position:
            kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    return initialize_megatron


# --- Transformer Engine is absent on a CPU, and 0.16 doesn't notice everywhere ---------------------------------------


def _unbound(module: str, name: str) -> Callable[[], bool]:
    return lambda: name not in vars(importlib.import_module(module))


def _bound(module: str, name: str) -> Callable[[], bool]:
    return lambda: name in vars(importlib.import_module(module))


def _mla_believes_in_transformer_engine() -> bool:
    mla = vars(importlib.import_module("megatron.core.transformer.multi_latent_attention"))
    return bool(mla.get("HAVE_TE")) and not isinstance(mla.get("TELinear"), type)


def _transformer_engine_version_is_none() -> bool:
    return importlib.import_module("megatron.core.utils").get_te_version() is None


def _version_zero(original: Any) -> Callable[[], Any]:
    from packaging.version import Version

    return lambda: Version("0.0")


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"

CORE_SHIMS: list[Shim] = [
    Shim(target=f"{_RANDOM}:_get_cuda_rng_state", make=lambda _: _cpu_rng_state, why="RNG tracker and recompute"),
    Shim(target=f"{_RANDOM}:_set_cuda_rng_state", make=lambda _: _set_cpu_rng_state, why="RNG tracker and recompute"),
    Shim(
        target=f"{_MOE}.token_dispatcher:maybe_move_tensor_to_cpu",
        make=_move_to_cpu,
        why="converts split sizes to numpy only if they were on a GPU; all-to-all wants numbers",
    ),
    *[
        Shim(
            target=f"{_WRITER}:{name}",
            make=_forked_queue,
            needed=_bound(_WRITER, name),
            why="a process that imports torch anew, on every rank, because a CUDA context can't be forked",
        )
        for name in ("get_write_results_queue", "_get_write_results_queue")  # the latter is 0.16's
    ],
    Shim(
        target=f"{_MOE}.moe_utils:te_general_gemm",
        make=lambda _: None,
        needed=_unbound(f"{_MOE}.moe_utils", "te_general_gemm"),
        why="0.16.1 leaves the name unbound without Transformer Engine",
    ),
    Shim(
        target="megatron.core.transformer.multi_latent_attention:HAVE_TE",
        make=lambda _: False,
        needed=_mla_believes_in_transformer_engine,
        why="0.16.1 sets it without Transformer Engine, then calls isinstance with a non-type",
    ),
    Shim(
        target="megatron.core.utils:get_te_version",
        make=_version_zero,
        needed=_transformer_engine_version_is_none,
        why="0.16.1 compares the version None without Transformer Engine",
    ),
]

TRAINING_LOOP_SHIMS: list[Shim] = [
    Shim(
        target="megatron.training.initialize:initialize_megatron",
        make=_allow_no_cuda,
        why="asserts torch.cuda.is_available() unless told otherwise",
    ),
    Shim(
        target="megatron.training.training:initialize_megatron",
        make=_allow_no_cuda,
        why="the same function, bound by name in the training loop",
    ),
]
