"""SwiGLU as a differentiable function, alone and in front of a quantised linear.

fprop   y = silu(gate) * up, x = [gate | up];  in front of a linear: Q(y), Q'(y) = one kernel of x
dgrad   dgate = dy up s (1 + gate (1 - s)), dup = dy silu(gate), s = sigmoid(gate)
Saved   x alone; y is computed from it, and never exists where the linear quantises it (see functional/fused_quantize.py)
Seam    Megatron's MLP computes its activation between its two linears, in code without a hook for a quantised result: the fused
        form is for callers of this package; the modules here do not use it
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.fused_quantize import front_backend, stand_in
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import Specs
from primus_turbo_plugin.kernels.reference.fused import swiglu_bwd, swiglu_fwd
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, computed in fp32 and rounded to x's dtype once.

    Args:
        x: [..., 2 * hidden]: gate, then up.

    Returns:
        [..., hidden] in x's dtype.

    Raises:
        ShapeError: x has an odd number of columns.
    """
    y: Tensor = _Swiglu.apply(x)
    return y


def swiglu_input(x: Tensor, call: LinearCall, *, with_wgrad: bool) -> tuple[Tensor, LinearCall]:
    """What `linear` takes for x = swiglu(x): the tensor, or a stand-in for it and a call that holds its copies.

    Args:
        x: [tokens, 2 * in] of this rank.
        call: The linear's call.
        with_wgrad: Whether the linear's wgrad will run.

    Returns:
        The tensor and the call to hand to `linear`.

    Raises:
        ShapeError: x is not [tokens, 2 * in].
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ShapeError(f"swiglu_input: x must be [tokens, 2 * in], gate then up, got {list(x.shape)}.")
    hidden = x.shape[1] // 2
    fused = front_backend("swiglu", x, hidden, call, with_wgrad=with_wgrad)
    if isinstance(fused, str):
        return swiglu(x), call
    specs = call.kernels.wanted_specs("x", row=True, column=with_wgrad)
    copies: list[QuantizedTensor | None] = []
    stand_in = _SwigluQuantize.apply(x, fused.kernels, specs, call, copies)
    return stand_in, replace(call, x_copies=(copies[0], copies[1]))


class _Swiglu(Function):
    """Saves x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return swiglu_fwd(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return swiglu_bwd(dy, x)


class _SwigluQuantize(Function):
    """Makes the copies of swiglu(x) and returns a stand-in for it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fused: Any,
        specs: Specs,
        call: LinearCall,
        copies: list[QuantizedTensor | None],
    ) -> Tensor:
        copies += fused.swiglu_quantize(
            x,
            *specs,
            key=call.key("x"),
            signs_seed=call.plan.precision.signs_seed,
            scale_layout=call.kernels.scale_layout("x", shard=call.parallel.gathers_input),
        )
        ctx.save_for_backward(x)
        return stand_in(x, x.shape[1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return swiglu_bwd(dy, x), None, None, None, None
