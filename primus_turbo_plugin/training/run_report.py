"""What training runs gave, as a table, a picture and a file."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one training run gave.

    Attributes:
        recipe: Precision preset.
        losses: Training loss by step.
        validation: Validation loss by step.
        tokens_per_s: Over the median step.
        seconds: From start to end, checkpoints and validation included.
        checkpoints: Folder of `iter_*` folders.
    """

    recipe: str
    losses: dict[int, float]
    validation: dict[int, float]
    tokens_per_s: float
    seconds: float
    checkpoints: Path

    @property
    def train_loss(self) -> float:
        """Mean over the last steps: one batch is small, its loss jumps about."""
        return statistics.fmean(list(self.losses.values())[-10:])

    @property
    def validation_loss(self) -> float:
        """The last one."""
        return list(self.validation.values())[-1]


def median_step_s(times_s: Sequence[float]) -> float:
    """Seconds of the median step, from when each step was reported; NaN below two reports."""
    gaps = [after - before for before, after in itertools.pairwise(times_s)]
    return statistics.median(gaps) if gaps else float("nan")


def smooth(values: list[float], keep: float = 0.85) -> list[float]:
    """Exponential moving average, started at the first value."""
    return list(itertools.accumulate(values, lambda mean, value: keep * mean + (1 - keep) * value))


def draw(runs: list[Run], picture: Path) -> None:
    """Above: loss of every recipe, training smoothed, validation as dots. Below: what each loses to the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), dpi=120, sharex=True, height_ratios=(3, 1))
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for run, color, style in zip(runs, colors, itertools.cycle(("-", "--", ":"))):
        steps, losses = list(run.losses), list(run.losses.values())
        above.plot(steps, losses, color=color, linewidth=0.6, alpha=0.3)
        above.plot(steps, smooth(losses), style, color=color, linewidth=2, label=f"{run.recipe}, training (smoothed)")
        dots = {
            "color": color,
            "markerfacecolor": "none" if style != "-" else color,
            "label": f"{run.recipe}, validation",
        }
        above.plot(list(run.validation), list(run.validation.values()), "o", markersize=9, **dots)
        if run is not runs[0]:
            gap = [loss - runs[0].losses[step] for step, loss in run.losses.items()]
            below.plot(steps, gap, color=color, linewidth=0.6, alpha=0.4)
            below.plot(steps, smooth(gap), color=color, linewidth=2)
    below.axhline(0, color=colors[0], linewidth=1)
    above.set(ylabel="loss (nats a token)", title="The same model and batches, one curve a precision recipe")
    below.set(xlabel="step", ylabel=f"minus {runs[0].recipe}")
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(picture, bbox_inches="tight")
    plt.close(figure)


def print_table(title: str, runs: list[Run]) -> None:
    """One row a run."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for heading in ("recipe", "first loss", "train loss", "validation loss", "tokens/s", "time"):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    for run in runs:
        first = next(iter(run.losses.values()))
        cells = [run.recipe, f"{first:.3f}", f"{run.train_loss:.3f}", f"{run.validation_loss:.3f}"]
        table.add_row(*cells, f"{run.tokens_per_s:,.0f}", f"{run.seconds:.0f} s")
    Console().print(table)


def save_results(path: Path, settings: Mapping[str, Any], runs: list[Run], resumed: str) -> None:
    """Everything in numbers, as JSON: settings, losses by step, and the verdict on the resumed run."""
    recipes = {
        run.recipe: {
            "train_loss": run.train_loss,
            "validation_loss": run.validation_loss,
            "tokens_per_s": run.tokens_per_s,
            "seconds": run.seconds,
            "losses": run.losses,
            "validation": run.validation,
        }
        for run in runs
    }
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    path.write_text(json.dumps({"settings": plain, "recipes": recipes, "resumed": resumed}, indent=2) + "\n")
