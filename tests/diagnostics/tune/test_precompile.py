"""Compiling ahead: what crashes or does not end costs one candidate, not the run."""

from __future__ import annotations

import time
from pathlib import Path

from primus_turbo_plugin.diagnostics.tune.precompile import Workers
from primus_turbo_plugin.kernels.tuning.search import search
from tests.diagnostics.tune import toy_workers
from tests.kernels.tuning.test_search import FakeCase


def test_a_crash_and_a_hang_are_named_and_the_rest_is_compiled(tmp_path: Path) -> None:
    done = tmp_path / "done"
    configs = ["a", "crash", "b", "hang", f"note {done}", "c", "crash "]
    start = time.monotonic()
    with Workers(2, toy_workers.launch, limit_s=2.0) as workers:
        fatal = workers.compile("task", configs)
        assert fatal == {
            "crash": "failed: ended the process that compiled it (exit code 139)",
            "hang": "failed: not compiled within 2 s",
        }
        assert workers.compile("next task", [f"note {done}"]) == {}, "workers were replaced"
    assert done.read_text() == "task\nnext task\n"
    assert time.monotonic() - start < 60


def test_what_would_end_the_process_is_not_tried_in_the_search() -> None:
    case = FakeCase({"default": 100.0, "crash": 1.0, "c": 90.0})
    outcome = search(
        ["default", "crash", "c"], case, {"crash": "failed: ended the process that compiled it (exit code 139)"}
    )
    assert case.checked == ["default", "c"]
    assert [(trial.config, trial.reason) for trial in outcome.failed] == [
        ("crash", "failed: ended the process that compiled it (exit code 139)")
    ]
    assert outcome.winner is not None
    assert outcome.winner.config == "c"


def test_without_workers_nothing_is_compiled_ahead() -> None:
    with Workers(0, toy_workers.launch, limit_s=2.0) as workers:
        assert workers.compile("task", ["crash"]) == {}
