"""The Triton norms against the reference's bits (RMS norm forward) and float64, on whatever GPU is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.norm import layer_norm, rms_norm, rms_norm_residual
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.reference import norm as reference
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.triton import norm as turbo
from tests.tolerances import FP32_UNIT, UNIT

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

CASES = [
    ((1, 1), torch.float32, False),
    ((300, 123), torch.float16, True),
    ((70, 128), torch.bfloat16, False),
    ((2048, 4096), torch.bfloat16, True),
    ((129, 5120), torch.float32, False),
    ((40, 8192), torch.bfloat16, False),
    ((33, 14336), torch.bfloat16, True),
    ((17, 40000), torch.bfloat16, False),
    ((5, 33000), torch.float16, True),
]
"""Shape, dtype, whether gamma is 1 + weight."""
each_case = pytest.mark.parametrize(("shape", "dtype", "zero_centered"), CASES, ids=str)


def _random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=rng) * 2 + offset).to(dtype).cuda()


def _close(got: Tensor, want: Tensor, terms: Tensor | float, count: int = 1) -> None:
    """One rounding to the result's dtype, and fp32's of terms of that size: a few for each, or a sum of `count` in any order."""
    bar = 1.01 * UNIT[got.dtype] * want.abs() + (16 + count) * FP32_UNIT * terms
    bar = bar + {torch.float16: 2.0**-24}.get(got.dtype, 0.0)
    wrong = (got.double() - want).abs() > bar
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


@needs_gpu
@each_case
def test_rms_norm_has_the_bits_of_the_reference(shape, dtype, zero_centered, rng) -> None:
    x = _random(shape, dtype, rng) * torch.logspace(-3, 3, shape[0], device="cuda").unsqueeze(1).to(dtype)
    for weight_dtype in (dtype, torch.float32):
        weight = _random(shape[1:], weight_dtype, rng)
        y, rstd = turbo.rms_norm_fwd(x, weight, 1e-5, zero_centered_gamma=zero_centered)
        want, want_rstd = reference.rms_norm_fwd(x.cpu(), weight.cpu(), 1e-5, zero_centered_gamma=zero_centered)
        assert torch.equal(rstd.cpu(), want_rstd)
        assert torch.equal(y.cpu(), want)


def _float64(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, zero_centered: bool
) -> dict[str, Tensor]:
    """y and gradients by autograd on the definition."""
    x, weight = x.double().requires_grad_(), weight.double().requires_grad_()
    bias = torch.zeros_like(weight).requires_grad_() if bias is None else bias.double().requires_grad_()
    centred = x if rms else x - x.mean(-1, keepdim=True)
    x_hat = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    y = x_hat * (weight + 1 if zero_centered else weight) + bias
    grads = torch.autograd.grad(y, [x, weight, bias], dy.double())
    return {"y": y.detach(), "x_hat": x_hat.detach(), **dict(zip(("dx", "dweight", "dbias"), grads))}


@needs_gpu
@each_case
@pytest.mark.parametrize("kind", ["rms", "layer", "layer without bias"])
def test_values_and_gradients_equal_float64_rounded_once(shape, dtype, zero_centered, kind, rng) -> None:
    rms = kind == "rms"
    x, dy = _random(shape, dtype, rng, offset=1.0), _random(shape, dtype, rng)
    weight, bias = (_random(shape[1:], torch.float32, rng) for _ in range(2))
    given = bias if kind == "layer" else None
    want = _float64(x, dy, weight, given, rms, zero_centered)
    options: dict[str, Any] = {"zero_centered_gamma": zero_centered}
    sums: tuple[Tensor, ...]
    if rms:
        y, rstd = turbo.rms_norm_fwd(x, weight, 1e-5, **options)
        dx, *sums = turbo.rms_norm_bwd(dy, x, weight, rstd, **options)  # type: ignore[assignment]
    else:
        y, mean, rstd = turbo.layer_norm_fwd(x, weight, given, 1e-5, **options)
        dx, *sums = turbo.layer_norm_bwd(dy, x, weight, mean, rstd, **options)  # type: ignore[assignment]
    gamma = (weight + 1 if zero_centered else weight).double().abs()
    # The mean of a row is off by a sum's rounding, and so is every centred value, before it is scaled by rstd.
    spread = rstd.double().unsqueeze(1) * (0.0 if rms else x.double().abs().mean(-1, keepdim=True) * 30)
    x_hat = want["x_hat"].abs() + spread
    _close(y, want["y"], x_hat * gamma * 2 + bias.abs())
    g = dy.double().abs() * gamma
    row = g.mean(-1, keepdim=True) + x_hat * (g * x_hat).mean(-1, keepdim=True)
    _close(dx, want["dx"], 8 * rstd.double().unsqueeze(1) * (g + row) * (1 + spread))
    assert {t.dtype for t in sums} == {torch.float32}
    terms = dy.double().abs() * x_hat
    _close(sums[0], want["dweight"], terms.sum(0), 64)
    if not rms:
        _close(sums[1], want["dbias"], dy.double().abs().sum(0), 64)


@needs_gpu
@pytest.mark.parametrize("hidden", [136, 9000])
def test_any_strides_and_a_second_gradient(hidden, rng) -> None:
    wide = _random((60, 2 * hidden + 8), torch.bfloat16, rng)
    weight = _random((hidden,), torch.bfloat16, rng)
    views = [wide[:, 3 : hidden + 3], wide[::2, :hidden], wide[:, ::2][:, :hidden], wide[:1, :hidden].expand(7, hidden)]
    views.append(_random((hidden, 50), torch.bfloat16, rng).t())
    for x in views:
        dy, residual = x.flip(0), torch.ones(1, 1, device="cuda").bfloat16().expand(x.shape)
        y, rstd = turbo.rms_norm_fwd(x, weight, 1e-5)
        assert torch.equal(y, turbo.rms_norm_fwd(x.contiguous(), weight, 1e-5)[0])
        got = turbo.rms_norm_bwd(dy, x, weight, rstd, dresidual=residual)
        dx, dweight = turbo.rms_norm_bwd(dy.contiguous(), x.contiguous(), weight, rstd, dresidual=residual.contiguous())
        # other strides, other columns a thread: sums of a row in another order, and now and then another rounding
        torch.testing.assert_close(got[0].float(), dx.float(), rtol=2.0**-7, atol=2.0**-12)
        torch.testing.assert_close(got[1], dweight, rtol=1e-5, atol=1e-4)
        alone = turbo.rms_norm_bwd(dy, x, weight, rstd)[0]
        torch.testing.assert_close(got[0].float(), alone.float() + 1, rtol=2.0**-7, atol=2.0**-6)


@needs_gpu
def test_gradients_have_the_same_bits_every_time(rng) -> None:
    x, dy = (_random((3000, 4096), torch.bfloat16, rng) for _ in range(2))
    weight = _random((4096,), torch.bfloat16, rng)
    _, mean, rstd = turbo.layer_norm_fwd(x, weight, None, 1e-5)
    first = turbo.layer_norm_bwd(dy, x, weight, mean, rstd)
    for _ in range(3):
        for mine, theirs in zip(first, turbo.layer_norm_bwd(dy, x, weight, mean, rstd)):
            assert torch.equal(mine, theirs)


@needs_gpu
def test_the_differentiable_functions_take_it_by_default(rng) -> None:
    """As TurboNorm calls them: `[seq, batch, hidden]`, heads, and no tokens at all."""
    for shape in ((6, 2, 256), (5, 2, 4, 64), (0, 2, 256)):
        x = _random(shape, torch.bfloat16, rng).requires_grad_()
        weight = _random(shape[-1:], torch.bfloat16, rng).requires_grad_()
        assert default_registry().select("norm", NormRequest.of("rms_norm", x, weight)).name == "triton"
        for function in (
            lambda x=x, weight=weight: rms_norm(x, weight, 1e-5),
            lambda x=x, weight=weight: layer_norm(x, weight, None, 1e-5),
            lambda x=x, weight=weight: sum(rms_norm_residual(x, weight, 1e-5)),
        ):
            y = function()
            dx, dweight = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
            assert (dx.shape, dweight.shape) == (x.shape, weight.shape)
            assert dx.isfinite().all()
            assert dweight.isfinite().all()


@needs_gpu
def test_rows_beyond_2_to_the_31_elements(rng) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    x = torch.empty(264_000, 8192, device="cuda", dtype=torch.bfloat16)
    x[-3:].normal_()
    y, rstd = turbo.rms_norm_fwd(x, x.new_ones(8192), 1e-5)
    want = reference.rms_norm_fwd(x[-3:], x.new_ones(8192), 1e-5)
    assert torch.equal(y[-3:], want[0])
    dx, _ = turbo.rms_norm_bwd(x, x, x.new_ones(8192), rstd)
    assert torch.equal(dx[-3:], turbo.rms_norm_bwd(x[-3:], x[-3:], x.new_ones(8192), rstd[-3:])[0])


def test_float64_and_other_devices_are_left_to_the_reference() -> None:
    fields: dict[str, Any] = {"kind": "rms_norm", "hidden": 8, "weight_dtype": torch.float32}
    cpu = NormRequest(device="cpu", dtype=torch.float32, **fields)
    wide = NormRequest(device="cuda", dtype=torch.float64, **fields)
    assert turbo.supports(cpu) == "runs on GPUs, the tensors are on cpu"
    assert turbo.supports(wide) == "reads bf16, fp16 and fp32, not float64"
    assert default_registry().select("norm", wide).name == "reference"
    assert default_registry().select("norm", cpu).name == "reference"


@needs_gpu
def test_calls_that_come_again_do_not_reuse_what_belongs_to_other_tensors(rng) -> None:
    """Alike but for contents, address or strides: each in turn, several times."""
    for step in range(3):
        values = _random((2 * 70 * 136,), torch.bfloat16, rng)
        weight = _random((128,), torch.float32, rng)
        for offset, *strides in ((0, 136, 1), (8, 136, 1), (1, 136, 1), (0, 128, 1), (0, 1, 70)):
            x = values.as_strided((70, 128), strides, offset)
            y, rstd = turbo.rms_norm_fwd(x, weight, 1e-5)
            want, want_rstd = reference.rms_norm_fwd(x.cpu(), weight.cpu(), 1e-5)
            assert torch.equal(y.cpu(), want), (step, offset, strides)
            assert torch.equal(rstd.cpu(), want_rstd)
            got = turbo.rms_norm_bwd(x, x, weight, rstd, dresidual=x if step else None)
            close = reference.rms_norm_bwd(
                x.cpu(), x.cpu(), weight.cpu(), want_rstd, dresidual=x.cpu() if step else None
            )
            for mine, theirs in zip(got, close):
                torch.testing.assert_close(mine.cpu(), theirs, rtol=2.0**-7, atol=2.0**-10 * float(theirs.abs().max()))
