"""Which decoder layers this rank builds, by their global numbers from 0."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from primus_turbo_plugin.errors import ConfigError


def stage_layers(config: Any, *, vp_stage: int | None = None, pp_rank: int | None = None) -> list[int]:
    """Global numbers of the layers of one pipeline stage (of one model chunk, under virtual pipelining).

    Uneven first and last stages, embedding and loss counted as layers, and an explicit layout are Megatron's to interpret:
    this asks the functions with which TransformerBlock numbers its layers.

    Args:
        config: A `TransformerConfig`.
        vp_stage: Model chunk, under virtual pipelining.
        pp_rank: Pipeline rank; None is this process's.

    Raises:
        ConfigError: Virtual pipelining without `vp_stage`.
    """
    if config.virtual_pipeline_model_parallel_size is not None and vp_stage is None:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size is {config.virtual_pipeline_model_parallel_size}: each model chunk has layers "
            "of its own, so the spec needs vp_stage. Pass the vp_stage that Megatron gives the model provider."
        )
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return list(layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank))
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return list(range(offset, offset + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)))


def moe_pattern(config: Any) -> list[bool]:
    """For every decoder layer, whether its MLP is a mixture of experts.

    Raises:
        ConfigError: `moe_layer_freq` is no frequency and no pattern over the layers.
    """
    layers = config.num_layers
    if config.num_moe_experts is None:
        return [False] * layers
    freq = config.moe_layer_freq
    if isinstance(freq, int) and not isinstance(freq, bool) and freq > 0:
        return [layer % freq == 0 for layer in range(layers)]
    if isinstance(freq, list) and len(freq) == layers and all(item in (0, 1) for item in freq):
        return [item == 1 for item in freq]
    raise ConfigError(
        f"moe_layer_freq: must be a positive integer (a MoE layer every so many) or a list of {layers} zeros and ones, "
        f"one a layer; got {freq!r}"
    )
