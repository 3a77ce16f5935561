"""`TurboSpecProvider`: which class serves each slot of a layer, by the provider chosen for each component.

Honours Megatron's `BackendSpecProvider`, so that Megatron's own helpers (`get_moe_module_spec_for_backend`...) build with it.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.modules import (
    TurboColumnParallelGroupedLinear,
    TurboColumnParallelLinear,
    TurboDotProductAttention,
    TurboGroupedMLP,
    TurboLayerNormColumnParallelLinear,
    TurboLinear,
    TurboNorm,
    TurboRowParallelGroupedLinear,
    TurboRowParallelLinear,
)
from primus_turbo_plugin.precision.config import COMPONENTS, PROVIDERS, TurboConfig
from primus_turbo_plugin.specs import compat

#: The linears of this package: the modules that a recipe applies to.
LINEAR_CLASSES: tuple[type, ...] = (
    TurboColumnParallelLinear,
    TurboRowParallelLinear,
    TurboLayerNormColumnParallelLinear,
    TurboLinear,
    TurboColumnParallelGroupedLinear,
    TurboRowParallelGroupedLinear,
)
#: Those among them that hold all local experts, and multiply in grouped GEMMs.
GROUPED_CLASSES: tuple[type, ...] = (TurboColumnParallelGroupedLinear, TurboRowParallelGroupedLinear)
#: The classes of this package that a spec may name; each takes `plan`.
TURBO_CLASSES: tuple[type, ...] = (*LINEAR_CLASSES, TurboNorm, TurboDotProductAttention)


class TurboSpecProvider(LocalSpecProvider):
    """Linears, norms and core attention, each from `turbo`, `megatron` or `transformer_engine`.

    Args:
        linear, norm, attention: Who provides that component; any mix.
        normalization: `config.normalization`. Helpers of Megatron that ask for a norm without saying which (MTP) get this one.
        fuse: Whether a norm becomes part of the linear behind it, where one provider has both.

    Raises:
        ConfigError: An unknown provider.
        UnsupportedError: `transformer_engine` is asked for and not installed.
    """

    def __init__(
        self,
        *,
        linear: str = "turbo",
        norm: str = "turbo",
        attention: str = "turbo",
        normalization: str = "LayerNorm",
        fuse: bool = True,
    ) -> None:
        self.providers = {"linear": linear, "norm": norm, "attention": attention}
        self.normalization = normalization
        self._fuse = fuse
        self._engine: Any = None
        for component, provider in self.providers.items():
            if provider not in PROVIDERS:
                raise ConfigError(f"{component}: must be one of {', '.join(PROVIDERS)}; got {provider!r}")
            if provider == "transformer_engine" and self._engine is None:
                self._engine = _transformer_engine_provider(component)

    @classmethod
    def from_config(cls, config: Any, turbo: TurboConfig) -> TurboSpecProvider:
        """The provider of a model with this `TransformerConfig`.

        Norms are not fused into linears where they are to be recomputed, or to carry the residual: Megatron does either
        only with a norm that is a module of its own.
        """
        choices = {component: getattr(turbo, component) for component in COMPONENTS}
        recomputed = config.recompute_granularity == "selective" and "layernorm" in (config.recompute_modules or ())
        carries_residual = getattr(config, "fused_residual_rmsnorm", False)  # from 0.17
        return cls(**choices, normalization=config.normalization, fuse=not (recomputed or carries_residual))

    def linear(self) -> Any:
        """A linear with the whole weight on every tensor-parallel rank; what MLA projects down with."""
        return self._pick("linear", TurboLinear, ColumnParallelLinear, "linear")

    def column_parallel_linear(self) -> Any:
        """A linear whose output features are sharded."""
        return self._pick("linear", TurboColumnParallelLinear, ColumnParallelLinear, "column_parallel_linear")

    def row_parallel_linear(self) -> Any:
        """A linear whose input features are sharded."""
        return self._pick("linear", TurboRowParallelLinear, RowParallelLinear, "row_parallel_linear")

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether the norm in front of a column-parallel linear is part of it."""
        linear = self.providers["linear"]
        return self._fuse and linear == self.providers["norm"] and linear != "megatron"

    def column_parallel_layer_norm_linear(self) -> Any:
        """The fused norm and linear, or None where they are not fused."""
        if not self.fuse_layernorm_and_linear():
            return None
        return self._pick("linear", TurboLayerNormColumnParallelLinear, None, "column_parallel_layer_norm_linear")

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """A norm. `has_residual`: it stands in front of a residual branch and may return its input as well, where
        `config.fused_residual_rmsnorm` asks for that; Megatron's own never does.
        """
        provider = self.providers["norm"]
        if provider == "turbo":
            return ModuleSpec(module=TurboNorm, params={"has_residual": True}) if has_residual else TurboNorm
        if provider == "transformer_engine":
            extra = {} if compat.facts().experts_are_a_pair else {"has_residual": has_residual}
            return self._engine.layer_norm(rms_norm=rms_norm, for_qk=for_qk, **extra)
        if rms_norm or self.normalization == "RMSNorm":
            return WrappedTorchNorm  # what super() returns too, after changing a global of Megatron's
        return super().layer_norm(rms_norm=False, for_qk=for_qk)

    def core_attention(self) -> Any:
        """Softmax attention over projected q, k, v."""
        return self._pick("attention", TurboDotProductAttention, DotProductAttention, "core_attention")

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool = False, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        """The routed experts: all local ones in grouped GEMMs, or one MLP an expert, of this provider's linears.

        Raises:
            UnsupportedError: Grouped GEMM is asked for from a provider that has none.
        """
        if self.providers["linear"] == "transformer_engine":
            legacy = (moe_use_legacy_grouped_gemm,) if compat.facts().experts_are_a_pair else ()
            return self._engine.grouped_mlp_modules(moe_use_grouped_gemm, *legacy)
        if moe_use_grouped_gemm and self.providers["linear"] == "megatron":
            raise UnsupportedError(
                "moe_grouped_gemm: linear: megatron has no grouped GEMM. Leave --moe-grouped-gemm out (the experts then run one "
                "after the other), or set 'linear: turbo'."
            )
        if moe_use_grouped_gemm:
            grouped = MLPSubmodules(
                linear_fc1=TurboColumnParallelGroupedLinear, linear_fc2=TurboRowParallelGroupedLinear
            )
            return compat.experts(TurboGroupedMLP, grouped)
        submodules = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(),
            linear_fc2=self.row_parallel_linear(),
            activation_func=self.activation_func(),
        )
        return compat.experts(SequentialMLP, submodules)

    def activation_func(self) -> Any:
        """Transformer Engine's activation module where its linears are used; None means `config.activation_func`."""
        return self._engine.activation_func() if self.providers["linear"] == "transformer_engine" else None

    def _pick(self, component: str, turbo: Any, megatron: Any, engine_method: str) -> Any:
        provider = self.providers[component]
        if provider == "turbo":
            return turbo
        return megatron if provider == "megatron" else getattr(self._engine, engine_method)()


def _transformer_engine_provider(component: str) -> Any:
    if not compat.transformer_engine_is_installed():
        raise UnsupportedError(
            f"{component}: 'transformer_engine' is asked for and Transformer Engine is not installed. Install it "
            f"(on AMD: github.com/ROCm/TransformerEngine), or set '{component}: turbo' or '{component}: megatron'."
        )
    module = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider")
    return module.TESpecProvider()
