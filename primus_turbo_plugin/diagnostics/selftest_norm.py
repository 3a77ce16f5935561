"""Self-test of norms, forward and backward: the formula and its autograd gradients in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from primus_turbo_plugin.diagnostics.selftest_gemm import Case
from primus_turbo_plugin.kernels.norm import NormRequest

_SEED = 20260801
_EPS = 1e-5
_NORM_RTOL = 2.0**-8
"""One rounding to bf16 of a result that is accurate in fp32."""


def norm_cases(torch_device: str) -> Iterator[Case]:
    """Both norms in bf16 with a tail; on GPUs also rows of several blocks."""
    kinds: tuple[Literal["rms_norm", "layer_norm"], ...] = ("rms_norm", "layer_norm")
    for kind in kinds:
        for hidden in (320,) if torch_device == "cpu" else (320, 5128):
            yield _case(torch_device, kind, hidden)


def _case(torch_device: str, kind: Literal["rms_norm", "layer_norm"], hidden: int) -> Case:
    generator = torch.Generator().manual_seed(_SEED)
    shapes = ((33, hidden), (33, hidden), (hidden,), (hidden,))
    x, dy, weight, bias = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)

    def check(kernels: Any, device: torch.device) -> str | None:
        inputs = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
        y64 = _norm64(kind, *inputs)
        y64.backward(dy.double())
        dy_d, x_d, weight_d, bias_d = (tensor.to(device) for tensor in (dy, x, weight, bias))
        if kind == "rms_norm":
            y, rstd = kernels.rms_norm_fwd(x_d, weight_d, _EPS)
            results = (y, *kernels.rms_norm_bwd(dy_d, x_d, weight_d, rstd))
        else:
            y, mean, rstd = kernels.layer_norm_fwd(x_d, weight_d, bias_d, _EPS)
            results = (y, *kernels.layer_norm_bwd(dy_d, x_d, weight_d, mean, rstd))
        wanted = [y64, *(tensor.grad for tensor in inputs)]
        for name, expected, got in zip(("y", "dx", "dweight", "dbias"), wanted, results):
            assert expected is not None
            error = (got.cpu().double() - expected).abs()
            if not bool((error <= _NORM_RTOL * expected.abs() + 1e-4).all()):  # NaN fails too
                return f"{name}: off by {error.max().item():.3g}"
        return None

    bf16 = torch.bfloat16
    request = NormRequest(device=torch_device, kind=kind, dtype=bf16, weight_dtype=bf16, hidden=hidden)
    return request, check


def _norm64(kind: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if kind == "rms_norm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + _EPS) * weight + bias
