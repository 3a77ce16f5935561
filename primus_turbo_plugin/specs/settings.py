"""Megatron's own precision and overlap settings: translated, honoured, or refused by name; never ignored.

Without Transformer Engine Megatron accepts every fp8 and fp4 setting and enters a null context, so the settings must be read
here. With it, Megatron enters Transformer Engine's context around each layer; this package's modules compute by their plan in
either case. `settings_table` lists every field.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.config import ModuleOverride, TurboConfig
from primus_turbo_plugin.precision.recipe import Recipe
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.settings_table import REFUSED, known_fields

#: (key, reason and remedy)
Reason = tuple[str, str]

_FP8_PRESETS = {"tensorwise": "fp8_tensorwise", "mxfp8": "mxfp8", "blockwise": "fp8_block128"}
_DELAYED_ONLY = {
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "tp_only_amax_red": False,
}
#: Megatron's optimizers that orthogonalise or precondition a matrix, and leave parameters of other shapes to Adam.
_MATRIX_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon", "soap")
#: Recomputed by discarding an output; Megatron's class for it takes its default, fp8=False, for a request for fp8.
_DISCARDING = frozenset(["layernorm", "mla_up_proj", "moe_act", "gdn_norm_out"])
_GRAPHS = {"enable_cuda_graph": False, "external_cuda_graph": False, "cuda_graph_impl": "none"}
#: Our name -> Megatron's, of the overlaps that each can turn off.
_OVERLAP_FLAGS = {
    "gather": "tp_comm_overlap_ag",
    "scatter": "tp_comm_overlap_rs",
    "bulk_gather": "tp_comm_bulk_dgrad",
    "bulk_scatter": "tp_comm_bulk_wgrad",
}
_OURS = "Choose the precision with PRIMUS_TURBO_CONFIG or --turbo-precision"


def resolve(config: Any, turbo: TurboConfig | None = None) -> TurboConfig:
    """What the model runs: `turbo` with Megatron's own precision settings merged in.

    Args:
        config: A `TransformerConfig`.
        turbo: None is `TurboConfig()`.

    Raises:
        ConfigError: Megatron's precision contradicts TurboConfig's; names both.
        UnsupportedError: Settings that cannot be honoured; `reasons` maps each field to why, and what to do.
    """
    compat.facts()
    turbo = turbo if turbo is not None else TurboConfig()
    reasons = dict(
        [
            *_refused(config, turbo),
            *_refused_by_circumstance(config, turbo),
            *_refused_with_grouped_experts(config, turbo),
            *_refused_precision(config, turbo),
            *_refused_overlap(config, turbo),
        ]
    )
    if reasons:
        raise UnsupportedError(f"Megatron settings that this package cannot honour: {', '.join(reasons)}.", reasons)
    _warn_of_unknown(config)
    merged = _with_overlap(config, _with_bf16_layers(config, _with_precision(config, turbo)))
    merged = _with_attention_precision(config, merged)
    graphs = _refused_graphs(config, merged)
    if graphs:
        raise UnsupportedError(f"Megatron settings that this package cannot honour: {', '.join(graphs)}.", graphs)
    return merged


def megatron_recipe(config: Any) -> tuple[str, Recipe] | None:
    """The setting of Megatron that asks for low precision, and the recipe it means; None if none does."""
    if config.fp8:
        name = f"fp8: {_text(config.fp8)!r}, fp8_recipe: {_text(config.fp8_recipe)!r}"
        overrides: dict[str, Any] = {"dy": {"element": "e5m2"}} if _text(config.fp8) == "hybrid" else {}
        preset = _FP8_PRESETS[_text(config.fp8_recipe)]
        if preset == "mxfp8" and overrides:
            preset, overrides = "mxfp8_hybrid", {}
        if not config.fp8_wgrad:
            overrides = {**overrides, "wgrad": {"format": "bf16"}}
            if "dy" in overrides:
                overrides["dgrad"] = {"dy": overrides.pop("dy")}
        return name, Recipe.preset(preset, **overrides)
    if config.fp4:
        return f"fp4: {_text(config.fp4)!r}, fp4_recipe: {_text(config.fp4_recipe)!r}", Recipe.preset("mxfp4")
    return None


def _refused(config: Any, turbo: TurboConfig) -> Iterator[Reason]:
    for name, rule in REFUSED.items():
        value = getattr(config, name, None)
        if any(value is harmless or value == harmless for harmless in rule.harmless):
            continue
        provider = getattr(turbo, rule.component) if rule.component else None
        if provider in rule.unless:
            continue
        where = f" with '{rule.component}: {provider}'" if provider else ""
        yield name, f"{_text(value)!r} is refused{where}: {rule.why}. {_sentence(rule.remedy)}."


def _refused_by_circumstance(config: Any, turbo: TurboConfig) -> Iterator[Reason]:
    facts = compat.facts()
    if _text(config.transformer_impl) not in ("local", "transformer_engine"):
        yield "transformer_impl", f"{config.transformer_impl!r} has a spec of its own. Set --transformer-impl local."
    low = config.params_dtype is not torch.float32 and not config.enable_autocast
    if config.fp32_residual_connection and low and turbo.linear != "transformer_engine":
        yield "fp32_residual_connection", "the norms' fp32 output would meet weights of another dtype. Leave it out."
    if config.delay_wgrad_compute and turbo.linear == "megatron":
        yield (
            "delay_wgrad_compute",
            "Megatron's own linears cannot delay wgrad. Set 'linear: turbo', or leave the flag out.",
        )
    graphs = getattr(config, "cuda_graph_impl", "none")
    if config.delay_wgrad_compute and turbo.linear == "turbo" and graphs in ("local", "transformer_engine"):
        yield (
            "delay_wgrad_compute",
            f"with cuda_graph_impl: {graphs!r}: gradients are put off when a backward pass is captured, and at no replay. "
            "Leave one of them out.",
        )
    if graphs == "transformer_engine" and not compat.transformer_engine_is_installed():
        yield (
            "cuda_graph_impl",
            "'transformer_engine' captures by Transformer Engine, which is not installed. Set local.",
        )
    if (
        isinstance(config.cp_comm_type, list)
        and config.context_parallel_size > 1
        and facts.cp_comm_type_list_is_shifted
    ):
        yield (
            "cp_comm_type",
            "megatron-core 0.16 hands each layer its neighbour's entry. Give one type, or update Megatron.",
        )
    if turbo.attention == "megatron":
        remedy = (
            "Megatron's own core attention cannot do it. Set 'attention: turbo' or 'attention: transformer_engine'."
        )
        if config.multi_latent_attention:
            yield "multi_latent_attention", remedy
        if config.context_parallel_size > 1:
            yield "context_parallel_size", remedy
        if config.fp8_dot_product_attention:
            yield "fp8_dot_product_attention", remedy
    if config.multi_latent_attention and _mla_believes_in_transformer_engine():
        yield (
            "multi_latent_attention",
            "MLA of megatron-core 0.16 fails without Transformer Engine. Update megatron-core.",
        )
    ours = {"moe_act"} if turbo.linear == "turbo" and config.moe_grouped_gemm else set()
    discarding = (_DISCARDING & set(config.recompute_modules or ())) - ours
    if config.recompute_granularity == "selective" and discarding and not compat.transformer_engine_is_installed():
        yield (
            "recompute_modules",
            f"Megatron recomputes {', '.join(sorted(discarding))} with functions of Transformer Engine, which is not installed. "
            "Leave them out, or set --recompute-granularity full.",
        )
    if turbo.norm == "megatron" and config.sequence_parallel and _norm_is_torchs(config):
        yield (
            "sequence_parallel",
            "Megatron's norm is torch's here, which refuses it. Set 'norm: turbo', or install Apex.",
        )
    backend = _text(config.attention_backend)
    fits = {"turbo": ("auto",), "megatron": ("auto", "local")}.get(turbo.attention, (backend,))
    if backend not in fits:
        remedy = "'attention: megatron'" if backend == "local" else "'attention: transformer_engine'"
        yield (
            "attention_backend",
            f"{backend!r} is no backend of 'attention: {turbo.attention}'. Set auto, or {remedy}.",
        )


def _refused_with_grouped_experts(config: Any, turbo: TurboConfig) -> Iterator[Reason]:
    """What the program at hand would do to a parameter that holds many experts' matrices, where one runs."""
    args = compat.training_arguments()
    if args is None or turbo.linear != "turbo" or not config.moe_grouped_gemm or config.num_moe_experts is None:
        return
    optimizer = getattr(args, "optimizer", None)
    if optimizer in _MATRIX_OPTIMIZERS:
        yield (
            "moe_grouped_gemm",
            f"True with --optimizer {optimizer}, which takes one matrix a parameter and would leave grouped experts to Adam. "
            "Leave --moe-grouped-gemm out, or set --optimizer adam.",
        )
    elif getattr(args, "moe_use_upcycling", False):
        yield (
            "moe_grouped_gemm",
            "True with --moe-use-upcycling: Megatron makes SequentialMLP's experts of a dense model. Leave --moe-grouped-gemm "
            "out of that run; its checkpoint then loads with it.",
        )


def _refused_precision(config: Any, turbo: TurboConfig) -> Iterator[Reason]:
    if turbo.linear == "transformer_engine" or not (config.fp8 or config.fp4):
        return
    field = "fp8" if config.fp8 else "fp4"
    if turbo.linear == "megatron":
        yield field, "Megatron's own linears ignore it and compute in BF16. Set 'linear: turbo', or leave it out."
        return
    recipe = _text(getattr(config, f"{field}_recipe"))
    if field == "fp8" and recipe not in _FP8_PRESETS:
        yield (
            "fp8_recipe",
            f"{recipe!r} is none of {', '.join(_FP8_PRESETS)}. Set one of them, or leave --fp8-format out. {_OURS}.",
        )
    if field == "fp4" and recipe != "mxfp4":
        yield "fp4_recipe", f"{recipe!r} is not mxfp4, the one FP4 format here. Leave --fp4-format out. {_OURS} mxfp4."
    if field == "fp8":
        for name, neutral in _DELAYED_ONLY.items():
            if getattr(config, name) != neutral:
                yield name, f"{getattr(config, name)!r} is for delayed scaling, which is refused. Leave it out."
    if _recomputes_through_transformer_engine(config):
        yield (
            "recompute_granularity",
            f"with {field} set, Megatron recomputes through Transformer Engine, which keeps other random states. "
            f"Leave --{field}-format out. {_OURS}; recomputing works with it.",
        )


def _recomputes_through_transformer_engine(config: Any) -> bool:
    if config.recompute_granularity == "full":
        return True
    return (
        config.recompute_granularity == "selective"
        and set(config.recompute_modules or ()) - {"core_attn", "moe_act"} != set()
    )


def _with_precision(config: Any, turbo: TurboConfig) -> TurboConfig:
    asked = megatron_recipe(config) if turbo.linear == "turbo" else None
    if asked is None:
        return turbo
    setting, recipe = asked
    own = turbo.precision
    if own.linear().is_quantized and own.linear() != recipe.linear():
        raise ConfigError(
            f"{setting} (Megatron) means precision: {recipe.name}, and precision: {own.name} (TurboConfig) is another. "
            "Leave one of them out."
        )
    modules = turbo.modules
    if config.fp4:  # Megatron itself keeps MTP out of FP4; a pattern written by the user comes later, so it wins
        mtp = (ModuleOverride(pattern="mtp.*", precision=Recipe.preset("bf16")),) if config.mtp_num_layers else ()
        modules = (*mtp, *modules)
    return dataclasses.replace(turbo, precision=recipe, modules=modules)


def _with_bf16_layers(config: Any, turbo: TurboConfig) -> TurboConfig:
    if not config.first_last_layers_bf16 or turbo.linear != "turbo":
        return turbo
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    own = (turbo.bf16_first_layers, turbo.bf16_last_layers)
    if own not in ((0, 0), (first, last)):
        raise ConfigError(
            f"first_last_layers_bf16 (Megatron) keeps {first} first and {last} last layers in BF16, and bf16_first_layers: "
            f"{own[0]}, bf16_last_layers: {own[1]} (TurboConfig) say otherwise. Leave one of them out."
        )
    return dataclasses.replace(turbo, bf16_first_layers=first, bf16_last_layers=last)


def _with_overlap(config: Any, turbo: TurboConfig) -> TurboConfig:
    """Megatron's flags for the overlap of tensor-parallel collectives, as settings of ours, whichever of the two turns it on."""
    own = turbo.communication
    if not (config.tp_comm_overlap or own.tp_overlap) or turbo.linear != "turbo":
        return turbo
    if own.tp_overlap is False:
        raise ConfigError(
            "tp_comm_overlap (Megatron) turns overlap on, and communication.tp_overlap: false (TurboConfig) turns it off. "
            "Leave one of them out."
        )
    named = {name: getattr(own, name) and getattr(config, flag) for name, flag in _OVERLAP_FLAGS.items()}
    off = [layer for layer in ("qkv", "fc1") if getattr(config, f"tp_comm_overlap_disable_{layer}", False)]
    communication = dataclasses.replace(
        own,
        tp_overlap=True,
        scatter_dgrad=own.scatter_dgrad or config.tp_comm_overlap_rs_dgrad,
        except_for=tuple(dict.fromkeys([*own.except_for, *off])),
        **named,
    )
    return dataclasses.replace(turbo, communication=communication)


def _with_attention_precision(config: Any, turbo: TurboConfig) -> TurboConfig:
    """Megatron's request for FP8 attention, where nothing more precise is written here."""
    if not config.fp8_dot_product_attention or turbo.attention != "turbo" or turbo.attention_precision.is_quantized:
        return turbo
    return dataclasses.replace(turbo, attention_precision=AttentionPrecision(format="fp8"))


def _refused_overlap(config: Any, turbo: TurboConfig) -> Iterator[Reason]:
    """Overlap that has nothing to overlap is a mistake worth an error: without sequence parallelism no rows are gathered."""
    asked = "tp_comm_overlap" if config.tp_comm_overlap else "communication.tp_overlap"
    if not (config.tp_comm_overlap or turbo.communication.tp_overlap):
        return
    if turbo.linear != "turbo":
        if not config.tp_comm_overlap:  # the field of Megatron has a rule of its own
            yield asked, f"True with 'linear: {turbo.linear}': only linears of this package do it. Set 'linear: turbo'."
    elif config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield (
            asked,
            "True without sequence parallelism: there is nothing to hide under a GEMM. Set --sequence-parallel.",
        )
    elif (
        any(getattr(config, name, none) != none for name, none in _GRAPHS.items())
        and config.tensor_model_parallel_size > 1
        and turbo.communication.transport != "sdma"
    ):
        yield (
            asked,
            f"True with CUDA graphs and 'transport: {turbo.communication.transport}': only 'sdma' can be captured. Name it, or "
            "set --cuda-graph-impl none.",
        )


def _refused_graphs(config: Any, turbo: TurboConfig) -> dict[str, str]:
    """What cannot be captured in a CUDA graph; other quantised linears quantise their weights inside it."""
    if turbo.linear != "turbo":
        return {}
    stochastic = [recipe.name for recipe in turbo.recipes() if recipe.linear().is_stochastic]
    if stochastic:
        why = f"stochastic rounding ({stochastic[0]}): a graph would replay its random bits in every step. Set rounding: nearest"
    elif (asked := megatron_recipe(config)) is not None:
        why = f"{asked[0]}: Megatron would capture state of Transformer Engine. Name the recipe by --turbo-precision"
    else:
        return {}
    graphs = {name: getattr(config, name, none) for name, none in _GRAPHS.items()}
    return {
        name: f"{value!r} with {why}, or --cuda-graph-impl none."
        for name, value in graphs.items()
        if value != _GRAPHS[name]
    }


def _warn_of_unknown(config: Any) -> None:
    """A newer Megatron may have settings this package has not seen; one that is set is worth a word."""
    known = known_fields()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, field.default)
        if field.name not in known and field.default is not dataclasses.MISSING and value != field.default:
            warnings.warn(f"{field.name}={value!r}: this package does not know this setting of Megatron", stacklevel=2)


def _mla_believes_in_transformer_engine() -> bool:
    module = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    return module.HAVE_TE and not compat.transformer_engine_is_installed()


def _norm_is_torchs(config: Any) -> bool:
    from megatron.core.models.backends import HAVE_APEX

    return config.normalization == "RMSNorm" or not HAVE_APEX


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _text(value: Any) -> Any:
    """Enum members by their text, so that `fp8_recipe` given as a string or as Megatron's enum reads the same."""
    if not isinstance(value, enum.Enum):
        return value
    return value.value if isinstance(value.value, str) else value.name
