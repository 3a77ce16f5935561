"""The GPT that Megatron's arguments describe, built from this package's layers. Needs `megatron.training`."""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size

from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.config_sources import ResolvedConfig
from primus_turbo_plugin.specs.checkpoint import checkpoint_to_read
from primus_turbo_plugin.specs.gpt import GptSpecs
from primus_turbo_plugin.specs.report import print_report


@dataclass(kw_only=True)
class TurboGPTModelConfig(GPTModelConfig):
    """Megatron's GPT configuration plus ours. Its builder also takes multi-token-prediction layers from our spec."""

    builder: ClassVar[str] = "primus_turbo_plugin.training.gpt_model.TurboGPTModelBuilder"
    turbo: ResolvedConfig = field(default_factory=lambda: ResolvedConfig(config=TurboConfig()))


class TurboGPTModelBuilder(GPTModelBuilder):
    """Builds one pipeline stage; wrapping it for data parallelism is inherited.

    Megatron's own builder takes a decoder spec, but hard-codes where MTP layers come from.
    """

    def build_model(
        self,
        pg_collection: Any,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Any:
        """One stage of the model.

        Args:
            pg_collection: Megatron's process groups.
            pre_process: Whether this stage embeds tokens; default: decided by its place in the pipeline.
            post_process: Whether it has the output layer.
            vp_stage: Virtual pipeline stage.
        """
        config = self._model_config
        transformer = config.transformer
        vp = {"vp_stage": vp_stage, "vp_size": transformer.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = is_vp_first_stage(**vp) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(**vp) and is_pp_last_stage(pg_collection.pp)
        specs = self._specs
        return GPTModel(
            config=transformer,
            transformer_layer_spec=specs.block(vp_stage, None),
            mtp_block_spec=specs.mtp(vp_stage, None),
            vocab_size=_padded_vocab_size(config),
            max_sequence_length=config.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **{name: getattr(config, name) for name in _PASSED_ON},
        )

    @functools.cached_property
    def _specs(self) -> GptSpecs:
        config, args = self._model_config, get_args()
        load = args.load if args.load is not None else args.pretrained_checkpoint
        specs = GptSpecs(config.transformer, config.turbo.config, checkpoint_to_read(load, args.ckpt_step))
        print_report(config.transformer, specs.turbo, specs.linear_plans(), config.turbo)
        return specs


_PASSED_ON = (
    "fp16_lm_cross_entropy",
    "parallel_output",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "scatter_embedding_sequence_parallel",
)


def _padded_vocab_size(config: Any) -> int:
    if not config.should_pad_vocab:
        size: int = config.vocab_size
        return size
    padded: int = calculate_padded_vocab_size(
        config.vocab_size, config.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
    )
    return padded


def model_config(args: argparse.Namespace, turbo: ResolvedConfig) -> Any:
    """The configuration `megatron.training.pretrain` builds the model from.

    `--spec` and `--turbo-spec megatron` leave everything to Megatron's own builder.
    """
    if args.spec is not None or args.turbo_spec == "megatron":
        return gpt_config_from_args(args)
    config = gpt_config_from_args(args, model_config_cls=TurboGPTModelConfig)
    config.turbo = turbo
    return config


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The pipeline ranks that hold the word embedding: the first; the last if input and output share it; those with MTP."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks |= set(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
