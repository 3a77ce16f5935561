"""Mistakes that Megatron would answer with a traceback, with silence or by never ending."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.training import arguments, preflight
from tests.support.gpt_arguments import tiny_gpt


def _refusal(argv: list[str], world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        _check(argv, world_size)
    text = str(raised.value)
    assert "\n" not in text
    return text


def _check(argv: list[str], world_size: int = 1) -> None:
    args = arguments.parse(argv, "cpu")
    args.world_size, args.rank = world_size, 0
    preflight.check(args)


@pytest.fixture(autouse=True)
def _arguments_of_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])


def _dataset(folder: Path, lengths: list[int]) -> str:
    """An indexed dataset written by Megatron, one sequence a document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(folder / "text")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.arange(length, dtype=torch.int64), [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (("no.such.module", "gpt_spec"), "there is no module no"),
        (("primus_turbo_plugin.megatron_lmm", "gpt_spec"), "did you mean primus_turbo_plugin.megatron_lm?"),
        (("primus_turbo_plugin.megatron_lm", "gpt_spek"), "has no 'gpt_spek'; did you mean gpt_spec?"),
        (("primus_turbo_plugin.megatron_lm.deeper", "gpt_spec"), "no module primus_turbo_plugin.megatron_lm.deeper"),
        (("primus_turbo_plugin.megatron_lm",), "takes a module and a name in it"),
        ((".megatron_lm", "gpt_spec"), "cannot be imported"),
    ],
)
def test_a_spec_that_names_nothing_is_refused(spec: tuple[str, ...], words: str) -> None:
    text = _refusal(tiny_gpt("--spec", *spec))
    assert text.startswith("--spec")
    assert words in text


def test_a_spec_module_that_imports_something_missing_is_not_called_missing_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec_with_missing_import.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = _refusal(tiny_gpt("--spec", "spec_with_missing_import", "gpt_spec"))
    assert "cannot be imported (No module named 'not_installed_here')" in text


def test_our_own_spec_passes() -> None:
    _check(tiny_gpt("--spec", "primus_turbo_plugin.megatron_lm", "gpt_spec"))


@pytest.mark.parametrize(
    "name",
    [
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length"),
        *("vocab_size", "micro_batch_size", "global_batch_size", "train_iters", "tensor_model_parallel_size"),
        *("pipeline_model_parallel_size", "context_parallel_size", "log_interval", "eval_interval"),
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_below_one_is_refused_by_its_flag(name: str, value: int) -> None:
    changed: dict[str, Any] = {name: value}
    assert _refusal(tiny_gpt(**changed)) == f"--{name.replace('_', '-')}: at least 1, got {value}."


def test_no_iterations_are_fine_where_training_is_skipped() -> None:
    _check(tiny_gpt("--skip-train", train_iters=0))


@pytest.mark.parametrize(
    ("argv", "world_size", "words"),
    [
        (tiny_gpt(num_query_groups=3), 1, "--num-query-groups 3 does not divide --num-attention-heads 4. Take one of"),
        (
            tiny_gpt(tensor_model_parallel_size=4),
            4,
            "--tensor-model-parallel-size 4 does not divide --num-query-groups 2. Take one of 1, 2,",
        ),
    ],
)
def test_query_groups_must_fit_heads_and_ranks(argv: list[str], world_size: int, words: str) -> None:
    assert words in _refusal(argv, world_size)


def test_more_ranks_than_query_groups_are_left_to_megatrons_attention() -> None:
    _check(tiny_gpt("--turbo-spec", "megatron", tensor_model_parallel_size=4), 4)


@pytest.mark.parametrize(
    ("num_documents", "split", "empty"),
    [
        (1, "95,5,0", "validation"),
        (10, "95,5,0", "validation"),
        (11, "95,5,0", None),
        (3, "969,30,1", "validation and test"),
        (4, "0,100,0", "training"),
        (1, "100,0,0", None),
    ],
)
def test_a_split_without_documents_is_refused(
    num_documents: int, split: str, empty: str | None, tmp_path: Path
) -> None:
    prefix = _dataset(tmp_path, [5] * num_documents)
    argv = tiny_gpt("--data-path", prefix, drop=("mock-data",), split=split)
    if empty is None:
        _check(argv)
    else:
        assert f"--split {split} of {num_documents} documents leaves nothing for {empty}." in _refusal(argv)


def test_a_split_of_empty_documents_is_refused(tmp_path: Path) -> None:
    prefix = _dataset(tmp_path, [5] * 18 + [0] * 2)
    argv = tiny_gpt("--data-path", prefix, drop=("mock-data",), split="90,10,0")
    assert "leaves nothing for validation" in _refusal(argv)


def test_a_dataset_of_one_split_may_be_small_but_not_empty(tmp_path: Path) -> None:
    for name, lengths in (("full", [5]), ("empty", [])):
        (tmp_path / name).mkdir()
        _dataset(tmp_path / name, lengths)
    full, empty = str(tmp_path / "full" / "text"), str(tmp_path / "empty" / "text")
    own = ("--train-data-path", full, "--valid-data-path")
    _check(tiny_gpt(*own, full, drop=("mock-data",)))
    assert f"dataset {empty}: holds no tokens" in _refusal(tiny_gpt(*own, empty, drop=("mock-data",)))


@pytest.mark.parametrize("content", [b"", b"not an index" * 9, None])
def test_a_broken_index_is_refused(content: bytes | None, tmp_path: Path) -> None:
    index = Path(_dataset(tmp_path, [5] * 40) + ".idx")
    index.write_bytes(index.read_bytes()[:60] if content is None else content)
    argv = tiny_gpt("--data-path", str(tmp_path / "text"), drop=("mock-data",))
    assert f"{index} cannot be read as Megatron's index" in _refusal(argv)


def test_paths_that_cannot_be_written_are_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "does not exist" in _refusal(tiny_gpt("--turbo-metrics", str(tmp_path / "missing" / "m.jsonl")))
    assert "is a folder" in _refusal(tiny_gpt("--turbo-metrics", str(tmp_path)))
    for flag in ("--save", "--tensorboard-dir", "--data-cache-path"):
        text = _refusal(tiny_gpt(flag, str(file / "deep" / "er")))
        assert text.startswith(f"{flag} {file}/deep/er: cannot be written")
        assert "Not a directory" in text
    _check(tiny_gpt("--save", str(tmp_path / "new" / "er"), "--turbo-metrics", str(tmp_path / "m.jsonl")))
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(sys.platform != "linux", reason="the proc file system")
def test_a_folder_that_even_root_cannot_make_is_refused() -> None:
    assert "--save /proc/nowhere: cannot be written (/proc: " in _refusal(tiny_gpt("--save", "/proc/nowhere"))
