"""The numbers of the closing table, the file and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from primus_turbo_plugin.training.run_report import Run, draw, median_step_s, print_table, save_results, smooth


def _run(recipe: str, offset: float) -> Run:
    losses = {step: 8.0 - step / 10 + offset for step in range(1, 41)}
    return Run(
        recipe=recipe,
        losses=losses,
        validation={20: 6.5 + offset, 40: 4.5 + offset},
        tokens_per_s=1234.4,
        seconds=61.2,
        checkpoints=Path("c"),
    )


def test_train_loss_is_the_mean_of_the_last_ten_steps_and_validation_the_last() -> None:
    run = _run("bf16", 0.0)
    assert run.train_loss == pytest.approx(8.0 - (31 + 40) / 2 / 10)
    assert run.validation_loss == 4.5


def test_the_median_step_is_not_moved_by_a_checkpoint_in_between() -> None:
    assert median_step_s([0.0, 1.0, 2.0, 30.0, 31.0]) == 1.0
    assert math.isnan(median_step_s([3.0]))


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smooth([5.0, 5.0, 5.0]) == [5.0, 5.0, 5.0]
    assert smooth([1.0, 2.0], keep=0.75) == [1.0, 1.25]


def test_the_table_shows_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", [_run("bf16", 0.0), _run("mxfp4", 0.25)])
    out = capsys.readouterr().out
    for words in ("bf16", "mxfp4", "7.900", "4.450", "4.700", "4.750", "1,234", "61 s"):
        assert words in out


def test_the_file_holds_settings_losses_and_verdict(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save_results(path, {"out": Path("runs"), "steps": 40}, [_run("bf16", 0.0)], "same bits")
    results = json.loads(path.read_text())
    assert results["settings"] == {"out": "runs", "steps": 40}
    assert results["resumed"] == "same bits"
    assert results["recipes"]["bf16"]["losses"]["40"] == 4.0


def test_the_picture_is_drawn_for_one_and_for_several_recipes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for count in (1, 3):
        picture = tmp_path / f"{count}.png"
        draw([_run(f"recipe{i}", i / 10) for i in range(count)], picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
