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


# --- distributed optimizer ---------------------------------------------------------------------------------------


def _give_every_parameter_its_step(optimizer: Any) -> None:
    """torch's Adam counts steps in a 0-dim tensor per parameter; Megatron leaves it out, or shares one among all."""
    for state in optimizer.state.values():
        step = state.get("step")
        state["step"] = step.detach().clone() if torch.is_tensor(step) else torch.tensor(float(step or 0.0))


def _state_dict_before_the_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam):  # AdamW is a subclass
            if not inner.state and self.init_state_fn is not None:
                self.init_state_fn(inner, self.config)
            if any("step" not in state for state in inner.state.values()):
                _give_every_parameter_its_step(inner)
        return original(self)

    return state_dict


def _load_state_dict_with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        if isinstance(self.optimizer, torch.optim.Adam):
            _give_every_parameter_its_step(self.optimizer)

    return load_state_dict


def _restore_without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        if "step" in state:  # load_state_dict has put the right one there; `tensors` has a stale one, or none
            tensors = {**tensors, "step": state["step"].clone()}
        with torch.no_grad():
            original(self, model_param, tensors)

    return set_main_param_and_optimizer_states


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


def _nothing(original: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


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
_DOPT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_STEP = "torch's Adam keeps `step` as a tensor per parameter"

CORE_SHIMS: list[Shim] = [
    Shim(target=f"{_RANDOM}:_get_cuda_rng_state", make=lambda _: _cpu_rng_state, why="RNG tracker and recompute"),
    Shim(target=f"{_RANDOM}:_set_cuda_rng_state", make=lambda _: _set_cpu_rng_state, why="RNG tracker and recompute"),
    Shim(
        target=f"{_MOE}.token_dispatcher:maybe_move_tensor_to_cpu",
        make=_move_to_cpu,
        why="converts split sizes to numpy only if they were on a GPU; all-to-all wants numbers",
    ),
    Shim(
        target=f"{_DOPT}.state_dict",
        make=_state_dict_before_the_first_step,
        why=f"{_STEP}; absent before the first step, so loading a checkpoint stops in an assertion",
    ),
    Shim(
        target=f"{_DOPT}.load_state_dict",
        make=_load_state_dict_with_own_steps,
        why=f"{_STEP}; loading makes all parameters share one, which then advances once per parameter",
    ),
    Shim(
        target=f"{_DOPT}._set_main_param_and_optimizer_states",
        make=_restore_without_step,
        why=f"{_STEP}; it's stored with the parameter groups, and the copy here would set it to 0; also needs no_grad",
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
    Shim(
        target="megatron.core.datasets.utils:compile_helpers",
        make=_nothing,
        why="runs make in the installed package; wheels ship the compiled helper, but no Makefile",
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
