"""Linear layer y = x @ w.T + b with quantised GEMMs, tensor and sequence parallelism, and gradients straight into a buffer.

T tokens, K inputs, N outputs, p ranks; Q(t) is t along its features, quantised or not, Q'(t) the columnwise copy of t,
transposed and quantised along tokens (rotated first, where the recipe says so). Which of the six are quantised is the plan's.

column      x [T, K] on every rank, or the rank's tokens [T/p, K] with sequence parallelism;   w [N/p, K],  y [T, N/p]
    fprop       y  = Q(AG(x)) @ Q(w).T + b            AG: all-gather, only with sequence parallelism
    dgrad       dx = RS(Q(dy) @ Q'(w).T)              RS: reduce-scatter with sequence parallelism, else an all-reduce
    wgrad       dw = Q'(dy) @ Q'(AG(x)).T
    dbias       db = sum_T dy                         from the read that quantises dy, where a kernel does both
row         x [T, K/p];   w [N, K/p];   y [T, N] on every rank, or the rank's tokens [T/p, N] with sequence parallelism
    fprop       y  = RS(Q(x) @ Q(w).T) + b
    dgrad       dx = Q(AG(dy)) @ Q'(w).T              without sequence parallelism dy is whole already
    wgrad       dw = Q'(AG(dy)) @ Q'(x).T
    dbias       db = sum_T dy                         of the rank's tokens; the caller sums it over ranks
none        the same without collectives

Saved       for dgrad: Q'(w), a reference to the weight's cached copy, or w itself where dgrad takes it unquantised
            for wgrad: Q'(x), else x itself. MXFP4 keeps 0.53 bytes an element, MXFP8 1.03, BF16 2; with sequence parallelism of
            the rank's tokens only, gathered again in backward (quantised where no block lies across ranks, else as x).
            Nothing for a GEMM that will not run: a frozen weight keeps no x, an input without gradient no w.
Order       backward starts AG(x) before dgrad and RS(dx) before wgrad, so that each transfer has a GEMM to hide under. The
            collectives, their order and, unquantised, the GEMM calls are those of Megatron-Core's linears: the same bits.
            With `call.overlap` the others run under GEMMs too, in `linear_overlap`, and sums over ranks are taken in rank order.
Equality    quantised shards carry the codes of the whole tensor wherever no block lies across ranks, so TP=p multiplies the
            numbers TP=1 does; only the order of the sums over ranks differs. Not so for FP8 `tensorwise` and `rowwise`, whose
            scales span a rank's shard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import dynamo at once, a second of start-up
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.communication.collectives import Pending, all_reduce, ready
from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.autocast import compute_dtype, no_autocast
from primus_turbo_plugin.functional.fused_quantize import gradient_sum
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import Operand
from primus_turbo_plugin.functional.linear_operands import (
    columnwise,
    local_operands,
    save_operands,
    saved_operands,
    weight_operands,
)
from primus_turbo_plugin.functional.linear_overlap import (
    gather_and_multiply,
    gather_gradient_and_multiply,
    multiply_and_scatter,
    start_input,
    start_scatter,
)
from primus_turbo_plugin.functional.wgrad import compute_wgrad


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> Tensor:
    """y = x @ weight.T + bias, split over ranks as `call.parallel` says.

    Under autocast both operands are cast to its dtype, as `torch.matmul` would do; nothing inside is cast again.

    Args:
        x: [tokens, in] of this rank, bf16, fp16 or fp32 (fp64 where nothing is quantised), any strides, any number of tokens.
        weight: [out, in] of this rank, x's dtype.
        bias: [out], x's dtype, or None. Of this rank in `column` mode; in `row` mode the whole one, added after the reduction.
        call: Plan, kernels, split, and where gradients go.

    Returns:
        [tokens, out] in x's dtype (or autocast's): all tokens in `column` mode, this rank's tokens for sequence-parallel `row`.

    Raises:
        ShapeError: Shapes or dtypes do not match, or a contraction needs padding that the plan refuses.
    """
    dtype = compute_dtype(x)
    _check(x, weight, bias, call)
    with no_autocast(x):
        untraced = call.overlap is not None and torch.compiler.is_compiling()
        run = _run_untraced if untraced else _Linear.apply
        y: Tensor = run(x if x.dtype == dtype else x.to(dtype), weight, bias, call, torch.is_grad_enabled())
    return y


@_disable_dynamo
def _run_untraced(*arguments: Any) -> Any:
    """Outside the graphs of torch.compile, which would replay the sequence numbers of one call."""
    return _Linear.apply(*arguments)


class _Linear(Function):
    """See the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall, grad_enabled: bool
    ) -> Tensor:
        x_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        with_dgrad, with_wgrad = grad_enabled and x_needs_grad, grad_enabled and weight_needs_grad
        if call.plan.precision.padding == "refuse":
            _check_contractions(call, x, weight, with_dgrad=with_dgrad, with_wgrad=with_wgrad)
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        gathers = call.parallel.gathers_input
        x_row, x_kept = local_operands(call, "x", x, row=not gathers, column=with_wgrad and not gathers)
        w_row, w_column = weight_operands(call, weight, row=True, column=with_dgrad or call.transpose_weight)
        assert w_row is not None
        if gathers:
            y, x_kept = gather_and_multiply(call, x, w_row, column=with_wgrad)
        else:
            assert x_row is not None
            y = _multiply_and_reduce(call, x_row, w_row)
        save_operands(ctx, x=x_kept, w=w_column if with_dgrad else None)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with_dgrad, with_wgrad, with_dbias = ctx.needs_input_grad[:3]
        call: LinearCall = replace(ctx.call, dy_sum=[]) if with_dbias else ctx.call
        saved = saved_operands(ctx)
        try:
            with no_autocast(dy):
                deferred = with_wgrad and call.defer is not None and call.defer(dy)
                x_arriving = _start_input(call, saved["x"], dy) if with_wgrad and not deferred else None
                dx, dy_column = _start_dgrad(call, dy, saved["w"] if with_dgrad else None, wgrad=x_arriving is not None)
                dw = _wgrad(call, dy_column, x_arriving)
                if deferred:
                    assert call.sink is not None
                    dw = call.sink.delivered()
                db = gradient_sum(call, dy).to(ctx.bias_dtype) if with_dbias else None
                return dx.wait(), dw, db, None, None
        except BaseException:  # out of memory, say: end the collectives under way, the caller may try a smaller batch
            if call.overlap is not None:
                call.overlap.overlap.abandon()
            raise


def _multiply_and_reduce(call: LinearCall, x: Operand, w: Operand) -> Tensor:
    if call.parallel.scatters_output:
        return multiply_and_scatter(call, "fprop", x, w)
    y = call.kernels.gemm_nt("fprop", x, w)
    return all_reduce(y, call.parallel.group).wait() if call.parallel.sums("row") else y


def _start_input(call: LinearCall, kept: Operand | None, dy: Tensor) -> Pending[Operand]:
    assert kept is not None
    return start_input(call, kept, dy) if call.parallel.gathers_input else ready(kept)


def _start_dgrad(
    call: LinearCall, dy: Tensor, w: Operand | None, *, wgrad: bool
) -> tuple[Pending[Tensor | None], Operand | None]:
    """dx = dy @ w, its reduction under way; and the columnwise copy of dy for wgrad."""
    if call.parallel.scatters_output:
        whole, dy_column = gather_gradient_and_multiply(call, dy, w, column=wgrad)
        return ready(whole), dy_column
    dy_row, dy_column = local_operands(call, "dy", dy, row=w is not None, column=wgrad)
    if dy_row is None or w is None:
        return ready(None), dy_column
    if call.parallel.gathers_input:
        if call.overlap is not None and (call.overlap.scatter_dgrad or not wgrad):
            return ready(multiply_and_scatter(call, "dgrad", dy_row, columnwise(w))), dy_column
        return Pending(start_scatter(call, call.kernels.gemm_nt("dgrad", dy_row, columnwise(w)), dy).wait), dy_column
    dx = call.kernels.gemm_nt("dgrad", dy_row, columnwise(w))
    return Pending(all_reduce(dx, call.parallel.group).wait) if call.parallel.sums("column") else ready(dx), dy_column


def _wgrad(call: LinearCall, dy_column: Operand | None, x_arriving: Pending[Operand] | None) -> Tensor | None:
    """dw, or what autograd gets in its place; None where it is put off or not wanted."""
    if dy_column is None or x_arriving is None:
        return None
    x_column = x_arriving.wait()  # even when put off: collectives stay in backward, in one order on every rank
    if isinstance(dy_column, Tensor):
        dy_column = dy_column.contiguous()

    def compute() -> Tensor | None:
        return compute_wgrad(call.kernels, columnwise(dy_column), columnwise(x_column), call.sink)

    if call.delay is not None:
        return call.delay(compute)
    dw = compute()
    return dw if call.sink is None else call.sink.delivered()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> None:
    where = call.plan.path or "linear"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"{where}: x must be [tokens, in] and weight [out, in], got {list(x.shape)} and {list(weight.shape)}. "
            "Flatten the leading dimensions of x, and check the layer's input size."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"{where}: bias must be [out] = [{weight.shape[0]}], got {list(bias.shape)}.")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ShapeError(
                f"{where}: x and {name} must share a dtype, got {x.dtype} and {t.dtype}. "
                f"Cast x, build the layer with params_dtype={x.dtype}, or run under autocast."
            )


def _check_contractions(call: LinearCall, x: Tensor, weight: Tensor, *, with_dgrad: bool, with_wgrad: bool) -> None:
    call.check_contraction("fprop", "K", weight.shape[1])
    if with_dgrad:
        call.check_contraction("dgrad", "N", weight.shape[0])
    if with_wgrad:
        tokens = x.shape[0] * (call.parallel.size if call.parallel.gathers_input else 1)
        call.check_contraction("wgrad", "tokens", tokens)
