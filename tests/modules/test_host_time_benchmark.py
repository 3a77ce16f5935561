"""benchmarks/host_time.py in small, on the CPU: what it times computes what its alternatives compute, and the clock is right."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from benchmarks import host_time
from benchmarks._host_cases import OURS, Case, Setting, Sizes
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import start_megatron

CPU = torch.device("cpu")
TINY = Setting(CPU, Sizes(tokens=12, hidden=64, ffn=96, heads=2, experts=2), ("bf16", "mxfp4"))


@pytest.mark.megatron
@ranks(world_size=1, megatron=True)
def test_every_case_runs_and_agrees_with_its_alternative(rank_info: RankInfo) -> None:
    start_megatron(seed=rank_info.seed)
    rows = list(host_time.rows(TINY, samples=1))
    passes = ("fwd, no grad", "fwd", "fwd+bwd")
    ops = [f"{op} {name}" for op in ("rms_norm", "attention", "linear", "norm + linear") for name in passes]
    layers = [f"layer {name}" for name in passes]
    assert list(dict.fromkeys(row.op for row in rows)) == [
        *("one launch", "quantize mxfp4"),
        *ops,
        *("experts fwd+bwd", *layers),
    ]
    assert not [row for row in rows if "WRONG" in row.ok or "cannot" in row.ok]
    for op in ops[6:] + layers + ["experts fwd+bwd"]:
        of = {row.backend: row.ok for row in rows if row.op == op}
        assert next(iter(of.values())) == "reference"
        ours = [float(ok.split()[0]) for backend, ok in of.items() if backend.startswith(OURS)]  # bf16, then mxfp4
        assert ours[0] > 38, (op, of)
        assert 8 < ours[1] < ours[0] - 5, (op, of)
    assert all(0 < row.us_p20 <= row.us <= row.us_p80 and row.us_done > 0 for row in rows)
    text = "\n".join(host_time.profile(TINY, f"linear fwd+bwd {OURS} bf16", samples=1))
    assert text.count("microseconds a call") == 2, "of the linear, and of the norm with one"
    assert " backward\n" in text, "the backward pass is seen too"


def test_the_clock_stops_when_the_call_returns_and_leaves_out_what_comes_before() -> None:
    calls: list[str] = []

    def call() -> None:
        calls.append("call")
        time.sleep(0.02)

    def before() -> None:
        calls.append("before")
        time.sleep(0.05)

    us, low, high, done = host_time.host_time(call, CPU, samples=3, before=before)
    assert calls == ["before", "call"] * (host_time.WARM_UP + 3)
    assert 20e3 <= low <= us <= high
    assert us < 50e3
    assert done >= us


def test_gradients_are_dropped_and_weights_made_stale_between_calls() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    leaf.grad = torch.ones(2)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module[0].is_first_microbatch = False  # type: ignore[assignment]
    case = Case(op="op", backend="ours", call=lambda: None, leaves=(leaf,), modules=(module,))
    host_time.prepare(case)
    assert leaf.grad is None
    assert module[0].is_first_microbatch is False
    host_time.prepare(case, first_microbatch=True)
    assert module[0].is_first_microbatch is True


def test_a_case_that_cannot_be_had_or_is_wrong_says_so(monkeypatch) -> None:
    def refused() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    x = torch.randn(64)
    cases = [
        Case(op="a", backend="first", call=lambda: None, result=lambda: x),
        Case(op="a", backend="other", call=lambda: None, result=lambda: -x),
        Case(op="a", backend="nan", call=lambda: None, result=lambda: x * math.nan),
        Case(op="b", backend="graph", call=refused),
    ]
    monkeypatch.setattr(host_time, "every_case", lambda setting: cases)
    rows = list(host_time.rows(TINY, samples=1))
    assert [row.ok.split(":")[0] for row in rows] == ["reference", "WRONG", "WRONG", "cannot"]
    assert rows[3].ok == "cannot: operation not permitted when stream is capturing"
    assert [row.backend for row in host_time.rows(TINY, ["B GRAPH"], samples=1)] == ["graph"]


@pytest.mark.megatron
@ranks(world_size=1, megatron=True)
def test_the_command_says_whose_times_they_are_and_writes_rows(rank_info: RankInfo) -> None:
    import contextlib
    import io
    import sys
    import tempfile

    out, path = io.StringIO(), tempfile.mktemp()
    sys.argv = ["host_time", "--only", "rms_norm fwd,", "--samples", "1", "--json", path]
    start_megatron(seed=rank_info.seed)
    host_time._megatron_here = lambda device: contextlib.nullcontext()  # it is here already
    with contextlib.redirect_stdout(out):
        host_time.main()
    assert out.getvalue().startswith("CPU (")
    first = out.getvalue().splitlines()[0]
    assert "median of 1 calls" in first
    assert "say nothing of a GPU's" in first
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert [row["backend"] for row in rows] == ["F.rms_norm", OURS]
    assert rows[0]["us"] > 0
