"""Metrics pass from the training process to a reader, whole lines only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from primus_turbo_plugin.training.metrics import MetricsFile, MetricsReader


def test_what_is_written_is_read_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert list(reader.new()) == []
    writer = MetricsFile(path)
    writer.add_scalar("lm loss", torch.tensor([2.5]), 1)
    writer.add_scalar("lm loss vs samples", 2.5, 8)
    writer.add_scalar("grad-norm", 1.0, 1)
    assert [(m.tag, m.step, m.value) for m in reader.new()] == [("lm loss", 1, 2.5), ("grad-norm", 1, 1.0)]
    writer.add_scalar("lm loss", 2.0, 2)
    assert [(m.step, m.value) for m in reader.new()] == [(2, 2.0)]
    assert list(reader.new()) == []


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).add_scalar("a", 1.0, 1)
    line = path.read_bytes()
    reader = MetricsReader(path)
    path.write_bytes(line + line[:20])
    assert len(list(reader.new())) == 1
    path.write_bytes(line + line)
    assert len(list(reader.new())) == 1


def test_another_writer_gets_everything_as_well(tmp_path: Path) -> None:
    calls: list[Any] = []

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def add_text(self, *args: Any) -> None:
            calls.append(args)

    writer = MetricsFile(tmp_path / "m", also=Writer())
    writer.add_scalar("lm loss vs samples", 1.0, 8)
    writer.add_text("args", "text")
    assert calls == [("lm loss vs samples", 1.0, 8), ("args", "text")]
    MetricsFile(tmp_path / "n").add_text("args", "text")  # alone: nothing happens
