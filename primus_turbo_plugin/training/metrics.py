"""What a training run measures, step by step, as a file another process can follow.

Megatron's training loop reports losses, learning rate and gradient norm to a TensorBoard writer if one is set, on the last
rank, where the loss is known. `MetricsFile` has that writer's methods and appends one JSON line a value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """One value: its name as Megatron calls it ("lm loss", "grad-norm"), the step, and the wall clock in seconds."""

    tag: str
    step: int
    value: float
    time_s: float


class MetricsFile:
    """Appends metrics to `path`; stands in for `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self, path: str | Path, also: Any = None) -> None:
        """Open `path` for appending; `also` is a writer that gets every call as well."""
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the run
        self._also = also

    def add_scalar(self, tag: str, value: Any, step: int, *args: Any, **kwargs: Any) -> None:
        """Append one value; what Megatron writes against the sample count instead of the step is left out."""
        if self._also is not None:
            self._also.add_scalar(tag, value, step, *args, **kwargs)
        if not tag.endswith(" vs samples"):
            line = {"tag": tag, "step": int(step), "value": float(value), "time_s": time.time()}
            self._file.write(json.dumps(line) + "\n")

    def __getattr__(self, name: str) -> Any:
        """Everything else a SummaryWriter can do: passed on, or done nothing about."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._also, name) if self._also is not None else _ignore


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


class MetricsReader:
    """Follows a metrics file while it grows."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._offset = Path(path), 0

    def new(self) -> Iterator[Metric]:
        """The metrics written since the last call; a line still being written is left for the next one."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield Metric(**json.loads(line))
