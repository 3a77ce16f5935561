"""Configurations of Megatron for tests that build nothing."""

from __future__ import annotations

from typing import Any

import torch


def config(**settings: Any) -> Any:
    """A `TransformerConfig` (MLA's where it says so) of four layers."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    base: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "transformer_impl": "local",
        "bf16": True,
        "pipeline_dtype": torch.bfloat16,
    }
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    return kind(**{**base, **settings})


MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}
MLA: dict[str, Any] = {"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32}
