"""One run of the study: a cell and a seed, stopped and continued as often as the machine demands.

Same seed, same initialisation and the same batches in the same order, whatever the cell. Learning rate: warm up, hold, fall
linearly over the last fifth, so that the held part compares cells at equal rate whatever the length. A checkpoint holds weights,
AdamW, step and torch's CPU generator (which stochastic rounding draws from): a run in pieces gives the bits of a run in one.
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

import torch
from torch import Tensor

from examples.mxfp4_study.corpus import Corpus, batch
from examples.mxfp4_study.grid import Cell
from examples.mxfp4_study.model import ModelSize, StudyModel
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
    decay: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 50
    eval_sequences: int = 64

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

    def __init__(self, cell: Cell, seed: int, settings: Settings, corpus: Corpus, out: Path, device: str) -> None:
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
        """Trains until the end or the deadline (of `time.monotonic`); True when it has ended."""
        torch.manual_seed(self.seed)
        self.model = StudyModel(self.settings.size, self.cell.config(seed=self.seed)).to(self.device)
        self.optimizer = _adamw(self.model, self.settings)
        self._load()
        slowest, ended = 0.0, self.step == self.settings.steps
        while not ended:
            start = time.monotonic()
            if start + 1.5 * slowest > deadline:
                self._save()
                return False
            point = self._train_step()
            slowest = max(slowest, time.monotonic() - start) if self.step > 3 else slowest
            self.seconds += time.monotonic() - start
            ended = self.step == self.settings.steps or not math.isfinite(point["train"])
            if "validation" in point:
                notify(
                    f"{self.cell.name} seed {self.seed}: step {self.step} {point['train']:.4f} / {point['validation']:.4f}"
                )
        self._finish()
        return True

    def _train_step(self) -> dict[str, float]:
        settings, losses = self.settings, []
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate(self.step)
        tokens = self._tokens(self.corpus.train, self.seed, self.step, settings.batch)
        for part in tokens.split(settings.micro_batch):
            loss = self.model(part) * (len(part) / settings.batch)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        point = {"step": self.step, "train": float(torch.stack(losses).sum()), "grad_norm": float(norm)}
        if self.step % settings.eval_every == 0 or self.step == settings.steps:
            point["validation"] = self.validate()
        self.curve.append(point)
        return point

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the same sequences in every run, in the cell's own precision; leaves the run's random state alone."""
        state = torch.get_rng_state()
        tokens = self._tokens(self.corpus.validation, 0, 0, self.settings.eval_sequences)
        losses = [self.model(part) * len(part) for part in tokens.split(self.settings.micro_batch)]
        torch.set_rng_state(state)
        return float(torch.stack(losses).sum()) / len(tokens)

    def _tokens(self, stream: Any, seed: int, step: int, sequences: int) -> Tensor:
        rows = batch(stream, seed=seed, step=step, sequences=sequences, seq=self.settings.size.seq)
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    def _load(self) -> None:
        path = self.folder / "state.pt"
        if path.exists():
            state = torch.load(path, map_location="cpu", weights_only=True)
            self._same(json.loads(state["identity"]), path)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.step, self.seconds, self.curve = state["step"], state["seconds"], json.loads(state["curve"])

    def _save(self) -> None:
        state = {
            "identity": json.dumps(identity(self.settings, self.corpus)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
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


def _adamw(model: StudyModel, settings: Settings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
