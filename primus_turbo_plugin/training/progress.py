"""The progress of a training run: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from primus_turbo_plugin.training.metrics import Metric

_SPEED_WINDOW = 10  # steps that tokens/s is averaged over


class Speed:
    """Tokens per second over the last steps, from the wall clock of their reports."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self._reports: list[tuple[int, float]] = []

    def add(self, step: int, time_s: float) -> None:
        """Note that `step` was reported at `time_s`."""
        self._reports = [*self._reports[-_SPEED_WINDOW:], (step, time_s)]

    @property
    def step_s(self) -> float | None:
        """Seconds a step; `None` before the second report."""
        if len(self._reports) < 2:
            return None
        (first, start), (last, end) = self._reports[0], self._reports[-1]
        return (end - start) / (last - first)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second; `None` before the second report."""
        return None if not self.step_s else self.tokens_per_step / self.step_s


class Display(Protocol):
    """What shows the progress of one run."""

    def show(self, step: int, loss: float, speed: Speed) -> None:
        """Show that `step` is done."""


@contextlib.contextmanager
def display(title: str, first_step: int, last_step: int) -> Iterator[Display]:
    """A progress display for steps `first_step + 1` to `last_step`, fitting for where the output goes."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        with _bar(console) as progress:
            yield _Bar(progress, title, first_step, last_step)
    else:
        yield _Lines(title, first_step, last_step)


def follow(metrics: Iterator[Metric], to: Display, speed: Speed) -> None:
    """Show every training loss among `metrics`."""
    for metric in metrics:
        if metric.tag == "lm loss":
            speed.add(metric.step, metric.time_s)
            to.show(metric.step, metric.value, speed)


def _bar(console: Any) -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description:<28}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[facts]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("ETA {task.fields[eta]}"),
        console=console,
    )


class _Bar:
    def __init__(self, progress: Any, title: str, first_step: int, last_step: int) -> None:
        self._progress, self._first, self._last = progress, first_step, last_step
        self._task = progress.add_task(title, total=last_step, completed=first_step, facts="starting", eta="-:--")

    def show(self, step: int, loss: float, speed: Speed) -> None:
        facts = f"loss {loss:.3f}  {_tokens(speed)}"
        self._progress.update(self._task, completed=step, facts=facts, eta=_eta(speed, self._last - step))


class _Lines:
    def __init__(self, title: str, first_step: int, last_step: int) -> None:
        self._title, self._first, self._last = title, first_step, last_step
        self._every = max(1, (last_step - first_step) // 10)
        print(f"{title}: starting", flush=True)

    def show(self, step: int, loss: float, speed: Speed) -> None:
        if (step - self._first) % self._every == 0 or step in (self._first + 1, self._last):
            eta = _eta(speed, self._last - step)
            print(f"{self._title}: step {step}/{self._last}  loss {loss:.3f}  {_tokens(speed)}  ETA {eta}", flush=True)
            sys.stdout.flush()


def _tokens(speed: Speed) -> str:
    rate = speed.tokens_per_s
    return "- tokens/s" if rate is None else f"{rate:,.0f} tokens/s"


def _eta(speed: Speed, steps: int) -> str:
    if speed.step_s is None:
        return "-:--"
    seconds = round(speed.step_s * steps)
    return f"{seconds // 60}:{seconds % 60:02d}"
