"""Grouped experts write the very entries that Megatron's SequentialMLP writes: keys, shapes, places, replicas, values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from primus_turbo_plugin.errors import UnsupportedError
from tests.support.distributed import RankInfo, ranks
from tests.support.experts import copy_weights, experts_config, grouped, sequential
from tests.support.linear import start_megatron

pytestmark = pytest.mark.megatron

PREFIX = "decoder.layers.3.mlp.experts."
LAYER = ((0, 3, 4),)


def _entries(experts: Any, metadata: dict[str, Any]) -> dict[tuple[Any, ...], torch.Tensor | None]:
    """Everything about each entry but its value -> its value, as the files will hold them."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    state = experts.sharded_state_dict(PREFIX, LAYER, metadata)
    for entry in state.values():  # as a block does it
        entry.key = entry.key.replace("layers.3.", "layers.")
    apply_factories(state)
    sharded, _ = extract_sharded_base(state)
    found: dict[tuple[Any, ...], torch.Tensor | None] = {}
    for entry in _leaves(sharded):
        place = (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        if isinstance(entry, ShardedTensor):
            more = (entry.axis_fragmentations, entry.local_shape, entry.prepend_axis_num, entry.dtype)
            found[(*place, *more)] = entry.data
        else:
            assert isinstance(entry, ShardedObject)
            found[place] = None
    return found


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | list):
        return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(part)]
    return [tree]


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("layout", ["ep", "etp", "dp"])
def test_entries_are_those_of_megatrons_experts(rank_info: RankInfo, layout: str) -> None:
    from megatron.core import parallel_state

    sizes = {"ep": {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}}.get(layout, {})
    start_megatron(tp=2 if layout == "etp" else 1, seed=rank_info.seed, **sizes)
    ours = {"ep": 2, "etp": 4, "dp": 4}[layout]
    fields: dict[str, Any] = {"expert_model_parallel_size": 2} if layout == "ep" else {}
    fields |= {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2} if layout == "etp" else {}
    for variant in ({}, {"gated_linear_unit": False}, {"add_bias_linear": True}):
        if layout == "etp" and "add_bias_linear" in variant:
            continue  # Megatron refuses it
        config = experts_config(**fields, **variant)
        one, every = sequential(config, experts=ours), grouped(config, experts=ours)
        copy_weights(one, every)
        for apart in (False, True):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            metadata = {"singleton_local_shards": apart, "dp_cp_group": group}
            expected, found = _entries(one, metadata), _entries(every, metadata)
            assert set(found) == set(expected), (layout, variant, apart)
            for place, value in expected.items():
                assert value is None or torch.equal(found[place], value), (layout, place)


@ranks(world_size=1, megatron=True)
def test_cut_and_join_are_inverse_for_an_optimizer_s_state_too(rank_info: RankInfo) -> None:
    """Megatron puts its own tensors and keys into the factories: exp_avg of the same shape, in fp32."""
    start_megatron(seed=rank_info.seed)
    for fields in ({}, {"gated_linear_unit": False}):
        every = grouped(experts_config(params_dtype=torch.bfloat16, **fields))
        for name, factory in every.sharded_state_dict(PREFIX, LAYER).items():
            if "_extra_state" in name:
                continue
            state = torch.randn(factory.data.shape)
            moved = replace(factory, key=f"optimizer.state.exp_avg.{factory.key}", data=state)
            parts = moved.build()
            assert all(piece.key == moved.key for pieces in parts for piece in pieces)
            assert torch.equal(moved.merge_fn([[piece.data for piece in pieces] for pieces in parts]), state)
            with pytest.raises(UnsupportedError, match="fully_sharded_model_space"):
                replace(moved, flattened_range=slice(0, 3)).build()
