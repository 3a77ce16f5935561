"""TurboDotProductAttention with its heads split over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.functional.attention_oracle import relative_error
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

pytestmark = pytest.mark.megatron


def _module(config: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    return TurboDotProductAttention(config, 1, AttnMaskType.causal, "self")


def _config(**fields: Any) -> Any:
    return megatron_config(hidden_size=64, num_attention_heads=8, num_query_groups=4, **fields)


@ranks(world_size=[2, 4], megatron=True)
def test_each_rank_has_its_heads_and_their_sinks(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.functional.attention import attention
    from primus_turbo_plugin.kernels.attention import AttentionMask

    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    module = _module(_config(tensor_model_parallel_size=size, attention_dropout=0.0, softmax_type="learnable"))
    sinks = torch.randn(8)
    with torch.no_grad():
        module.softmax_offset.copy_(sinks.chunk(size)[rank])
    q, k, v = (torch.randn(9, 2, heads, 8) for heads in (8, 4, 4))
    want = attention(q, k, v, mask=AttentionMask(causal=True), sinks=sinks)
    got = module(*(x.chunk(size, 2)[rank] for x in (q, k, v)), None)
    assert relative_error(got, want.chunk(size, 2)[rank].flatten(2)) <= 1e-6
    (sharded,) = module.sharded_state_dict("core_attention.").values()
    assert sharded.global_shape == (8,)
    assert sharded.global_offset == (rank * 8 // size,)
    assert sharded.local_shape == (8 // size,)


@ranks(world_size=2, megatron=True)
def test_ranks_drop_different_probabilities_unless_the_sequence_is_split(rank_info: RankInfo) -> None:
    """As Megatron's own module: with sequence parallelism the transformer block has entered the tensor-parallel generator."""
    import torch.distributed as dist

    start_megatron(tp=2)
    qkv = [torch.ones(32, 2, heads // 2, 8) for heads in (8, 4, 4)]
    for sequence_parallel in (False, True):
        config = _config(tensor_model_parallel_size=2, attention_dropout=0.5, sequence_parallel=sequence_parallel)
        torch.manual_seed(4)
        out = _module(config)(*qkv, None)
        outs = [torch.empty_like(out) for _ in range(2)]
        dist.all_gather(outs, out)
        assert torch.equal(*outs) is sequence_parallel


@ranks(world_size=3, megatron=True)
def test_heads_that_cannot_be_split_are_named(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ConfigError

    start_megatron(tp=3)
    config = _config()
    with pytest.raises(ConfigError, match="num_attention_heads=8 must be divisible by tensor_model_parallel_size=3"):
        _module(config)
