"""Whether a checkpoint on disk is whole, found out before anything is set up.

A torch_dist checkpoint is a folder `iter_<7 digits>` with data files `__<rank>_<n>.distcp`, an index `.metadata` that says
which bytes of which file hold which tensor, and `metadata.json`, written last. `latest_checkpointed_iteration.txt` beside
the folders names the newest.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from primus_turbo_plugin.errors import ConfigError

TRACKER = "latest_checkpointed_iteration.txt"


def check_load(load: str, *, step: int | None, may_be_empty: bool) -> None:
    """Check what `--load` points to.

    Args:
        load: The folder that holds `iter_*` folders.
        step: `--ckpt-step`; default: the one the tracker file names.
        may_be_empty: Whether an empty folder means "start from scratch": so where `--save` names the same.

    Raises:
        ConfigError: There is no checkpoint, or it isn't whole; names the whole ones.
    """
    folder = Path(load)
    if step is None:
        tracker = folder / TRACKER
        if not tracker.exists():
            if may_be_empty:
                return
            raise ConfigError(f"--load {load}: no checkpoint there ({TRACKER} is missing). {_remedy(folder)}")
        text = tracker.read_text().strip()
        if text == "release":
            return
        if not text.isdigit():
            raise ConfigError(f"--load {load}: {TRACKER} must hold a number, got {text!r}. {_remedy(folder)}")
        step = int(text)
    iteration = folder / f"iter_{step:07d}"
    fault = fault_of(iteration)
    if fault is not None:
        raise ConfigError(f"--load {load}: iteration {step} cannot be loaded: {fault}. {_remedy(folder, exclude=step)}")


def fault_of(iteration: Path) -> str | None:
    """What is wrong with one checkpoint folder; `None` if it is whole, or of a format this doesn't know."""
    if not iteration.is_dir():
        return f"{iteration} does not exist"
    if any(iteration.glob("mp_rank_*")):
        return None  # Megatron's older one-file-a-rank format
    if not (iteration / "metadata.json").exists():
        return "it was never finished (metadata.json is missing)"
    try:
        ends = _bytes_needed(iteration)
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ValueError) as error:
        return f"its index .metadata is unreadable ({type(error).__name__})"
    for name, needed in sorted(ends.items()):
        file = iteration / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < needed:
            return f"{name} is truncated ({file.stat().st_size} of {needed} bytes)"
    return None


def _bytes_needed(iteration: Path) -> dict[str, int]:
    """For every data file, up to which byte the index refers to it."""
    from torch.distributed.checkpoint import FileSystemReader

    ends: dict[str, int] = {}
    for place in FileSystemReader(str(iteration)).read_metadata().storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def whole_iterations(folder: Path) -> list[int]:
    """The iterations under `folder` that can be loaded, oldest first."""
    candidates = sorted(folder.glob("iter_*"))
    return [int(c.name.removeprefix("iter_")) for c in candidates if c.name[5:].isdigit() and fault_of(c) is None]


def _remedy(folder: Path, exclude: int | None = None) -> str:
    whole = [step for step in whole_iterations(folder) if step != exclude] if folder.is_dir() else []
    if whole:
        return f"Resume from a whole one with --ckpt-step ({', '.join(map(str, whole[-5:]))}), or leave --load out."
    return "Check the path, or leave --load out to start from scratch."
