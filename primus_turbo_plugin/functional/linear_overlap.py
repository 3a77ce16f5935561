"""The collectives of a sequence-parallel linear, under its GEMMs where a call asks for it, and one after the other where not.

            overlapped                                                       else
column
  fprop     rows of x (or their codes and scales) are multiplied as they arrive     AG(x), then the GEMM
  dgrad     AG(x) for wgrad runs under it                                           the same, by the group's library
            dx leaves under wgrad; without a wgrad, as its products are made        the same, by the group's library
row
  fprop     products leave for their owners as they are made                        the GEMM, then RS(y)
  dgrad     rows of dy are multiplied as they arrive, and kept for wgrad            AG(dy), then the GEMM

What is asked for and does not fit a call is done the other way for a reason that is noted (`OverlapUse.note`): a GEMM below the
measured size, an operand whose blocks lie across ranks. The reasons depend on sizes and formats only, so all ranks decide alike.
Gathered operands lie in memory of the transport: they are multiplied here and never saved; a wgrad that is put off gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Pending, reduce_scatter
from primus_turbo_plugin.communication.executor import Multiply
from primus_turbo_plugin.communication.overlap import Payload
from primus_turbo_plugin.communication.quantized import shards_align
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import Operand
from primus_turbo_plugin.functional.linear_operands import (
    Pair,
    columnwise,
    gather_for_wgrad,
    gather_gradient,
    gather_input,
    local_operands,
    quantize_shards,
)
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


def gather_and_multiply(call: LinearCall, x: Tensor, w: Operand, *, column: bool) -> tuple[Tensor, Operand | None]:
    """y = AG(x) @ w.T of a column-parallel layer.

    Args:
        call: Plan, kernels, group, overlap.
        x: [tokens / size, in] of this rank.
        w: [out / size, in], the row copy.
        column: Whether wgrad will run.

    Returns:
        y [tokens, out / size], and what backward will gather for wgrad, or None.
    """
    use = call.overlap
    tokens = x.shape[0] * call.parallel.size
    if use is None or not use.gather or _small(call, "fprop", tokens, w.shape):
        x_row, kept = gather_input(call, x, column=column)
        return call.kernels.gemm_nt("fprop", x_row, w), kept
    row_spec, column_spec = call.kernels.specs["x"]
    row_shard, column_shard = quantize_shards(call, "x", x, (row_spec, column_spec if column else None))
    if row_spec is not None and row_shard is None:
        _note(call, "fprop", "the blocks of x lie across ranks, so it is quantised after gathering")
        x_row, kept = gather_input(call, x, column=column)
        return call.kernels.gemm_nt("fprop", x_row, w), kept
    y = torch.empty(tokens, w.shape[0], dtype=call.kernels.dtype, device=x.device)
    shard = x if row_shard is None else row_shard
    use.overlap.gather_gemm(
        _payload(shard), _multiply(call, "fprop", shard, w), y, x.shape[1], label=_label(call, "fprop")
    )
    return y, (column_shard or x) if column else None


def multiply_and_scatter(call: LinearCall, gemm: str, x: Operand, w: Operand) -> Tensor:
    """RS(x @ w.T): of a row-parallel layer's fprop, or a column-parallel one's dgrad.

    Args:
        call: Plan, kernels, group, overlap.
        gemm: `fprop` or `dgrad`.
        x: [tokens, contraction / size] of this rank, the row copy.
        w: [columns, contraction / size].

    Returns:
        [tokens / size, columns].
    """
    use, tokens = call.overlap, x.shape[0]
    wanted = use is not None and (use.scatter if gemm == "fprop" else use.scatter_dgrad or use.bulk_scatter)
    if (
        use is None
        or not wanted
        or tokens % call.parallel.size
        or _small(call, gemm, tokens, w.shape)
        or _torn(call, gemm, x)
    ):
        return reduce_scatter(call.kernels.gemm_nt(gemm, x, w), call.parallel.group).wait()
    y = torch.empty(tokens // call.parallel.size, w.shape[0], dtype=call.kernels.dtype, device=x.device)
    return use.overlap.gemm_scatter(
        _payload(x),
        _multiply(call, gemm, x, w),
        y,
        x.shape[1],
        can_add=_adds(call, gemm, x, w),
        label=_label(call, gemm),
    )


def start_input(call: LinearCall, kept: Operand, dy: Tensor) -> Pending[Operand]:
    """The columnwise copy of all tokens' x, from what forward kept of this rank's, under way; dgrad of dy comes next."""
    use, features = call.overlap, kept.shape[0] if isinstance(kept, QuantizedTensor) else kept.shape[1]
    if use is None or not use.bulk_gather or _small(call, "dgrad", dy.shape[0], (features, dy.shape[1])):
        return gather_for_wgrad(call, kept)
    label = _label(call, "x for wgrad")
    if isinstance(kept, QuantizedTensor):
        return _start_columns(call, kept, label)
    pending = use.overlap.start_gather(_payload(kept), label=label)

    def finish() -> Operand:
        (gathered,) = pending.wait()
        _, copy = local_operands(call, "x", gathered, row=False, column=True)
        assert copy is not None
        return _own(call, copy)

    return Pending(finish)


def start_scatter(call: LinearCall, dx: Tensor, dy: Tensor) -> Pending[Tensor]:
    """RS(dx), to run under the wgrad of dy."""
    use, (tokens, features) = call.overlap, dx.shape
    wanted = use is not None and use.bulk_scatter and tokens % call.parallel.size == 0
    if use is not None and wanted and use.overlap.ring:
        _note(call, "dx under wgrad", "a ring adds on its way, for which wgrad leaves no room")
        wanted = False
    if use is None or not wanted or _small(call, "wgrad", tokens, (features, dy.shape[1])):
        return reduce_scatter(dx, call.parallel.group)
    return use.overlap.start_scatter(dx, label=_label(call, "dx under wgrad"))


def gather_gradient_and_multiply(
    call: LinearCall, dy: Tensor, w: Operand | None, *, column: bool
) -> tuple[Tensor | None, Operand | None]:
    """dx = AG(dy) @ w of a row-parallel layer, and the gathered dy for wgrad.

    Args:
        call: Plan, kernels, group, overlap.
        dy: [tokens / size, out] of this rank.
        w: The weight's columnwise copy, or None where dx is not wanted.
        column: Whether wgrad will run.

    Returns:
        dx [tokens, in / size] or None, and the columnwise copy of dy or None.
    """
    use, tokens = call.overlap, dy.shape[0] * call.parallel.size
    if w is not None and use is not None and use.gather and not _small(call, "dgrad", tokens, columnwise(w).shape):
        row_spec, column_spec = call.kernels.specs["dy"]
        wanted = (row_spec, column_spec if column else None)
        if wanted == (None, None):
            return _plain_gradient(call, dy, columnwise(w), column=column)
        rows_align = row_spec is not None and shards_align(row_spec, _shape(dy), "outer")
        columns_align = column_spec is not None and shards_align(column_spec, _shape(dy.t()), "contraction")
        if rows_align and (not column or columns_align):
            row_shard, column_shard = quantize_shards(call, "dy", dy, wanted)
            assert row_shard is not None
            return _quantized_gradient(call, row_shard, column_shard, columnwise(w))
        if row_spec is None or (rows_align and row_spec.rounding == "nearest"):
            return _gradient_quantized_on_arrival(call, dy, row_spec, columnwise(w))
        _note(call, "dgrad", "a copy of dy is made of all tokens, so dy is gathered first")
    dy_row, dy_column = _gathered(call, dy, row=w is not None, column=column)
    return (None if dy_row is None or w is None else call.kernels.gemm_nt("dgrad", dy_row, columnwise(w))), dy_column


def _gathered(call: LinearCall, dy: Tensor, *, row: bool, column: bool) -> Pair:
    return gather_gradient(call, dy, row=row, column=column) if row or column else (None, None)


def _plain_gradient(call: LinearCall, dy: Tensor, w: Operand, *, column: bool) -> tuple[Tensor, Operand | None]:
    assert call.overlap is not None
    dx = torch.empty(dy.shape[0] * call.parallel.size, w.shape[0], dtype=call.kernels.dtype, device=dy.device)
    dy = dy.contiguous()
    (gathered,) = call.overlap.overlap.gather_gemm(
        _payload(dy), _multiply(call, "dgrad", dy, w), dx, dy.shape[1], keep=column, label=_label(call, "dgrad")
    )
    return dx, _own(call, gathered) if column else None


def _gradient_quantized_on_arrival(
    call: LinearCall, dy: Tensor, row_spec: QuantSpec | None, w: Operand
) -> tuple[Tensor, Operand | None]:
    """dy travels in BF16, since its columnwise copy is made of all tokens; rows are quantised for dgrad as they come."""
    assert call.overlap is not None
    dx = torch.empty(dy.shape[0] * call.parallel.size, w.shape[0], dtype=call.kernels.dtype, device=dy.device)

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        rows, _ = call.kernels.quantize("dy", planes[0], row_spec, None, call.key("dy"))
        _write(call, "dgrad", planes[0] if rows is None else rows, w, out)

    align = 1 if row_spec is None else max(row_spec.block_shape[0], 1)
    (gathered,) = call.overlap.overlap.gather_gemm(
        Payload.plain(dy), multiply, dx, dy.shape[1], keep=True, align=align, label=_label(call, "dgrad")
    )
    _, column = local_operands(call, "dy", gathered, row=False, column=True)
    assert column is not None
    return dx, _own(call, column)


def _shape(t: Tensor) -> tuple[int, int]:
    return t.shape[0], t.shape[1]


def _quantized_gradient(
    call: LinearCall, row: QuantizedTensor, column: QuantizedTensor | None, w: Operand
) -> tuple[Tensor, Operand | None]:
    assert call.overlap is not None
    pending = None if column is None else _start_columns(call, column, _label(call, "dy for wgrad"))
    dx = torch.empty(row.shape[0] * call.parallel.size, w.shape[0], dtype=call.kernels.dtype, device=row.device)
    multiply = _multiply(call, "dgrad", row, w)
    call.overlap.overlap.gather_gemm(_payload(row), multiply, dx, row.shape[1], label=_label(call, "dgrad"))
    return dx, None if pending is None else pending.wait()


def _start_columns(call: LinearCall, shard: QuantizedTensor, label: str) -> Pending[Operand]:
    """All ranks' columnwise copies [features, tokens / size] side by side: stacked as they travel, turned when they are there."""
    assert call.overlap is not None
    size, (features, tokens) = call.parallel.size, shard.shape
    planes = (shard.data, shard.block_scale)
    stacked = Payload(tuple(plane.reshape(1, -1) for plane in planes), (1, 1), rows=1)
    pending = call.overlap.overlap.start_gather(stacked, label=label)

    def finish() -> Operand:
        """Always a copy: one row of scales for all features would else stay a view of the slot, and wgrad may be put off."""
        data, scale = (
            arrived.view(size, *plane.shape).transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1)
            for arrived, plane in zip(pending.wait(), planes)
        )
        return QuantizedTensor(data, scale, shard.spec, (features, size * tokens), signs_seed=shard.signs_seed)

    return Pending(finish)


def _own(call: LinearCall, copy: Operand) -> Operand:
    """A copy that outlives the next collectives, where wgrad is put off."""
    return copy.clone() if call.delay is not None and isinstance(copy, Tensor) else copy


def _payload(operand: Operand) -> Payload:
    if isinstance(operand, QuantizedTensor):
        operand = operand.plain()  # rows of another layout of scales cannot be cut where chunks and owners are
        planes = (operand.data.contiguous(), operand.block_scale.contiguous())
        return Payload(planes, (1, _per_row(operand)), operand.shape[0])
    return Payload.plain(operand)


def _per_row(operand: QuantizedTensor) -> int:
    """Rows that share a row of scales; all of them, where one scale serves the tensor."""
    return operand.spec.block_shape[0] or max(operand.shape[0], 1)


def _multiply(call: LinearCall, gemm: str, like: Operand, w: Operand) -> Multiply:
    """The GEMM of some rows of an operand, straight into the result where the kernel can write there."""
    if isinstance(like, QuantizedTensor):
        spec, contraction, seed = like.spec, like.shape[1], like.signs_seed

        def multiply_codes(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
            data, scale = planes
            rows = QuantizedTensor(data, scale, spec, (data.shape[0], contraction), signs_seed=seed)
            _write(call, gemm, rows, w, out)

        return multiply_codes
    if not _writes_in_place(call, gemm, like, w):
        return lambda planes, out, add: _write(call, gemm, planes[0], w, out)
    assert isinstance(w, Tensor)
    turned = w.t()

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        if out.dtype != planes[0].dtype:  # fp32 sums of a ring
            out.copy_(torch.mm(planes[0], turned))
        elif add is None:
            torch.mm(planes[0], turned, out=out)
        else:
            torch.addmm(add, planes[0], turned, out=out)

    return multiply


def _write(call: LinearCall, gemm: str, rows: Operand, w: Operand, out: Tensor) -> None:
    if out.dtype == call.kernels.dtype:
        call.kernels.gemm_nt(gemm, rows, w, into=out)
    else:  # fp32 sums of a ring
        out.copy_(call.kernels.gemm_nt(gemm, rows, w))


def _writes_in_place(call: LinearCall, gemm: str, x: Operand, w: Operand) -> bool:
    """torch.mm, which is what the backend `torch` runs, takes `out`; it multiplies no contraction of length 0."""
    plain = isinstance(x, Tensor) and isinstance(w, Tensor) and x.dtype == w.dtype == call.kernels.dtype
    return plain and call.kernels.gemms[gemm].name == "torch" and 0 not in w.shape


def _adds(call: LinearCall, gemm: str, x: Operand, w: Operand) -> bool:
    """Whether the GEMM adds rows in its own pass. On an H200 (torch 2.11) cuBLAS rounds the product before it adds for most
    shapes, which gives the bits of the sum in rank order, and only after it for others (K = 14336), which is closer still.
    """
    return _writes_in_place(call, gemm, x, w) and x.device.type == "cuda"


def _small(call: LinearCall, gemm: str, tokens: int, sizes: Sequence[int]) -> bool:
    """Whether the GEMM of so many tokens with a weight [columns, contraction] is below the measured size."""
    assert call.overlap is not None
    reason = call.overlap.overlap.too_small(tokens, sizes[0], sizes[1])
    if reason is not None:
        _note(call, gemm, reason)
    return reason is not None


def _torn(call: LinearCall, gemm: str, x: Operand) -> bool:
    """Whether a block of scales would lie across two owners' rows."""
    if not isinstance(x, QuantizedTensor) or x.spec.block_shape[0] <= 1:
        return False
    if (x.shape[0] // call.parallel.size) % x.spec.block_shape[0] == 0:
        return False
    _note(call, gemm, f"the rows of a rank are no multiple of the operand's {x.spec.block} blocks")
    return True


def _label(call: LinearCall, what: str) -> str:
    return f"{call.plan.path or 'linear'} {what}"


def _note(call: LinearCall, what: str, why: str) -> None:
    assert call.overlap is not None
    call.overlap.note(what, why)
