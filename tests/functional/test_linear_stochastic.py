"""Stochastic rounding in the linear: reproducible by its key, different wherever the key is, unbiased, replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import Rounding
from tests.support import seeded
from tests.support.linear import leaf, make_call, plan, relative_error

STOCHASTIC = plan("mxfp4", dgrad={"dy": {"rounding": "stochastic"}}, wgrad={"dy": {"rounding": "stochastic"}})
BASE = Rounding(seed=7, draw=11, rank=0, path="decoder.layers.0.mlp.linear_fc1")


def _gradients(g: torch.Generator, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((64, 64), (64, 64), (64, 64)))
    leaves = [leaf(x), leaf(w)]
    y = linear(*leaves, None, make_call(STOCHASTIC, torch.float32, rounding=rounding))
    y.backward(dy)
    return y.detach(), leaves[0].grad, leaves[1].grad


def test_the_same_key_gives_the_same_bits_and_another_key_others(request: Any) -> None:
    """Ranks, layers or steps that share random bits round alike, which biases the gradient they sum."""
    y, dx, dw = _gradients(seeded(request), BASE)
    again = _gradients(seeded(request), BASE)
    assert all(torch.equal(a, b) for a, b in zip((y, dx, dw), again))
    others = {
        "seed": Rounding(seed=8, draw=11, rank=0, path=BASE.path),
        "draw": Rounding(seed=7, draw=12, rank=0, path=BASE.path),
        "rank": Rounding(seed=7, draw=11, rank=1, path=BASE.path),
        "path": Rounding(seed=7, draw=11, rank=0, path="decoder.layers.1.mlp.linear_fc1"),
    }
    for name, rounding in others.items():
        other_y, other_dx, other_dw = _gradients(seeded(request), rounding)
        assert torch.equal(other_y, y), name  # fprop rounds to nearest in this recipe
        assert not torch.equal(other_dx, dx), name
        assert not torch.equal(other_dw, dw), name


def test_operands_have_keys_of_their_own() -> None:
    keys = [BASE.key(operand) for operand in ("x", "w", "dy")]
    assert len({key.tensor for key in keys}) == 3


def test_the_mean_over_draws_approaches_what_nearest_rounding_misses(request: Any) -> None:
    x, w, dy = (torch.randn(*shape, generator=seeded(request)) for shape in ((32, 32), (32, 32), (32, 32)))
    draws, total = 256, torch.zeros(32, 32, dtype=torch.float64)
    first = None
    for draw in range(draws):
        rounding = Rounding(seed=7, draw=draw, rank=0, path="m")
        source = leaf(x)
        of = plan("bf16", dgrad={"dy": {"format": "mxfp4", "rounding": "stochastic"}})
        linear(source, w, None, make_call(of, torch.float32, rounding=rounding)).backward(dy)
        total += source.grad.double()
        first = source.grad if first is None else first
    exact = dy.double() @ w.double()
    assert first is not None
    single, mean = relative_error(first, exact), relative_error(total / draws, exact)
    # Clipping of the top values (EVEN saturates) is not unbiased; what is left must be near 1/sqrt(draws) of one draw's error.
    assert mean < single / 5, (single, mean)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_replays_the_draw(request: Any, use_reentrant: bool) -> None:
    """torch's checkpoint restores the CPU generator; were the draw from elsewhere, the second pass would be another function."""
    g = seeded(request)
    x, w = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)
    of = plan("mxfp4", fprop={"x": {"rounding": "stochastic"}})
    outputs: list[Tensor] = []

    def layer(t: Tensor, weight: Tensor) -> Tensor:
        draw = int(torch.randint(2**62, ()))
        y = linear(
            t, weight, None, make_call(of, torch.float32, rounding=Rounding(seed=7, draw=draw, rank=0, path="m"))
        )
        outputs.append(y.detach())
        return y

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):  # or the second pass ends before its output
        y = torch.utils.checkpoint.checkpoint(layer, leaf(x), leaf(w), use_reentrant=use_reentrant)
    torch.randint(2**62, ())
    y.sum().backward()
    assert len(outputs) == 2
    assert torch.equal(*outputs)
