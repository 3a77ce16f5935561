"""Who serves what, on which units: emulation is called emulation, and only emulation is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from primus_turbo_plugin.diagnostics.serving import (
    attention_status,
    emulation,
    format_summary,
    gemm_formats,
    requests_of,
    unserved,
    who_serves,
)
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.registry import Backend, default_registry
from primus_turbo_plugin.kernels.requests import GemmRequest, QuantizeRequest
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import KernelOrders
from primus_turbo_plugin.precision.presets import PRESETS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import Recipe
from tests.diagnostics.machines import device, fake_backend, registry_with


def summary(arch: str, *native_backends: Backend[Any], only: tuple[str, ...] | None = None) -> dict[str, str]:
    orders = {"gemm_nt": only} if only else None
    return format_summary(device(arch), who_serves(registry_with(*native_backends), device(arch), orders))


def native(arch: str, *formats: str) -> Backend[Any]:
    return dataclasses.replace(fake_backend("native"), matrix_units={arch: formats})


def test_quantised_formats_are_emulated_on_a_cpu_and_bf16_is_not() -> None:
    found = summary("cpu")
    assert found["bf16"] == "by torch"
    for name in ("fp8", "mxfp8", "mxfp4"):
        assert found[name].startswith("emulated by dequantising, numerics equal, no speed-up: cpu has no")


def test_a_format_without_units_is_emulated_whoever_multiplies_it() -> None:
    assert summary("sm90")["mxfp4"] == (
        "emulated by dequantising, numerics equal, no speed-up: sm90 has no MXFP4 matrix units"
    )
    assert summary("gfx942")["mxfp8"].endswith("gfx942 has no MXFP8 matrix units")


@pytest.mark.parametrize("arch", ["sm90", "gfx942", "gfx950", "gfx1250"])
def test_fp8_attention_runs_on_fp8_units_of_either_encoding_and_says_where_it_cannot(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from primus_turbo_plugin.kernels.triton import attention

    monkeypatch.setattr(attention, "refusal", lambda device: None)  # as on that machine
    served = who_serves(default_registry(), device(arch), {"attention": ("triton",)})
    assert attention_status(device(arch), served) == "FP8 matrix units, by triton"
    on_reference = who_serves(default_registry(), device(arch), {"attention": ("reference",)})
    assert "emulated" in attention_status(device(arch), on_reference)


def test_fp8_attention_is_emulated_where_there_are_no_units_and_does_not_stand_for_gemms() -> None:
    served = who_serves(default_registry(), device("cpu"))
    assert attention_status(device("cpu"), served).endswith("cpu has no FP8 matrix units")
    (row,) = [row for row in served if row.op == "attention" and row.formats == ("fp8",)]
    assert "fp8" in row.request
    gemms = who_serves(registry_with(native("sm90", "fp8")), device("sm90"))
    assert format_summary(device("sm90"), [*gemms, row]) == format_summary(device("sm90"), gemms)


def test_scales_of_rows_times_scales_of_blocks_have_no_instruction() -> None:
    backend = native("gfx950", "fp8", "mxfp8", "mxfp4")
    assert emulation(device("gfx950"), ("mxfp8", "mxfp4"), backend) is None
    for pair in (("fp8", "mxfp8"), ("mxfp4", "fp8")):
        assert "units for " + " x ".join(pair) in str(emulation(device("gfx950"), pair, backend))


def test_a_device_with_units_is_emulated_where_the_backend_decodes() -> None:
    """The reference decodes; to call its FP8 GEMM native would promise a speed-up it has not."""
    decoded = summary("sm90", only=("reference",))["fp8"]
    assert decoded.endswith("no speed-up: reference does not use sm90's units for fp8")
    assert summary("sm90")["fp8"] == "native, by triton"
    assert summary("sm90", native("sm90", "fp8"))["fp8"] == "native, by native"
    assert "reference does not use gfx950's units for mxfp4" in summary("gfx950", only=("reference",))["mxfp4"]
    assert summary("gfx950")["bf16"] == "native, by torch"


@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_triton_multiplies_two_mx_operands_on_the_scaled_matrix_units(arch: str) -> None:
    assert summary(arch)["mxfp4"] == summary(arch)["mxfp8"] == "native, by triton"
    triton = default_registry().backend("gemm_nt", "triton")
    assert emulation(device(arch), ("mxfp4", "mxfp8"), triton) is None
    assert "units for bf16 x mxfp8" in str(emulation(device(arch), ("bf16", "mxfp8"), triton))
    assert emulation(device(arch), ("bf16",), triton) is None


def test_format_nobody_serves_shows_every_backends_reason() -> None:
    rows = who_serves(default_registry(), device("cpu"), {"gemm_nt": ("torch",)})
    assert format_summary(device("cpu"), rows)["mxfp4"] == "torch: multiplies plain tensors only, not quantised ones"
    row = next(row for row in rows if row.formats == ("mxfp4",))
    assert row.backend is None
    assert dict(row.refusals).keys() == {"torch"}


def test_one_order_for_all_ops_may_name_backends_some_ops_lack() -> None:
    """`--turbo-kernels torch,reference`: torch multiplies plain tensors and quantises nothing."""
    rows = who_serves(default_registry(), device("cpu"), KernelOrders.from_value(["torch", "reference"]))
    assert {row.backend for row in rows if row.op == "quantize"} == {"reference"}
    assert all(row.backend for row in rows)


def test_order_with_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"refrence.*Did you mean 'reference'"):
        who_serves(default_registry(), device("cpu"), {"gemm_nt": ("refrence",)})


def test_formats_of_a_request() -> None:
    def of(a: object, b: object) -> tuple[str, ...]:
        return gemm_formats(GemmRequest(device="cpu", a=a, b=b, out_dtype=torch.float32))  # type: ignore[arg-type]

    mxfp4, mxfp8 = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp8")
    assert of(torch.bfloat16, torch.bfloat16) == ("bf16",)
    assert of(mxfp4, mxfp4) == ("mxfp4",)
    assert of(mxfp4, mxfp8) == ("mxfp4", "mxfp8")
    assert of(torch.bfloat16, mxfp8) == ("bf16", "mxfp8")
    assert gemm_formats(QuantizeRequest(device="cpu", dtype=torch.bfloat16, row_spec=mxfp4)) == ()


@pytest.mark.parametrize("preset", PRESETS)
def test_doctor_asks_for_exactly_the_kernels_a_linear_layer_selects(preset: str) -> None:
    """If the layer asked for another kernel than the doctor, the doctor would call a broken machine healthy."""
    asked: list[object] = []

    class Recording:
        def select(self, op: str, request: object, order: object = None) -> object:
            asked.append(request)
            return fake_backend("any")

    plan = TurboConfig(precision=Recipe.preset(preset)).plan("m")
    LinearKernels.select(
        plan,
        torch.device("cpu"),
        torch.bfloat16,
        wgrad_dtype=torch.float32,
        accumulate=True,
        registry=Recording(),  # type: ignore[arg-type]
    )
    assert set(asked) == set(requests_of(plan.precision, "cpu"))


def test_what_nobody_serves_is_listed_with_reasons() -> None:
    linear = Recipe.preset("mxfp4").linear()
    assert unserved(linear, KernelOrders(), default_registry(), "cpu") == []
    found = unserved(linear, KernelOrders.from_value(["torch"]), default_registry(), "cpu")
    assert [(item.op, dict(item.reasons)) for item in found] == [
        ("quantize", {"torch": "has no kernels for 'quantize'"}),
        ("gemm_nt", {"torch": "multiplies plain tensors only, not quantised ones"}),
    ]
    assert [len(item.requests) for item in found] == [3, 3]
    assert "and 2 more (torch: has no kernels" in str(found[0])
    assert "\n" not in str(found[0])


def test_unknown_backend_is_an_error_not_something_unserved() -> None:
    with pytest.raises(ConfigError, match="nvcc"):
        unserved(Recipe.preset("mxfp4").linear(), KernelOrders.from_value(["nvcc"]), default_registry(), "cpu")
