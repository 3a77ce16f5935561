"""Attention with features drawn at random, all combinations possible: no larger errors than flash attention's roundings cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.triton import attention as triton_attention
from tests.kernels.triton.attention_cases import Problem, make
from tests.kernels.triton.attention_fuzz import described, draw, flash_model, worse

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
NAMES = ("out", "dq", "dk", "dv")


def _run(kernels: Any, problem: Problem) -> dict[str, Tensor]:
    q, k, v, dout = problem.tensors if kernels is triton_attention else [x.nan_to_num() for x in problem.tensors]
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    _, lse = kernels.attention_fwd(q, k, v, problem.options, sinks=problem.sinks, out=out)
    grads = kernels.attention_bwd(dout, q, k, v, out, lse, problem.options, sinks=problem.sinks)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), grads))


@pytest.mark.parametrize(
    ("kernels", "device", "draws"),
    [(reference, "cpu", 60), pytest.param(triton_attention, "cuda", 24, marks=needs_gpu)],
    ids=["reference", "triton"],
)
def test_no_combination_of_features_errs_more_than_flash_attention(
    kernels: Any, device: str, draws: int, rng: torch.Generator
) -> None:
    """Against float64. A tenth more is let pass: two RMS values of few hundred errors."""
    for _ in range(draws):
        case = draw(rng)
        problem = make(case, rng, device)
        got = _run(kernels, problem)
        assert worse(problem, got, 1.1, 2e-4) == [], described(case)
        want = problem.expected["lse"]
        assert torch.equal(got["lse"].isinf(), want.isinf()), described(case)
        torch.testing.assert_close(got["lse"].double(), want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_model_of_flash_attention_errs_as_torchs_own_does(causal: bool, dim: int, rng: torch.Generator) -> None:
    """torch's flash kernel for CPUs, bf16; it is the yardstick, so it must be no looser than the real one: within a tenth."""
    shapes = [(1, 4, 300, dim)] * 3
    leaves = [torch.randn(shape, generator=rng).bfloat16().requires_grad_() for shape in shapes]
    dout = torch.randn(shapes[0], generator=rng).bfloat16()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        grads = torch.autograd.grad(theirs, leaves, dout)
    options = AttentionOptions(scale=dim**-0.5, mask=AttentionMask(causal=causal))
    q, k, v, do = (x.detach().transpose(1, 2) for x in (*leaves, dout))
    out, lse = reference.attention_fwd(q.double(), k.double(), v.double(), options)
    want = (out, *reference.attention_bwd(do.double(), q.double(), k.double(), v.double(), out, lse, options)[:3])
    model = flash_model(Problem((q, k, v, do), options, None, {}))
    for name, exact, their in zip(NAMES, want, (theirs, *grads)):
        flash = (their.transpose(1, 2).double() - exact).square().mean().sqrt()
        assert (model[name].double() - exact).square().mean().sqrt() <= 1.1 * flash, name
