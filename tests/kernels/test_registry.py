"""The kernel registry: explicit order, typed refusals, no silent fallback, no state."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.kernels.registry import Backend, KernelRegistry, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, QuantizeRequest, Request
from tests.kernels.quantize_cases import spec

BF16_GEMM = GemmRequest(device="cpu", a=torch.bfloat16, b=torch.bfloat16, out_dtype=torch.bfloat16)
FP4_GEMM = GemmRequest(device="cpu", a=spec("mxfp4"), b=spec("mxfp4"), out_dtype=torch.bfloat16)


def backend(name: str, reason: str | None = None, request: type[Request] = GemmRequest) -> Backend[GemmRequest]:
    kernels = SimpleNamespace(gemm_nt=lambda: name, quantize=lambda: name, quantize_both=lambda: name)
    return Backend(name=name, request=request, kernels=kernels, supports=lambda _: reason)  # type: ignore[arg-type]


def test_the_first_backend_of_the_order_that_supports_the_request_is_chosen() -> None:
    registry = KernelRegistry([backend("a", "too old"), backend("b"), backend("c")])
    assert registry.select("gemm_nt", BF16_GEMM).name == "b"
    assert registry.select("gemm_nt", BF16_GEMM, ["c", "b"]).name == "c"
    assert registry.select("gemm_nt", BF16_GEMM, ["a", "c"]).name == "c"


def test_when_nobody_can_the_error_holds_every_reason() -> None:
    registry = KernelRegistry([backend("a", "needs gfx950"), backend("b", "K must be a multiple of 128"), backend("c")])
    with pytest.raises(UnsupportedError) as refused:
        registry.select("gemm_nt", BF16_GEMM, ["a", "b"])
    assert refused.value.reasons == {"a": "needs gfx950", "b": "K must be a multiple of 128"}
    for word in ("gemm_nt", "bfloat16", "needs gfx950", "multiple of 128"):
        assert word in str(refused.value)


def test_a_backend_that_is_passed_over_is_named_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    """Where it is written for this device, or a user's order names it; others refuse silently, as every request has some."""
    fast = dataclasses.replace(backend("fast", "needs Triton 3.8, found 3.6"), written_for=lambda request: True)
    registry = KernelRegistry([fast, backend("elsewhere", "is for other GPUs"), backend("plain")])
    for _ in range(3):
        assert registry.select("gemm_nt", BF16_GEMM).name == "plain"
    (line,) = caplog.messages
    assert line == "kernels: gemm_nt: fast is passed over (needs Triton 3.8, found 3.6); plain serves instead."
    registry.select("gemm_nt", FP4_GEMM, ["elsewhere", "plain"])
    assert [message.split(";")[0] for message in caplog.messages[1:]] == [
        "kernels: gemm_nt: elsewhere is passed over (is for other GPUs)"
    ]
    (choice,) = {choice.backend.name: choice for choice in registry.explain("cpu") if choice.backend}.values()
    assert choice.notable == {"fast": "needs Triton 3.8, found 3.6"}
    assert choice.refusals.keys() == {"fast", "elsewhere"}


def test_a_backend_outside_the_order_is_never_a_fallback() -> None:
    registry = KernelRegistry([backend("a", "no"), backend("b")])
    with pytest.raises(UnsupportedError):
        registry.select("gemm_nt", BF16_GEMM, ["a"])


def test_unknown_names_are_refused_with_the_nearest_known_one() -> None:
    registry = default_registry()
    with pytest.raises(ConfigError, match=r"unknown backend 'refernce'. Did you mean 'reference'\?"):
        registry.select("gemm_nt", BF16_GEMM, ["torch", "refernce"])
    with pytest.raises(ConfigError, match=r"unknown op 'gemm_tn'. Did you mean 'gemm_nt'\?"):
        registry.select("gemm_tn", BF16_GEMM)
    with pytest.raises(ConfigError, match="unknown backend"):
        registry.backend("gemm_nt", "cublas")


def test_an_unknown_name_is_refused_even_behind_a_backend_that_serves() -> None:
    """A typing mistake must not wait until the first backend fails."""
    with pytest.raises(ConfigError):
        KernelRegistry([backend("a")]).select("gemm_nt", BF16_GEMM, ["a", "tirton"])


def test_an_empty_order_and_a_request_of_another_op_are_refused() -> None:
    registry = default_registry()
    with pytest.raises(ConfigError, match="must name a backend"):
        registry.select("gemm_nt", BF16_GEMM, ())
    with pytest.raises(ConfigError, match="must be one for 'quantize', got one for 'gemm_nt'"):
        registry.select("quantize", BF16_GEMM)


def test_a_registry_refuses_twins_and_backends_that_lack_a_function() -> None:
    with pytest.raises(ConfigError, match="two backends are named 'a'"):
        KernelRegistry([backend("a"), backend("a")])
    incomplete = Backend(
        name="x", request=QuantizeRequest, kernels=SimpleNamespace(quantize=print), supports=lambda _: None
    )
    with pytest.raises(ConfigError, match="must define quantize_both"):
        KernelRegistry([incomplete])


def test_plain_gemms_go_to_torch_and_quantised_ones_to_the_reference_on_a_cpu() -> None:
    registry = default_registry()
    assert registry.select("gemm_nt", BF16_GEMM).name == "torch"
    assert registry.select("gemm_nt", FP4_GEMM).name == "reference"
    assert registry.select("gemm_nt", BF16_GEMM, ["reference"]).name == "reference"
    with pytest.raises(UnsupportedError, match="plain tensors only"):
        registry.select("gemm_nt", FP4_GEMM, ["torch"])


def test_a_selected_backend_runs_and_can_be_passed_along() -> None:
    a, b = torch.randn(3, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    chosen = default_registry().select("gemm_nt", GemmRequest.of(a, b, torch.bfloat16))
    assert torch.equal(chosen.kernels.gemm_nt(a, b, out_dtype=torch.bfloat16), a @ b.t())


def test_the_default_registry_is_one_and_the_same_object() -> None:
    assert default_registry() is default_registry()


def test_explain_says_who_serves_every_op_and_why_others_do_not() -> None:
    choices = default_registry().explain("cpu")
    assert {choice.request.op for choice in choices} == set(default_registry().ops)
    assert all(choice.backend is not None for choice in choices)
    fp4 = next(c for c in choices if isinstance(c.request, GemmRequest) and not c.request.is_plain)
    assert fp4.backend is not None
    assert fp4.backend.name == "reference"
    assert "plain tensors" in fp4.refusals["torch"]


def test_explain_reports_what_nobody_serves_instead_of_raising() -> None:
    choices = default_registry().explain("cpu", {"gemm_nt": ["torch"]})
    unserved = [choice for choice in choices if choice.backend is None]
    assert unserved
    assert all(choice.request.op == "gemm_nt" and choice.refusals for choice in unserved)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (GemmRequest(device="cpu", a=torch.bfloat16, b=torch.float32, out_dtype=torch.float32), "one dtype"),
        (GemmRequest(device="cpu", a=torch.bfloat16, b=torch.bfloat16, out_dtype=torch.float16), "not torch.float16"),
        (FP4_GEMM, "plain tensors only"),
    ],
    ids=str,
)
def test_the_torch_backend_says_why_it_refuses(request_: GemmRequest, reason: str) -> None:
    refusal = default_registry().backend("gemm_nt", "torch").supports(request_)
    assert refusal is not None
    assert reason in refusal


def test_requests_describe_themselves() -> None:
    x = torch.zeros(2, 32, dtype=torch.bfloat16)
    assert str(FP4_GEMM) == "gemm_nt mxfp4(e2m1, 1x32, even) x mxfp4(e2m1, 1x32, even) -> bfloat16 on cpu"
    described = str(QuantizeRequest.of(x, spec("mxfp4"), spec("mxfp4", hadamard=16)))
    assert described == ("quantize bfloat16 on cpu: rows mxfp4(e2m1, 1x32, even), columns mxfp4(e2m1, 1x32, even, H16)")
