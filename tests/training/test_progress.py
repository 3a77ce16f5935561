"""Speed, ETA and the plain display."""

from __future__ import annotations

import pytest

from primus_turbo_plugin.training.metrics import Metric
from primus_turbo_plugin.training.progress import Speed, display, follow


def test_speed_is_that_of_the_last_steps() -> None:
    speed = Speed(tokens_per_step=100)
    assert speed.tokens_per_s is None
    speed.add(1, 0.0)
    assert speed.tokens_per_s is None
    speed.add(2, 100.0)  # the first step is slow
    for step in range(3, 20):
        speed.add(step, 100.0 + (step - 2) * 2.0)
    assert speed.step_s == pytest.approx(2.0)
    assert speed.tokens_per_s == pytest.approx(50.0)


def test_lines_are_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = [Metric("lm loss", step, 5.0 - step / 100, time_s=step * 3.0) for step in range(41, 101)]
    metrics.insert(3, Metric("grad-norm", 43, 1.0, 0.0))
    with display("mxfp4", 40, 100) as shown:
        follow(iter(metrics), shown, Speed(tokens_per_step=1500))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mxfp4: starting"
    assert lines[1].startswith("mxfp4: step 41/100  loss 4.590  - tokens/s")
    assert "mxfp4: step 70/100  loss 4.300  500 tokens/s  ETA 1:30" in lines
    assert lines[-1] == "mxfp4: step 100/100  loss 4.000  500 tokens/s  ETA 0:00"
    assert len(lines) <= 14
