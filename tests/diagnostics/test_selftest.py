"""The self-test passes what is right and, what matters more, fails what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from primus_turbo_plugin.diagnostics.selftest import CaseResult, run_selftest
from primus_turbo_plugin.diagnostics.selftest_cases import CASES
from primus_turbo_plugin.kernels.attention import AttentionRequest
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.reference import attention, gemm, norm, quantize
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, QuantizeRequest, Request
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from tests.diagnostics.machines import fake_backend

MODULES: dict[type[Request], Any] = {
    GemmRequest: gemm,
    QuantizeRequest: quantize,
    NormRequest: norm,
    AttentionRequest: attention,
}


def outcomes(
    request: type[Request], supports: Callable[[Any], str | None] = lambda _: None, **changed: Any
) -> list[CaseResult]:
    """The self-test of a copy of the reference with some functions replaced."""
    functions = {name: getattr(MODULES[request], name) for name in request.functions}
    backend = fake_backend("copy", supports, request, **functions | changed)
    return list(run_selftest(KernelRegistry([backend]), "cpu"))


def failures(request: type[Request], **changed: Any) -> list[CaseResult]:
    return [result for result in outcomes(request, **changed) if result.outcome == "failed"]


def test_every_kernel_of_this_package_passes_on_this_machine() -> None:
    results = run_selftest(default_registry(), "cpu")
    assert [result for result in results if result.outcome == "failed"] == []
    assert {(item.op, item.backend) for item in results if item.outcome == "passed"} >= {
        ("gemm_nt", "torch"),
        ("gemm_nt", "reference"),
        ("quantize", "reference"),
        ("norm", "reference"),
        ("attention", "reference"),
    }


def test_every_op_of_the_registry_has_cases() -> None:
    assert set(default_registry().ops) <= set(CASES)


@pytest.mark.parametrize("request_type", MODULES)
def test_right_copy_passes_everything(request_type: type[Request]) -> None:
    results = outcomes(request_type)
    assert results
    assert {result.outcome for result in results} == {"passed"}


def _edit(tensor: QuantizedTensor | None, part: str) -> QuantizedTensor | None:
    assert tensor is not None
    data, scale = tensor.data.clone(), tensor.block_scale.clone()
    (data if part == "data" else scale).view(-1)[-1] += 1
    return QuantizedTensor(data, scale, tensor.spec, tensor.shape, tensor.signs_seed)


@pytest.mark.parametrize("part", ["data", "block_scale"])
@pytest.mark.parametrize("copy", [0, 1])
def test_one_wrong_code_or_scale_of_either_copy_fails_every_case(part: str, copy: int) -> None:
    def wrong(*args: Any, **kwargs: Any) -> tuple[QuantizedTensor | None, ...]:
        copies = list(quantize.quantize_both(*args, **kwargs))
        copies[copy] = _edit(copies[copy], part)
        return tuple(copies)

    found = failures(QuantizeRequest, quantize_both=wrong)
    assert len(found) == len(outcomes(QuantizeRequest))
    assert all(f"{('rowwise', 'columnwise')[copy]} {part}" in result.detail for result in found)


def test_quantiser_that_puts_scales_elsewhere_fails_every_mx_case() -> None:
    def plain(*args: Any, scale_layout: Any, **kwargs: Any) -> Any:
        return quantize.quantize_both(*args, **kwargs)

    found = failures(QuantizeRequest, quantize_both=plain)
    assert len(found) == sum("mxfp" in result.case for result in outcomes(QuantizeRequest))
    assert all(result.detail.endswith("gfx950 scales") for result in found)


def test_quantiser_that_ignores_key_or_signs_fails_the_stochastic_rotated_case() -> None:
    def deaf(x: Any, row: Any, column: Any, *, key: Any, signs_seed: int, scale_layout: Any) -> Any:
        return quantize.quantize_both(x, row, column, key=key, signs_seed=0, scale_layout=scale_layout)

    assert [result.case for result in failures(QuantizeRequest, quantize_both=deaf)]
    assert all("randomised" in result.case for result in failures(QuantizeRequest, quantize_both=deaf))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, **kw: gemm.gemm_nt(b, a, **{**kw, "out": None}),  # transposed
        lambda a, b, **kw: gemm.gemm_nt(a, b, **kw) * (1 + 2.0**-20),  # a little off
        lambda a, b, **kw: gemm.gemm_nt(a, b, **{**kw, "out": None}),  # overwrites instead of accumulating
        lambda a, b, **kw: torch.zeros(a.shape[0], b.shape[0]),
        lambda a, b, **kw: torch.full((a.shape[0], b.shape[0]), torch.nan),
    ],
)
def test_wrong_product_fails(wrong: Callable[..., Any]) -> None:
    assert failures(GemmRequest, gemm_nt=wrong)


def test_gemm_that_overwrites_fails_exactly_the_accumulating_cases() -> None:
    def overwrites(a: Any, b: Any, *, out: Any = None, **kw: Any) -> Any:
        return gemm.gemm_nt(a, b, **kw)

    found = failures(GemmRequest, gemm_nt=overwrites)
    assert len(found) == sum("accumulating" in result.case for result in outcomes(GemmRequest))
    assert all("accumulating" in result.case for result in found)


def test_gemm_that_ignores_strides_fails_exactly_the_layouts_it_misreads() -> None:
    def flat(x: Any) -> Any:
        """As if it were contiguous along K."""
        return x if not isinstance(x, torch.Tensor) or x.is_contiguous() else x.t().reshape(x.shape)

    found = failures(GemmRequest, gemm_nt=lambda a, b, **kw: gemm.gemm_nt(flat(a), flat(b), **kw))
    assert {result.case.split(", ")[-1].split()[0] for result in found} == {"NN", "TN", "TT"}


def test_gemm_that_drops_the_bias_or_the_tail_fails_those_cases() -> None:
    def no_bias(a: Any, b: Any, *, bias: Any = None, **kw: Any) -> Any:
        return gemm.gemm_nt(a, b, **kw)

    def no_tail(a: Any, b: Any, **kw: Any) -> Any:
        y = gemm.gemm_nt(a, b, **kw)
        y[128:] = 0
        return y

    assert {"with bias" in result.case for result in failures(GemmRequest, gemm_nt=no_bias)} == {True}
    assert {"133x131" in result.case for result in failures(GemmRequest, gemm_nt=no_tail)} == {True}


def test_wrong_norm_gradient_fails_and_names_the_tensor() -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        dx, dweight = norm.rms_norm_bwd(*args, **kwargs)
        return dx, dweight * 1.02

    assert [result.detail.split(":")[0] for result in failures(NormRequest, rms_norm_bwd=wrong)] == ["dweight"]


def test_wrong_layer_norm_gradient_fails_and_names_the_tensor() -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        dx, dweight, dbias = norm.layer_norm_bwd(*args, **kwargs)
        return dx, dweight, dbias * 1.02

    assert [result.detail.split(":")[0] for result in failures(NormRequest, layer_norm_bwd=wrong)] == ["dbias"]


@pytest.mark.parametrize("index", range(3))
def test_wrong_attention_gradient_fails_and_names_the_tensor(index: int) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        grads = list(attention.attention_bwd(*args, **kwargs))
        grads[index] = grads[index] * 1.05
        return tuple(grads)

    found = failures(AttentionRequest, attention_bwd=wrong)
    cases = len(outcomes(AttentionRequest))
    assert [result.detail.split(":")[0] for result in found] == [("dq", "dk", "dv")[index]] * cases


def test_nan_in_an_output_is_a_failure_not_a_comparison_that_is_false() -> None:
    def nan_norm(*args: Any, **kwargs: Any) -> Any:
        y, rstd = norm.rms_norm_fwd(*args, **kwargs)
        return y * torch.nan, rstd

    def nan_attention(*args: Any, **kwargs: Any) -> Any:
        out, lse = attention.attention_fwd(*args, **kwargs)
        return out * torch.nan, lse

    assert failures(NormRequest, rms_norm_fwd=nan_norm)
    assert failures(AttentionRequest, attention_fwd=nan_attention)


def test_kernel_that_raises_has_failed_with_its_message_on_one_line() -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    details = {result.detail for result in failures(GemmRequest, gemm_nt=broken)}
    assert details == {"RuntimeError: no kernel image is available"}


def test_what_a_kernel_does_not_claim_is_not_run() -> None:
    def explode(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("must not run")

    results = outcomes(GemmRequest, lambda request: "not today", gemm_nt=explode)
    assert {(result.outcome, result.detail) for result in results} == {("not claimed", "not today")}


def test_op_without_cases_is_reported_as_untested() -> None:
    class OddRequest(GemmRequest):
        op = "odd"

    (result,) = run_selftest(KernelRegistry([fake_backend("any", request=OddRequest)]), "cpu")
    assert (result.op, result.outcome) == ("odd", "untested")
