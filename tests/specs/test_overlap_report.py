"""What the start-up report says of overlapped collectives."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.communication import tracing
from primus_turbo_plugin.precision.communication import Communication
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.specs.report import print_report
from tests.specs.configs import config

pytestmark = pytest.mark.megatron


def _report(capsys: pytest.CaptureFixture[str], turbo: TurboConfig, *, ranks: int, **resolved: object) -> str:
    model = config()
    model.tensor_model_parallel_size = ranks
    print_report(model, turbo, [], ResolvedConfig(config=turbo, **resolved))  # type: ignore[arg-type]
    return capsys.readouterr().out


def test_overlap_and_its_transport_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    turbo = TurboConfig(communication=Communication(tp_overlap=True, transport="sdma"))
    text = _report(capsys, turbo, ranks=2)
    assert "collectives of 2 tensor-parallel ranks, transport: sdma" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in text
    assert "collectives of" not in _report(capsys, TurboConfig(norm="megatron"), ranks=2)


def test_what_spoils_overlap_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    turbo = TurboConfig(communication=Communication(tp_overlap=True, chunks=2))
    variables = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES")
    text = _report(capsys, turbo, ranks=4, one_hardware_queue=variables)
    assert f"{variables[torch.version.hip is not None]}=1 puts copies and GEMMs into one hardware queue" in text
    assert variables[torch.version.hip is None] not in text
    assert "communication.tp_overlap: true changes nothing" in _report(capsys, turbo, ranks=1)


def test_layers_that_are_excepted_and_not_there_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    turbo = TurboConfig(communication=Communication(tp_overlap=True, except_for=("fc1", "q_up_proj")))
    model = config()
    model.tensor_model_parallel_size = 2
    plans = [turbo.plan(f"decoder.layers.0.{name}") for name in ("self_attention.linear_qkv", "mlp.linear_fc1")]
    print_report(model, turbo, plans, ResolvedConfig(config=turbo))
    text = capsys.readouterr().out
    assert "except_for: q_up_proj is the name of no linear here (there are fc1, qkv)" in text
    assert "except_for: fc1" not in text


def test_a_trace_that_is_asked_for_begins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tracing, "_CURRENT", [])
    _report(capsys, TurboConfig(signs_seed=1), ranks=1, trace="somewhere:4-5")
    tracer = tracing.current_tracer()
    assert tracer is not None
    assert (str(tracer.folder), tracer.first, tracer.last) == ("somewhere", 4, 5)
    tracer._handle.remove()
