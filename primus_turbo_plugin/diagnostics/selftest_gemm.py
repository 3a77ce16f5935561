"""Self-test of ordinary GEMMs: products of exact sums equal float64 bit for bit, in every format, layout, size and epilogue.

Operands are small integers, and where a scale's block begins a value that makes every format's scale a power of two. Sums need 13
bits at most: Hopper's FP8 units keep 14. So every right kernel gives the same bits, in whatever order it adds. Only with a bias
is a second rounding allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, Union

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.reference import quantize as reference_quantize
from primus_turbo_plugin.kernels.requests import GemmRequest, Request
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_SEED = 20260801
_SMALL, _TAILS, _LARGE = (40, 72, 256), (133, 131, 328), (2100, 2200, 328)
"""[M, N, K]: one tile; tails in every dimension; many tiles a work-group of persistent kernels."""
_BLOCK = 128
"""The largest block of scales along K."""

Check = Callable[[Any, torch.device], "str | None"]
#: (what is asked, how it is run and judged, what else distinguishes the case): the check returns None, or what is wrong.
Case: TypeAlias = Union["tuple[Request, Check]", "tuple[Request, Check, str]"]
Kind: TypeAlias = "torch.dtype | QuantSpec"
Operand: TypeAlias = "Tensor | QuantizedTensor"


def _pairs() -> Iterator[tuple[Kind, Kind]]:
    """Every format and kind of scale at least once, and the pairs of unlike formats that recipes give."""
    fp8, mxfp4, mxfp8 = Format.FP8, QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP8)
    alike: list[Kind] = [torch.bfloat16, torch.float16, mxfp4, mxfp8]
    alike += [QuantSpec(format=fp8, block=block) for block in ("tensorwise", "rowwise", "1x128")]
    yield from ((kind, kind) for kind in alike)
    yield mxfp4, QuantSpec(format=Format.MXFP4, block="32x32")
    yield QuantSpec(format=Format.MXFP8, element="e5m2"), mxfp8
    yield QuantSpec(format=fp8, element="e5m2", block="rowwise"), QuantSpec(format=fp8, block="tensorwise")
    yield QuantSpec(format=fp8, block="1x128"), QuantSpec(format=fp8, block="128x128")
    yield mxfp8, mxfp4


def gemm_cases(torch_device: str) -> Iterator[Case]:
    """Each pair of formats: tails, a bias, accumulation, on GPUs many tiles; plain operands also contiguous along their rows."""
    fp32 = torch.float32
    for a, b in _pairs():
        rounded = a if isinstance(a, torch.dtype) else torch.bfloat16
        yield _case(torch_device, a, b, _SMALL, fp32)
        yield _case(torch_device, a, b, _SMALL, fp32, accumulate=True)
        yield _case(torch_device, a, b, _TAILS, rounded, bias=True)
        if isinstance(a, torch.dtype):
            for layout in ("NN", "TN", "TT"):
                yield _case(torch_device, a, b, _TAILS, rounded, layout=layout)
            yield _case(torch_device, a, b, _SMALL, fp32, accumulate=True, layout="TN")
        if torch_device != "cpu":
            yield _case(torch_device, a, b, _LARGE, rounded)


def _case(
    torch_device: str,
    a: Kind,
    b: Kind,
    size: tuple[int, int, int],
    out_dtype: torch.dtype,
    *,
    bias: bool = False,
    accumulate: bool = False,
    layout: str = "NT",
) -> Case:
    """One product. `layout`: the left letter T says that a is contiguous along M, the right one N that b is along N."""

    def made() -> tuple[Operand, Operand, Tensor | None, Tensor]:
        rows, cols, depth = size
        left, right = (_operand(_integers(n, depth, kind), kind) for n, kind in ((rows, a), (cols, b)))
        added = _integers(1, cols, torch.bfloat16)[0] if bias else None
        # fp32 sums of such integers are exact in any order, and faster than float64
        wanted = _values(left)[:, :depth] @ _values(right)[:, :depth].T + (8.0 if accumulate else 0.0)
        return left, right, added, wanted

    def check(kernels: Any, device: torch.device) -> str | None:
        left, right, added, wanted = made()
        there = [_move(left, device, layout[0] == "T"), _move(right, device, layout[1] == "N")]
        options: dict[str, Any] = {} if added is None else {"bias": added.to(device)}
        out = torch.full(wanted.shape, 8.0, device=device) if accumulate else None
        got = kernels.gemm_nt(*there, out_dtype=out_dtype, out=out, **options).cpu()
        if added is None:
            wanted = wanted.to(out_dtype)
            return None if torch.equal(wanted, got) else show_difference("y", wanted, got)
        slack = wanted.abs()  # torch's CPU kernels round the sum before they add the bias
        wanted = wanted + added.float()
        slack = (slack + wanted.abs()) * 2.0**-8
        close = torch.where((got.float() - wanted).abs() <= slack, wanted, got.float())
        return None if torch.equal(wanted, close) else show_difference("y", wanted, close)

    request = GemmRequest(device=torch_device, a=a, b=b, out_dtype=out_dtype, bias=bias, accumulate=accumulate)
    words = f"{layout} {'x'.join(map(str, size))}" + (" with bias" if bias else "")
    return request, check, words


def _integers(rows: int, depth: int, kind: Kind) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED + rows)
    x = torch.randint(-4, 5, (rows, depth), generator=generator).to(torch.bfloat16)
    x[:, ::_BLOCK] = 7.0 if isinstance(kind, QuantSpec) and kind.format is Format.FP8 else 6.0  # 7 = 448 / 2^6
    return x


def _operand(x: Tensor, kind: Kind) -> Operand:
    return reference_quantize.quantize(x, kind) if isinstance(kind, QuantSpec) else x.to(kind)


def _values(operand: Operand) -> Tensor:
    return operand.dequantize(torch.float32) if isinstance(operand, QuantizedTensor) else operand.float()


def _move(operand: Operand, device: torch.device, turned: bool) -> Operand:
    """On the device; `turned`: contiguous along the rows."""
    if isinstance(operand, Tensor):
        return operand.to(device).t().contiguous().t() if turned else operand.to(device)
    moved = operand.data.to(device), operand.block_scale.to(device)
    return QuantizedTensor(*moved, operand.spec, operand.shape, operand.signs_seed)


def show_difference(name: str, wanted: Tensor, got: Tensor) -> str:
    """How many elements differ, where the first is, and both values; or that shapes do."""
    if wanted.shape != got.shape:
        return f"{name}: {list(wanted.shape)} wanted, {list(got.shape)} got"
    where = (~(wanted == got)).nonzero()
    index = tuple(where[0].tolist())
    values = f"{wanted[index].item()} wanted, {got[index].item()} got"
    return f"{name}: {len(where)} of {wanted.numel()} differ, first at {index}: {values}"
