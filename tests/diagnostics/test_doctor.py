"""The doctor's report, as data and as text."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin.devices import Device, DeviceFacts, detect
from primus_turbo_plugin.diagnostics.doctor import Report, examine
from primus_turbo_plugin.diagnostics.render import render
from primus_turbo_plugin.diagnostics.selftest import CaseResult
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from tests.diagnostics.machines import device, inventory

DOCS = Path(__file__).parents[2] / "docs" / "doctor.md"


def report_of(mapping: dict[str, Any] | None = None, on: Device | None = None, **resolved: Any) -> Report:
    config = ResolvedConfig(config=TurboConfig.from_dict(mapping or {}), **resolved)
    return examine(config, {}, device=on or device("cpu"), inventory=inventory())


def test_machine_with_everything_it_is_asked_for_is_healthy() -> None:
    report = report_of({"precision": "mxfp4"})
    assert report.is_healthy
    assert report.problems == ()
    assert render(report).endswith("Everything that was asked for can be had.")


def test_configuration_that_cannot_be_read_is_a_problem_beside_the_rest_of_the_report() -> None:
    report = examine(ConfigError("r.yaml: unknown key 'x'"), {}, device=device("cpu"), inventory=inventory())
    assert not report.is_healthy
    assert [str(item) for item in report.problems] == ["configuration: r.yaml: unknown key 'x'"]
    text = render(report)
    assert "configuration: r.yaml: unknown key 'x'" in text
    assert "Served by" in text
    assert report.to_dict()["config"] is None


def test_problems_come_last_in_the_text() -> None:
    lines = render(report_of({"kernels": ["nvcc"]})).splitlines()
    assert lines[-1] == "Not everything that was asked for can be had."
    assert lines.index("Broken") > lines.index("Served by")


def test_missing_requirement_makes_it_unhealthy() -> None:
    config = ResolvedConfig(config=TurboConfig())
    report = examine(config, {}, device=device("cpu"), inventory=inventory(megatron_core=None))
    assert not report.is_healthy
    assert "megatron-core" in report.problems[0].where


def test_failed_self_test_makes_it_unhealthy_and_is_shown_in_full() -> None:
    results = (
        CaseResult(op="gemm_nt", backend="triton", case="gemm of ones", outcome="failed", detail="y: 3 of 4 differ"),
        CaseResult(op="gemm_nt", backend="triton", case="gemm of twos", outcome="passed"),
        CaseResult(op="gemm_nt", backend="torch", case="gemm of ones", outcome="not claimed", detail="why"),
        CaseResult(op="conv", backend="torch", case="-", outcome="untested"),
    )
    report = dataclasses.replace(report_of(), selftest=results)
    assert not report.is_healthy
    text = render(report)
    assert re.search(r"gemm_nt +triton +FAILED +1 passed, 1 failed", text)
    assert re.search(r"gemm_nt +torch +- +1 not claimed", text)
    assert re.search(r"conv +torch +- +1 untested", text)
    assert re.search(r"gemm of ones +y: 3 of 4 differ", text)
    assert "self-test: FAILED: 1 passed, 1 failed, 1 not claimed, 1 untested" in text
    rest = dataclasses.replace(report, selftest=results[1:])
    assert rest.is_healthy
    assert "self-test: all that ran passed: 1 passed" in render(rest)
    late = CaseResult(op="gemm_nt", backend="torch", case="gemm of twos", outcome="not run", detail="the time was up")
    assert not dataclasses.replace(report, selftest=(*results[1:], late)).is_healthy


def test_text_says_who_set_each_key_and_what_each_operand_gets() -> None:
    text = render(report_of({"precision": "mxfp4", "padding": "refuse"}, origins=(("precision", "r.yaml"),)))
    assert re.search(r"precision +r\.yaml +mxfp4", text)
    assert re.search(r"padding +default +refuse", text)
    assert re.search(r"wgrad x +mxfp4\(e2m1, 1x32, even, H16\)", text)


def test_text_describes_a_gpu_with_its_published_peaks_and_their_source() -> None:
    text = render(report_of(on=device("gfx950")))
    assert "AMD Instinct MI355X x 8" in text
    assert "gfx950 (CDNA 4), waves of 64, LDS 160 KiB" in text
    assert re.search(
        r"peak of MI355X +dense TFLOPS: bf16 2500, fp8 5000, mxfp8 5000, mxfp4 10100 \(AMD .*data sheet", text
    )
    assert re.search(r"lacks +tensor DMA", text)
    assert re.search(r"has +TDM, transpose loads", render(report_of(on=device("gfx1250"))))


def test_notes_of_device_and_configuration_are_shown() -> None:
    odd = detect(DeviceFacts(amd_driver=True))
    text = render(report_of(on=odd, notes=("PRIMUS_TURBO_CONFIG is set but empty: not read",)))
    assert "install a ROCm build of torch" in text
    assert "PRIMUS_TURBO_CONFIG is set but empty" in text


@pytest.mark.parametrize("arch", ["cpu", "sm90", "gfx942", "gfx950", "gfx1250"])
def test_report_of_any_device_is_json_and_text(arch: str) -> None:
    report = report_of({"precision": "mxfp4", "modules": {"*.fc2": "mxfp8"}}, on=device(arch))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["healthy"] is True
    assert data["device"]["capabilities"]["arch"] == arch
    assert data["config"]["values"]["modules"] == {"*.fc2": {"precision": "mxfp8"}}
    assert TurboConfig.from_dict(data["config"]["values"]) == report.resolved.config  # type: ignore[union-attr]
    assert set(data["formats"]) == {"bf16", "fp8", "mxfp8", "mxfp4"}
    assert all(len(line) <= 160 for line in render(report).splitlines())


def test_json_has_exactly_the_keys_its_documentation_lists() -> None:
    text = DOCS.read_text().split("## JSON", 1)[1]
    documented = re.sub(r"\([^)]*\)", "", text)
    assert set(re.findall(r"`(\w+)`", documented)) == set(report_of().to_dict())


def test_doctor_changes_nothing_it_is_given() -> None:
    environ = {"PRIMUS_TURBO_CONFIG": "r.yaml"}
    examine(ResolvedConfig(config=TurboConfig()), environ, device=device("cpu"))
    assert environ == {"PRIMUS_TURBO_CONFIG": "r.yaml"}
