"""The spec of one decoder layer, unbound: attention or MLA, dense MLP or mixture of experts."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from primus_turbo_plugin.modules.latent_attention import TurboMLASelfAttention
from primus_turbo_plugin.specs.checkpoint import FUSED_NAMES, CheckpointKeys, TurboTransformerLayer
from primus_turbo_plugin.specs.provider import TurboSpecProvider


def decoder_layer_spec(
    config: Any, provider: TurboSpecProvider, *, moe: bool, checkpoint: CheckpointKeys | None = None
) -> ModuleSpec:
    """One layer of a GPT decoder.

    Norms in front of qkv and fc1 are part of those linears where `provider` fuses them, else modules of their own whose
    checkpoint keys are written as if they were fused, as Transformer Engine writes them.

    Args:
        config: A `TransformerConfig`.
        provider: Which classes fill the slots.
        moe: Whether the MLP is a mixture of experts.
        checkpoint: Keys of the checkpoint that will be loaded, if its spec may have written other ones.
    """
    mla = config.multi_latent_attention
    norm = layer_norm(config, provider, has_residual=True)
    fused = provider.fuse_layernorm_and_linear()
    own_input_norm = mla or not fused
    own_mlp_norm = moe or not fused
    separate = {"input_layernorm"} if own_input_norm and not mla else set()
    separate |= {"pre_mlp_layernorm"} if own_mlp_norm and not moe else set()
    separate |= {"self_attention.q_layernorm", "self_attention.kv_layernorm"} if mla and config.qk_layernorm else set()
    return ModuleSpec(
        module=TurboTransformerLayer,
        params={"checkpoint": checkpoint},
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if own_input_norm else IdentityOp,
            self_attention=mla_spec(config, provider) if mla else attention_spec(config, provider),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm if own_mlp_norm else IdentityOp,
            mlp=mlp_spec(config, provider, moe=moe),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={name + ".": FUSED_NAMES[name] for name in sorted(separate)},
        ),
    )


def layer_norm(config: Any, provider: TurboSpecProvider, *, for_qk: bool = False, has_residual: bool = False) -> Any:
    """The norm of the residual stream (`has_residual`: inside a layer), or of queries and keys."""
    rms_norm = config.normalization == "RMSNorm"
    return provider.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)


def mlp_spec(config: Any, provider: TurboSpecProvider, *, moe: bool) -> Any:
    """The MLP slot, in the form this Megatron release takes it in."""
    if not moe:
        return get_mlp_module_spec_for_backend(backend=provider)
    return get_mlp_module_spec_for_backend(
        backend=provider, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )


def attention_spec(config: Any, provider: TurboSpecProvider) -> ModuleSpec:
    """Self-attention with grouped queries, optionally with normalised queries and keys."""
    qk_norm: Any = IdentityOp
    if config.qk_l2_norm:
        qk_norm = L2Norm
    elif config.qk_layernorm:
        qk_norm = layer_norm(config, provider, for_qk=True)
    qkv = provider.column_parallel_layer_norm_linear() or provider.column_parallel_linear()
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=qkv,
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def mla_spec(config: Any, provider: TurboSpecProvider) -> ModuleSpec:
    """Multi-latent attention. The norms of the latents stay modules of their own: Megatron 0.19 builds a fused one only
    from its own backends; their keys are written as Transformer Engine's fused ones. Without `q_lora_rank` queries have none.
    """
    latent_norm = layer_norm(config, provider, for_qk=True) if config.qk_layernorm else IdentityOp
    if config.q_lora_rank is None:
        query = {"linear_q_proj": provider.column_parallel_linear(), "q_layernorm": IdentityOp}
    else:
        query = {
            "linear_q_down_proj": provider.linear(),
            "linear_q_up_proj": provider.column_parallel_linear(),
            "q_layernorm": latent_norm,
        }
    return ModuleSpec(
        module=TurboMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            **query,
            linear_kv_down_proj=provider.linear(),
            linear_kv_up_proj=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            kv_layernorm=latent_norm,
        ),
    )
