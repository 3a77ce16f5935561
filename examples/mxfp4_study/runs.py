"""The runs of a study one after another, or several at once: processes that share the device, a run each.

On one GPU two processes hide each other's start, compilation and validation; the bits of a run do not depend on its neighbours.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.mxfp4_study import corpus, wgrad_statistics
from examples.mxfp4_study.grid import Cell
from examples.mxfp4_study.train import Run, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is common to the runs of one call.

    Attributes:
        settings: Of every run.
        characters: Of text.
        out: The study's folder.
        device: `cuda` or `cpu`.
        deadline: Of `time.monotonic`, which all processes share.
        capture: Whether steps may be replayed from a CUDA graph.
        whole_runs: Begin no run that would not end before the deadline, to judge by the longest so far.
        measured_seed: The seed whose trained BF16 model the statistics of wgrad are taken from.
    """

    settings: Settings
    characters: int
    out: Path
    device: str
    deadline: float
    capture: bool
    whole_runs: bool
    measured_seed: int

    def text(self) -> corpus.Corpus:
        """Built by the first call, read by later ones."""
        return _text(self.out, self.settings.size.vocab, self.characters)


@functools.cache
def _text(out: Path, vocab: int, characters: int) -> corpus.Corpus:
    return corpus.load(out, vocab=vocab, max_characters=characters)


def train_all(pairs: Sequence[tuple[Cell, int]], plan: Plan, *, workers: int) -> int:
    """Trains (cell, seed) in this order until the deadline; returns how many have not ended."""
    text = plan.text()
    todo = [
        (cell, seed) for cell, seed in pairs if not Run(cell, seed, plan.settings, text, plan.out, plan.device).finished
    ]
    if workers == 1:
        prepare(plan.device)
        return [_advance(cell, seed, plan) for cell, seed in todo].count(False)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=prepare, initargs=(plan.device,)) as pool:
        futures = [pool.submit(_advance, cell, seed, plan) for cell, seed in todo]
        return [future.result() for future in futures].count(False)


def prepare(device: str) -> None:
    """Makes every operation of this process give the same bits in each run: attention's backward does not by itself."""
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_seconds: dict[bool, float] = {}
"""The longest run that has ended in this process, replayed from a graph or not."""


def _advance(cell: Cell, seed: int, plan: Plan) -> bool:
    """One run, as far as the deadline lets it; whether it has ended."""
    start = time.monotonic()
    replayed = plan.capture and not cell.config(seed=seed).plan("linear").precision.is_stochastic
    needed = _seconds.get(replayed, max(_seconds.values(), default=0.0))
    if start + (needed if plan.whole_runs else 0.0) > plan.deadline:
        return False
    run = Run(cell, seed, plan.settings, plan.text(), plan.out, plan.device, capture=plan.capture)
    if not run.advance(plan.deadline, lambda line: print(line, flush=True)):
        return False
    if cell.name == "bf16" and seed == plan.measured_seed:
        _measure(run, plan)
    del run
    gc.collect()
    torch.cuda.empty_cache()
    elapsed = time.monotonic() - start
    _seconds[replayed] = max(elapsed, _seconds.get(replayed, 0.0))
    print(f"{cell.name} seed {seed}: ended after {elapsed:.0f} s", flush=True)
    return True


def _measure(run: Run, plan: Plan) -> None:
    settings = plan.settings
    rows = corpus.batch(run.corpus.validation, seed=0, step=0, sequences=min(4, settings.batch), seq=settings.size.seq)
    tokens = torch.from_numpy(rows).to(plan.device)
    wgrad_statistics.write(wgrad_statistics.measure(run.model, tokens, run.seed), plan.out / "wgrad.csv")
