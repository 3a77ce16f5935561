"""`QuantSpec`: how one operand of one GEMM is represented."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, Literal, TypeVar, cast

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.formats import (
    ELEMENT_TYPES,
    FORMAT_BLOCKS,
    FORMAT_ELEMENTS,
    ElementType,
    Format,
    ScaleRule,
)

HADAMARD_SIZES = (0, 16, 32, 64, 128)
ROUNDINGS = ("nearest", "stochastic")

_DEFAULT_SCALE_RULE = {Format.MXFP4: ScaleRule.EVEN, Format.MXFP8: ScaleRule.RCEIL}

Rounding = Literal["nearest", "stochastic"]
_E = TypeVar("_E", bound=Enum)


class _Derived:
    """What follows from a spec's fields. Kernels ask for it in every call, so it is computed once, with the spec.

    Attributes:
        is_quantized: The format is not bf16.
        is_mx: E8M0 scales.
        element_type: The element type; only of a quantised spec, as all that follow.
        block_shape: (outer, contraction) extent of a block; 0 stands for the whole axis.
        contraction_multiple: The contraction axis is zero-padded to a multiple of this.
    """

    __slots__ = ("_hash", "block_shape", "contraction_multiple", "element_type", "is_mx", "is_quantized")

    is_quantized: bool
    is_mx: bool
    element_type: ElementType
    block_shape: tuple[int, int]
    contraction_multiple: int
    _hash: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantSpec(_Derived):
    """How one operand of one GEMM is represented. Strings are accepted for the enums and checked.

    Attributes:
        format: `bf16` (not quantised), `mxfp4`, `mxfp8` or `fp8`.
        element: `e2m1`, `e4m3` or `e5m2`; None takes the format's default.
        scale_rule: Rule of the E8M0 scale; None takes the default (mxfp4: even, mxfp8: rceil). FP8 scales are
            amax / max, there it must be None.
        block: Elements that share a scale, outer x contraction: `1x32` or `32x32` (mx); `tensorwise`, `rowwise`,
            `1x128` or `128x128` (fp8); None takes the format's default.
        hadamard: Size of the rotation along the contraction axis, 0 for none.
        random_signs: Seeded signs in front of the Hadamard transform.
        rounding: `nearest` (ties to even) or `stochastic`.

    Raises:
        ConfigError: A field has a value it cannot have, or not together with another field.
    """

    format: Format = Format.BF16
    element: str | None = None
    scale_rule: ScaleRule | None = None
    block: str | None = None
    hadamard: int = 0
    random_signs: bool = False
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        self._set("format", _enum("format", Format, self.format))
        if self.scale_rule is not None:
            self._set("scale_rule", _enum("scale_rule", ScaleRule, self.scale_rule))
        _one_of("hadamard", self.hadamard, HADAMARD_SIZES)
        _one_of("random_signs", self.random_signs, (False, True))
        _one_of("rounding", self.rounding, ROUNDINGS)
        if self.format is Format.BF16:
            self._check_unquantized()
        else:
            self._fill_defaults()
        if self.random_signs and not self.hadamard:
            raise ConfigError(
                "quant spec: random_signs: true needs a rotation, got hadamard: 0. "
                "Set hadamard to 16, 32, 64 or 128, or random_signs to false."
            )
        self._derive()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are built anew: what is derived is not among the fields, and strings hash differently elsewhere."""
        return _rebuilt, tuple(getattr(self, field.name) for field in fields(self))

    @classmethod
    def bf16(cls) -> QuantSpec:
        """The operand is used as it is."""
        return cls(format=Format.BF16)

    def padded(self, contraction: int) -> int:
        """Length of the stored contraction axis for a logical length of `contraction`."""
        multiple = self.contraction_multiple
        return -(-contraction // multiple) * multiple

    def scale_shape(self, outer: int, contraction: int) -> tuple[int, int]:
        """Shape of `block_scale` for a logical `[outer, contraction]` operand."""
        block_outer, block_contraction = self.block_shape
        rows = -(-outer // block_outer) if block_outer else 1
        columns = self.padded(contraction) // block_contraction if block_contraction else 1
        return rows, columns

    def __str__(self) -> str:
        if not self.is_quantized:
            return "bf16"
        parts = [f"{self.format}({self.element}, {self.block}"]
        parts += [f", {self.scale_rule}"] if self.scale_rule else []
        parts += [f", {'randomised ' if self.random_signs else ''}H{self.hadamard}"] if self.hadamard else []
        parts += [", stochastic"] if self.rounding == "stochastic" else []
        return "".join(parts) + ")"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _derive(self) -> None:
        self._set("_hash", hash(tuple(getattr(self, field.name) for field in fields(self))))
        self._set("is_quantized", self.format is not Format.BF16)
        self._set("is_mx", self.format in _DEFAULT_SCALE_RULE)
        if self.is_quantized:
            self._set("element_type", ELEMENT_TYPES[cast(str, self.element)])
            self._set("block_shape", _block_shape(cast(str, self.block)))
            parts = (self.block_shape[1], self.hadamard, self.element_type.codes_per_byte)
            self._set("contraction_multiple", math.lcm(*(max(part, 1) for part in parts)))

    def _check_unquantized(self) -> None:
        """A bf16 operand has nothing to scale, rotate or round: a switch that would do nothing is refused."""
        given: dict[str, object] = {"element": self.element, "scale_rule": self.scale_rule, "block": self.block}
        given |= {"hadamard": self.hadamard or None, "random_signs": self.random_signs or None}
        given["rounding"] = None if self.rounding == "nearest" else self.rounding
        for key, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"quant spec: {key}: {value} has no effect with format: bf16. Choose a quantised format "
                    f"(mxfp4, mxfp8, fp8), or remove {key}."
                )

    def _fill_defaults(self) -> None:
        for key, choices in (("element", FORMAT_ELEMENTS[self.format]), ("block", FORMAT_BLOCKS[self.format])):
            if getattr(self, key) is None:
                self._set(key, choices[0])
            _one_of(key, getattr(self, key), choices, f" with format: {self.format}")
        rule = _DEFAULT_SCALE_RULE.get(self.format)
        if rule is not None and self.scale_rule is None:
            self._set("scale_rule", rule)
        if rule is None and self.scale_rule is not None:
            raise ConfigError(
                f"quant spec: scale_rule: {self.scale_rule} is a rule for E8M0 scales, but format: fp8 scales by "
                "amax / max in fp32. Remove scale_rule, or choose mxfp8."
            )


@functools.cache
def _block_shape(block: str) -> tuple[int, int]:
    fixed = {"tensorwise": (0, 0), "rowwise": (1, 0)}
    if block in fixed:
        return fixed[block]
    outer, contraction = block.split("x")
    return int(outer), int(contraction)


def _rebuilt(*values: Any) -> QuantSpec:
    return QuantSpec(**dict(zip((field.name for field in fields(QuantSpec)), values)))


def _one_of(key: str, value: object, choices: tuple[Any, ...], context: str = "") -> None:
    if any(value == choice and type(value) is type(choice) for choice in choices):
        return
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    listed = ", ".join(str(choice).lower() for choice in choices)
    raise ConfigError(f"quant spec: {key} must be one of {listed}{context}, got {value!r}.{hint}")


def _enum(key: str, kind: type[_E], value: Any) -> _E:
    if isinstance(value, kind):
        return value
    choices = tuple(member.value for member in kind)
    _one_of(key, value, choices)
    return kind(value)
