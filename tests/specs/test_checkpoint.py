"""Which names a norm has in a checkpoint, and how the right one is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from primus_turbo_plugin.specs.checkpoint import (
    FUSED_NAMES,
    CheckpointKeys,
    checkpoint_to_read,
    match_checkpoint_keys,
    other_name,
)

pytestmark = pytest.mark.megatron

PREFIXES = [
    "decoder.layers.",
    "decoder.layers.7.",
    "mtp.layers.0.transformer_layer.",
    "optimizer.state.exp_avg.decoder.layers.",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("alone", "fused"), FUSED_NAMES.items())
def test_each_name_has_the_other(prefix: str, alone: str, fused: str) -> None:
    for parameter in ("weight", "bias"):
        assert other_name(f"{prefix}{alone}.{parameter}") == f"{prefix}{fused}{parameter}"
        assert other_name(f"{prefix}{fused}{parameter}") == f"{prefix}{alone}.{parameter}"


@pytest.mark.parametrize(
    "key",
    [
        "decoder.final_layernorm.weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.self_attention.k_layernorm.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "embedding.word_embeddings.weight",
    ],
)
def test_other_parameters_have_one_name(key: str) -> None:
    assert other_name(key) is None


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a checkpoint of the given keys, as far as its list of keys goes."""

    def write(*keys: str) -> CheckpointKeys:
        monkeypatch.setattr(
            "megatron.core.dist_checkpointing.load_tensors_metadata", lambda folder: dict.fromkeys(keys)
        )
        return CheckpointKeys("somewhere")

    return write


def sharded(*keys: str) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {key: ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in keys}


TE_MOE = "decoder.layers.pre_mlp_layernorm.weight"
LOCAL_MOE = "decoder.layers.mlp.linear_fc1.layer_norm_weight"


def test_norm_gets_the_name_it_has_in_the_checkpoint(written: Any) -> None:
    wanted = sharded(TE_MOE, "decoder.layers.mlp.router.weight")
    nested = {"model": wanted, "optimizer": [{"exp_avg": sharded("optimizer.state.exp_avg." + TE_MOE)}]}
    renamed = written(LOCAL_MOE, "decoder.layers.mlp.router.weight").rename(nested)
    assert renamed == {TE_MOE: LOCAL_MOE, "optimizer.state.exp_avg." + TE_MOE: "optimizer.state.exp_avg." + LOCAL_MOE}
    assert wanted[TE_MOE].key == LOCAL_MOE
    assert nested["optimizer"][0]["exp_avg"]["optimizer.state.exp_avg." + TE_MOE].key.endswith(LOCAL_MOE)


def test_norm_that_is_there_or_nowhere_keeps_its_name(written: Any) -> None:
    """What is missing is Megatron's to report, by the name this package writes."""
    assert written(TE_MOE, LOCAL_MOE).rename(sharded(TE_MOE)) == {}
    assert written("decoder.layers.mlp.router.weight").rename(sharded(TE_MOE)) == {}


def test_layer_numbers_of_one_chunk_do_not_matter(written: Any) -> None:
    """A layer renames before the block gives it its global prefix."""
    layer = sharded("decoder.layers.0.pre_mlp_layernorm.weight")
    assert written("decoder.layers.5.mlp.linear_fc1.layer_norm_weight").rename(layer, of_layer=True) == {
        "decoder.layers.0.pre_mlp_layernorm.weight": "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    }


def test_dense_and_expert_layers_of_one_model_find_their_own_names(written: Any) -> None:
    """First layers dense, the others experts: on the way back to the local spec, one layer's name says nothing of another's."""
    dense, experts = "decoder.layers.0.", "decoder.layers.1."
    engine = (dense + "mlp.linear_fc1.layer_norm_weight", experts + "pre_mlp_layernorm.weight")
    local = (dense + "mlp.linear_fc1.layer_norm_weight", experts + "mlp.linear_fc1.layer_norm_weight")
    state = sharded(*local, "optimizer.state.exp_avg." + local[1])
    renamed = written(*engine, *(f"optimizer.state.exp_avg.{key}" for key in engine)).rename(state)
    assert renamed == {
        local[1]: engine[1],
        f"optimizer.state.exp_avg.{local[1]}": f"optimizer.state.exp_avg.{engine[1]}",
    }
    assert written(*local).rename(sharded(*engine)) == {engine[1]: local[1]}


def test_free_function_is_the_same(written: Any) -> None:
    written(LOCAL_MOE)
    assert match_checkpoint_keys(sharded(TE_MOE), "somewhere") == {TE_MOE: LOCAL_MOE}


def make(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    (folder / ".metadata").write_bytes(b"")
    return str(folder)


def test_checkpoint_that_load_stands_for(tmp_path: Path) -> None:
    third, tenth = make(tmp_path / "run" / "iter_0000003"), make(tmp_path / "run" / "iter_0000010")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10\n")

    def folder(*args: Any) -> str | None:
        found = checkpoint_to_read(*args)
        return None if found is None else found.folder

    assert folder(tmp_path / "run") == tenth
    assert folder(str(tmp_path / "run"), 3) == third
    assert folder(third) == third
    assert folder(None) is None
    assert folder(tmp_path / "nothing") is None
    assert folder(tmp_path / "run", 99) is None
    released = make(tmp_path / "base" / "release")
    (tmp_path / "base" / "latest_checkpointed_iteration.txt").write_text("release")
    assert folder(tmp_path / "base") == released


def test_legacy_checkpoint_is_left_to_megatron(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert checkpoint_to_read(tmp_path) is None
