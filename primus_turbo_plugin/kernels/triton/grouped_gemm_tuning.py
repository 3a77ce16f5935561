"""What the tuning table needs to know of the grouped Triton GEMMs."""

from __future__ import annotations

from dataclasses import replace

from primus_turbo_plugin.kernels.triton import gemm_defaults
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.grouped_gemm_key import GroupedGemmKey, default_config, refusal
from primus_turbo_plugin.kernels.tuning.tunable import Tunable


def considered(key: GroupedGemmKey) -> list[GemmConfig]:
    """Everything a tuner should look at: what it would for an average expert, the contraction never shared."""
    base = default_config(key)
    found = [replace(config, split_k=1, num_xcds=base.num_xcds) for config in gemm_defaults.considered(key.dense)]
    return list(dict.fromkeys([base, *found]))


def candidates(key: GroupedGemmKey) -> list[GemmConfig]:
    """Configurations that can serve a product, the shipped default first."""
    return [config for config in considered(key) if refusal(key, config) is None]


def struck_out(key: GroupedGemmKey) -> list[tuple[GemmConfig, str]]:
    """Configurations that were considered and cannot serve a product, each with the reason."""
    reasons = ((config, refusal(key, config)) for config in considered(key))
    return [(config, reason) for config, reason in reasons if reason is not None]


TUNABLE = Tunable(
    op="triton.grouped_gemm",
    version=1,
    key_type=GroupedGemmKey,
    config_type=GemmConfig,
    default=default_config,
    candidates=candidates,
    struck_out=struck_out,
    refusal=refusal,
)
"""`version`: raise it with every change of the kernels' code, of GemmConfig's meaning or of GroupedGemmKey's fields."""
