"""Multi-latent attention: Megatron's own module around this package's linears, norms and core attention."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class TurboMLASelfAttention(MLASelfAttention):
    """Megatron's MLA with the norms and projections that its spec names, and no others.

    From 0.19 Megatron asks the backend of `config.transformer_impl`, not the spec, which norms it may build, and with
    `q_lora_rank=None` (DeepSeek-V2-Lite: the latent of keys and values has a norm, queries have none) finds none in a spec
    of a third party. Older releases take the spec as it is; there this class adds nothing.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name, None) for name in names}
