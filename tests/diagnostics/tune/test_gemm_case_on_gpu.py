"""On a GPU: what a candidate does wrong is found out, and the command tunes for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.diagnostics.tune.gemm_case import GemmCase
from primus_turbo_plugin.diagnostics.tune.gemm_tasks import GemmTask, kind_of
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.triton.gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.tuning.clock import Sample, Stopwatch
from primus_turbo_plugin.kernels.tuning.file import read_entries
from primus_turbo_plugin.kernels.tuning.table import tuning_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch sees")


def _task(name: str = "bf16", **fields: Any) -> GemmTask:
    kind = kind_of(name)
    sizes = {"rows": 512, "cols": 384, "contraction": 1024, **fields}
    return GemmTask(name=name, a=kind, b=kind, **sizes)


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "mxfp8", "fp8:rowwise", "fp8:1x128"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_default_passes_its_check(name: str, accumulate: bool) -> None:
    out = {"out_dtype": torch.float32, "accumulate": True} if accumulate else {}
    task = _task(name, layout="tn", **out)
    case = GemmCase(task, default_registry())
    assert case.check(TUNABLE.default(case.key)) is None
    assert case.is_alive() is None
    assert case.key == task.key(case.key.arch, case.key.compute_units)


class _Spoilt(GemmCase):
    """A kernel with a fault."""

    fault = ""
    runs = 0

    def _triton(self, config: Any, inputs: Any) -> torch.Tensor:
        y = super()._triton(config, inputs)
        self.runs += 1
        if self.fault == "one tile":
            y[128:256, 128:256] *= 1.25
        elif self.fault == "not written":
            fresh = torch.empty_like(y).fill_(float("nan"))
            fresh[:-1] = y[:-1]
            return fresh
        elif self.fault == "a race" and self.runs % 2:
            y[3, 5] += 0.25
        return y


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("one tile", "tile (1, 1)"),
        ("not written", "384 of 196608 results are not finite"),
        ("a race", "two runs on the same inputs differ"),
    ],
)
def test_a_fault_is_found_and_named(fault: str, words: str) -> None:
    case = _Spoilt(_task(), default_registry())
    config = TUNABLE.default(case.key)
    assert case.check(config) is None
    case.fault = fault
    wrong = case.check(config)
    assert wrong is not None
    assert words in wrong


def test_what_does_not_fit_raises_one_of_the_named_errors() -> None:
    case = GemmCase(_task(), default_registry())
    config = replace(TUNABLE.default(case.key), block_m=256, block_n=256, num_stages=8)
    with pytest.raises(case.errors):
        case.check(config)
    assert case.is_alive() is None


def test_times_are_those_of_the_work() -> None:
    """Four times the work takes about four times as long; both by graph replay."""
    times = {}
    for factor in (1, 4):
        x = [torch.randn(factor << 24, device="cuda") for _ in range(2)]
        watch = Stopwatch(lambda index, x=x: x[index].clone(), 2)
        assert watch.is_graph
        times[factor] = Sample.of(watch.read(20)).us
    assert 2.5 < times[4] / times[1] < 6.0


@pytest.mark.parametrize("name", ["bf16", "mxfp4"])
def test_the_command_writes_entries_that_serve_here(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tuned.json"
    arguments = ["tune", "--shapes", "512,384,1024", "--formats", name, "--max-candidates", "4", "--out", str(path)]
    assert main([*arguments, "--backends", "torch"]) == 0
    assert "won" in capsys.readouterr().out
    (entry,) = read_entries(path)
    assert entry.us is not None
    assert entry.us > 0
    case = GemmCase(_task(name), default_registry(str(path)), sets=1)
    tuned = tuning_table(str(path)).tuned(TUNABLE, case.key)
    assert tuned is not None
    assert case.check(tuned) is None
