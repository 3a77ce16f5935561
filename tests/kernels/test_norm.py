"""kernels/reference/norm.py: statistics and dtypes. Values and gradients are in tests/functional/test_norm.py."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.reference import norm as reference
from primus_turbo_plugin.kernels.registry import default_registry


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_those_of_each_row_in_the_inner_precision(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = (torch.randn(7, 50, generator=rng, dtype=torch.float64) * 3 + 2).to(dtype)
    weight = torch.ones(50, dtype=dtype)
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    exact = x.double()
    _, rstd = reference.rms_norm_fwd(x, weight, 1e-2)
    torch.testing.assert_close(rstd.double(), (exact.pow(2).mean(-1) + 1e-2).pow(-0.5), rtol=1e-6, atol=0)
    _, mean, layer_rstd = reference.layer_norm_fwd(x, weight, None, 1e-2)
    torch.testing.assert_close(mean.double(), exact.mean(-1), rtol=1e-5, atol=1e-5)
    want = (exact.var(-1, correction=0) + 1e-2).pow(-0.5)
    torch.testing.assert_close(layer_rstd.double(), want, rtol=1e-6, atol=0)
    assert {t.dtype for t in (rstd, mean, layer_rstd)} == {inner}


def test_gradients_of_parameters_are_not_rounded_to_the_dtype_of_activations(rng: torch.Generator) -> None:
    """Whoever sums them over ranks or microbatches rounds; bf16 here would lose small contributions."""
    x, dy = (torch.randn(300, 16, generator=rng).bfloat16() for _ in range(2))
    weight = torch.ones(16, dtype=torch.bfloat16)
    _, rstd = reference.rms_norm_fwd(x, weight, 1e-5)
    dx, dweight = reference.rms_norm_bwd(dy, x, weight, rstd)
    assert (dx.dtype, dweight.dtype) == (torch.bfloat16, torch.float32)
    exact = (dy.double() * x.double() * rstd.double().unsqueeze(-1)).sum(0)
    torch.testing.assert_close(dweight.double(), exact, rtol=1e-5, atol=1e-4)
    _, mean, rstd = reference.layer_norm_fwd(x, weight, None, 1e-5)
    _, dweight, dbias = reference.layer_norm_bwd(dy, x, weight, mean, rstd)
    assert (dweight.dtype, dbias.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(dbias.double(), dy.double().sum(0), rtol=1e-5, atol=1e-4)


def test_the_variance_of_a_large_mean_is_not_lost() -> None:
    """mean(x^2) - mean(x)^2 in fp32 would give nothing here."""
    x = torch.tensor([[4096.0, 4097.0, 4098.0, 4099.0]])
    _, mean, rstd = reference.layer_norm_fwd(x, torch.ones(4), None, 0.0)
    assert mean.item() == 4097.5
    torch.testing.assert_close(rstd.item(), 1.25**-0.5)


def test_the_reference_serves_every_example() -> None:
    for request in NormRequest.examples("cpu"):
        assert default_registry().select("norm", request, ["reference"]).name == "reference"
