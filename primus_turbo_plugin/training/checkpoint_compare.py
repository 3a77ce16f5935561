"""Whether two torch_dist checkpoints hold the same training state, bit for bit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was compared.

    Attributes:
        num_weights: Tensors of the model.
        num_optimizer: Tensors of the optimizer: fp32 weights and moments.
        num_rng: States of random number generators.
        different: Names of what differs, or is in one of the two only.
    """

    num_weights: int
    num_optimizer: int
    num_rng: int
    different: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every bit is the same."""
        return not self.different


def compare_checkpoints(first: Path, second: Path) -> Comparison:
    """Compare two `iter_*` folders written by the same number of processes."""
    a, b = read_checkpoint(first), read_checkpoint(second)
    different = sorted(name for name in a.keys() | b.keys() if not _same(a.get(name), b.get(name)))
    kinds = [_kind(name) for name in a]
    return Comparison(kinds.count("weights"), kinds.count("optimizer"), kinds.count("rng"), tuple(different))


def read_checkpoint(iteration: Path) -> dict[str, Any]:
    """Name -> tensor for weights and optimizer, name -> bytes as stored for RNG states."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(str(iteration))
    metadata = reader.read_metadata()
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # as intended: one process reads it all
        load(tensors, storage_reader=FileSystemReader(str(iteration)), no_dist=True)
    state: dict[str, Any] = dict(tensors)
    for index, place in metadata.storage_data.items():
        if _kind(index.fqn) == "rng":
            with open(iteration / place.relative_path, "rb") as file:
                file.seek(place.offset)
                state[index.fqn] = file.read(place.length)
    return state


def _kind(name: str) -> str:
    if name.startswith("rng_state"):
        return "rng"
    return "optimizer" if name.startswith("optimizer.") else "weights"


def _same(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Bits, not values: NaN equals itself, 0.0 does not equal -0.0.
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
