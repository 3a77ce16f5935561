"""Which tuned configuration applies: everything in the key counts, versions count, and nothing is used that cannot serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from primus_turbo_plugin.diagnostics.tune.gemm_tasks import shape_tasks
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.tuning.codec import decode, encode
from primus_turbo_plugin.kernels.tuning.entry import Entry
from primus_turbo_plugin.kernels.tuning.file import merge_into, read_entries, write_entries
from primus_turbo_plugin.kernels.tuning.shipped import ARCHITECTURES, shipped_entries
from primus_turbo_plugin.kernels.tuning.table import build_table, tuning_table
from primus_turbo_plugin.kernels.tuning.tunable import tunables
from tests.kernels.tuning.toy import TOY, ToyConfig, ToyKey, entry, key

OPS = {"toy": TOY}


def test_the_default_serves_until_a_file_says_otherwise() -> None:
    assert build_table([], ops=OPS).config(TOY, key()) == ToyConfig(block=2)
    table = build_table([entry(key(), 8)], ops=OPS)
    assert table.config(TOY, key()) == ToyConfig(block=8)
    assert table.config(TOY, key()) is table.config(TOY, key())


@pytest.mark.parametrize(
    "other",
    [key(17), key(arch="gfx942"), key(element="fp16"), key(aligned=False)],
    ids=["size", "arch", "kind", "tail"],
)
def test_every_part_of_the_key_tells_cases_apart(other: ToyKey) -> None:
    """A cache elsewhere ignored the shape's tail, and gave one case's configuration to another."""
    table = build_table([entry(key(), 8)], ops=OPS)
    assert table.config(TOY, other) == ToyConfig(block=2)
    assert table.config(TOY, key()) == ToyConfig(block=8)


def test_a_users_entry_goes_before_the_shipped_one() -> None:
    table = build_table([entry(key(), 8), entry(key(32), 8)], [entry(key(), 4)], source="mine.json", ops=OPS)
    assert table.config(TOY, key()) == ToyConfig(block=4)
    assert table.config(TOY, key(32)) == ToyConfig(block=8)
    assert table.count() == {("mine.json", "measured"): 1, ("shipped", "measured"): 1}


@pytest.mark.parametrize("changed", [{"torch": "1.0"}, {"triton": "1.0"}, {"kernels": 2}])
def test_a_users_entry_of_other_versions_is_not_used_and_said_so(changed: dict[str, object]) -> None:
    stale = entry(key(), 4, versions=replace(TOY.versions, **changed))  # type: ignore[arg-type]
    table = build_table([], [stale], source="mine.json", ops=OPS)
    assert table.config(TOY, key()) == ToyConfig(block=2)
    assert len(table.notes) == 1
    for word in ("mine.json", "1 entries are not used", str(stale.versions), str(TOY.versions), "primus-turbo tune"):
        assert word in table.notes[0]


def test_a_shipped_entry_outlives_torch_and_triton_but_not_the_kernel() -> None:
    kept = entry(key(), 8, versions=replace(TOY.versions, torch="1.0", triton="1.0"))
    dropped = entry(key(32), 8, versions=replace(TOY.versions, kernels=2))
    table = build_table([kept, dropped], ops=OPS)
    assert table.config(TOY, key()) == ToyConfig(block=8)
    assert table.config(TOY, key(32)) == ToyConfig(block=2)


def test_entries_of_an_op_that_is_not_tuned_here_are_named() -> None:
    unknown = replace(entry(key(), 4), op="toy2")
    assert "toy2, an op that this package does not tune" in build_table([], [unknown], source="m", ops=OPS).notes[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"block": 32}, "cannot serve it: block exceeds size"),
        ({"block": 3}, "block must be even"),
        ({"block": "4"}, r"block: must be int, got '4'"),
        ({"block": 4, "mode": "c"}, "mode: must be one of a, b, got 'c'"),
        ({"blok": 4}, r"unknown field 'blok' \(did you mean 'block'\?\)"),
        ({}, "misses block"),
    ],
)
def test_a_configuration_that_cannot_serve_its_case_is_refused_by_its_origin(
    config: dict[str, object], words: str
) -> None:
    table = build_table([], [replace(entry(key(), 4), config=config)], source="mine.json", ops=OPS)
    with pytest.raises(ConfigError, match=words) as refused:
        table.config(TOY, key())
    assert "mine.json" in str(refused.value)
    assert table.config(TOY, key(32)) == ToyConfig(block=2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sizes": 16}, r"unknown field 'sizes' \(did you mean 'size'\?\)"),
        ({"size": 16.0}, r"size: must be int, got 16\.0"),
        ({"side": {"element": "bf16"}}, "is not complete"),
    ],
)
def test_a_key_that_no_product_has_is_refused(changed: dict[str, object], words: str) -> None:
    """Such an entry would never be found, and its owner would believe it serves."""
    good = entry(key(), 4)
    with pytest.raises(ConfigError, match=words) as refused:
        build_table([], [replace(good, key={**good.key, **changed})], source="mine.json", ops=OPS)
    assert "mine.json" in str(refused.value)
    assert "Remove the entry, or tune again." in str(refused.value)


def test_the_digest_tells_choices_apart_and_nothing_else() -> None:
    one = build_table([entry(key(), 8), entry(key(32), 4)], ops=OPS)
    assert build_table([entry(key(32), 4, us=9.0, note="again"), entry(key(), 8)], ops=OPS).digest == one.digest
    assert build_table([entry(key(), 8), entry(key(32), 8)], ops=OPS).digest != one.digest
    assert build_table([entry(key(), 8)], ops=OPS).digest != one.digest


def test_remembered_answers_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from primus_turbo_plugin.kernels.tuning import table as module

    monkeypatch.setattr(module, "_MOST_ANSWERS", 8)
    table = build_table([entry(key(64), 8)], ops=OPS)
    for size in range(2, 100):
        assert table.config(TOY, key(size)).block == (8 if size == 64 else 2)
        assert len(table._answers) <= 8


def test_keys_and_configurations_come_back_from_plain_values() -> None:
    assert decode(ToyKey, encode(key()), "key") == key()
    with pytest.raises(TypeError, match="plain values"):
        encode(object())


def test_a_process_reads_a_file_once_and_hands_it_to_the_backends(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    write_entries(path, [])
    registry = default_registry(str(path))
    path.unlink()
    assert default_registry(str(path)) is registry
    assert tuning_table(str(path)).source == str(path)
    triton = registry.backend("gemm_nt", "triton")
    assert triton.kernels.gemm_nt.keywords["resolve"].func.__self__ is tuning_table(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        default_registry(str(tmp_path / "other.json"))


def test_shipped_entries_are_sound() -> None:
    """Measured where there was a GPU to measure on, heuristics elsewhere; each a candidate for its own key."""
    for item in shipped_entries():
        tunable = tunables()[item.op]
        assert item.versions.kernels == tunable.version, "tune again: the kernel has changed"
        assert item.arch in ARCHITECTURES
        assert item.source == ("measured" if item.arch == "sm90" else "heuristic")
        assert item.arch == "sm90" or item.note, "a heuristic says its rule"
        case = decode(tunable.key_type, item.key, "shipped key")
        assert encode(case) == item.key, "a key without all its fields is never found"
        config = decode(tunable.config_type, item.config, "shipped configuration")
        assert tunable.refusal(case, config) is None
        assert tuning_table().config(tunable, case) == config
        assert config != tunable.default(case), "an entry that is the default says nothing"
        assert item.us is None or item.default_us is None or item.us < 0.99 * item.default_us


def test_an_entry_of_a_product_serves_it_and_no_other(tmp_path: Path) -> None:
    """Of the real op, as a file holds it: what would be shipped is found by its key, and its neighbours keep the default."""
    tunable = tunables()["triton.gemm_nt"]
    task = next(shape_tasks(["16384,4096,4096"], ["mxfp4"], ["nt"], accumulate=False))
    case = task.key("sm90", 132)
    other = next(item for item in tunable.candidates(case) if item != tunable.default(case))
    found = Entry(
        op=tunable.op, versions=tunable.versions, key=encode(case), config=encode(other), source="measured",
        device="NVIDIA H200", us=700.0, default_us=800.0, date="2026-12-01",
    )  # fmt: skip
    merge_into(tmp_path / "sm90.json", [found])
    table = build_table(read_entries(tmp_path / "sm90.json"))
    assert table.count("sm90") == {("shipped", "measured"): 1}
    assert table.config(tunable, case) == other
    for neighbour in (replace(case, rows=case.rows // 2), replace(case, compute_units=78)):
        assert table.config(tunable, neighbour) == tunable.default(neighbour)
