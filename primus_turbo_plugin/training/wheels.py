"""What Megatron lacks where it comes from a wheel: a Makefile; without Transformer Engine and Apex a fused Adam and fused wgrad.

On any device: `without_engine()` surrounds training on a GPU, and `megatron_on_cpu()` includes the same list.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from primus_turbo_plugin.kernels.torch_native.gemm import gemm_nt
from primus_turbo_plugin.training.cpu_device.patching import Shim, patched


@contextlib.contextmanager
def without_engine() -> Iterator[None]:
    """Applies the shims that this installation needs inside the `with` block: none where Transformer Engine or Apex is installed
    and Megatron comes from its sources.
    """
    with patched(WHEEL_SHIMS):
        yield


def _adam_is_torchs() -> bool:
    return issubclass(importlib.import_module("megatron.core.optimizer").Adam, torch.optim.Adam)


def _no_fused_wgrad() -> bool:
    return not importlib.import_module(_LAYERS)._grad_accum_fusion_available


class _FusedWgrad:
    """The two functions of Apex's `fused_weight_gradient_mlp_cuda`: main_grad [N, K] += dy[T, N].T @ x[T, K]."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        gemm_nt(dy.t(), x.t(), out_dtype=torch.float32, out=main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(gemm_nt(dy.t(), x.t(), out_dtype=torch.float32))


def _no_makefile() -> bool:
    datasets = importlib.util.find_spec("megatron.core.datasets")
    return datasets is not None and not any(
        Path(folder, "Makefile").exists() for folder in datasets.submodule_search_locations or ()
    )


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


def _nothing(original: Any) -> Callable[..., None]:
    return lambda *args, **kwargs: None


_DOPT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_STEP = "torch's Adam keeps `step` as a tensor per parameter"

_LAYERS = "megatron.core.tensor_parallel.layers"

WHEEL_SHIMS: list[Shim] = [
    Shim(
        target=f"{_LAYERS}:fused_weight_gradient_mlp_cuda",
        make=lambda _: _FusedWgrad,
        needed=_no_fused_wgrad,
        why="Apex's kernel, which gradient_accumulation_fusion wants for the output layer; the GEMMs of this package add too",
    ),
    Shim(
        target=f"{_LAYERS}:_grad_accum_fusion_available",
        make=lambda _: True,
        needed=_no_fused_wgrad,
        why="the name says whether that kernel is there",
    ),
    Shim(
        target=f"{_DOPT}.state_dict",
        make=_state_dict_before_the_first_step,
        needed=_adam_is_torchs,
        why=f"{_STEP}; absent before the first step, so loading a checkpoint stops in an assertion",
    ),
    Shim(
        target=f"{_DOPT}.load_state_dict",
        make=_load_state_dict_with_own_steps,
        needed=_adam_is_torchs,
        why=f"{_STEP}; loading makes all parameters share one, which then advances once per parameter",
    ),
    Shim(
        target=f"{_DOPT}._set_main_param_and_optimizer_states",
        make=_restore_without_step,
        needed=_adam_is_torchs,
        why=f"{_STEP}; it's stored with the parameter groups, and the copy here would set it to 0; also needs no_grad",
    ),
    Shim(
        target="megatron.core.datasets.utils:compile_helpers",
        make=_nothing,
        needed=_no_makefile,
        why="runs make in the installed package; wheels ship the compiled helper, but no Makefile",
    ),
]
