"""Megatron's convention for weight gradients that bypass `weight.grad`.

DistributedDataParallel gives each parameter a view `main_grad` of its gradient buffer and counts a parameter as ready when
autograd has accumulated into it. A fused wgrad therefore adds to `main_grad` itself, sets `grad_added_to_main_grad` so that
DDP does not add again, and still returns a tensor of the weight's shape: its values do not matter, its arrival fires DDP's
hooks, in backward's order and on backward's thread. With `zero_out_wgrad` (a weight shared with the embedding) they do matter,
since DDP adds them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, UnsupportedError


class MainGradSink:
    """Accumulates the gradient of one weight into its `main_grad` (see `functional.wgrad.GradientSink`).

    Args:
        weight: A parameter [out, in].
        path: The module's path, for messages.
    """

    __slots__ = ("path", "weight")

    def __init__(self, weight: Any, path: str) -> None:
        self.weight, self.path = weight, path

    def buffer(self) -> Tensor:
        """The `main_grad` that DDP attached.

        Raises:
            ConfigError: There is none.
        """
        main_grad: Tensor | None = getattr(self.weight, "main_grad", None)
        if main_grad is None:
            raise ConfigError(
                f"{self.path}: gradient_accumulation_fusion needs weight.main_grad, got a weight without one. Wrap the model in "
                "Megatron's DistributedDataParallel, or set gradient_accumulation_fusion to False."
            )
        return main_grad

    def overwrites(self) -> bool:
        return bool(getattr(self.weight, "overwrite_main_grad", False))

    def delivered(self) -> Tensor | None:
        """Marks the gradient as added. The placeholder is uninitialised memory unless `zero_out_wgrad` asks for zeros."""
        weight = self.weight
        if getattr(weight, "grad_added_to_main_grad", None) is None:  # not under DDP: nobody waits
            return None
        weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
        return make(weight.shape, dtype=weight.dtype, device=weight.device)


def wgrad_dtype(weight: Any, *, fused: bool) -> tuple[torch.dtype, bool]:
    """What the wgrad GEMM of a weight writes.

    Args:
        weight: A parameter [out, in].
        fused: Whether its gradient goes to `main_grad`.

    Returns:
        The dtype of the GEMM's result, and whether it adds to the buffer: an fp32 `main_grad` takes the GEMM's own
        accumulation, a 16-bit one the rounded sum of itself and an fp32 result.
    """
    if not fused:
        return weight.dtype, False
    main_grad = getattr(weight, "main_grad", None)
    return torch.float32, main_grad is None or main_grad.dtype == torch.float32


def add_to_grad(weight: Any, dw: Tensor) -> None:
    """What autograd would have done with a gradient that comes after its backward."""
    weight.grad = dw if weight.grad is None else weight.grad + dw


def move_grad_to_main_grad(weight: Any) -> None:
    """What DDP's hook would do, for a delayed gradient of a weight that has a `main_grad` but whose hook is not ours to call."""
    if getattr(weight, "main_grad", None) is not None and weight.grad is not None:
        weight.main_grad.add_(weight.grad)
        weight.grad = None


def refuse_fsdp(weight: Any, path: str) -> None:
    """Megatron's FSDP makes and drops weights and gradient buffers under the layer, which the weight cache does not follow.

    Raises:
        UnsupportedError: The weight belongs to it.
    """
    if getattr(weight, "__fsdp_param__", None) is not None:
        raise UnsupportedError(
            f"{path}: Megatron-FSDP (use_megatron_fsdp) is not supported by turbo linears. Use Megatron's "
            "DistributedDataParallel with use_distributed_optimizer, or set linear: megatron."
        )
