"""RMS norm in front of a quantised linear, the bias gradient beside it: the bits of the ops apart, in fewer passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.fused_quantize import norm_fusion_refusal, rms_norm_input
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, Rounding
from primus_turbo_plugin.functional.norm import rms_norm
from primus_turbo_plugin.kernels.reference import fused as reference
from primus_turbo_plugin.precision.module_plan import KernelOrders
from primus_turbo_plugin.precision.tree_sum import tree_sum
from tests.support.linear import QUANTIZED_RECIPES, leaf, make_call, plan

EPS = 1e-5


def _inputs(rng: torch.Generator, tokens: int = 96, k: int = 128, n: int = 64) -> list[Tensor]:
    shapes = ((tokens, k), (k,), (n, k), (n,), (tokens, n))
    return [torch.randn(*shape, generator=rng).bfloat16() for shape in shapes]


def _run(call: LinearCall, tensors: list[Tensor], *, fused: bool, zero_centered: bool = False) -> list[Tensor]:
    """y, dx, dgamma, dw, db."""
    *inputs, dy = tensors
    x, gamma, w, b = leaves = [leaf(t) for t in inputs]
    if fused:
        assert norm_fusion_refusal(x, gamma, call, with_wgrad=True) is None
        normed, call = rms_norm_input(x, gamma, EPS, call, zero_centered_gamma=zero_centered, with_wgrad=True)
        assert normed.isnan().all(), "the normed tensor must not exist"
    else:
        normed = rms_norm(x, gamma, EPS, zero_centered_gamma=zero_centered)
    y = linear(normed, w, b, call)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_fused_norm_gives_the_bits_of_norm_then_linear(
    recipe: str, zero_centered: bool, rng: torch.Generator
) -> None:
    tensors, call = _inputs(rng), make_call(plan(recipe), torch.bfloat16)
    fused, apart = (_run(call, tensors, fused=flag, zero_centered=zero_centered) for flag in (True, False))
    for name, a, b in zip(("y", "dx", "dgamma", "dw", "db"), fused, apart):
        assert torch.equal(a, b), name
        assert a.isfinite().all(), name


def test_stochastic_rounding_draws_the_same_bits_fused_and_apart(rng: torch.Generator) -> None:
    of = plan("mxfp4", x={"rounding": "stochastic"}, dy={"rounding": "stochastic"})
    call = make_call(of, torch.bfloat16, rounding=Rounding(seed=1, draw=2, rank=0, path="a"))
    tensors = _inputs(rng)
    for a, b in zip(*(_run(call, tensors, fused=flag) for flag in (True, False))):
        assert torch.equal(a, b)


def test_backward_keeps_the_copies_and_not_the_normed_tensor(rng: torch.Generator) -> None:
    x, gamma, w, b, _ = _inputs(rng)
    saved: list[Tensor] = []
    call = make_call(plan("mxfp4"), torch.bfloat16)
    x, gamma, w, b = (leaf(t) for t in (x, gamma, w, b))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normed, call = rms_norm_input(x, gamma, EPS, call, zero_centered_gamma=False, with_wgrad=True)
        linear(normed, w, b, call)
    wide = [t for t in saved if t.shape == x.shape and t.dtype == torch.bfloat16]
    assert [t.data_ptr() for t in wide] == [x.data_ptr()]


def test_a_frozen_weight_needs_no_columnwise_copy(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    original = reference.rms_norm_quantize
    monkeypatch.setattr(
        reference, "rms_norm_quantize", lambda *args, **kwargs: asked.append(args[3:5]) or original(*args, **kwargs)
    )
    x, gamma, w, _, dy = _inputs(rng)
    x, gamma = leaf(x), leaf(gamma)
    call = make_call(plan("mxfp4"), torch.bfloat16)
    normed, call = rms_norm_input(x, gamma, EPS, call, zero_centered_gamma=False, with_wgrad=False)
    linear(normed, w, None, call).backward(dy)
    assert len(asked) == 1
    assert asked[0][0] is not None
    assert asked[0][1] is None
    assert x.grad is not None
    assert gamma.grad is not None


def test_what_is_not_fused_says_why_and_runs_apart(rng: torch.Generator) -> None:
    x, gamma, *_ = _inputs(rng)
    reasons = {
        "needs x unquantised": make_call(plan(), torch.bfloat16),
        "needs x unquantised as well": make_call(
            plan("mxfp4", wgrad={"format": "bf16", "hadamard": 0}), torch.bfloat16
        ),
        "is cast from torch.bfloat16": make_call(plan("mxfp4"), torch.float32),
        "no fused kernels of reference": make_call(
            replace(plan("mxfp4"), kernels=KernelOrders(by_op=(("fused_quantize", ("triton",)),))), torch.bfloat16
        ),
    }
    for reason, call in reasons.items():
        assert reason in str(norm_fusion_refusal(x, gamma, call, with_wgrad=True))
        normed, same = rms_norm_input(x, gamma, EPS, call, zero_centered_gamma=False, with_wgrad=True)
        assert same is call
        assert torch.equal(normed, rms_norm(x, gamma, EPS))
    without_wgrad = reasons["needs x unquantised as well"]
    assert norm_fusion_refusal(x, gamma, without_wgrad, with_wgrad=False) is None


def test_the_bias_gradient_comes_from_the_read_that_quantises_dy(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    original = reference.quantize_and_sum
    monkeypatch.setattr(
        reference, "quantize_and_sum", lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
    )
    tensors = _inputs(rng)
    results = _run(make_call(plan("mxfp4"), torch.bfloat16), tensors, fused=False)
    assert len(calls) == 1
    assert torch.equal(results[4], tree_sum(tensors[4].float(), 0).bfloat16())
    calls.clear()
    b = leaf(tensors[3])  # nothing but the bias is wanted: dy is summed, not quantised
    linear(tensors[0], tensors[2], b, make_call(plan("mxfp4"), torch.bfloat16)).backward(tensors[4])
    assert torch.equal(b.grad, results[4])
    assert calls[0][1:] == (None, None)
