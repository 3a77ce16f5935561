"""`gpt_layer_spec`: the decoder of a GPTModel; `gpt_mtp_spec`: its multi-token prediction layers."""

from __future__ import annotations

import re
from typing import Any

from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_offset,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.module_plan import ModulePlan
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.agreement import agree_on_model
from primus_turbo_plugin.specs.bind import bind_layer, modules_of, require_matches
from primus_turbo_plugin.specs.checkpoint import CheckpointKeys
from primus_turbo_plugin.specs.layers import decoder_layer_spec, layer_norm
from primus_turbo_plugin.specs.pipeline import moe_pattern, stage_layers
from primus_turbo_plugin.specs.provider import LINEAR_CLASSES, TurboSpecProvider
from primus_turbo_plugin.specs.settings import resolve

FINAL_NORM = "decoder.final_layernorm"


def gpt_layer_spec(
    config: Any,
    turbo: TurboConfig | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    checkpoint: CheckpointKeys | None = None,
) -> TransformerBlockSubmodules:
    """The `transformer_layer_spec` of a GPTModel: one spec for each layer of this pipeline stage, and the final norm.

    Args:
        config: A `TransformerConfig` or `MLATransformerConfig`.
        turbo: Precision and providers; None is `TurboConfig()`. Megatron's own precision settings in `config` count as well.
        vp_stage: Model chunk, under virtual pipelining.
        pp_rank: Pipeline rank; None is this process's.
        checkpoint: Keys of the checkpoint that will be loaded (`checkpoint_to_read`), to read one of Megatron's local spec.

    Raises:
        ConfigError: A setting is impossible, contradictory, or names a module that does not exist.
        UnsupportedError: A setting of Megatron cannot be honoured; names all such settings.
    """
    return GptSpecs(config, turbo, checkpoint).block(vp_stage, pp_rank)


def gpt_mtp_spec(
    config: Any,
    turbo: TurboConfig | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    *,
    checkpoint: CheckpointKeys | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The `mtp_block_spec` of a GPTModel, or None where this stage has no MTP layer. Arguments and errors as `gpt_layer_spec`."""
    return GptSpecs(config, turbo, checkpoint).mtp(vp_stage, pp_rank)


def gpt_module_paths(config: Any, turbo: TurboConfig | None = None) -> list[str]:
    """Paths of all modules of this package in the model, over all pipeline stages; what patterns are matched against."""
    return list(GptSpecs(config, turbo, None).modules)


class GptSpecs:
    """The specs of one model: templates of its layers, bound on demand to the plans of their paths.

    Attributes:
        config: A `TransformerConfig`.
        turbo: `settings.resolve`'s result.
        modules: Path -> class of this package's modules, over all pipeline stages.
    """

    def __init__(self, config: Any, turbo: TurboConfig | None, checkpoint: CheckpointKeys | None) -> None:
        self.config = config
        self.turbo = resolve(config, turbo)
        self.provider = TurboSpecProvider.from_config(config, self.turbo)
        self.moe = moe_pattern(config)
        self.templates = {
            moe: decoder_layer_spec(config, self.provider, moe=moe, checkpoint=checkpoint)
            for moe in sorted(set(self.moe))
        }
        self.final_norm = layer_norm(config, self.provider)
        self.modules = self._all_modules()
        require_matches(self.turbo, self.modules)
        agree_on_model(config, self.turbo, self.modules, self.linear_plans())

    def layer(self, index: int) -> ModuleSpec:
        """Decoder layer `index`, global from 0."""
        path = f"decoder.layers.{index}"
        return bind_layer(self.templates[self.moe[index]], path, self.turbo, index, self.config.num_layers)

    def norm(self) -> Any:
        """The norm after the last layer."""
        return bind_layer(self.final_norm, FINAL_NORM, self.turbo, None, self.config.num_layers)

    def linear_plans(self) -> list[ModulePlan]:
        """The plans of all linears, over all pipeline stages."""
        plans: list[ModulePlan] = []
        for path, kind in self.modules.items():
            layer = re.match(r"decoder\.layers\.(\d+)\.", path)
            if kind in LINEAR_CLASSES:
                plans.append(self.turbo.plan(path, int(layer[1]) if layer else None, self.config.num_layers))
        return plans

    def block(self, vp_stage: int | None, pp_rank: int | None) -> TransformerBlockSubmodules:
        """The submodules of one pipeline stage's block."""
        layers = stage_layers(self.config, vp_stage=vp_stage, pp_rank=pp_rank)
        return TransformerBlockSubmodules(layer_specs=[self.layer(index) for index in layers], layer_norm=self.norm())

    def mtp(self, vp_stage: int | None, pp_rank: int | None) -> MultiTokenPredictionBlockSubmodules | None:
        """The submodules of the MTP block, if this stage has one."""
        count = get_mtp_num_layers_to_build(self.config, vp_stage=vp_stage, pp_rank=pp_rank)
        if not count:
            return None
        first = get_mtp_layer_offset(self.config, vp_stage=vp_stage)
        depths = range(first, first + (1 if self._repeats() else count))
        template = self._mtp_template()
        specs = [
            bind_layer(template, f"mtp.layers.{depth}", self.turbo, None, self.config.num_layers) for depth in depths
        ]
        return MultiTokenPredictionBlockSubmodules(layer_specs=specs)

    def _mtp_template(self) -> ModuleSpec:
        """A prediction depth holds one more layer like the decoder's last."""
        submodules = compat.mtp_layer_submodules(
            norm=layer_norm(self.config, self.provider),
            eh_proj=self.provider.column_parallel_linear(),
            layer=self.templates[self.moe[-1]],
        )
        return ModuleSpec(module=MultiTokenPredictionLayer, submodules=submodules)

    def _repeats(self) -> bool:
        """One MTP layer serves every depth (a setting from 0.17 on)."""
        return bool(getattr(self.config, "mtp_use_repeated_layer", False))

    def _all_modules(self) -> dict[str, type]:
        """Path -> class over all pipeline stages."""
        found: dict[str, type] = {}
        for layer, moe in enumerate(self.moe):
            found |= modules_of(self.templates[moe], f"decoder.layers.{layer}")
        found |= modules_of(self.final_norm, FINAL_NORM)
        if self.config.mtp_num_layers:
            template = self._mtp_template()
            for depth in range(1 if self._repeats() else self.config.mtp_num_layers):
                found |= modules_of(template, f"mtp.layers.{depth}")
        return found
