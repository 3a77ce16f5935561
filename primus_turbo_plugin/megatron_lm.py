"""What an unmodified Megatron-LM command line names: `--spec primus_turbo_plugin.megatron_lm gpt_spec` (or `hybrid_spec`).

The configuration is that of `PRIMUS_TURBO_CONFIG`, and of `--turbo-*` flags where the entry script added them
(`extra_args_provider`). Megatron-LM up to 0.18 hands the imported object to the model as it is, without a configuration; from
0.19 on it calls it. `gpt_spec` is both.

MTP is refused: Megatron-LM takes the spec of MTP layers from its own functions, whatever `--spec` says.
"""

from __future__ import annotations

import os
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.config_sources import ResolvedConfig, add_turbo_arguments
from primus_turbo_plugin.precision.config_sources import resolve as resolve_sources
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.checkpoint import CheckpointKeys, checkpoint_to_read
from primus_turbo_plugin.specs.gpt import GptSpecs
from primus_turbo_plugin.specs.hybrid import hybrid_stack_spec
from primus_turbo_plugin.specs.on_demand import on_demand
from primus_turbo_plugin.specs.pipeline import stage_layers
from primus_turbo_plugin.specs.report import plans_of, print_report
from primus_turbo_plugin.specs.settings import resolve

__all__ = ["extra_args_provider", "gpt_spec", "hybrid_spec"]

#: For `pretrain(..., extra_args_provider=extra_args_provider)`: adds the `--turbo-*` flags.
extra_args_provider = add_turbo_arguments


def _user_config() -> ResolvedConfig:
    return resolve_sources(compat.training_arguments(), os.environ)


def _checkpoint() -> CheckpointKeys | None:
    args = compat.training_arguments()
    if args is None:
        return None
    found = checkpoint_to_read(args.load, getattr(args, "ckpt_step", None))
    return found or checkpoint_to_read(getattr(args, "pretrained_checkpoint", None))


def _refuse_mtp(config: Any) -> None:
    if config.mtp_num_layers:
        raise UnsupportedError(
            "Megatron settings that this package cannot honour: mtp_num_layers.",
            {
                "mtp_num_layers": f"{config.mtp_num_layers} with --spec: Megatron-LM builds MTP layers from its own spec, so "
                "they would not be this package's. Use examples/pretrain_gpt.py, or leave --mtp-num-layers out."
            },
        )


class _FinalNorm:
    """Builds the final norm once Megatron has given the configuration."""

    def __new__(cls, *, spec: _GptSpec, config: Any, **kwargs: Any) -> Any:
        return build_module(spec.of(config).norm(), config=config, **kwargs)


class _GptSpec(TransformerBlockSubmodules):
    """The `--spec` object of a GPT: `gpt_spec(model_config, vp_stage)`, or the block's submodules themselves.

    Used as submodules, its layers are specs that look up their own number when Megatron builds them; only how many there are
    in a stage must be known before, and is taken from the arguments of the running program.
    """

    def __init__(self) -> None:
        self.__qualname__ = "gpt_spec"  # Megatron-LM writes the name into its YAML
        self._specs: GptSpecs | None = None

    def __call__(self, model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        """Megatron-LM from 0.19: `model_config` is a GPTModelConfig; a `TransformerConfig` will do."""
        return self.of(getattr(model_config, "transformer", model_config)).block(vp_stage, None)

    def __repr__(self) -> str:
        return f"{__name__}.gpt_spec"

    def of(self, config: Any) -> GptSpecs:
        """The specs for this configuration; made, and reported, once for each."""
        if self._specs is None or self._specs.config is not config:
            _refuse_mtp(config)
            user = _user_config()
            specs = GptSpecs(config, user.config, _checkpoint())
            print_report(config, specs.turbo, specs.linear_plans(), user)
            self._specs = specs
        return self._specs

    @property
    def layer_specs(self) -> list[ModuleSpec]:  # type: ignore[override]
        """One spec a layer of a stage."""
        config = compat.training_config()
        _refuse_mtp(config)
        chunks = range(config.virtual_pipeline_model_parallel_size or 1)
        virtual = config.virtual_pipeline_model_parallel_size is not None
        counts = {len(stage_layers(config, vp_stage=chunk if virtual else None)) for chunk in chunks}
        if len(counts) > 1:
            raise ConfigError(
                f"--spec: the model chunks of a pipeline rank have {sorted(counts)} layers, and this Megatron-LM does not tell "
                "the spec which chunk it builds. Use chunks of equal size, Megatron 0.19, or examples/pretrain_gpt.py."
            )
        return [on_demand(lambda config, index: self.of(config).layer(index))] * counts.pop()

    @property
    def layer_norm(self) -> ModuleSpec:  # type: ignore[override]
        """The final norm."""
        return ModuleSpec(module=_FinalNorm, params={"spec": self})


class _HybridStack:
    """Builds the stack once Megatron has given the configuration. The report covers the first stage's layers: which kinds
    the others are, only the model knows.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        user = _user_config()
        stack = build_module(hybrid_stack_spec(config, user.config), config, *args, **kwargs)
        print_report(config, resolve(config, user.config), plans_of(stack), user)
        return stack


gpt_spec = _GptSpec()
hybrid_spec = ModuleSpec(module=_HybridStack)
