"""functional/norm.py against float64 and torch's own norms, forward and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.norm import layer_norm, rms_norm, rms_norm_residual

KINDS = ["rms", "layer", "layer without bias"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Relative to the value itself: half a unit in the last place, the one rounding. Where terms cancel, fp32's error of the terms.
ULP = {torch.float64: 2**-53, torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def norm_float64(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    """The definition, in float64 and by autograd."""
    gamma = weight + 1 if zero_centered else weight
    if kind == "rms":
        return gamma * x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps)
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    y = gamma * centred / torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return y if bias is None else y + bias


def norm(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    if kind == "rms":
        return rms_norm(x, weight, eps, zero_centered_gamma=zero_centered)
    return layer_norm(x, weight, bias, eps, zero_centered_gamma=zero_centered)


def _random(rng: torch.Generator, *shape: int, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * 2 + offset).to(dtype).requires_grad_()


def _check(got: Tensor, want: Tensor, dtype: torch.dtype, inner: torch.dtype, terms: float) -> None:
    """One rounding to dtype of a result whose terms, of size `terms`, were rounded a few times in `inner`."""
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(),
        want,
        rtol=1.01 * ULP[dtype] + 8 * ULP[inner],
        atol=16 * ULP[inner] * terms + 1e-7 * (dtype == torch.float16),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3, 123), (2, 3, 4, 16), (33, 1030)], ids=str)
def test_values_and_gradients_equal_float64_rounded_once(
    kind: str,
    zero_centered: bool,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    shape: tuple[int, ...],
    rng: torch.Generator,
) -> None:
    weight_dtype, eps = weight_dtype or dtype, 1e-3
    x = _random(rng, *shape, dtype=dtype, offset=1.0)
    weight = _random(rng, shape[-1], dtype=weight_dtype)
    bias = _random(rng, shape[-1], dtype=weight_dtype) if kind == "layer" else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    y = norm(kind, x, weight, bias, eps, zero_centered)
    dy = torch.randn(shape, generator=rng).to(dtype)
    grads = torch.autograd.grad(y, inputs, dy)
    copies = [t.detach().double().requires_grad_() for t in inputs]
    want = norm_float64(kind, copies[0], copies[1], copies[2] if bias is not None else None, eps, zero_centered)
    want_grads = torch.autograd.grad(want, copies, dy.double())
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = x.numel() // shape[-1]
    _check(y, want, dtype, inner, terms=20)
    _check(grads[0], want_grads[0], dtype, inner, terms=max(20.0, 20 / eps**0.5 if shape[-1] == 1 else 0))
    for grad, full in zip(grads[1:], want_grads[1:]):
        _check(grad, full, weight_dtype, inner, terms=20 * tokens**0.5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fp32_equals_torchs_own_norm(kind: str, rng: torch.Generator) -> None:
    """What Megatron's local spec runs: torch.nn.RMSNorm and LayerNorm."""
    x, weight, bias = (_random(rng, *shape, dtype=torch.float32) for shape in ((7, 3, 200), (200,), (200,)))
    dy = torch.randn(x.shape, generator=rng)
    inputs = [x, weight] + ([bias] if kind == "layer" else [])
    ours = norm(kind, x, weight, bias, 1e-5, False)
    functional = torch.nn.functional
    theirs = (
        functional.rms_norm(x, (200,), weight, 1e-5)
        if kind == "rms"
        else functional.layer_norm(x, (200,), weight, bias, 1e-5)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for got, want in zip(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(theirs, inputs, dy)):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 1)], ids=str)
def test_no_tokens_give_no_output_and_zero_weight_gradients(kind: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape, requires_grad=True)
    weight = torch.ones(shape[-1], requires_grad=True)
    bias = torch.ones(shape[-1], requires_grad=True) if kind == "layer" else None
    y = norm(kind, x, weight, bias, 1e-5, False)
    y.sum().backward()
    assert y.shape == shape
    for parameter in (weight, bias):
        assert parameter is None or (parameter.grad is not None and not parameter.grad.any())


@pytest.mark.parametrize("kind", KINDS)
def test_strided_views_are_read_in_place_and_saved_as_they_are(kind: str, rng: torch.Generator) -> None:
    """The queries of a fused qkv projection, normalised over the head dimension."""
    mixed = _random(rng, 5, 2, 3, 24, dtype=torch.float32)
    weight = _random(rng, 8, dtype=torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        query = mixed[..., 8:16]
        y = norm(kind, query, weight, None, 1e-5, False)
    assert any(t.data_ptr() == query.data_ptr() and t.shape == query.shape for t in saved)
    (got,) = torch.autograd.grad(y.square().sum(), mixed)
    copy = mixed.detach().double().requires_grad_()
    want = norm_float64(kind, copy[..., 8:16], weight.detach().double(), None, 1e-5, False)
    torch.testing.assert_close(got.double(), torch.autograd.grad(want.square().sum(), copy)[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_neither_the_output_nor_a_copy_of_the_input_is_saved(kind: str, rng: torch.Generator) -> None:
    x = _random(rng, 64, 32, dtype=torch.bfloat16)
    weight = _random(rng, 32, dtype=torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(kind, x, weight, None, 1e-5, False)
    assert [t.data_ptr() for t in saved if t.numel() == x.numel()] == [x.data_ptr()]


def test_a_residual_gets_its_gradient_inside_the_norm_rounded_once(rng: torch.Generator) -> None:
    x, weight = _random(rng, 9, 3, 40, dtype=torch.bfloat16), _random(rng, 40, dtype=torch.bfloat16)
    y, residual = rms_norm_residual(x, weight, 1e-5)
    assert torch.equal(residual, x)
    assert torch.equal(y, rms_norm(x, weight, 1e-5))
    dy, dresidual = (torch.randn(x.shape, generator=rng).bfloat16() for _ in range(2))
    dx, dweight = torch.autograd.grad((y, residual), (x, weight), (dy, dresidual))
    copies = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = norm_float64("rms", *copies, None, 1e-5, False)
    want_dx, want_dweight = torch.autograd.grad((want, copies[0] * 1), copies, (dy.double(), dresidual.double()))
    _check(dx, want_dx, torch.bfloat16, torch.float32, terms=20)
    _check(dweight, want_dweight, torch.bfloat16, torch.float32, terms=200)


@pytest.mark.parametrize("unused", [0, 1])
def test_a_residual_that_only_one_branch_uses_still_has_a_gradient(unused: int, rng: torch.Generator) -> None:
    x, weight = _random(rng, 4, 8, dtype=torch.float32), _random(rng, 8, dtype=torch.float32)
    outputs = rms_norm_residual(x, weight, 1e-5)
    (dx,) = torch.autograd.grad(outputs[1 - unused].sum(), x)
    want = x if unused == 0 else rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(dx, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_nan_stays_in_its_row(kind: str) -> None:
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    y = norm(kind, x, torch.ones(8), None, 1e-5, False)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_large_bf16_values_do_not_overflow_their_squares(kind: str) -> None:
    x = torch.linspace(-1, 1, 64).mul(1e18).bfloat16().repeat(2, 1)
    y = norm(kind, x, torch.ones(64), None, 1e-5, False)
    torch.testing.assert_close(
        y.double(), norm_float64(kind, x.double(), torch.ones(64).double(), None, 0.0, False), rtol=2**-8, atol=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(3, 4), "weight": torch.ones(5)}, r"hidden size, \[4\], got \[5\]"),
        ({"x": torch.ones(3, 0), "weight": torch.ones(0)}, "hidden >= 1"),
        ({"x": torch.ones(()), "weight": torch.ones(1)}, "hidden >= 1"),
        ({"x": torch.ones(3, 4).int(), "weight": torch.ones(4)}, "x must be a float"),
        ({"x": torch.ones(3, 4), "weight": torch.ones(4).int()}, "weight must be a float"),
    ],
)
def test_inputs_that_do_not_fit_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        rms_norm(**arguments, eps=1e-5)
    with pytest.raises(ShapeError, match=message):
        layer_norm(**arguments, bias=None, eps=1e-5)


def test_a_bias_of_another_size_is_named() -> None:
    with pytest.raises(ShapeError, match="bias must have"):
        layer_norm(torch.ones(3, 4), torch.ones(4), torch.ones(3), 1e-5)


def test_an_unknown_kernel_is_an_error() -> None:
    with pytest.raises((ConfigError, UnsupportedError), match="tritonn"):
        rms_norm(torch.ones(3, 4), torch.ones(4), 1e-5, kernels=["tritonn"])
