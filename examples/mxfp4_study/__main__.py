"""Repeats the MXFP4 study: what quantising each GEMM costs a training run, and what repairs it.

    python -m examples.mxfp4_study --minutes 9        as much as fits; run it again to go on where it stopped
    python -m examples.mxfp4_study --preset tiny      the same in about two minutes on a CPU, too small to conclude from
    python -m examples.mxfp4_study --report           tables and pictures of the runs below --out, without training

Writes into --out: runs/*/curve.json, results.csv, results.md, loss_gap.png, and, from the BF16 model, wgrad.csv and two pictures.
docs/mxfp4-study.md says what came out.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

from examples.mxfp4_study import grid, kept, pictures, results, wgrad_statistics
from examples.mxfp4_study.model import ModelSize
from examples.mxfp4_study.runs import Plan, train_all
from examples.mxfp4_study.train import Settings
from primus_turbo_plugin.errors import ConfigError, TurboError

_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "hidden": 64, "ffn": 160, "heads": 2, "kv_heads": 1, "vocab": 512, "seq": 64},
    "60m": {"layers": 9, "hidden": 768, "ffn": 2048, "heads": 6, "kv_heads": 2, "vocab": 8192, "seq": 2048},
    "160m": {"layers": 14, "hidden": 896, "ffn": 2432, "heads": 14, "kv_heads": 7, "vocab": 16384, "seq": 2048},
    "350m": {"layers": 24, "hidden": 1024, "ffn": 2816, "heads": 16, "kv_heads": 8, "vocab": 16384, "seq": 2048},
}
_LONG = {"eval_every": 50, "eval_sequences": 64}
_RUNS: dict[str, dict[str, Any]] = {
    "tiny": {"steps": 12, "batch": 4, "micro_batch": 4, "lr": 3e-3, "eval_every": 3, "eval_sequences": 8},
    "60m": {"steps": 500, "batch": 8, "micro_batch": 8, "lr": 3e-4, **_LONG},
    "160m": {"steps": 1500, "batch": 32, "micro_batch": 16, "lr": 6e-4, **_LONG},
    "350m": {"steps": 2000, "batch": 64, "micro_batch": 8, "lr": 4e-4, **_LONG},
}
_CHARACTERS = {"tiny": 300_000, "60m": 40_000_000}
"""Of text; elsewhere all there is."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.mxfp4_study", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=tuple(_SIZES), default="60m", help="model and length; default: %(default)s")
    parser.add_argument("--cells", default="core", help="core, all, or names separated by commas; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="of each run")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--lr", type=float, help="highest learning rate")
    parser.add_argument("--attention", choices=("torch", "package"), help="whose kernels; default: torch's")
    parser.add_argument("--characters", type=int, help="of text to take; default: what the preset's runs need")
    parser.add_argument("--minutes", type=float, help="stop, to be continued, before so many have passed")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that share the device, a run each; default: 1"
    )
    parser.add_argument("--whole-runs", action="store_true", help="begin none that --minutes would interrupt")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph: same bits, slower")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument(
        "--kept", type=Path, help="folder of small files of finished runs: used, not repeated, added to"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mxfp4_study"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--list", action="store_true", help="show the cells and stop")
    return parser.parse_args(argv)


def choose(names: str) -> list[grid.Cell]:
    """The cells of `--cells`.

    Raises:
        ConfigError: A name is unknown.
    """
    every = {alias: cell for cell in grid.cells() for alias in (cell.name, *cell.same_as)}
    wanted = list(grid.CORE) if names == "core" else list(every) if names == "all" else names.split(",")
    unknown = [name for name in wanted if name not in every]
    if unknown:
        raise ConfigError(f"--cells: unknown {', '.join(unknown)}. Known: {', '.join(every)}.")
    return list({every[name].name: every[name] for name in wanted}.values())


def settings_of(options: argparse.Namespace) -> Settings:
    """The preset with the flags that were given."""
    run = dict(_RUNS[options.preset])
    given = {key: getattr(options, key) for key in ("steps", "batch", "micro_batch", "lr", "attention")}
    run |= {key: value for key, value in given.items() if value is not None}
    return Settings(size=ModelSize(**_SIZES[options.preset]), **run)


def main(argv: list[str]) -> int:
    """Runs what fits, then writes the table and the pictures of everything that has ended; 0 if nothing is left to do."""
    options = parse(argv)
    chosen = choose(options.cells)
    if options.list:
        for cell in chosen:
            print(cell.name, *(f"= {name}" for name in cell.same_as))
        return 0
    if options.kept:
        kept.restore(options.kept, options.out)
    if options.report:
        _report(options.out)
        return 0
    settings = settings_of(options)
    plan = Plan(
        settings=settings,
        characters=options.characters or _CHARACTERS.get(options.preset, 1 << 40),
        out=options.out,
        device=options.device,
        deadline=time.monotonic() + 60 * options.minutes if options.minutes else math.inf,
        capture=not options.eager,
        whole_runs=options.whole_runs,
        measured_seed=options.seeds[0],
    )
    text = plan.text()
    print(
        f"{settings.size.parameters / 1e6:.1f} M parameters, "
        f"{settings.steps * settings.tokens_per_step / 1e6:.1f} M tokens a run, "
        f"{len(text.train) / 1e6:.1f} M in the text ({text.digest}), {len(chosen)} cells x {len(options.seeds)} seeds",
        flush=True,
    )
    left = train_all([(cell, seed) for seed in options.seeds for cell in chosen], plan, workers=options.workers)
    if options.kept:
        kept.keep(options.out, options.kept)
    _report(options.out)
    print(f"{left} runs left; the same command continues" if left else "every run has ended")
    return 0


def _report(out: Path) -> None:
    """Tables of all runs that have ended, and pictures where matplotlib is installed."""
    runs = results.load(out)
    rows = results.table(runs)
    if not rows:
        return
    results.write_csv(rows, out / "results.csv")
    results.write_csv(results.each_run(runs), out / "runs.csv")
    tables = results.markdown(rows) + "\n" + results.contrasts_markdown(results.contrasts(runs))
    (out / "results.md").write_text(tables)
    print(tables)
    if importlib.util.find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed here; --report draws them where it is")
        return
    pictures.draw_gaps(runs, out / "loss_gap.png")
    statistics = out / "wgrad.csv"
    if statistics.exists():
        pictures.draw_statistics(wgrad_statistics.read(statistics), out / "wgrad_error.png", out / "outliers.png")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TurboError as error:
        sys.exit(f"mxfp4_study: {error}")
