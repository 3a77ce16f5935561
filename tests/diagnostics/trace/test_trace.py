"""`primus-turbo trace`: the arithmetic of its table, its files, and what it says where there is nothing to show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.diagnostics.trace.analysis import chrome_trace, common, merged, rows, table

SCRIPT = """
import json, os, sys
folder = os.environ["PRIMUS_TURBO_TRACE"].rpartition(":")[0]
os.makedirs(folder, exist_ok=True)
json.dump({content}, open(os.path.join(folder, "rank0.json"), "w"))
sys.exit({code})
"""


def _piece(lane: int, name: str, start: float, end: float, nbytes: int = 0) -> dict[str, Any]:
    return {"lane": lane, "name": name, "start_ms": start, "end_ms": end, "bytes": nbytes}


def _collective(label: str, *pieces: dict[str, Any]) -> dict[str, Any]:
    return {"label": label, "transport": "sdma", "engine": "copy engine", "pieces": list(pieces)}


RANK = {
    "rank": 0,
    "steps": [2, 3],
    "collectives": [
        _collective(
            "decoder.layers.0.mlp.linear_fc1 fprop",
            _piece(-1, "call", 0, 20),
            _piece(0, "put to rank 1", 0, 4, 1000),
            _piece(1, "put to rank 2", 2, 6, 1000),  # at once with the other: 6 ms together
            _piece(-1, "gemm", 3, 10),
            _piece(-1, "gemm", 9, 12),
        ),
        _collective(
            "decoder.layers.1.mlp.linear_fc1 fprop", _piece(-1, "call", 20, 30), _piece(0, "put to rank 1", 20, 22, 500)
        ),
        _collective("decoder.layers.1.mlp.linear_fc1 x for wgrad", _piece(-1, "call", 40, 41)),
    ],
}


def test_intervals() -> None:
    assert merged([_piece(0, "", 3, 5), _piece(0, "", 0, 2), _piece(0, "", 1, 3)]) == [(0, 5)]
    assert common([(0, 5), (8, 9)], [(1, 2), (4, 8.5)]) == pytest.approx(2.5)
    assert common([], [(0, 1)]) == 0


def test_copies_under_compute_are_counted_once_and_waiting_is_no_compute() -> None:
    fprop, wgrad = rows([RANK])
    assert fprop.name == "decoder.layers.*.mlp.linear_fc1 fprop"
    assert (fprop.calls, fprop.nbytes) == (2, 1250)
    assert fprop.copy_ms == pytest.approx((6 + 2) / 2)
    assert fprop.hidden == pytest.approx(3 / 8)  # 3 ... 6 of 0 ... 6; nothing of 20 ... 22, which lay under no GEMM
    assert fprop.exposed_ms == pytest.approx(5 / 2)
    assert (wgrad.copy_ms, wgrad.hidden) == (0, 1)
    text = table([fprop, wgrad])
    for words in ("under compute", "38%", "copy engine", "all: 8.00 ms of copies a rank, 38% under compute"):
        assert words in text


def test_chrome_trace_has_named_ranges_on_named_lanes() -> None:
    events = chrome_trace([RANK])["traceEvents"]
    names = {(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M" and "tid" in e}
    assert names == {(0, "compute"), (1, "copy lane 0"), (2, "copy lane 1")}
    ranges = [e for e in events if e["ph"] == "X"]
    assert len(ranges) == sum(len(c["pieces"]) for c in RANK["collectives"])
    put = next(e for e in ranges if e["name"].startswith("put to rank 2"))
    assert (put["ts"], put["dur"], put["tid"], put["args"]["bytes"]) == (2000, 4000, 2, 1000)


def test_a_command_is_run_and_its_trace_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "train.py", tmp_path / "deep" / "trace.json"
    script.write_text(SCRIPT.format(content=RANK, code=0))
    assert main(["trace", "--out", str(out), "--", sys.executable, str(script)]) == 0
    assert "decoder.layers.*.mlp.linear_fc1 fprop" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]
    script.write_text(SCRIPT.format(content=RANK, code=3))
    assert (
        main(["trace", "--out", str(out), "--json", "--", sys.executable, str(script)]) == 3
    )  # failed after the steps
    assert json.loads(capsys.readouterr().out)[0]["hidden"] == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no command. Write it after --"),
        (["--steps", "3-2", "--", "true"], "--steps 3-2: must be FIRST-LAST"),
        (["--steps", "x", "--", "true"], "--steps x: must be FIRST-LAST"),
        (["--", "no-such-program"], "no-such-program cannot be run"),
        (["--", "true"], "turn them on with --tp-comm-overlap"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_a_command_that_fails_early_gives_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
