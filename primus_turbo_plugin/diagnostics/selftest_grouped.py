"""Self-test of what experts run: copies equal the reference's bit for bit, products of exact sums equal float64 bit for bit.

Four experts: of a few tokens, of none, of one, of more than a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.grouped_operands import depth_multiple, stack_weights
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference import grouped_quantize, quantize
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest, GroupedQuantizeRequest, Request
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey

_SEED = 20260801
_COUNTS = (33, 0, 1, 130)
_INPUTS, _OUTPUTS = 160, 72

Case = tuple[Request, Callable[[Any, torch.device], str | None]]
Operand: TypeAlias = "Tensor | QuantizedTensor"


def _groups(device: torch.device | str = "cpu") -> Groups:
    """As a router leaves them: on the device, unknown to the host."""
    groups = Groups.of(torch.tensor(_COUNTS).to(device), sum(_COUNTS), torch.device(device))
    return Groups(groups.offsets, groups.total)


def grouped_quantize_cases(torch_device: str) -> Iterator[Case]:
    """Every kind of scale, a rotation and stochastic rounding, each expert at its own magnitude."""
    generator = torch.Generator().manual_seed(_SEED)
    size = torch.repeat_interleave(torch.tensor([1.0, 1.0, 1e3, 1e-3]), torch.tensor(_COUNTS))
    x = (torch.randn(sum(_COUNTS), _INPUTS, generator=generator) * size[:, None]).to(torch.bfloat16)
    key = RoundingKey(seed=_SEED, draw=1, tensor=2, rank=0)
    specs = (
        QuantSpec(format=Format.MXFP4, hadamard=16),
        QuantSpec(format=Format.MXFP4, block="32x32", rounding="stochastic"),
        QuantSpec(format=Format.MXFP8),
        QuantSpec(format=Format.FP8, block="tensorwise"),
        QuantSpec(format=Format.FP8, block="rowwise"),
        QuantSpec(format=Format.FP8, block="128x128"),
    )
    for spec in specs:

        def check(kernels: Any, device: torch.device, spec: QuantSpec = spec) -> str | None:
            both = []
            for module, where in ((grouped_quantize, torch.device("cpu")), (kernels, device)):
                groups = _groups(where)
                padded = groups.padded(depth_multiple(spec))
                both.append(module.grouped_quantize(x.to(where), spec, spec, groups, padded, key=key, signs_seed=3))
            for name, wanted, got in zip(("row", "columnwise"), *both):
                for part in ("block_scale", "data"):
                    if not torch.equal(getattr(wanted, part), getattr(got, part).cpu()):
                        return f"{name} {part}: differs from the reference"
            return None

        yield GroupedQuantizeRequest(device=torch_device, dtype=x.dtype, row_spec=spec, col_spec=spec), check


def grouped_gemm_cases(torch_device: str) -> Iterator[Case]:
    """Small integers, and where a scale's block begins a value that makes every scale a power of two: sums of 13 bits."""
    fp8 = {"rows": "rowwise", "depth": "1x128"}
    for kind in ("rows", "depth"):
        formats: list[torch.dtype | QuantSpec] = [torch.bfloat16]
        formats += [QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP8)]
        formats += [QuantSpec(format=Format.FP8, block=fp8[kind])]
        for spec, accumulate in itertools.product(formats, (False, True)):
            if not accumulate or kind == "depth":
                make = _rows_case if kind == "rows" else _depth_case
                yield make(torch_device, spec, accumulate)


def _rows_case(torch_device: str, kind: torch.dtype | QuantSpec, accumulate: bool) -> Case:
    x, weight = _integers(kind, sum(_COUNTS), _INPUTS), _integers(kind, len(_COUNTS), _OUTPUTS, _INPUTS)
    x[:, 0] = weight[..., 0] = _peak(kind)
    a: Operand = x
    b: Operand = weight
    values = x.double(), weight.double()
    if isinstance(kind, QuantSpec):
        a, b = quantize.quantize(x, kind), stack_weights([quantize.quantize(w, kind) for w in weight])
        values = a.dequantize().double(), b.dequantize().double().view(weight.shape)
    pieces = values[0].split(_COUNTS)
    wanted = torch.cat([piece @ w.T for piece, w in zip(pieces, values[1])]).float()

    def check(kernels: Any, device: torch.device) -> str | None:
        got = kernels.grouped_gemm_nt(_move(a, device), _move(b, device), _groups(device), out_dtype=torch.float32)
        return _differs(wanted, got.cpu())

    request = GroupedGemmRequest(device=torch_device, kind="rows", a=kind, b=kind, out_dtype=torch.float32)
    return request, check


def _depth_case(torch_device: str, kind: torch.dtype | QuantSpec, accumulate: bool) -> Case:
    groups = _groups()
    operands: list[Operand] = []
    values: list[Tensor] = []
    for features in (_OUTPUTS, _INPUTS):
        t = _integers(kind, sum(_COUNTS), features)
        for start in itertools.accumulate(_COUNTS[:-1], initial=0):  # an expert's blocks begin at its first token
            t[start::128] = _peak(kind)
        if isinstance(kind, QuantSpec):
            padded = groups.padded(128)
            copy = grouped_quantize.grouped_quantize(t, None, kind, groups, padded)[1]
            assert copy is not None
            operands.append(copy)
            values.append(copy.dequantize().double().T.index_select(0, groups.places_in(padded)))
        else:
            operands.append(t.T)
            values.append(t.double())
    dy, x = (value.split(_COUNTS) for value in values)
    wanted = torch.stack([left.T @ right for left, right in zip(dy, x)]).add(8.0 if accumulate else 0.0).float()

    def check(kernels: Any, device: torch.device) -> str | None:
        there = _groups(device)
        there = there.padded(128) if isinstance(kind, QuantSpec) else there
        out = torch.full(wanted.shape, 8.0 if accumulate else float("nan"), device=device)
        a, b = (_move(operand, device) for operand in operands)
        kernels.grouped_gemm_depth(a, b, there, out, accumulate=accumulate)
        return _differs(wanted, out.cpu())

    fp32 = torch.float32
    request = GroupedGemmRequest(
        device=torch_device, kind="depth", a=kind, b=kind, out_dtype=fp32, accumulate=accumulate
    )
    return request, check


def _integers(kind: torch.dtype | QuantSpec, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + len(shape))
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)


def _peak(kind: torch.dtype | QuantSpec) -> float:
    return 7.0 if isinstance(kind, QuantSpec) and kind.format is Format.FP8 else 6.0  # 7 = 448 / 2^6


def _move(operand: Operand, device: torch.device) -> Operand:
    if isinstance(operand, Tensor):
        return operand.to(device)
    moved = operand.data.to(device), operand.block_scale.to(device)
    return QuantizedTensor(*moved, operand.spec, operand.shape, operand.signs_seed)


def _differs(wanted: Tensor, got: Tensor) -> str | None:
    if torch.equal(wanted, got):
        return None
    where = (~(wanted == got)).nonzero()
    index = tuple(where[0].tolist())
    values = f"{wanted[index].item()} wanted, {got[index].item()} got"
    return f"{len(where)} of {wanted.numel()} differ, first at {index}: {values}"
