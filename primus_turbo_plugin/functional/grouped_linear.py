"""Linear layers of experts, y[rows of e] = x[rows of e] @ w[e].T + b[e], with quantised GEMMs and gradients into a buffer.

T tokens sorted by expert, E experts, K inputs, N outputs; Q(t) is t along its features, quantised or not, Q'(t) the columnwise
copy of t: transposed and quantised along each expert's tokens (rotated first, where the recipe says so), expert by expert.

    fprop       y  = Q(x) @ Q(w[e]).T + b[e]          x [T, K], w [E, N, K], y [T, N]
    dgrad       dx = Q(dy) @ Q'(w[e]).T               dy [T, N]
    wgrad       dw[e] = Q'(dy) @ Q'(x).T              over the expert's tokens; zero for an expert without any
    dbias       db[e] = sum of dy over the expert's tokens

Equality    every expert's operands are quantised as if they were alone: no scale, block or rotation spans two experts
Saved       for dgrad: Q'(w), a reference to the weights' cached copies, or w itself where dgrad takes it unquantised
            for wgrad: Q'(x), each expert's tokens padded to whole blocks with zeros (at most E * 31 rows in MX), else x itself
Waiting     the number of tokens of each expert may be known to the GPU alone: nothing waits for it, unless the kernels chosen say
            so (`GroupedLinearKernels.choices`)
Collectives none: tokens arrive at their experts before, and leave after; partial sums of split experts are the caller's
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.autocast import compute_dtype, no_autocast
from primus_turbo_plugin.functional.grouped_linear_call import GroupedLinearCall
from primus_turbo_plugin.functional.linear_kernels import Operand, operand_specs
from primus_turbo_plugin.functional.linear_operands import save_operands, saved_operands
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference.grouped_quantize import move_apart
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Pair = tuple[Operand | None, Operand | None]


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    tokens_per_expert: Tensor | Groups,
    call: GroupedLinearCall,
    bias: Tensor | None = None,
) -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e].T + bias[e] for every expert e.

    Under autocast both operands are cast to its dtype, as `torch.matmul` would do; nothing inside is cast again.

    Args:
        x: [T, K], rows sorted by expert; bf16, fp16 or fp32 (fp64 where nothing is quantised), any strides, any T.
        weight: [E, N, K], x's dtype, any strides.
        tokens_per_expert: int64 [E], on the CPU or with x, of sum T; or the `Groups` made of it, for several layers on the same
            tokens.
        call: Plan, kernels, and where gradients go.
        bias: [E, N], x's dtype, or None.

    Returns:
        [T, N] in x's dtype (or autocast's).

    Raises:
        ShapeError: Shapes, dtypes or devices do not match, or a contraction needs padding that the plan refuses.
    """
    groups = tokens_per_expert
    if not isinstance(groups, Groups):
        groups = Groups.of(groups, x.shape[0], x.device)
    dtype = compute_dtype(x)
    _check(x, weight, bias, groups, call)
    with no_autocast(x):
        y: Tensor = _GroupedLinear.apply(x.to(dtype), weight, bias, groups, call, torch.is_grad_enabled())
    return y


class _GroupedLinear(Function):
    """See the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        call: GroupedLinearCall,
        grad_enabled: bool,
    ) -> Tensor:
        with_dgrad, with_wgrad = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        call.check_contraction("fprop", "K", weight.shape[2])
        if with_dgrad:
            call.check_contraction("dgrad", "N", weight.shape[1])
        padded = groups.padded(call.kernels.token_multiple) if with_wgrad else groups
        x_row, x_column = _token_operands(call, "x", x, groups, padded, row=True, column=with_wgrad)
        w_row, w_column = _weight_operands(call, weight, column=with_dgrad or call.transpose_weight)
        assert x_row is not None
        assert w_row is not None
        y = _multiply_rows(call, "fprop", x_row, w_row, groups, weight.shape[1])
        save_operands(ctx, x=x_column, w=w_column if with_dgrad else None)
        ctx.call, ctx.groups, ctx.padded = call, groups, padded
        ctx.weight_shape, ctx.bias_dtype = tuple(weight.shape), None if bias is None else bias.dtype
        return y if bias is None else y + bias.to(y.dtype).index_select(0, groups.of_rows())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with_dgrad, with_wgrad, with_dbias = ctx.needs_input_grad[:3]
        call: GroupedLinearCall = ctx.call
        groups: Groups = ctx.groups
        saved = saved_operands(ctx)
        with no_autocast(dy):
            dy_row, dy_column = _token_operands(call, "dy", dy, groups, ctx.padded, row=with_dgrad, column=with_wgrad)
            dx = dw = db = None
            if with_dgrad:
                assert dy_row is not None
                assert saved["w"] is not None
                dx = _multiply_rows(call, "dgrad", dy_row, saved["w"], groups, ctx.weight_shape[2])
            if with_wgrad:
                assert dy_column is not None
                assert saved["x"] is not None
                dw = _wgrad(call, dy_column, saved["x"], ctx.padded, ctx.weight_shape)
            if with_dbias:
                db = _sum_of_groups(dy, groups).to(ctx.bias_dtype)
            return dx, dw, db, None, None, None


def _token_operands(
    call: GroupedLinearCall, name: str, t: Tensor, groups: Groups, padded: Groups, *, row: bool, column: bool
) -> Pair:
    """Both copies of x or dy [T, features]; None where not needed.

    What is not quantised is t itself, and as wgrad's partner of a quantised operand t with its experts moved apart as in that.
    """
    row_spec, column_spec = operand_specs(call.plan, name)
    row_copy, column_copy = call.kernels.quantize(
        name, t, row_spec if row else None, column_spec if column else None, groups, padded, call.key(name)
    )
    column_operand: Operand | None = column_copy
    if column and column_spec is None:
        column_operand = move_apart(t, groups, padded)
    return (row_copy or (t if row else None)), column_operand


def _weight_operands(call: GroupedLinearCall, weight: Tensor, *, column: bool) -> Pair:
    """Row copies of the weights for fprop, columnwise ones for dgrad; kept in the call's cache if it has one."""
    row_spec, column_spec = operand_specs(call.plan, "w")
    cast = weight.to(call.kernels.dtype)

    def quantize(with_row: bool, with_column: bool) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        keys = [call.key(f"w/{expert}") for expert in range(weight.shape[0])]
        specs = (row_spec if with_row else None, column_spec if with_column else None)
        return call.kernels.quantize_weights(cast, *specs, keys)

    wanted = (row_spec is not None, column and column_spec is not None)
    if call.cache is None or not any(wanted):
        row_copy, column_copy = quantize(*wanted)
    else:
        row_copy, column_copy = call.cache.copies(weight, call.kernels.dtype, quantize, row=wanted[0], column=wanted[1])
    return (row_copy or cast), (column_copy or (cast if column else None))


def _multiply_rows(call: GroupedLinearCall, gemm: str, a: Operand, w: Operand, groups: Groups, outputs: int) -> Tensor:
    """a [T, inputs] times each expert's weight: as it is for fprop, turned for dgrad."""
    if 0 in (a.shape[0], a.shape[1], outputs):
        return torch.zeros(a.shape[0], outputs, dtype=call.kernels.dtype, device=a.device)
    if isinstance(w, Tensor) and gemm == "dgrad":
        w = w.transpose(1, 2)
    return call.kernels.multiply_rows(gemm, a, w, groups)


def _wgrad(call: GroupedLinearCall, dy: Operand, x: Operand, padded: Groups, shape: tuple[int, ...]) -> Tensor | None:
    """dw, or what autograd gets in its place; None where it is put off."""

    def compute() -> Tensor | None:
        return _compute_wgrad(call, dy, x, padded, shape)

    if call.delay is not None:
        return call.delay(compute)
    dw = compute()
    return dw if call.sink is None else call.sink.delivered()


def _compute_wgrad(
    call: GroupedLinearCall, dy: Operand, x: Operand, padded: Groups, shape: tuple[int, ...]
) -> Tensor | None:
    """dw [E, N, K], or None when it went into the sink."""
    kernels, sink = call.kernels, call.sink
    left, right = (t.t() if isinstance(t, Tensor) else t for t in (dy, x))
    if sink is None:
        dw = torch.empty(shape, dtype=kernels.wgrad_dtype, device=left.device)
        return kernels.multiply_depth(left, right, padded, dw, accumulate=False)
    buffer = sink.buffer()
    if tuple(buffer.shape) != shape:
        raise ShapeError(
            f"{call.where}: the gradient's buffer must be [experts, out, in] = {list(shape)}, got {list(buffer.shape)}. "
            "Give main_grad the weight's shape."
        )
    adds = not sink.overwrites()
    if buffer.dtype == torch.float32:
        kernels.multiply_depth(left, right, padded, buffer, accumulate=adds)
        return None
    dw = torch.empty(shape, dtype=torch.float32, device=left.device)
    kernels.multiply_depth(left, right, padded, dw, accumulate=False)
    if adds:
        buffer.add_(dw)  # dw in fp32: one rounding, of the sum
    else:
        buffer.copy_(dw)
    return None


def _sum_of_groups(dy: Tensor, groups: Groups) -> Tensor:
    """fp32 [E, N], dy [T, N] summed over every expert's rows in their order: the same bits every run."""
    if dy.shape[0] == 0:
        return dy.new_zeros(groups.count, dy.shape[1], dtype=torch.float32)
    wide = dy if dy.dtype == torch.float64 else dy.float()
    return torch.segment_reduce(wide, "sum", offsets=groups.offsets, axis=0, unsafe=True, initial=0)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, call: GroupedLinearCall) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ShapeError(
            f"{call.where}: x must be [tokens, in] and weight [experts, out, in], got {list(x.shape)} and "
            f"{list(weight.shape)}. Flatten the leading dimensions of x, and check the layer's input size."
        )
    if groups.count != weight.shape[0] or groups.total != x.shape[0]:
        raise ShapeError(
            f"{call.where}: tokens_per_expert must be [experts] = [{weight.shape[0]}] for {x.shape[0]} tokens, got "
            f"[{groups.count}] for {groups.total}. Pass the counts of this rank's experts, as the dispatcher returns them with x."
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ShapeError(
            f"{call.where}: bias must be [experts, out] = {list(weight.shape[:2])}, got {list(bias.shape)}. "
            "Stack one bias an expert."
        )
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ShapeError(
                f"{call.where}: x and {name} must share a dtype, got {x.dtype} and {t.dtype}. "
                f"Cast x, build the layer with params_dtype={x.dtype}, or run under autocast."
            )
