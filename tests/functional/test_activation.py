"""functional/activation.py: SwiGLU against float64 autograd, and in front of a quantised linear against the two apart."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.activation import swiglu, swiglu_input
from primus_turbo_plugin.functional.linear import linear
from tests.support.linear import QUANTIZED_RECIPES, leaf, make_call, plan
from tests.tolerances import BF16_UNIT


@pytest.mark.parametrize("shape", [(7, 10), (2, 3, 64), (0, 8)])
def test_values_and_gradients_are_those_of_float64_rounded_once(shape: tuple[int, ...], rng: torch.Generator) -> None:
    x = (torch.randn(*shape, generator=rng) * 3).bfloat16()
    dy = torch.randn(*shape[:-1], shape[-1] // 2, generator=rng).bfloat16()
    mine, exact = leaf(x), leaf(x.double())
    y = swiglu(mine)
    y.backward(dy)
    gate, up = exact.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    wanted.backward(dy.double())
    torch.testing.assert_close(y.double(), wanted, rtol=BF16_UNIT * 1.001, atol=1e-30)
    # A factor 1 + gate (1 - s) near 0 cancels: a few fp32 roundings of numbers below 10.
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=BF16_UNIT * 1.001, atol=1e-5)


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_in_front_of_a_quantised_linear_it_gives_the_bits_of_the_two_apart(recipe: str, rng: torch.Generator) -> None:
    x, w, dy = (torch.randn(*s, generator=rng).bfloat16() for s in ((96, 256), (64, 128), (96, 64)))
    call, results = make_call(plan(recipe), torch.bfloat16), []
    for fused in (True, False):
        source, weight = leaf(x), leaf(w)
        hidden, used = swiglu_input(source, call, with_wgrad=True) if fused else (swiglu(source), call)
        assert hidden.isnan().all() == fused
        y = linear(hidden, weight, None, used)
        y.backward(dy)
        results.append((y.detach(), source.grad, weight.grad))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_an_unquantised_linear_takes_the_tensor(rng: torch.Generator) -> None:
    x, call = torch.randn(8, 16, generator=rng).bfloat16(), make_call(plan(), torch.bfloat16)
    hidden, same = swiglu_input(x, call, with_wgrad=True)
    assert same is call
    assert torch.equal(hidden, swiglu(x))
    with pytest.raises(ShapeError, match=r"gate then up, got \[8, 15\]"):
        swiglu_input(x[:, :15], call, with_wgrad=True)
