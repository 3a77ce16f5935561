"""Ops of a linear's neighbours in the pass that quantises its operands: RMS norm in front of x, the bias gradient beside dy.

fprop   Q(x), Q'(x), rstd = one kernel of x and gamma; the normed tensor exists nowhere
dgrad   dnormed = dy @ w as in functional/linear.py;  dx, dgamma = kernels.rms_norm_bwd(dnormed, x, gamma, rstd)
dbias   db = tree_sum(dy), from the read of dy that quantises it
Saved   x, gamma and rstd as functional/norm.py does, Q'(x) as functional/linear.py does
Equality  the bytes are those of the ops one after the other, see kernels/reference/fused.py

A fusion is used where the backend that quantises the operand also serves the fused request (and an order in the
configuration, `kernels: {fused_quantize: [...]}`, names it); elsewhere the ops run one after the other.

How the norm reaches a linear that knows nothing of it: its quantised copies go into `LinearCall.x_copies`, and a stand-in without
memory takes the normed tensor's place in autograd, so that the linear's dx arrives here as the norm's dy.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode

from primus_turbo_plugin.communication.quantized import shards_align
from primus_turbo_plugin.functional.autocast import compute_dtype
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import LinearKernels, Specs
from primus_turbo_plugin.functional.norm import Kernels, choose, rms_norm
from primus_turbo_plugin.kernels.registry import Backend, default_registry
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor


def rms_norm_input(
    x: Tensor,
    gamma: Tensor,
    eps: float,
    call: LinearCall,
    *,
    zero_centered_gamma: bool,
    with_wgrad: bool,
    kernels: Kernels = None,
) -> tuple[Tensor, LinearCall]:
    """What `linear` takes for x = rms_norm(x): the normed tensor, or a stand-in for it and a call that holds its copies.

    Args:
        x: [tokens, in] of this rank.
        gamma: [in], the norm's weight.
        eps: Added to the mean square.
        call: The linear's call.
        zero_centered_gamma: gamma = 1 + weight.
        with_wgrad: Whether the linear's wgrad will run: then its columnwise copy is made too.
        kernels: Backends of the norm, first choice first, or a choice that is kept; None for the registry's order.

    Returns:
        The tensor and the call to hand to `linear`.
    """
    fused = front_backend("rms_norm", x, x.shape[1], call, with_wgrad=with_wgrad, weight_dtype=gamma.dtype)
    if isinstance(fused, str):
        return rms_norm(x, gamma, eps, zero_centered_gamma=zero_centered_gamma, kernels=kernels), call
    specs = call.kernels.wanted_specs("x", row=True, column=with_wgrad)
    norm = choose("rms_norm", x, gamma, kernels)
    copies: list[QuantizedTensor | None] = []
    stand_in = _NormQuantize.apply(
        x, gamma, eps, zero_centered_gamma, fused.kernels, norm, specs, call, copies, torch.is_grad_enabled()
    )
    return stand_in, replace(call, x_copies=(copies[0], copies[1]))


def norm_fusion_refusal(x: Tensor, gamma: Tensor, call: LinearCall, *, with_wgrad: bool) -> str | None:
    """Why an RMS norm in front of this linear runs apart, or None."""
    found = front_backend("rms_norm", x, x.shape[1], call, with_wgrad=with_wgrad, weight_dtype=gamma.dtype)
    return found if isinstance(found, str) else None


def front_backend(
    kind: Literal["rms_norm", "swiglu"],
    x: Tensor,
    features: int,
    call: LinearCall,
    *,
    with_wgrad: bool,
    weight_dtype: torch.dtype | None = None,
) -> Backend[FusedQuantizeRequest] | str:
    """The kernels that compute the op in front of a linear and quantise, or why it runs apart.

    Args:
        kind: The op.
        x: Its input, [tokens, ...] of this rank.
        features: Columns of its output, the linear's input size.
        call: The linear's call.
        with_wgrad: Whether the linear's wgrad will run.
        weight_dtype: dtype of the norm's weight.
    """
    row, column = call.kernels.specs["x"]
    if row is None or (with_wgrad and column is None):
        return "the linear needs x unquantised as well"
    if not compute_dtype(x) == x.dtype == call.kernels.dtype:
        return f"x is cast from {x.dtype} to {call.kernels.dtype} behind it"
    if call.parallel.gathers_input:
        tokens = x.shape[0]
        aligned = shards_align(row, (tokens, features), "outer")
        if with_wgrad:
            assert column is not None
            aligned = aligned and shards_align(column, (features, tokens), "contraction")
        if not aligned:
            return "blocks lie across ranks, so that x is gathered before it is quantised"
    return fused_backend(call.kernels, "x", kind, x, features, column=with_wgrad, weight_dtype=weight_dtype)


def quantize_gradient(
    call: LinearCall, dy: Tensor, row: QuantSpec | None, column: QuantSpec | None, *, shard: bool = False
) -> Copies:
    """Both copies of dy; its sum over tokens goes into `call.dy_sum` where that is asked for and a kernel does it.

    Args:
        call: The linear's call.
        dy: [tokens, out].
        row: Spec of the row copy, or None.
        column: Spec of the columnwise copy, or None.
        shard: dy is this rank's tokens, and its copies are put together with those of other ranks.
    """
    if call.dy_sum is not None and (row is not None or column is not None):
        fused = _gradient_backend(call, dy)
        if isinstance(fused, Backend):
            row_copy, column_copy, total = fused.kernels.quantize_and_sum(
                dy,
                row,
                column,
                key=call.key("dy"),
                signs_seed=call.plan.precision.signs_seed,
                scale_layout=call.kernels.scale_layout("dy", shard=shard),
            )
            call.dy_sum.append(total)
            return row_copy, column_copy
    return call.kernels.quantize("dy", dy, row, column, call.key("dy"), shard=shard)


def gradient_sum(call: LinearCall, dy: Tensor) -> Tensor:
    """db = sum of dy [tokens, out] over tokens: what `quantize_gradient` found, else the same sum by a read of its own.

    Its bits depend on the plan, not on which gradients are wanted: fp32 by `precision.tree_sum` where the plan quantises dy with
    kernels that sum, torch's sum where not.
    """
    if call.dy_sum:
        return call.dy_sum[0]
    fused = _gradient_backend(call, dy)
    if isinstance(fused, Backend):
        total: Tensor = fused.kernels.quantize_and_sum(dy, None, None)[2]
        return total
    return dy.sum(0)


def _gradient_backend(call: LinearCall, dy: Tensor) -> Backend[FusedQuantizeRequest] | str:
    return fused_backend(call.kernels, "dy", "sums", dy, dy.shape[1])


def fused_backend(
    kernels: LinearKernels,
    operand: str,
    kind: Literal["rms_norm", "swiglu", "sums"],
    t: Tensor,
    hidden: int,
    *,
    column: bool = True,
    weight_dtype: torch.dtype | None = None,
) -> Backend[FusedQuantizeRequest] | str:
    """The fused kernels of the backend that quantises the operand, or why there are none. Looked for once for tensors alike.

    Args:
        kernels: Of the linear.
        operand: Which of its operands is quantised.
        kind: What is computed in the same pass.
        t: The input, [tokens, ...].
        hidden: Columns of what is quantised.
        column: Whether the columnwise copy is made too.
        weight_dtype: dtype of a norm's weight.
    """
    quantizer = kernels.quantizers.get(operand)
    if quantizer is None:
        return f"{operand} is not quantised"
    key = (operand, kind, t.device, t.dtype, hidden, column, weight_dtype)
    found: Backend[FusedQuantizeRequest] | str | None = kernels.fused.get(key)
    if found is None:
        row_spec, col_spec = kernels.wanted_specs(operand, row=True, column=column)
        request = FusedQuantizeRequest(
            device=t.device.type,
            kind=kind,
            dtype=t.dtype,
            hidden=hidden,
            weight_dtype=weight_dtype,
            row_spec=row_spec,
            col_spec=col_spec,
        )
        found = kernels.fused[key] = _fused_of(quantizer.name, operand, request, kernels.plan)
    return found


def _fused_of(
    quantizer: str, operand: str, request: FusedQuantizeRequest, plan: ModulePlan
) -> Backend[FusedQuantizeRequest] | str:
    registry = default_registry(plan.tuning_file)
    order = plan.kernels.get(FusedQuantizeRequest.op)
    if quantizer not in (registry.names(FusedQuantizeRequest.op) if order is None else order):
        return f"no fused kernels of {quantizer}, which quantises {operand}, are allowed"
    backend = registry.backend(FusedQuantizeRequest.op, quantizer)
    reason = backend.supports(request)
    return backend if reason is None else f"{backend.name} {reason}"


def stand_in(x: Tensor, columns: int) -> Tensor:
    """What takes the place of a tensor [tokens, columns] made of x that only its copies exist of: NaN, should anybody read it.

    Without memory, and without a launch: the one NaN of a device and dtype is made once.
    """
    nan = _nan(x.device, x.dtype) if _is_plain(x) else x.new_full((), float("nan"))
    return nan.expand(x.shape[0], columns)


def _is_plain(x: Tensor) -> bool:
    """Not, say, a FakeTensor, nor among such: the NaN that is kept would be a fake too."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    return type(x) in (Tensor, Parameter)


@functools.cache
def _nan(device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):  # training may be next
        return torch.full((), float("nan"), dtype=dtype, device=device)


class _NormQuantize(Function):
    """Makes the copies of the normed x and returns a stand-in for it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        eps: float,
        zero_centered_gamma: bool,
        fused: Any,
        norm: Any,
        specs: Specs,
        call: LinearCall,
        copies: list[QuantizedTensor | None],
        grad_enabled: bool,
    ) -> Tensor:
        row, column, rstd = fused.rms_norm_quantize(
            x,
            gamma,
            eps,
            *specs,
            zero_centered_gamma=zero_centered_gamma,
            key=call.key("x"),
            signs_seed=call.plan.precision.signs_seed,
            scale_layout=call.kernels.scale_layout("x", shard=call.parallel.gathers_input),
        )
        copies += [row, column]
        if grad_enabled:
            ctx.save_for_backward(x, gamma, rstd)
        ctx.norm, ctx.zero_centered_gamma = norm, zero_centered_gamma
        return stand_in(x, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, rstd = ctx.saved_tensors
        dx, dgamma = ctx.norm.rms_norm_bwd(dy, x, gamma, rstd, zero_centered_gamma=ctx.zero_centered_gamma)
        return dx, dgamma.to(gamma.dtype), *([None] * 8)
