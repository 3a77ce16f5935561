"""Tuned configurations and kept activations in what a user reads: doctor and the start-up report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.diagnostics.report import startup_report, tuning_rows
from primus_turbo_plugin.kernels.triton.gemm_defaults import default_config
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, OperandKey
from primus_turbo_plugin.kernels.triton.gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.tuning.codec import encode
from primus_turbo_plugin.kernels.tuning.entry import Entry
from primus_turbo_plugin.kernels.tuning.file import write_entries
from primus_turbo_plugin.kernels.tuning.table import build_table
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from tests.diagnostics.machines import device
from tests.specs.configs import config as megatron_config


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRIMUS_TURBO_CONFIG", "PRIMUS_TURBO_TUNING"):
        monkeypatch.delenv(name, raising=False)


def entry(rows: int = 512, **changes: Any) -> Entry:
    operand = OperandKey(element="bf16")
    key = GemmKey(
        arch="gfx950", compute_units=256, rows=rows, cols=512, contraction=512, a=operand, b=operand, out="bf16"
    )
    measured = Entry(
        op="triton.gemm_nt", versions=TUNABLE.versions, key=encode(key), config=encode(default_config(key)), source="measured",
        device="AMD Instinct MI355X", us=10.0, default_us=11.0, date="2026-12-01",
    )  # fmt: skip
    return replace(measured, **changes)


def written(folder: Path, *entries: Entry) -> str:
    path = folder / "tuned.json"
    write_entries(path, entries)
    return str(path)


def test_the_report_counts_what_applies_and_says_when_nothing_was_measured() -> None:
    table = build_table([entry(source="heuristic", note="a rule")], [entry(1024)], source="mine.json")
    assert tuning_rows(table, device("gfx950")) == [("shipped", "1 heuristic"), ("mine.json", "1 measured")]
    rows = tuning_rows(build_table([]), device("gfx950"))
    assert len(rows) == 1
    assert "none measured for gfx950" in rows[0][1]
    assert "primus-turbo tune" in rows[0][1]


def test_the_startup_report_has_them_and_names_entries_that_do_not_apply(tmp_path: Path) -> None:
    stale = entry(1024, versions=replace(TUNABLE.versions, triton="0.1"))
    path = written(tmp_path, entry(), stale)
    resolved = ResolvedConfig(config=TurboConfig(tuning_file=path))
    text = startup_report([], resolved=resolved, device=device("gfx950"), memory=[("all layers", "less")])
    words = " ".join(text.split())
    assert f"{path} 1 measured" in words
    assert "1 entries are not used: they are for triton.gemm_nt with torch" in words
    assert "kept for backward by linears (predicted) all layers less" in words


def test_doctor_reports_a_tuning_file_that_cannot_be_used_as_broken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("{}")
    assert main(["doctor", "--json", "--turbo-tuning-file", str(path)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["problems"][0]["where"] == "tuning_file"
    assert "is no tuning file" in data["problems"][0]["what"]
    monkeypatch.setenv("PRIMUS_TURBO_TUNING", str(written(tmp_path, entry())))
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tuning"]["file"] == str(path)
    assert data["config"]["origins"]["tuning_file"] == "PRIMUS_TURBO_TUNING"


@pytest.mark.megatron
def test_the_startup_report_of_a_model_says_what_its_linears_keep(capsys: pytest.CaptureFixture[str]) -> None:
    from primus_turbo_plugin.specs.gpt import GptSpecs
    from primus_turbo_plugin.specs.memory import memory_rows

    config = megatron_config(hidden_size=128, ffn_hidden_size=512)
    turbo = TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": 1})
    rows = dict(memory_rows(config, GptSpecs(config, turbo, None).linear_plans()))
    # qkv, fc1 and fc2 keep 128 + 128 + 512 inputs, proj (whose BF16 input attention keeps) 128 more, at 17/32 bytes
    assert rows["layers 1-3, each"] == "476 bytes a token, in BF16 1536 bytes a token"
    assert rows["layer 0"].startswith("1536 bytes a token")
    assert "31% of BF16" not in rows["all layers"]
    experts = megatron_config(num_moe_experts=4, moe_ffn_hidden_size=64)
    figures = dict(memory_rows(experts, GptSpecs(experts, turbo, None).linear_plans()))
    assert figures["all layers"].endswith("of BF16"), figures
