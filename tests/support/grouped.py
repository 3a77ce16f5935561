"""What the tests of experts share: loads, operands quantised expert by expert, and the float64 products of those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.grouped_operands import depth_multiple, stack_weights
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference import grouped_quantize, quantize
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Tensor | QuantizedTensor

LOADS = {
    "uneven": (33, 0, 64, 1, 30),
    "one token": (0, 1, 0),
    "all in one": (0, 0, 77),
    "one expert": (45,),
    "no tokens": (0, 0),
}


def on_device(counts: Sequence[int], device: str) -> Groups:
    """As a router leaves them: on the device, unknown to the host."""
    groups = Groups.of(torch.tensor(counts, device=device), sum(counts), torch.device(device))
    return Groups(groups.offsets, groups.total)


def tokens(rng: torch.Generator, counts: Sequence[int], features: int) -> Tensor:
    """bf16 `[T, features]`, every expert's at another magnitude, so that a scale of the neighbour's is far off."""
    size = torch.cat([torch.full((count, 1), 8.0 ** (expert % 3 - 1)) for expert, count in enumerate(counts)])
    return (torch.randn(sum(counts), features, generator=rng) * size).bfloat16()


def rows_operands(
    x: Tensor, weight: Tensor, counts: Sequence[int], specs: tuple[QuantSpec | None, QuantSpec | None], device: str
) -> tuple[Operand, Operand, Groups]:
    """x `[T, K]` and the experts' weights `[E, N, K]` as `grouped_gemm_nt` takes them."""
    groups = on_device(counts, device)
    a: Operand = x.to(device)
    b: Operand = weight.to(device)
    if specs[0] is not None:
        a = _copy(grouped_quantize.grouped_quantize(a, specs[0], None, groups, groups)[0])
    if specs[1] is not None:
        b = stack_weights([quantize.quantize(w, specs[1]) for w in b])
    return a, b, groups


def depth_operands(
    dy: Tensor, x: Tensor, counts: Sequence[int], specs: tuple[QuantSpec | None, QuantSpec | None], device: str
) -> tuple[Operand, Operand, Groups]:
    """dy `[T, M]` and x `[T, N]` as `grouped_gemm_depth` takes them."""
    groups = on_device(counts, device)
    padded = groups.padded(depth_multiple(*specs))
    operands: list[Operand] = []
    for t, spec in zip((dy.to(device), x.to(device)), specs):
        if spec is None:
            operands.append(grouped_quantize.move_apart(t, groups, padded).t())
        else:
            operands.append(_copy(grouped_quantize.grouped_quantize(t, None, spec, groups, padded)[1]))
    return operands[0], operands[1], padded


def experts(t: Tensor, counts: Sequence[int], spec: QuantSpec | None, *, columnwise: bool) -> Iterator[Tensor]:
    """fp64 values of every expert's operand, quantised alone by the dense reference: contraction last, rotated as stored."""
    for piece in t.cpu().split(list(counts)):
        if spec is None:
            yield (piece.t() if columnwise else piece).double()
        else:
            yield quantize.quantize(piece, spec, columnwise=columnwise).decode().double()


def weights(weight: Tensor, spec: QuantSpec | None) -> Iterator[Tensor]:
    """fp64 values of every expert's weight, quantised alone."""
    for w in weight.cpu():
        yield w.double() if spec is None else quantize.quantize(w, spec).decode().double()


def products(left: Iterator[Tensor], right: Iterator[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(product, largest error of summing it in fp32) of every expert, both fp64."""
    found = []
    for a, b in zip(left, right):
        length = min(a.shape[1], b.shape[1])  # past the shorter one the other is padding
        a, b = a[:, :length], b[:, :length]
        bound = (length + 6) * 2.0**-24 * (
            a.abs() @ b.abs().t()
        ) + 1e-30  # 6: scales outside the sum, rounded once each
        found.append((a @ b.t(), bound))
    return found


def _copy(copy: QuantizedTensor | None) -> QuantizedTensor:
    assert copy is not None
    return copy
