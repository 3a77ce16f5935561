"""A GEMM that reads shuffled MX scales gets them from the quantisation, through backward and the weight's cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.reference import gemm, quantize
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry
from primus_turbo_plugin.kernels.requests import GemmRequest, QuantizeRequest
from primus_turbo_plugin.precision.module_plan import ModulePlan
from tests.support.linear import leaf, make_call, plan


def _call(of: ModulePlan, seen: list[Any], wants: Any) -> LinearCall:
    def gemm_nt(a: Any, b: Any, **options: Any) -> Tensor:
        seen.append([getattr(operand, "scale_layout", None) for operand in (a, b)])
        return gemm.gemm_nt(a, b, **options)

    backends: list[Backend[Any]] = [
        Backend(
            name="reference",
            request=GemmRequest,
            kernels=SimpleNamespace(gemm_nt=gemm_nt),
            supports=gemm.supports,
            scale_layout=wants,
        ),
        Backend(name="reference", request=QuantizeRequest, kernels=quantize, supports=quantize.supports),
    ]
    kernels = LinearKernels.select(
        of,
        torch.device("cpu"),
        torch.bfloat16,
        wgrad_dtype=torch.bfloat16,
        accumulate=False,
        registry=KernelRegistry(backends),
    )
    return LinearCall(plan=of, kernels=kernels)


def _run(call: LinearCall, tensors: list[Tensor]) -> list[Tensor]:
    x, w, dy = leaf(tensors[0]), leaf(tensors[1]), tensors[2]
    y = linear(x, w, None, call)
    y.backward(dy)
    return [y.detach(), x.grad, w.grad]


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8", "fp8_block128"])
def test_scales_lie_as_the_gemms_want_them_and_results_are_the_same(recipe: str, rng: torch.Generator) -> None:
    tensors = [torch.randn(*shape, generator=rng).bfloat16() for shape in ((96, 160), (64, 160), (96, 64))]
    seen: list[Any] = []
    results = _run(_call(plan(recipe), seen, lambda request: "gfx950"), tensors)
    layout = "plain" if recipe.startswith("fp8") else "gfx950"
    assert seen == [[layout, layout]] * 3
    for mine, plain in zip(results, _run(make_call(plan(recipe), torch.bfloat16), tensors)):
        assert torch.equal(mine, plain)


def test_an_operand_of_gemms_that_disagree_keeps_the_plain_layout(rng: torch.Generator) -> None:
    tensors = [torch.randn(*shape, generator=rng).bfloat16() for shape in ((64, 96), (32, 96), (64, 32))]
    wgrad_b = plan("mxfp4").precision.wgrad_x
    seen: list[Any] = []
    call = _call(plan("mxfp4"), seen, lambda request: "plain" if request.b == wgrad_b else "gfx950")
    _run(call, tensors)
    assert call.kernels.scale_layouts == {"x": "plain", "w": "gfx950", "dy": "plain"}
    assert seen == [["plain", "gfx950"], ["plain", "gfx950"], ["plain", "plain"]]
