"""Broken checkpoints are recognised before anything is set up, with the whole ones named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training.checkpoint_files import TRACKER, check_load, fault_of, whole_iterations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20):
        iteration = tmp_path / f"iter_{step:07d}"
        save({"w": torch.randn(64, 8), "b": torch.randn(3)}, storage_writer=FileSystemWriter(iteration), no_dist=True)
        (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / TRACKER).write_text("20")
    return tmp_path


def _refusal(folder: Path, step: int | None = None, may_be_empty: bool = False) -> str:
    with pytest.raises(ConfigError) as raised:
        check_load(str(folder), step=step, may_be_empty=may_be_empty)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_whole_checkpoint_passes(folder: Path) -> None:
    check_load(str(folder), step=None, may_be_empty=False)
    check_load(str(folder), step=10, may_be_empty=False)
    assert whole_iterations(folder) == [10, 20]


@pytest.mark.parametrize("cut", [1, 600])
def test_a_truncated_data_file_is_named_with_its_size_and_the_remedy(folder: Path, cut: int) -> None:
    file = next((folder / "iter_0000020").glob("*.distcp"))
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - cut])
    text = _refusal(folder)
    assert f"{file.name} is truncated ({size - cut} of " in text
    assert "--ckpt-step (10)" in text


def test_a_missing_data_file_is_named(folder: Path) -> None:
    file = next((folder / "iter_0000020").glob("*.distcp"))
    file.unlink()
    assert f"{file.name} is missing" in _refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"no pickle"])
def test_an_unreadable_index_is_named(folder: Path, content: bytes) -> None:
    (folder / "iter_0000020" / ".metadata").write_bytes(content)
    assert ".metadata is unreadable" in _refusal(folder)


def test_an_unfinished_checkpoint_is_recognised(folder: Path) -> None:
    (folder / "iter_0000020" / "metadata.json").unlink()
    assert "never finished" in _refusal(folder)
    assert whole_iterations(folder) == [10]


def test_a_missing_step_names_those_that_exist(folder: Path) -> None:
    text = _refusal(folder, step=15)
    assert "iter_0000015 does not exist" in text
    assert "--ckpt-step (10, 20)" in text


@pytest.mark.parametrize("content", ["", "2o"])
def test_a_broken_tracker_is_named(folder: Path, content: str) -> None:
    (folder / TRACKER).write_text(content)
    assert f"{TRACKER} must hold a number" in _refusal(folder)


def test_an_empty_folder_is_fine_only_where_the_run_also_saves_there(tmp_path: Path) -> None:
    check_load(str(tmp_path), step=None, may_be_empty=True)
    assert "no checkpoint there" in _refusal(tmp_path)
    assert "no checkpoint there" in _refusal(tmp_path / "nowhere")


def test_formats_it_does_not_know_are_left_to_megatron(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    assert fault_of(tmp_path / "iter_0000001") is None
