"""Which representation each operand of each GEMM of a linear layer gets.

A `Recipe` is what a user writes (a preset and its overrides); the `LinearPrecision` it builds is what a layer runs.

    fprop  y  = x @ w.T       fprop_x, fprop_w
    dgrad  dx = dy @ w        dgrad_dy, dgrad_w
    wgrad  dw = dy.T @ x      wgrad_dy, wgrad_x
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.presets import ALIASES, GEMM_OPERANDS, PRESETS, SLOTS
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe_overrides import Override, flatten, nest, resolve_fields
from primus_turbo_plugin.precision.vocabulary import check_choice, check_int

Padding = Literal["pad", "refuse"]
PADDINGS = ("pad", "refuse")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearPrecision:
    """The six operand representations of one linear layer, and what its quantisers need besides.

    Attributes:
        fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x: Operand of the GEMM named first.
        padding: `pad`: a contraction that is no multiple of the block is zero-padded, which is exact; `refuse`: it is an error.
        signs_seed: Seed of the random signs in front of a rotation; unused without `random_signs`.
        rounding_seed: Seed of stochastic rounding; unused without it.

    Raises:
        ConfigError: The six contradict each other (see `_check_rotation` and `_check_shared_scale`).
    """

    fprop_x: QuantSpec
    fprop_w: QuantSpec
    dgrad_dy: QuantSpec
    dgrad_w: QuantSpec
    wgrad_dy: QuantSpec
    wgrad_x: QuantSpec
    padding: Padding = "pad"
    signs_seed: int = 0
    rounding_seed: int = 0

    def __post_init__(self) -> None:
        check_choice("padding", self.padding, PADDINGS)
        check_int("signs_seed", self.signs_seed)
        check_int("rounding_seed", self.rounding_seed)
        for gemm in GEMM_OPERANDS:
            _check_rotation(gemm, *self.gemm(gemm))
        for operand in ("x", "w", "dy"):
            _check_shared_scale(operand, {gemm: self.spec(gemm, operand) for gemm, name in SLOTS if name == operand})

    @classmethod
    def bf16(cls) -> LinearPrecision:
        """No quantisation anywhere."""
        return Recipe.preset("bf16").linear()

    def spec(self, gemm: str, operand: str) -> QuantSpec:
        """The representation of `operand` (x, w or dy) in `gemm` (fprop, dgrad or wgrad).

        Raises:
            ConfigError: `gemm` has no such operand.
        """
        if (gemm, operand) not in SLOTS:
            raise ConfigError(f"no operand {operand!r} in GEMM {gemm!r}: operands are {_slot_names()}")
        spec: QuantSpec = getattr(self, f"{gemm}_{operand}")
        return spec

    def gemm(self, gemm: str) -> tuple[QuantSpec, QuantSpec]:
        """Both operands' representations, in the order of `presets.GEMM_OPERANDS`."""
        first, second = GEMM_OPERANDS[check_choice("gemm", gemm, GEMM_OPERANDS)]
        return self.spec(gemm, first), self.spec(gemm, second)

    @property
    def is_quantized(self) -> bool:
        """Whether any operand of any GEMM is quantised."""
        return any(self.spec(*slot).is_quantized for slot in SLOTS)

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand is rounded stochastically, so that the layer must draw from the random state each forward."""
        return any(self.spec(*slot).rounding == "stochastic" for slot in SLOTS)

    @property
    def has_random_signs(self) -> bool:
        """Whether any rotation has seeded signs."""
        return any(self.spec(*slot).random_signs for slot in SLOTS)


def _slot_names() -> str:
    return ", ".join(f"{gemm}.{operand}" for gemm, operand in SLOTS)


def _is_2d(spec: QuantSpec) -> bool:
    """Whether a scale covers several rows, so that the quantised tensor can be read in both directions."""
    return spec.is_quantized and spec.block_shape[0] > 1


def _check_rotation(gemm: str, first: QuantSpec, second: QuantSpec) -> None:
    """H Hᵀ = I keeps a product only where both operands are rotated by the same H, signs included."""
    first_name, second_name = GEMM_OPERANDS[gemm]
    if (first.hadamard, first.random_signs) == (second.hadamard, second.random_signs):
        return
    raise ConfigError(
        f"{gemm}: both operands must be rotated alike, or the product changes; got "
        f"{first_name}: {_rotation(first)}, {second_name}: {_rotation(second)}. "
        f"Set hadamard and random_signs for '{gemm}' as a whole, and rotate only GEMMs whose two operands are quantised."
    )


def _rotation(spec: QuantSpec) -> str:
    if not spec.is_quantized:
        return "not quantised, so not rotated"
    return f"hadamard {spec.hadamard}, random_signs {str(spec.random_signs).lower()}"


def _check_shared_scale(operand: str, specs: Mapping[str, QuantSpec]) -> None:
    """A 2D block's scale serves the tensor and its transpose: both copies must then hold the same numbers."""
    for gemm, spec in specs.items():
        if _is_2d(spec) and spec.hadamard:
            raise ConfigError(
                f"{gemm}.{operand}: block {spec.block} shares one scale between both directions of the tensor, and rotating "
                f"along one of them changes the numbers of that one only; got hadamard {spec.hadamard}. "
                f"Set '{gemm}: {{{operand}: {{block: 1x{spec.block_shape[1]}}}}}', or hadamard: 0."
            )
    (gemm_a, a), (gemm_b, b) = specs.items()
    if _is_2d(a) and _is_2d(b) and a != b:
        fields = [f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)]
        raise ConfigError(
            f"{operand}: a 2D block shares codes and scales between {gemm_a} and {gemm_b}, so both need the same "
            f"{', '.join(fields)}; got '{a}' and '{b}'. "
            f"Set them for '{operand}' as a whole, or use a one-dimensional block in one of the two."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A preset and the overrides a user put on it.

    Attributes:
        base: A name of `presets.PRESETS` or `presets.ALIASES`.
        overrides: What `recipe_overrides.flatten` makes of the user's nested mapping, in its canonical order.
    """

    base: str
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        check_choice("preset", self.base, [*ALIASES, *PRESETS])
        self.linear()  # every contradiction shows here, not when the first layer is built

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Recipe:
        """The preset `name`, with overrides as in YAML: `Recipe.preset("mxfp4", wgrad={"hadamard": 32})`.

        Raises:
            ConfigError: The name or an override is unknown, or the overrides contradict each other.
        """
        return cls.from_value({"preset": name, **overrides}, where="recipe")

    @classmethod
    def from_value(cls, value: Any, *, where: str = "precision") -> Recipe:
        """A recipe from a preset's name or a mapping `{preset: ..., <overrides>}`.

        Args:
            value: What a YAML file or a flag holds.
            where: Prefix of error messages.

        Raises:
            ConfigError: Names the key, the value and the remedy.
        """
        presets = [*ALIASES, *PRESETS]
        if isinstance(value, str):
            value = {"preset": check_choice(where, value, presets)}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: must be a preset's name or a mapping; got {value!r}")
        if "preset" not in value:
            raise ConfigError(f"{where}: key 'preset' is missing; set it to one of {', '.join(presets)}")
        name = check_choice(f"{where}.preset", value["preset"], presets)
        overrides = flatten({key: item for key, item in value.items() if key != "preset"}, where)
        try:
            return cls(base=name, overrides=overrides)
        except ConfigError as error:
            raise ConfigError(f"{where}: recipe '{name}': {error}") from error

    def to_value(self) -> str | dict[str, Any]:
        """The inverse of `from_value`: the preset's name alone, or a mapping."""
        return self.base if not self.overrides else {"preset": self.base, **nest(self.overrides)}

    @property
    def name(self) -> str:
        """The preset's name, marked where overrides change it."""
        return f"{self.base}*" if self.overrides else self.base

    def linear(self, *, padding: Padding = "pad", signs_seed: int = 0, rounding_seed: int = 0) -> LinearPrecision:
        """The operand representations of a linear layer under this recipe."""
        specs = {
            f"{gemm}_{operand}": spec for (gemm, operand), spec in resolve_fields(self.base, self.overrides).items()
        }
        return LinearPrecision(**specs, padding=padding, signs_seed=signs_seed, rounding_seed=rounding_seed)
