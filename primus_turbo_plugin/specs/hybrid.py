"""`hybrid_stack_spec`: the stack of a HybridModel (MambaModel before 0.18), with this package's norm after the last layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.agreement import agree_on_model
from primus_turbo_plugin.specs.bind import bind_layer, modules_of, require_matches
from primus_turbo_plugin.specs.checkpoint import FUSED_NAMES
from primus_turbo_plugin.specs.layers import attention_spec, layer_norm, mlp_spec
from primus_turbo_plugin.specs.on_demand import on_demand
from primus_turbo_plugin.specs.provider import LINEAR_CLASSES, TurboSpecProvider
from primus_turbo_plugin.specs.schedule_begins import AnnouncesSchedules
from primus_turbo_plugin.specs.settings import resolve

_Stack, _StackSubmodules = compat.hybrid_classes()

FINAL_NORM = "decoder.final_norm"
#: Kinds of layers that Megatron's hybrid stack knows and this package has no spec for, and what to write in the pattern instead.
_REFUSED = {
    "gdn_layer": "gated delta net ('G')",
    "dsa_layer": "sparse attention ('D')",
    "mla_layer": "multi-latent attention ('+')",
}


class _AttentionLayer(AnnouncesSchedules, TransformerLayer): ...


class _MLPLayer(AnnouncesSchedules, MLPLayer): ...


class _MoELayer(AnnouncesSchedules, MoETransformerLayer): ...


class _MambaLayer(AnnouncesSchedules, MambaLayer): ...


class TurboHybridStack(_Stack):  # type: ignore[misc, valid-type]
    """Megatron's stack with a final norm of the spec's choice; Megatron's own is always Transformer Engine's.

    Args:
        config: A `TransformerConfig`.
        submodules: Specs by kind of layer.
        final_norm: Spec of the norm after the last layer.
        *args, **kwargs: As Megatron's stack takes them.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, final_norm: Any, **kwargs: Any) -> None:
        post_layer_norm = kwargs.pop("post_layer_norm", True)
        super().__init__(config, submodules, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.final_norm = build_module(final_norm, config=config, **sizes)


def hybrid_stack_spec(config: Any, turbo: TurboConfig | None = None) -> ModuleSpec:
    """The `hybrid_stack_spec` of a HybridModel, the `mamba_stack_spec` of a MambaModel.

    Attention, MLP and MoE layers are as in `gpt_layer_spec`; Mamba layers keep Megatron's mixer, with this package's
    projections around it.

    Args:
        config: A `TransformerConfig`.
        turbo: Precision and providers; None is `TurboConfig()`.

    Raises:
        ConfigError, UnsupportedError: As `gpt_layer_spec`; also where a pattern asks for a kind of layer without a spec, and
            for MTP.
    """
    if config.mtp_num_layers:
        reason = "MTP in a hybrid model has no spec here. Leave the '/...' part of the layer pattern out."
        raise UnsupportedError("Megatron settings that this package cannot honour.", {"mtp_num_layers": reason})
    turbo = resolve(config, turbo)
    provider = TurboSpecProvider.from_config(config, turbo)
    layers = _layer_templates(config, provider)
    final_norm = layer_norm(config, provider)
    modules = _all_modules(config, provider, layers, final_norm)
    require_matches(turbo, modules)
    linears = [path for path, kind in modules.items() if kind in LINEAR_CLASSES]
    agree_on_model(config, turbo, modules, [turbo.plan(path, _layer_of(path), config.num_layers) for path in linears])
    makers: dict[str, Callable[[], ModuleSpec]] = {
        kind: functools.partial(_same, template) for kind, template in layers.items()
    }
    makers["mamba_layer"] = functools.cache(functools.partial(_mamba_layer, config, provider))
    slots = {kind: on_demand(functools.partial(_bound, template=make, turbo=turbo)) for kind, make in makers.items()}
    slots |= {kind: on_demand(functools.partial(_refuse, what=what)) for kind, what in _REFUSED.items()}
    return ModuleSpec(
        module=TurboHybridStack,
        params={"final_norm": bind_layer(final_norm, FINAL_NORM, turbo, None, config.num_layers)},
        submodules=compat.fill(_StackSubmodules, **slots),
    )


def _bound(config: Any, index: int, *, template: Callable[[], ModuleSpec], turbo: TurboConfig) -> ModuleSpec:
    return bind_layer(template(), f"decoder.layers.{index}", turbo, index, config.num_layers)


def _same(template: ModuleSpec) -> ModuleSpec:
    return template


def _refuse(config: Any, index: int, *, what: str) -> ModuleSpec:
    raise UnsupportedError(
        f"decoder.layers.{index}: the layer pattern asks for {what}, which has no spec here. "
        "Use M (Mamba), * (attention), - (MLP) and E (experts)."
    )


def _layer_templates(config: Any, provider: TurboSpecProvider) -> Mapping[str, ModuleSpec]:
    """Kind of layer -> its unbound spec; Mamba layers apart."""
    fused = provider.fuse_layernorm_and_linear()
    norm = IdentityOp if fused else layer_norm(config, provider)
    layers = {
        "attention_layer": ModuleSpec(
            module=_AttentionLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=attention_spec(config, provider),
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=_keys_map("input_layernorm", fused),
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=_MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=mlp_spec(config, provider, moe=False),
                mlp_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map=_keys_map("pre_mlp_layernorm", fused),
            ),
        ),
    }
    if config.num_moe_experts is not None:
        layers["moe_layer"] = ModuleSpec(
            module=_MoELayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=layer_norm(config, provider),
                mlp=mlp_spec(config, provider, moe=True),
                mlp_bda=get_bias_dropout_add,
            ),
        )
    return layers


def _mamba_layer(config: Any, provider: TurboSpecProvider) -> ModuleSpec:
    """Made only where a model has such a layer: up to 0.16, importing the mixer needs Triton."""
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules

    fused = provider.fuse_layernorm_and_linear()
    mixer = MambaMixerSubmodules(in_proj=_mixer_projection(provider), out_proj=provider.row_parallel_linear())
    return ModuleSpec(
        module=_MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=IdentityOp if fused else layer_norm(config, provider),
            mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fused else {"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _mixer_projection(provider: TurboSpecProvider) -> Any:
    return provider.column_parallel_layer_norm_linear() or provider.column_parallel_linear()


def _keys_map(norm: str, fused: bool) -> dict[str, str]:
    return {} if fused else {f"{norm}.": FUSED_NAMES[norm]}


def _all_modules(
    config: Any, provider: TurboSpecProvider, layers: Mapping[str, ModuleSpec], final_norm: Any
) -> dict[str, type]:
    """Path -> class. Which kind each layer is, only the model's layer pattern says: any kind may stand anywhere."""
    found = modules_of(final_norm, FINAL_NORM)
    mixer = {"in_proj": _mixer_projection(provider), "out_proj": provider.row_parallel_linear()}
    for index in range(config.num_layers):
        path = f"decoder.layers.{index}"
        for template in layers.values():
            found |= modules_of(template, path)
        for slot, spec in mixer.items():
            found |= modules_of(spec, f"{path}.mixer.{slot}")
    return found


def _layer_of(path: str) -> int:
    """The layer number in the path of a linear; all linears of a stack are in layers."""
    return int(path.split(".")[2])
