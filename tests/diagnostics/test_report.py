"""The start-up report: which modules run in which precision, said once, on rank 0."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus_turbo_plugin.diagnostics.report import (
    MegatronSetting,
    PrecisionRow,
    _print,
    precision_rows,
    print_once,
    startup_report,
)
from primus_turbo_plugin.diagnostics.tables import WIDTH, ranges, section, table
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from tests.diagnostics.machines import device, fake_backend, registry_with

CONFIG = TurboConfig.from_dict(
    {
        "precision": "mxfp4",
        "modules": {"decoder.layers.*.mlp.linear_fc2": "mxfp8"},
        "bf16_first_layers": 1,
        "bf16_last_layers": 2,
    }
)


def plans(config: TurboConfig = CONFIG, num_layers: int = 12) -> list[ModulePlan]:
    modules = ("self_attention.linear_qkv", "mlp.linear_fc2")
    return [
        config.plan(f"decoder.layers.{layer}.{module}", layer, num_layers)
        for layer in range(num_layers)
        for module in modules
    ]


def test_modules_that_run_alike_are_one_row_with_their_layers() -> None:
    qkv, fc2 = "decoder.layers.*.self_attention.linear_qkv", "decoder.layers.*.mlp.linear_fc2"
    assert precision_rows(plans()) == [
        PrecisionRow(modules=qkv, layers="0", recipe="bf16", reason="bf16_first_layers"),
        PrecisionRow(modules=qkv, layers="1-9", recipe="mxfp4", reason="precision"),
        PrecisionRow(modules=qkv, layers="10-11", recipe="bf16", reason="bf16_last_layers"),
        PrecisionRow(modules=fc2, layers="0", recipe="bf16", reason="bf16_first_layers"),
        PrecisionRow(modules=fc2, layers="1-9", recipe="mxfp8", reason="modules['decoder.layers.*.mlp.linear_fc2']"),
        PrecisionRow(modules=fc2, layers="10-11", recipe="bf16", reason="bf16_last_layers"),
    ]


def test_rows_are_in_order_of_layers_whatever_the_order_of_plans() -> None:
    rows = precision_rows(reversed(plans()))
    assert [(row.layers, row.recipe) for row in rows if row.modules.endswith("linear_qkv")] == [
        ("0", "bf16"),
        ("1-9", "mxfp4"),
        ("10-11", "bf16"),
    ]


def test_module_outside_the_layers_has_a_row_of_its_own() -> None:
    rows = precision_rows([*plans(), CONFIG.plan("mtp.layers.0.eh_proj")])
    assert rows[-1] == PrecisionRow(modules="mtp.layers.0.eh_proj", layers="", recipe="mxfp4", reason="precision")


def test_every_plan_is_in_exactly_one_row() -> None:
    counted = 0
    for row in precision_rows(plans()):
        for part in row.layers.split(", "):
            first, _, last = part.partition("-")
            counted += int(last or first) - int(first) + 1
    assert counted == len(plans())


def test_report_shows_device_formats_kernels_precision_settings_and_notes() -> None:
    text = startup_report(
        plans(),
        resolved=ResolvedConfig(config=CONFIG, notes=("padding: pad gives way",)),
        settings=[MegatronSetting(name="fp8", value="hybrid", outcome="honoured", note="precision: mxfp8_hybrid")],
        components={"attention": "megatron"},
        device=device("sm90"),
    )
    for words in (
        "NVIDIA H200",
        "mxfp4  emulated by dequantising, numerics equal, no speed-up: sm90 has no MXFP4 matrix units",
        "gemm_nt",
        "decoder.layers.*.mlp.linear_fc2",
        "1-9",
        "honoured  fp8 = hybrid  precision: mxfp8_hybrid",
        "attention  megatron",
        "padding: pad gives way",
    ):
        assert words in text, text


def test_report_speaks_only_of_formats_that_are_used() -> None:
    text = startup_report(plans(), device=device("cpu"))
    formats = text.split("formats\n")[1].split("primus-turbo:")[0]
    assert [line.split()[0] for line in formats.splitlines()] == ["bf16", "mxfp8", "mxfp4"]


def test_report_without_plans_still_says_what_runs_here() -> None:
    text = startup_report([], device=device("cpu"))
    assert "primus-turbo: kernels" in text
    assert "precision" not in text


def test_report_is_printed_by_rank_0_once(capsys: pytest.CaptureFixture[str]) -> None:
    _print.cache_clear()
    print_once("not for rank 1", rank=1)
    print_once("first", rank=0)
    print_once("first", rank=0)
    print_once("second")  # torch.distributed is not initialised here: this is rank 0
    assert capsys.readouterr().out == "first\nsecond\n"


@given(st.sets(st.integers(0, 200)))
def test_ranges_name_exactly_the_numbers(numbers: set[int]) -> None:
    text = ranges(numbers)
    found: list[int] = []
    for part in filter(None, text.split(", ")):
        ends = [int(end) for end in part.split("-")]
        found += range(ends[0], ends[-1] + 1)
    assert found == sorted(numbers)
    parts = [part.split("-") for part in text.split(", ") if part]
    assert all(int(after[0]) > int(before[-1]) + 1 for before, after in itertools.pairwise(parts))


def test_table_aligns_columns_and_wraps_the_last_one_under_itself() -> None:
    lines = table([("a", "word " * 60), ("longer", "x")])
    assert len(lines) > 2
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[0].index("word") == lines[1].index("word") == lines[-1].index("x")


def test_section_without_rows_has_no_title() -> None:
    assert section("Nothing", []) == []


def test_a_kernel_written_for_this_gpu_that_does_not_serve_is_reported_with_its_reason() -> None:
    def late(request: Any) -> str | None:
        return "needs Triton 3.8 or later for gfx950's layouts in Gluon, found 3.6.0"

    passed_over = dataclasses.replace(fake_backend("fast", late), written_for=lambda request: True)
    text = startup_report([], device=device("gfx950"), registry=registry_with(passed_over))
    assert re.search(r"kernels passed over\n +gemm_nt +fast +needs Triton 3\.8 or later for gfx950's layouts", text)
    assert "passed over" not in startup_report([], device=device("cpu"))
