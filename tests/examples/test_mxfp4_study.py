"""The MXFP4 study: its cells, a run in pieces, the arithmetic of its table, and what it measures of weight gradients."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from examples.mxfp4_study import __main__ as study
from examples.mxfp4_study import corpus, grid, kept, results, runs, train, wgrad_statistics
from examples.mxfp4_study.model import ModelSize, StudyModel
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig


@pytest.fixture
def rng(rng: torch.Generator) -> np.random.Generator:
    """numpy's generator, fresh in every run as torch's of the same name is."""
    return np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))


SIZE = ModelSize(layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, vocab=300, seq=64)


def _text(rng: np.random.Generator) -> corpus.Corpus:
    train_tokens, validation = (rng.integers(0, SIZE.vocab, n).astype(np.uint16) for n in (4000, 800))
    return corpus.Corpus(train=train_tokens, validation=validation, vocab=SIZE.vocab, digest="random")


def _settings(**changes: Any) -> train.Settings:
    values: dict[str, Any] = {
        "steps": 6,
        "batch": 4,
        "micro_batch": 2,
        "lr": 1e-2,
        "eval_every": 2,
        "eval_sequences": 2,
    }
    return train.Settings(size=SIZE, **(values | changes))


def _cell(name: str) -> grid.Cell:
    return next(cell for cell in grid.cells() if name in (cell.name, *cell.same_as))


def test_every_combination_is_reached_and_no_recipe_runs_twice() -> None:
    cells = grid.cells()
    names = [name for cell in cells for name in (cell.name, *cell.same_as)]
    combinations = itertools.product(grid.SCOPES, grid.STABILISERS, grid.PLACEMENTS)
    assert sorted(names) == sorted(["bf16", "mxfp8", *(".".join(parts) for parts in combinations)])
    recipes = [cell.config(seed=3).plan("linear").precision for cell in cells]
    assert len(set(recipes)) == len(recipes)
    assert set(grid.CORE) <= set(names)


@pytest.mark.parametrize(("placement", "preset"), [("wgrad", "mxfp4_wgrad"), ("all", "mxfp4_all")])
def test_h16_in_all_three_gemms_is_the_packages_preset_of_that_name(placement: str, preset: str) -> None:
    ours = _cell(f"fprop+dgrad+wgrad.h16.{placement}").config(seed=0).plan("linear").precision
    assert ours == TurboConfig.from_dict({"precision": preset}).plan("linear").precision


@pytest.mark.parametrize("name", ["bf16", "fprop+dgrad+wgrad.sr.all"])
def test_a_run_in_pieces_gives_the_bits_of_a_run_in_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    text, seed = _text(rng), int(rng.integers(1000))
    whole = train.Run(_cell(name), seed, _settings(), text, tmp_path / "whole", "cpu")
    assert whole.advance(math.inf, lambda _: None)
    pieces = 0
    while True:
        ticks = itertools.count()
        monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda ticks=ticks: float(next(ticks))))
        run = train.Run(_cell(name), seed, _settings(), text, tmp_path / "pieces", "cpu")
        pieces += 1
        if run.advance(2.5, lambda _: None):  # one stretch between validations, of 1 tick
            break
        assert run.step < 6
        assert not run.finished
    assert pieces > 2
    curves = [
        json.loads((tmp_path / kind / "runs" / f"{name}-seed{seed}" / "curve.json").read_text())
        for kind in ("whole", "pieces")
    ]
    assert curves[0]["curve"] == curves[1]["curve"]
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[key]), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fprop+dgrad+wgrad.rh16.all", "fprop+dgrad+wgrad.sr.wgrad"])
def test_steps_from_a_cuda_graph_give_the_bits_of_steps_without(
    name: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    text, settings = _text(rng), _settings(steps=8, attention="package" if "rh16" in name else "torch")
    runs.prepare("cuda")
    try:
        trained = []
        for capture in (False, True):
            run = train.Run(_cell(name), 3, settings, text, tmp_path / str(capture), "cuda", capture=capture)
            assert run.advance(math.inf, lambda _: None)
            assert run.training.captured == (capture and "sr" not in name)
            trained.append(run)
    finally:
        torch.use_deterministic_algorithms(False)
    assert trained[0].curve == trained[1].curve
    for key, value in trained[0].model.state_dict().items():
        assert torch.equal(value, trained[1].model.state_dict()[key]), key


def test_all_cells_of_a_seed_start_alike_and_see_the_same_batches(tmp_path: Path, rng: np.random.Generator) -> None:
    text = _text(rng)
    first = []
    for name in ("bf16", "fprop.none.wgrad", "fprop+dgrad+wgrad.h16.wgrad"):
        run = train.Run(_cell(name), 1, _settings(steps=1), text, tmp_path, "cpu")
        run.advance(math.inf, lambda _: None)
        first.append(run.curve[0]["train"])
    # Same weights, same tokens: only the quantised forward differs, and not in a cell that has the same forward.
    assert first[1] == first[2]
    assert first[0] == pytest.approx(first[1], abs=0.05)
    assert first[0] != first[1]


def test_runs_with_other_settings_are_not_continued(tmp_path: Path, rng: np.random.Generator) -> None:
    text = _text(rng)
    train.Run(_cell("bf16"), 0, _settings(steps=2), text, tmp_path, "cpu").advance(math.inf, lambda _: None)
    with pytest.raises(ConfigError, match=r"bf16-seed0.*another lr"):
        _ = train.Run(_cell("bf16"), 0, _settings(steps=2, lr=2e-2), text, tmp_path, "cpu").finished


def test_batches_cover_an_epoch_once_and_depend_on_seed_and_step_alone() -> None:
    stream = np.arange(64 * 10 + 1, dtype=np.uint16)
    epoch = [corpus.batch(stream, seed=5, step=step, sequences=2, seq=64) for step in range(5)]
    assert sorted(int(row[0]) for rows in epoch for row in rows) == [64 * i for i in range(10)]
    assert np.array_equal(epoch[3], corpus.batch(stream, seed=5, step=3, sequences=2, seq=64))
    assert not np.array_equal(epoch[3], corpus.batch(stream, seed=6, step=3, sequences=2, seq=64))
    second = [int(corpus.batch(stream, seed=5, step=step, sequences=2, seq=64)[0, 0]) for step in range(5, 10)]
    assert second != [int(rows[0, 0]) for rows in epoch]


def test_corpus_is_deterministic_keeps_each_text_once_and_is_read_back(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    root = tmp_path / "texts"
    for number in range(12):
        words = " ".join(f"word{value}" for value in rng.integers(0, 500, 400))
        for copy in ("a", "b"):
            (root / copy).mkdir(parents=True, exist_ok=True)
            (root / copy / f"{number}.md").write_text(words)
    built = corpus.load(tmp_path / "one", vocab=400, max_characters=10**6, roots=[root])
    again = corpus.load(tmp_path / "two", vocab=400, max_characters=10**6, roots=[root])
    assert (
        built.digest
        == again.digest
        == corpus.load(tmp_path / "one", vocab=400, max_characters=10**6, roots=[root]).digest
    )
    assert int((np.concatenate([built.train, built.validation]) == 0).sum()) == 12  # an end of document each
    assert corpus.load(tmp_path / "one", vocab=380, max_characters=10**6, roots=[root]).digest != built.digest


def _report(losses: dict[int, float], steps: int = 10) -> dict[str, Any]:
    size = {"seq": 10}
    curve = [{"step": step, "train": 0.0, "validation": loss} for step, loss in losses.items()]
    return {"identity": {"steps": steps, "batch": 2, "size": size}, "curve": curve, "same_as": []}


def test_extra_tokens_are_read_off_between_two_evaluations() -> None:
    base = _report({2: 5.0, 4: 4.0, 6: 3.0, 8: 2.5, 10: 2.0})
    slow = _report({2: 5.0, 4: 4.5, 6: 3.5, 8: 2.5, 10: 2.2})
    # BF16 has 4.0 at step 4; the slow run at step 5: a quarter more.
    assert results.extra_tokens(slow, base) == pytest.approx(1 / 4)
    assert results.extra_tokens(_report({2: 5.0, 10: 4.1}), base) == math.inf
    assert results.final_loss(_report({2: 5.0, 4: 4.0})) == math.inf  # ended before its last step: NaN


def test_runs_too_short_to_read_tokens_off_say_so() -> None:
    base = _report({10: 3.0})
    assert math.isnan(results.extra_tokens(_report({10: 3.1}), base))
    row = {"cell": "x", "seeds": 1, "loss": 3.1, "gap": 0.1, "gap_ci95": math.nan, "spikes": 0}
    assert "too short" in results.markdown([row | {"extra_tokens": math.nan, "extra_tokens_ci95": math.nan}])
    assert "not reached" in results.markdown([row | {"extra_tokens": math.inf, "extra_tokens_ci95": math.nan}])


def test_a_jump_of_the_loss_is_a_spike_and_noise_is_not(rng: np.random.Generator) -> None:
    losses = 5.0 - 0.002 * np.arange(400) + rng.normal(scale=0.05, size=400).clip(-0.1, 0.1)
    report = {"identity": {"steps": 400}, "curve": [{"train": float(loss)} for loss in losses]}
    assert results.spikes(report) == 0
    for step in rng.choice(np.arange(60, 400), 3, replace=False):
        report["curve"][step]["train"] += 2.0
    assert results.spikes(report) == 3
    report["curve"][-1]["train"] = math.nan
    assert results.spikes(report) >= 3


def test_contrasts_pair_seeds_and_say_what_is_not_resolved() -> None:
    full = "fprop+dgrad+wgrad"
    runs = {
        "fprop+dgrad.none.wgrad": {0: _report({10: 3.0}), 1: _report({10: 4.0})},
        f"{full}.none.wgrad": {0: _report({10: 3.5}), 1: _report({10: 4.52}), 2: _report({10: 9.0})},
        f"{full}.h16.wgrad": {0: _report({10: 3.1}), 1: _report({10: 3.9})},
        f"{full}.h32.wgrad": {0: _report({10: 3.2})},
        f"{full}.sr.wgrad": {0: _report({5: 3.2})},
    }
    rows = {row["contrast"]: row for row in results.contrasts(runs)}
    assert rows["wgrad in FP4 without stabiliser less wgrad in BF16"]["difference"] == pytest.approx(0.51)
    assert rows["wgrad in FP4 without stabiliser less wgrad in BF16"]["ci95"] == pytest.approx(12.706 * 0.01, rel=1e-3)
    lines = results.contrasts_markdown(list(rows.values())).splitlines()
    said = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert said["wgrad in FP4 without stabiliser less wgrad in BF16"].endswith("| +0.500, +0.520 | resolved |")
    assert said["wgrad in FP4 with H16 less wgrad in BF16"].endswith("| not resolved |")
    assert said["H32 less H16"].endswith("| one seed: no interval |")
    assert said["stochastic rounding less none"].endswith("| runs ended in NaN |")


def test_runs_of_other_settings_are_not_put_into_one_table(tmp_path: Path) -> None:
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        report = {"cell": name, "seed": 0, "identity": {"lr": rate}, "curve": []}
        (tmp_path / "runs" / name / "curve.json").write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"b/curve\.json: was made with another lr .* folder of its own"):
        results.load(tmp_path)


def test_interval_is_students() -> None:
    mean, width = results.interval([1.0, 2.0, 4.0])
    # scipy.stats.t.ppf(0.975, 2) * scipy.stats.sem([1, 2, 4])
    assert (mean, width) == pytest.approx((7 / 3, 3.7946), rel=1e-3)
    assert math.isnan(results.interval([1.0])[1])


def test_outlier_tokens_hurt_unrotated_wgrad_and_h16_repairs_it(rng: np.random.Generator) -> None:
    """reference numbers: 1 % of 1024 tokens scaled by 30, relative error .147 without and .063 with H16."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    x, dy = (torch.randn(1024, 256, generator=generator).bfloat16() for _ in range(2))
    tokens = torch.randperm(1024, generator=generator)[:10]
    x[tokens] *= 30
    dy[tokens] *= 30
    (none, quiet_none), (h16, quiet_h16) = (wgrad_statistics._error(name, x, dy, seed=0) for name in ("none", "h16"))
    assert h16 < 0.75 * none
    assert quiet_none < 0.9 < quiet_h16 < 1.1
    crest = [wgrad_statistics._outliers(x, size)["crest p99"] for size in (0, 16)]
    assert crest[1] < crest[0]


def test_statistics_take_the_gradients_that_wgrad_gets(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    model = StudyModel(SIZE, TurboConfig.from_dict({"precision": "bf16"}))
    tokens = torch.from_numpy(rng.integers(0, SIZE.vocab, (4, SIZE.seq + 1)))
    rows = wgrad_statistics.measure(model, tokens, seed=0)
    assert [row["linear"] for row in rows] == list(model.linears())
    assert all(0.01 < row[f"error {name}"] < 0.5 for row in rows for name in grid.STABILISERS)
    model(tokens).backward()
    module = model.linears()["decoder.layers.1.mlp.linear_fc2"]
    module.taken, kept = [], module.weight.grad
    module.weight.grad = None
    model(tokens).backward()
    ((x, dy),) = module.taken
    torch.testing.assert_close(dy.double().t() @ x.double(), kept.double(), rtol=1e-3, atol=1e-6)


def test_one_command_runs_writes_everything_and_has_nothing_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    argv = ["--preset", "tiny", "--steps", "4", "--seeds", "0", "1", "--out", str(tmp_path), "--device", "cpu"]
    argv += ["--cells", "bf16,fprop+dgrad+wgrad.h16.wgrad"]
    assert study.main(argv) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "results.csv",
        "runs.csv",
        "results.md",
        "loss_gap.png",
        "wgrad.csv",
        "wgrad_error.png",
        "outliers.png",
    } <= names
    assert "| `fprop+dgrad+wgrad.h16.wgrad` | 2 |" in (tmp_path / "results.md").read_text()
    capsys.readouterr()
    assert study.main(argv) == 0
    assert "step" not in capsys.readouterr().out.replace("1 steps", "")


def test_report_draws_what_is_there_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    argv = ["--preset", "tiny", "--steps", "4", "--seeds", "0", "--out", str(tmp_path), "--device", "cpu"]
    study.main([*argv, "--cells", "bf16"])
    for name in ("results.md", "wgrad_error.png"):
        (tmp_path / name).unlink()
    capsys.readouterr()
    assert study.main(["--report", "--out", str(tmp_path)]) == 0
    assert "step" not in capsys.readouterr().out
    assert (tmp_path / "results.md").exists()
    assert (tmp_path / "wgrad_error.png").exists()


def test_kept_runs_are_used_on_another_machine_and_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--preset", "tiny", "--steps", "3", "--cells", "bf16", "--device", "cpu", "--kept", str(tmp_path / "kept")]
    assert study.main([*argv, "--seeds", "0", "--out", str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["bf16-seed0.json"]
    capsys.readouterr()
    assert study.main([*argv, "--seeds", "0", "1", "--out", str(tmp_path / "two")]) == 0
    said = capsys.readouterr().out
    assert "bf16 seed 1: ended" in said
    assert "bf16 seed 0: ended" not in said
    assert len(list((tmp_path / "kept").iterdir())) == 2
    before, after = (results.load(tmp_path / out)["bf16"][0] for out in ("one", "two"))
    assert results.validation(before) == results.validation(after)
    trained = [[point["train"] for point in report["curve"]] for report in (before, after)]
    assert trained[1] == pytest.approx(trained[0], abs=1e-4)
    with pytest.raises(ConfigError, match="another lr"):
        study.main([*argv, "--lr", "1", "--out", str(tmp_path / "three")])


def test_the_page_says_what_the_kept_runs_come_to(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "mxfp4-study.md").read_text()
    kept.restore(docs / "mxfp4-study" / "curves", tmp_path)
    loaded = results.load(tmp_path)
    for row in results.table(loaded):
        end = results.markdown([row]).splitlines()[-1].split(" | ", 1)[1].rsplit(" | ", 1)[0]
        assert f"| {end.strip(' |')} |" in page, row["cell"]
    for row in results.contrasts(loaded):
        value = results.contrasts_markdown([row]).splitlines()[-1].split(" | ")[2]
        assert f"| {value} " in page, row["contrast"]


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset", "tiny", "--steps", "2", "--seeds", "0", "1", "--cells", "bf16", "--device", "cpu"]
    for workers in ("1", "2"):
        out = tmp_path / workers
        assert study.main([*argv, "--workers", workers, "--out", str(out), "--minutes", "5", "--whole-runs"]) == 0
    one, two = (results.load(tmp_path / workers)["bf16"] for workers in ("1", "2"))
    assert all(one[seed]["curve"] == two[seed]["curve"] for seed in (0, 1))


def test_no_run_begins_that_the_deadline_would_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--preset", "tiny", "--steps", "2", "--seeds", "0", "1", "--cells", "bf16", "--device", "cpu"]
    runs._seconds[True] = 1e6
    try:
        assert study.main([*argv, "--out", str(tmp_path), "--minutes", "5", "--whole-runs"]) == 0
    finally:
        runs._seconds.clear()
    assert "2 runs left" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_unknown_cells_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown h17"):
        study.choose("bf16,h17")
