"""Megatron's whole attention layers around TurboDotProductAttention and TurboNorm, split over a context-parallel group.

Here Megatron's rotary positions meet our idea of which tokens a rank holds; a disagreement is invisible to either alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.context_parallel_cases import share
from tests.functional.attention_oracle import relative_error
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import start_megatron

pytestmark = pytest.mark.megatron


def _config(size: int, latent: bool) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    common: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True, "attention_dropout": 0.2,
        "normalization": "RMSNorm", "add_bias_linear": False, "context_parallel_size": size, "cp_comm_type": "p2p",
        "apply_rope_fusion": False, "params_dtype": torch.float32,
    }  # fmt: skip
    if not latent:
        return TransformerConfig(num_query_groups=2, qk_layernorm=True, **common)
    return MLATransformerConfig(
        q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, rope_type="rope",
        multi_latent_attention=True, qk_layernorm=True, **common,
    )  # fmt: skip


def _layer(config: Any, latent: bool, cp_group: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

    from primus_turbo_plugin.modules import TurboDotProductAttention, TurboNorm

    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    groups.cp = cp_group
    column, row, core, norm = ColumnParallelLinear, RowParallelLinear, TurboDotProductAttention, TurboNorm
    torch.manual_seed(3)
    arguments: dict[str, Any] = {
        "config": config, "layer_number": 1, "attn_mask_type": AttnMaskType.causal, "cp_comm_type": config.cp_comm_type,
        "pg_collection": groups,
    }  # fmt: skip
    if not latent:
        parts = SelfAttentionSubmodules(
            linear_qkv=column, core_attention=core, linear_proj=row, q_layernorm=norm, k_layernorm=norm
        )
        return SelfAttention(submodules=parts, **arguments)
    parts = MLASelfAttentionSubmodules(
        linear_q_proj=column, linear_q_down_proj=column, linear_q_up_proj=column, linear_kv_down_proj=column,
        linear_kv_up_proj=column, core_attention=core, linear_proj=row, q_layernorm=norm, kv_layernorm=norm,
    )  # fmt: skip
    return MLASelfAttention(submodules=parts, **arguments)


def _rotary(config: Any, packed: Any, cp_group: Any, seq: int) -> tuple[Tensor, Tensor]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(config.kv_channels, 1.0, use_cpu_initialization=True, cp_group=cp_group)
    positions = embedding(seq, packed_seq=packed is not None)
    return positions, positions


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("latent", [False, True], ids=["grouped queries", "latent"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_split_layer_equals_the_whole_one(rank_info: RankInfo, latent: bool, packed: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    size = rank_info.world_size
    start_megatron(context_parallel_size=size)
    alone = [dist.new_group([rank]) for rank in range(size)][rank_info.rank]
    rooms = [16, 8] if packed else [24]
    ends = torch.tensor([0, 16, 24], dtype=torch.int32)
    params = None
    if packed:
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=16, max_seqlen_kv=16
        )
    hidden = torch.randn(24, 1 if packed else 2, 64)
    dout = torch.randn(hidden.shape)
    outputs, gradients = [], []
    for group in (alone, dist.group.WORLD):
        config = _config(group.size(), latent)
        layer = _layer(config, latent, group)
        own = (lambda x: x) if group is alone else (lambda x: share(x, rank_info, rooms=rooms))
        x = own(hidden).clone().requires_grad_()
        rotary = None if latent else _rotary(config, params, group, 24)
        model_parallel_cuda_manual_seed(9, force_reset_rng=True)
        out, _ = layer(x, None, rotary_pos_emb=rotary, packed_seq_params=params)
        out.backward(own(dout))
        outputs.append(out.detach())
        gradients.append({name: p.grad for name, p in layer.named_parameters()} | {"input": x.grad})
    assert relative_error(outputs[1], share(outputs[0], rank_info, rooms=rooms)) < 1e-5
    gradients[0]["input"] = share(gradients[0]["input"], rank_info, rooms=rooms)
    for name, grad in gradients[1].items():
        if name != "input":
            dist.all_reduce(grad)
        assert relative_error(grad, gradients[0][name]) < 1e-5, name
