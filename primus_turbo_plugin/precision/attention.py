"""`AttentionPrecision`: what a user chooses about the numbers that core attention multiplies.

FP8 attention holds q, k, v and the gradient of the output as FP8 codes, with one scale for each block of `BLOCK_TOKENS` tokens
of a head. A block is as wide as the head, because q @ k.T contracts over the head's dim and a scale must leave the sum; it is
as long as a kernel's tile, because probabilities @ v contracts over tokens, where only a whole tile can share a factor. Scales
are powers of two: a decoded number is then a BF16 number, exactly, and any kernel can work with the very same numbers.

Source: Shah et al., FlashAttention-3, 2024, section 3.3 (one scale a block of queries, keys or values).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.vocabulary import check_choice, check_keys

BLOCK_TOKENS = 128
"""Tokens of a head that share a scale, counted from the start of their sequence."""

FORMATS = ("bf16", "fp8")
GRADIENTS = ("e4m3", "e5m2", "bf16")

_NO_SENSE = {
    "mxfp8": "its blocks of 32 lie along the contraction, and tokens x head dim contracts along both dimensions in turn",
    "mxfp4": "one mantissa bit of a logit is lost in the exponential: a probability would be off by a factor",
    "nvfp4": "one mantissa bit of a logit is lost in the exponential: a probability would be off by a factor",
    "fp8_e5m2": "two mantissa bits leave logits off by an eighth; a scale for every block makes its range useless",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPrecision:
    """In which numbers core attention multiplies.

    Attributes:
        format: `bf16`: as the tensors come (fp16 too). `fp8`: q, k, v and probabilities in E4M3, softmax and sums in fp32.
        gradients: How the gradient of the output is held under `fp8`: `e4m3`, `e5m2` (more range inside a block, half the
            precision) or `bf16` (not quantised).

    Raises:
        ConfigError: A value is unknown or makes no sense for attention.
    """

    format: str = "bf16"
    gradients: str = "e4m3"

    def __post_init__(self) -> None:
        if self.format in _NO_SENSE:
            raise ConfigError(
                f"attention_precision.format: {self.format} makes no sense for attention: {_NO_SENSE[self.format]}. "
                "Set 'fp8' or 'bf16'."
            )
        check_choice("attention_precision.format", self.format, FORMATS)
        check_choice("attention_precision.gradients", self.gradients, GRADIENTS)
        if not self.is_quantized and self.gradients != "e4m3":
            raise ConfigError(
                f"attention_precision.gradients: {self.gradients} needs 'format: fp8'; under bf16 nothing is quantised. "
                "Remove it."
            )

    @property
    def is_quantized(self) -> bool:
        return self.format == "fp8"

    @property
    def name(self) -> str:
        """As the reports show it."""
        if not self.is_quantized:
            return self.format
        return f"fp8 (e4m3, gradients {self.gradients}, a scale for {BLOCK_TOKENS} tokens of a head)"

    @classmethod
    def from_value(cls, value: Any, *, where: str = "attention_precision") -> AttentionPrecision:
        """From YAML: a format's name (`fp8_e4m3` is `fp8`), or a mapping of the fields.

        Raises:
            ConfigError: A key is unknown or a value impossible.
        """
        value = {"format": value} if isinstance(value, str) else value
        given = dict(check_keys(where, value, [field.name for field in fields(cls)]))
        if given.get("format") == "fp8_e4m3":
            given["format"] = "fp8"
        return cls(**given)

    def to_value(self) -> str | dict[str, str]:
        """The inverse of `from_value`."""
        if self == AttentionPrecision(format=self.format):
            return self.format
        return {"format": self.format, "gradients": self.gradients}
