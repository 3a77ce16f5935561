"""The tuning file: what is written comes back, nothing is lost, and what is damaged or foreign is refused with the remedy."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.tuning import file as tuning_file
from primus_turbo_plugin.kernels.tuning.entry import Failure
from primus_turbo_plugin.kernels.tuning.file import merge_into, read_entries, write_entries
from tests.kernels.tuning.toy import TOY, entry, key


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    failure = Failure(config={"block": 8, "mode": "b"}, reason="failed: out of shared memory")
    full = entry(key(), 4, candidates=5, failures=(failure,), backends={"torch": 2.5}, note="why")
    heuristic = replace(entry(key(32), 8), source="heuristic", us=None, default_us=None, device="", date="")
    write_entries(path, [full, heuristic])
    assert read_entries(path) == (full, heuristic)
    assert path.read_text().count("\n    {") == 2  # a line an entry


def test_a_merge_replaces_the_same_case_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    other_versions = replace(TOY.versions, triton="0.0.1")
    merge_into(path, [entry(key(), 4), entry(key(32), 8), entry(key(), 2, versions=other_versions)])
    merge_into(path, [entry(key(), 16), entry(key(aligned=False), 6)])
    blocks = {
        (item.key["size"], item.key["side"]["aligned"], item.versions.triton): item.config["block"]
        for item in read_entries(path)
    }
    triton = TOY.versions.triton
    assert blocks == {
        (16, True, triton): 16,
        (32, True, triton): 8,
        (16, True, "0.0.1"): 2,
        (16, False, triton): 6,
    }


def _merge_many(path: str, first: int) -> None:
    for size in range(first, first + 20):
        merge_into(path, [entry(key(2 * size), 2)])


def test_two_processes_that_merge_at_once_lose_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "tuned.json")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_merge_many, args=(path, first)) for first in (100, 200)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_entries(path)) == 40


def test_an_interrupted_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuned.json"
    write_entries(path, [entry(key(), 4)])

    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning_file.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_entries(path, [])
    assert len(read_entries(path)) == 1
    assert os.listdir(tmp_path) == ["tuned.json"]


def changed(**fields: Any) -> str:
    plain = {**entry(key(), 4).to_plain(), **fields}
    return json.dumps({"format": tuning_file.FORMAT, "schema": 1, "entries": [plain]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged or no JSON"),
        (changed()[:-40], "damaged or no JSON"),
        ("[]", "is no tuning file"),
        ('{"entries": []}', "'format' must be"),
        (changed().replace('"schema": 1', '"schema": 2'), "has schema 2, this package reads 1"),
        (changed().replace('"entries": [', '"entries": 3, "x": ['), "'entries' must be a list"),
        (changed(us="3"), "entries[0].us: must be float, got '3'"),
        (changed(us=True), "entries[0].us: must be float, got True"),
        (changed(source="guessed"), "entries[0].source: must be one of measured, heuristic"),
        (changed(extra=1), "entries[0]: unknown field 'extra'"),
        (changed(key={"size": 3}), "entries[0].key: misses 'arch'"),
        (changed(versions={"torch": "2"}), "entries[0].versions: must be {torch: text"),
        (changed(device=""), "a measured entry has us, default_us (or failures), device and date"),
        (changed(failures=[{"reason": "x"}]), "entries[0].failures: must be {config, reason}"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name_and_left_alone(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(text)
    for use in (lambda: read_entries(path), lambda: merge_into(path, [entry(key(), 4)])):
        with pytest.raises(ConfigError) as refused:
            use()
        message = str(refused.value)
        assert words in message
        assert str(path) in message
        assert "tune again" in message
    assert path.read_text() == text


def test_the_same_case_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    write_entries(path, [entry(key(), 4), entry(key(), 8)])
    with pytest.raises(ConfigError, match=r"entries\[0\] and entries\[1\] answer the same case"):
        read_entries(path)


def test_a_missing_file_and_an_unwritable_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json.*No such file"):
        read_entries(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="writable folder"):
        merge_into(tmp_path / "no" / "folder.json", [])
