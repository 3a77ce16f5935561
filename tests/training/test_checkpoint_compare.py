"""Two checkpoints are the same only if every bit is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from primus_turbo_plugin.training.checkpoint_compare import compare_checkpoints


def _state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(16, 4, generator=generator).to(torch.bfloat16)
    weight[0, 0] = float("nan")
    moments = torch.zeros(64)
    return {"decoder.weight": weight, "optimizer.exp_avg": moments, "rng_state/shard_0": "seed 1", "common_state": [1]}


def _write(state: dict[str, Any], folder: Path) -> Path:
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def test_equal_checkpoints_are_identical_nan_and_all(tmp_path: Path) -> None:
    first, second = _write(_state(), tmp_path / "a"), _write(_state(), tmp_path / "b")
    result = compare_checkpoints(first, second)
    assert result.identical
    assert (result.num_weights, result.num_optimizer, result.num_rng) == (1, 1, 1)


def _flip_sign_of_zero(state: dict[str, Any]) -> None:
    state["optimizer.exp_avg"][63] = -0.0


def _change_one_bit(state: dict[str, Any]) -> None:
    state["decoder.weight"].view(torch.int16)[5, 3] ^= 1


def _change_rng(state: dict[str, Any]) -> None:
    state["rng_state/shard_0"] = "seed 2"


def _drop(state: dict[str, Any]) -> None:
    del state["decoder.weight"]


def _widen(state: dict[str, Any]) -> None:
    state["decoder.weight"] = state["decoder.weight"].float()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_flip_sign_of_zero, "optimizer.exp_avg"),
        (_change_one_bit, "decoder.weight"),
        (_change_rng, "rng_state/shard_0"),
        (_drop, "decoder.weight"),
        (_widen, "decoder.weight"),
    ],
)
def test_any_difference_is_named(change: Any, name: str, tmp_path: Path) -> None:
    other = copy.deepcopy(_state())
    change(other)
    assert compare_checkpoints(_write(_state(), tmp_path / "a"), _write(other, tmp_path / "b")).different == (name,)


def test_settings_saved_beside_the_state_may_differ(tmp_path: Path) -> None:
    """Paths in Megatron's saved arguments differ between a run and its continuation."""
    other = {**_state(), "common_state": [2]}
    assert compare_checkpoints(_write(_state(), tmp_path / "a"), _write(other, tmp_path / "b")).identical
