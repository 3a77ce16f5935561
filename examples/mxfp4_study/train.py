"""One run of the study: a cell and a seed, stopped and continued as often as the machine demands.

Same seed, same initialisation and the same batches in the same order, whatever the cell. Learning rate: warm up, hold, fall
linearly over the last half: the held part compares cells at equal rate, the long fall leaves little of the last batches' noise.
A checkpoint holds weights, AdamW, step and torch's CPU generator (which stochastic rounding draws from): a run in pieces gives
the bits of a run in one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.mxfp4_study.corpus import Corpus, batch
from examples.mxfp4_study.grid import Cell
from examples.mxfp4_study.model import Attention, ModelSize, StudyModel
from examples.mxfp4_study.step import Step
from primus_turbo_plugin.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every run of one study shares; runs with other settings or another text are never compared with them."""

    size: ModelSize
    steps: int
    batch: int
    micro_batch: int
    lr: float
    warmup: float = 0.05
    decay: float = 0.5
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 50
    eval_sequences: int = 64
    attention: Attention = "torch"

    def __post_init__(self) -> None:
        if self.batch % self.micro_batch:
            raise ConfigError(f"--micro-batch {self.micro_batch} must divide --batch {self.batch}.")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.size.seq

    def rate(self, step: int) -> float:
        """Learning rate of a step counted from 0."""
        warm, fall = max(1, round(self.warmup * self.steps)), max(1, round(self.decay * self.steps))
        return self.lr * min(1.0, (step + 1) / warm, (self.steps - step) / fall)


def identity(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What must be equal for two runs to be comparable."""
    return {**asdict(settings), "data": corpus.digest}


class Run:
    """A cell and a seed in a folder of their own, `curve.json` when it has ended, `state.pt` while it has not."""

    def __init__(
        self, cell: Cell, seed: int, settings: Settings, corpus: Corpus, out: Path, device: str, *, capture: bool = True
    ) -> None:
        self.capture = capture
        self.cell, self.seed, self.settings, self.corpus, self.device = cell, seed, settings, corpus, device
        self.folder = out / "runs" / f"{cell.name}-seed{seed}"
        self.curve: list[dict[str, float]] = []
        self.step = 0
        self.seconds = 0.0

    @property
    def finished(self) -> bool:
        """Whether it ended, with these settings on this text.

        Raises:
            ConfigError: It ended with others.
        """
        path = self.folder / "curve.json"
        return path.exists() and self._same(json.loads(path.read_text())["identity"], path)

    def advance(self, deadline: float, notify: Callable[[str], None]) -> bool:
        """Trains until the end or the deadline (of `time.monotonic`); True when it has ended.

        From one validation to the next nothing waits for the GPU; it stops, also on NaN, at validations alone.
        """
        torch.manual_seed(self.seed)
        config = self.cell.config(seed=self.seed)
        self.model = StudyModel(self.settings.size, config, self.settings.attention).to(self.device)
        self.training = Step(self.model, self.settings, capture=self.capture)
        self._load()
        elapsed, ended = 0.0, self.step == self.settings.steps
        while not ended:
            start = time.monotonic()
            if start + 1.5 * elapsed > deadline:
                self._save()
                return False
            points = self._stretch()
            self.curve += points
            elapsed = time.monotonic() - start
            self.seconds += elapsed
            ended = self.step == self.settings.steps or not all(math.isfinite(point["train"]) for point in points)
            last = points[-1]
            pace = f"{1e3 * elapsed / len(points):.0f} ms a step"
            losses = f"{last['train']:.4f} / {last['validation']:.4f}"
            notify(f"{self.cell.name} seed {self.seed}: step {self.step} {losses}, {pace}")
        self._finish()
        return True

    def _stretch(self) -> list[dict[str, float]]:
        """The steps up to and including the next one with a validation."""
        settings, results = self.settings, []
        count = min(settings.eval_every - self.step % settings.eval_every, settings.steps - self.step)
        rows = [self._rows(self.corpus.train, self.seed, self.step + i, settings.batch) for i in range(count)]
        for tokens in torch.from_numpy(np.stack(rows)).to(self.device):
            results.append(self.training(tokens, settings.rate(self.step)))
            self.step += 1
        validation = self.validate()
        first = self.step - count + 1
        points = [
            {"step": first + i, "train": loss, "grad_norm": norm}
            for i, (loss, norm) in enumerate(torch.stack(results).tolist())
        ]
        points[-1]["validation"] = validation
        return points

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the same sequences in every run, in the cell's own precision; leaves the run's random state alone."""
        state = torch.get_rng_state()
        rows = self._rows(self.corpus.validation, 0, 0, self.settings.eval_sequences)
        tokens = torch.from_numpy(rows).to(self.device)
        losses = [
            self.model(part) * len(part) for part in tokens.split(4 * self.settings.micro_batch)
        ]  # no gradients: room for more
        torch.set_rng_state(state)
        return float(torch.stack(losses).sum()) / len(tokens)

    def _rows(self, stream: Any, seed: int, step: int, sequences: int) -> np.ndarray:
        return batch(stream, seed=seed, step=step, sequences=sequences, seq=self.settings.size.seq)

    def _load(self) -> None:
        path = self.folder / "state.pt"
        if path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._same(json.loads(state["identity"]), path)
            self.model.load_state_dict(state["model"])
            self.training.load(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.step, self.seconds, self.curve = state["step"], state["seconds"], json.loads(state["curve"])

    def _save(self) -> None:
        state = {
            "identity": json.dumps(identity(self.settings, self.corpus)),
            "model": self.model.state_dict(),
            "optimizer": self.training.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": json.dumps(self.curve),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.folder / "state.partial")
        os.replace(self.folder / "state.partial", self.folder / "state.pt")

    def _finish(self) -> None:
        report = {
            "cell": self.cell.name,
            "same_as": list(self.cell.same_as),
            "seed": self.seed,
            "identity": identity(self.settings, self.corpus),
            "seconds": self.seconds,
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "captured": self.training.captured,
            "curve": self.curve,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "curve.partial").write_text(json.dumps(report))
        os.replace(self.folder / "curve.partial", self.folder / "curve.json")
        (self.folder / "state.pt").unlink(missing_ok=True)

    def _same(self, stored: dict[str, Any], path: Path) -> bool:
        mine = json.loads(json.dumps(identity(self.settings, self.corpus)))
        if stored != mine:
            different = sorted(key for key in mine if stored.get(key) != mine[key])
            raise ConfigError(
                f"{path}: was made with another {', '.join(different)}. Runs of one study share their settings and text: "
                "take the same, or another --out."
            )
        return True
