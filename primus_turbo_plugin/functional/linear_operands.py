"""The operands of a linear's three GEMMs: quantised where the plan says so, gathered where the tokens are spread over ranks.

A tensor t [tokens, features] is needed twice: as it is, with the contraction along its features (its *row copy*), and transposed,
with the contraction along tokens (its *columnwise copy*). Where it is not quantised, either copy is t itself, and `columnwise`
turns it when it is multiplied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primus_turbo_plugin.communication.collectives import Pending, all_gather, ready
from primus_turbo_plugin.communication.quantized import Axis, all_gather_quantized, shards_align
from primus_turbo_plugin.functional.fused_quantize import quantize_gradient
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import Operand, Specs
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Pair = tuple[Operand | None, Operand | None]


def columnwise(copy: Operand) -> Operand:
    """A columnwise copy as the GEMM takes it, [features, tokens]."""
    return copy if isinstance(copy, QuantizedTensor) else copy.t()


def local_operands(call: LinearCall, name: str, t: Tensor, *, row: bool, column: bool) -> Pair:
    """Both copies of x or dy [tokens, features], where this rank has all tokens; None where not needed."""
    specs = call.kernels.wanted_specs(name, row=row, column=column)
    if specs == (None, None):
        return (t if row else None), (t if column else None)
    if name == "x" and call.x_copies is not None:
        row_copy, column_copy = (copy if spec else None for copy, spec in zip(call.x_copies, specs))
    elif name == "dy" and not call.parallel.scatters_output:  # else t holds other ranks' tokens too
        row_copy, column_copy = quantize_gradient(call, t, *specs)
    else:
        row_copy, column_copy = call.kernels.quantize(name, t, *specs, call.key(name))
    return (row_copy or (t if row else None)), (column_copy or (t if column else None))


def weight_operands(call: LinearCall, weight: Tensor, *, row: bool, column: bool) -> Pair:
    """Both copies of the weight [out, in], row for fprop and columnwise for dgrad; kept in the call's cache if it has one."""
    row_spec, column_spec = call.kernels.wanted_specs("w", row=row, column=column)
    cast = weight.to(call.kernels.dtype)
    if row_spec is None and column_spec is None:
        return (cast if row else None), (cast if column else None)

    def quantize(with_row: bool, with_column: bool) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        specs = (row_spec if with_row else None, column_spec if with_column else None)
        return call.kernels.quantize("w", cast, *specs, call.key("w"))

    wanted = (row_spec is not None, column_spec is not None)
    if call.cache is None:
        row_copy, column_copy = quantize(*wanted)
    else:
        row_copy, column_copy = call.cache.copies(weight, call.kernels.dtype, quantize, row=wanted[0], column=wanted[1])
    return (row_copy or (cast if row else None)), (column_copy or (cast if column else None))


def gather_input(call: LinearCall, x: Tensor, *, column: bool) -> tuple[Operand, Operand | None]:
    """Gathers x [tokens / size, in] for fprop, and prepares what backward will gather for wgrad.

    Args:
        call: Plan, kernels, group.
        x: This rank's tokens.
        column: Whether wgrad will run.

    Returns:
        The row copy of all tokens; and for wgrad this rank's columnwise copy [in, tokens / size] where no block lies across
        ranks (MXFP4: 0.53 bytes an element kept and sent later, against 2), else x itself, or None without wgrad.
    """
    row_shard, column_shard = quantize_shards(call, "x", x, call.kernels.wanted_specs("x", row=True, column=column))
    if row_shard is not None:
        row: Operand | None = all_gather_quantized(row_shard, call.parallel.group, "outer").wait()
    else:
        gathered = all_gather(x, call.parallel.group).wait()
        row, _ = local_operands(call, "x", gathered, row=True, column=False)
    assert row is not None
    return row, (column_shard or x) if column else None


def gather_for_wgrad(call: LinearCall, shard: Operand) -> Pending[Operand]:
    """The columnwise copy of all tokens from what `gather_input` prepared: starts the transfer and returns."""
    if isinstance(shard, QuantizedTensor):
        quantized = all_gather_quantized(shard, call.parallel.group, "contraction")
        return Pending(quantized.wait)
    pending = all_gather(shard, call.parallel.group)

    def finish() -> Operand:
        _, copy = local_operands(call, "x", pending.wait(), row=False, column=True)
        assert copy is not None
        return copy

    return Pending(finish)


def gather_gradient(call: LinearCall, dy: Tensor, *, row: bool, column: bool) -> Pair:
    """Both copies of all tokens' dy from this rank's [tokens / size, out]; None where not needed."""
    group = call.parallel.group
    row_shard, column_shard = quantize_shards(call, "dy", dy, call.kernels.wanted_specs("dy", row=row, column=column))
    pending_row = ready(None) if row_shard is None else all_gather_quantized(row_shard, group, "outer")
    pending_column = ready(None) if column_shard is None else all_gather_quantized(column_shard, group, "contraction")
    late: Pair = (None, None)
    if (row and row_shard is None) or (column and column_shard is None):
        late = local_operands(
            call,
            "dy",
            all_gather(dy, group).wait(),
            row=row and row_shard is None,
            column=column and column_shard is None,
        )
    return (pending_row.wait() or late[0]), (pending_column.wait() or late[1])


def quantize_shards(
    call: LinearCall, name: str, shard: Tensor, specs: Specs
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """Quantises this rank's tokens before they are sent, where that gives the bits that quantising all of them would."""
    tokens, features = shard.shape
    axes: tuple[tuple[tuple[int, int], Axis], ...] = (
        ((tokens, features), "outer"),
        ((features, tokens), "contraction"),
    )
    early: list[Any] = [
        spec if spec is not None and shards_align(spec, shape, axis) else None
        for spec, (shape, axis) in zip(specs, axes)
    ]
    if name == "x" and call.x_copies is not None:
        row_copy, column_copy = call.x_copies
        return row_copy if early[0] else None, column_copy if early[1] else None
    if name == "dy":
        return quantize_gradient(call, shard, early[0], early[1], shard=True)
    return call.kernels.quantize(name, shard, early[0], early[1], call.key(name), shard=True)


def save_operands(ctx: Any, **operands: Operand | None) -> None:
    """Saves operands for backward as plain tensors, so that hooks on saved tensors (offloading) see every byte.

    One tensor for each operand, None among them, or two where it is quantised: then the rest of it is kept in `ctx.quantized`.
    """
    tensors: list[Tensor | None] = []
    quantized: dict[str, tuple[Any, ...] | None] = {}
    for name, operand in operands.items():
        if isinstance(operand, QuantizedTensor):
            tensors += (operand.data, operand.block_scale)
            quantized[name] = (operand.spec, operand.shape, operand.signs_seed, operand.scale_layout)
        else:
            tensors.append(operand)
            quantized[name] = None
    ctx.save_for_backward(*tensors)
    ctx.quantized = quantized


def saved_operands(ctx: Any) -> dict[str, Operand | None]:
    """What `save_operands` saved, by name."""
    tensors = iter(ctx.saved_tensors)
    return {
        name: next(tensors) if rest is None else QuantizedTensor.trusted(next(tensors), next(tensors), *rest)
        for name, rest in ctx.quantized.items()
    }
