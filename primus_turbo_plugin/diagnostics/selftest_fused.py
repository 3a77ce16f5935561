"""Self-test cases of fused quantisation: the device's bytes equal those of the reference on the CPU, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from primus_turbo_plugin.kernels.reference import fused as reference
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest, Request
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec

_SEED = 20261201
_PAIRS = (
    (QuantSpec(format=Format.MXFP4), QuantSpec(format=Format.MXFP4, hadamard=16)),
    (QuantSpec(format=Format.MXFP8), QuantSpec(format=Format.FP8, block="1x128")),
)


def fused_cases(torch_device: str) -> Iterator[tuple[Request, Callable[[Any, torch.device], str | None]]]:
    """Each fusion with two pairs of copies, on rows of very different size."""
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(130, 2 * 264, generator=generator) * torch.logspace(-3, 3, 130).unsqueeze(1)
    x, weight = x.to(torch.bfloat16), torch.randn(264, generator=generator).to(torch.bfloat16)
    half = x[:, :264].contiguous()
    calls: dict[str, Callable[[Any, torch.device, Any], tuple[Any, ...]]] = {
        "rms_norm": lambda kernels, device, specs: kernels.rms_norm_quantize(
            half.to(device), weight.to(device), 1e-5, *specs
        ),
        "swiglu": lambda kernels, device, specs: kernels.swiglu_quantize(x.to(device), *specs),
        "sums": lambda kernels, device, specs: kernels.quantize_and_sum(half.to(device), *specs),
    }
    for kind, call in calls.items():
        for specs in _PAIRS:

            def check(kernels: Any, device: torch.device, call: Any = call, specs: Any = specs) -> str | None:
                wanted, got = call(reference, torch.device("cpu"), specs), call(kernels, device, specs)
                return _difference(wanted, got)

            yield (
                FusedQuantizeRequest(
                    device=torch_device,
                    kind=kind,  # type: ignore[arg-type]
                    dtype=x.dtype,
                    hidden=264,
                    weight_dtype=weight.dtype if kind == "rms_norm" else None,
                    row_spec=specs[0],
                    col_spec=specs[1],
                ),
                check,
            )


def _difference(wanted: tuple[Any, ...], got: tuple[Any, ...]) -> str | None:
    """Which result differs, or None. Copies come first, a tensor (rstd, sums) may follow."""
    for name, a, b in zip(("rowwise copy", "columnwise copy", "third result"), wanted, got):
        pairs = [(a, b)] if isinstance(a, torch.Tensor) else [(a.data, b.data), (a.block_scale, b.block_scale)]
        for want, have in pairs:
            differs = int((want != have.cpu()).sum())
            if differs:
                return f"{name}: {differs} of {want.numel()} differ from the reference"
    return None
