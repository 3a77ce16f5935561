"""What Megatron's configuration says about core attention: read, checked, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from primus_turbo_plugin.errors import ConfigError

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
PADDING = (AttnMaskType.padding, AttnMaskType.padding_causal)

_OTHERS = "or set 'attention: megatron' or 'attention: transformer_engine'"

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    # Settings absent from a release read as None.
    ("qk_clip", bool, "the largest logit of each head is not recorded. Unset it, " + _OTHERS),
    ("log_max_attention_logit", bool, "the largest logit of each head is not recorded. Unset it, " + _OTHERS),
    (
        "fp8_multi_head_attention",
        bool,
        "the linears around attention hand it no FP8 codes. Set fp8_dot_product_attention, which quantises inside, "
        + _OTHERS,
    ),
    ("use_kitchen_attention", bool, "it names another library's attention. Unset it, " + _OTHERS),
    (
        "batch_invariant_mode",
        bool,
        "no kernel here promises results that are independent of the batch. Unset it, " + _OTHERS,
    ),
    (
        "flash_attention_version",
        lambda version: version is not None,
        "it names another library's kernel. Unset it, " + _OTHERS,
    ),
    (
        "attention_backend",
        lambda backend: backend is not None and backend.name != "auto",
        "it picks among Transformer Engine's or Megatron's kernels; here 'kernels: {attention: [...]}' does. "
        "Set it to auto, " + _OTHERS,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSettings:
    """Settings of one layer's core attention.

    Attributes:
        heads: Query heads on this rank.
        groups: Key and value heads on this rank.
        scale: On the scores.
        window: (left, right) reach of the sliding window; (-1, -1) where the layer has none.
        dropout: Probability.
    """

    heads: int
    groups: int
    scale: float
    window: tuple[int, int]
    dropout: float


def read_settings(
    config: TransformerConfig,
    where: str,
    *,
    layer_number: int,
    mask_type: AttnMaskType,
    tp_size: int,
    dropout: float | None,
    scale: float | None,
    k_channels: int | None,
) -> AttentionSettings:
    """Settings of a layer, from the configuration and the constructor's arguments.

    `apply_query_key_layer_scaling` divides the scores by the layer's number and multiplies them back inside an fp32
    softmax, to keep fp16 scores small; here scores are fp32 throughout and nothing is left of it. For the same reason
    `attention_softmax_in_fp32` holds whether set or not, and `masked_softmax_fusion` has nothing to fuse.

    Raises:
        ConfigError: A setting is refused, contradictory or impossible.
    """
    for name, asked, reason in _REFUSED:
        value = getattr(config, name, None)
        if asked(value):
            raise ConfigError(f"{where}: {name}={getattr(value, 'name', value)} can't be honoured: {reason}.")
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise ConfigError(
            f"{where}: softmax_type must be vanilla, off-by-one or learnable, got {config.softmax_type!r}."
        )
    window = (-1, -1)
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        window = _window(config, where, mask_type)
    return AttentionSettings(
        heads=_share(config.num_attention_heads, "num_attention_heads", tp_size, where),
        groups=_share(config.num_query_groups, "num_query_groups", tp_size, where),
        scale=1.0 / math.sqrt(k_channels or config.kv_channels) if scale is None else scale,
        window=window,
        dropout=_probability(config.attention_dropout if dropout is None else dropout, where),
    )


def _window(config: TransformerConfig, where: str, mask_type: AttnMaskType) -> tuple[int, int]:
    try:
        left, right = config.window_size  # type: ignore[misc]
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: window_size must be (left, right), got {config.window_size!r}.") from None
    if left < -1 or right < -1:
        raise ConfigError(
            f"{where}: window_size must be numbers of tokens, or -1 for no limit, got {config.window_size}."
        )
    if mask_type in CAUSAL and right > 0:
        raise ConfigError(
            f"{where}: window_size={config.window_size} lets a query see {right} tokens ahead and attn_mask_type="
            f"{mask_type.name} none. Set window_size to ({left}, 0), or the mask type to no_mask."
        )
    return left, right


def _share(total: int | None, name: str, tp_size: int, where: str) -> int:
    if total is None or total % tp_size:
        raise ConfigError(
            f"{where}: {name}={total} must be divisible by tensor_model_parallel_size={tp_size}. Change one of them."
        )
    return total // tp_size


def _probability(value: float, where: str) -> float:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{where}: attention_dropout must be a probability, got {value}.")
    return value
