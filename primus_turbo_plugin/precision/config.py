"""`TurboConfig`: everything a user chooses, and what each module of the model gets by it.

Read from YAML, the environment or arguments (`config_sources`); docs/configuration.md lists every key.
Which precision a module runs:

1. A layer among the first `bf16_first_layers` or last `bf16_last_layers` runs in BF16, whatever else is written.
2. Else the last pattern in `modules` that matches its path and sets `precision`.
3. Else `precision`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.communication import Communication
from primus_turbo_plugin.precision.config_file import parse_yaml, read_yaml
from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan
from primus_turbo_plugin.precision.recipe import PADDINGS, Padding, Recipe
from primus_turbo_plugin.precision.vocabulary import check_choice, check_int, check_keys

#: Who may provide a component of a layer.
PROVIDERS = ("turbo", "megatron", "transformer_engine")
#: The components a user chooses a provider for.
COMPONENTS = ("linear", "norm", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleOverride:
    """What the modules whose path matches `pattern` get instead; None leaves it as it is.

    Attributes:
        pattern: A glob over full module paths: `*` any characters, dots included; `?` one character; `[0-3]` one of a set.
    """

    pattern: str
    precision: Recipe | None = None
    padding: Padding | None = None
    kernels: KernelOrders | None = None
    attention_precision: AttentionPrecision | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError(f"modules: a pattern must be a non-empty string; got {self.pattern!r}")
        if self.padding is not None:
            check_choice(f"modules[{self.pattern!r}].padding", self.padding, PADDINGS)

    def matches(self, path: str) -> bool:
        """Whether `path` matches the pattern, case included."""
        return fnmatch.fnmatchcase(path, self.pattern)

    @classmethod
    def from_value(cls, pattern: str, value: Any) -> ModuleOverride:
        """From YAML: a preset's name, or a mapping with `precision`, `padding`, `kernels`, `attention_precision`.

        Raises:
            ConfigError: A key is unknown, or nothing is set.
        """
        where = f"modules[{pattern!r}]"
        value = {"precision": value} if isinstance(value, str) else value
        check_keys(where, value, ("precision", "padding", "kernels", "attention_precision"))
        if not value:
            raise ConfigError(
                f"{where}: sets nothing; give precision, padding, kernels or attention_precision, or remove it"
            )
        readers: dict[str, Any] = {"precision": Recipe.from_value, "kernels": KernelOrders.from_value}
        readers["attention_precision"] = AttentionPrecision.from_value
        given: dict[str, Any] = {
            key: readers[key](item, where=f"{where}.{key}") if key in readers else item for key, item in value.items()
        }
        return cls(pattern=pattern, **given)

    def to_value(self) -> dict[str, Any]:
        """The inverse of `from_value`."""
        value: dict[str, Any] = {}
        if self.precision is not None:
            value["precision"] = self.precision.to_value()
        if self.padding is not None:
            value["padding"] = self.padding
        if self.kernels is not None:
            value["kernels"] = self.kernels.to_value()
        if self.attention_precision is not None:
            value["attention_precision"] = self.attention_precision.to_value()
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TurboConfig:
    """What a user chooses. Frozen, hashable, and equal after a round trip through YAML.

    Attributes:
        precision: Recipe of every linear that nothing below says otherwise about.
        modules: Overrides by path, in the order written: a later match wins.
        bf16_first_layers: The first so many decoder layers run in BF16.
        bf16_last_layers: The last so many decoder layers run in BF16.
        linear, norm, attention: Who provides that component: turbo, megatron or transformer_engine.
        attention_precision: In which numbers core attention multiplies.
        kernels: Which backends may serve each op, in which order.
        tuning_file: File of tuned kernel configurations (`primus-turbo tune`), in front of those this package ships.
        padding: `pad` (exact) or `refuse` contractions that are no multiple of the block.
        signs_seed: Seed of random rotation signs.
        rounding_seed: Seed of stochastic rounding.
        communication: Which collectives run under GEMMs, and by which transport.

    Raises:
        ConfigError: A value is impossible or contradicts another; names the key, the value and the remedy.
    """

    precision: Recipe = field(default_factory=lambda: Recipe(base="bf16"))
    modules: tuple[ModuleOverride, ...] = ()
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    linear: str = "turbo"
    norm: str = "turbo"
    attention: str = "turbo"
    attention_precision: AttentionPrecision = field(default_factory=AttentionPrecision)
    kernels: KernelOrders = field(default_factory=KernelOrders)
    tuning_file: str | None = None
    padding: Padding = "pad"
    signs_seed: int = 0
    rounding_seed: int = 0
    communication: Communication = field(default_factory=Communication)

    def __post_init__(self) -> None:
        for component in COMPONENTS:
            check_choice(component, getattr(self, component), PROVIDERS)
        check_choice("padding", self.padding, PADDINGS)
        for key in ("bf16_first_layers", "bf16_last_layers", "signs_seed", "rounding_seed"):
            check_int(key, getattr(self, key))
        if self.tuning_file is not None and (not isinstance(self.tuning_file, str) or not self.tuning_file):
            raise ConfigError(f"tuning_file: must be the path of a file; got {self.tuning_file!r}")
        self._check_attention()
        asked = self.quantized_by()
        if asked and self.linear != "turbo":
            raise ConfigError(
                f"linear: {self.linear!r} contradicts {asked[0]}: only linears of this package follow a recipe. "
                "Set 'linear: turbo', or 'precision: bf16' here and the precision in the other provider's own settings."
            )

    @classmethod
    def from_yaml(cls, path: str | Path) -> TurboConfig:
        """From a YAML file.

        Raises:
            ConfigError: The file is unreadable, or a key or value in it is wrong; names the file.
        """
        return cls.from_dict(read_yaml(path), where=str(path))

    @classmethod
    def from_dict(cls, mapping: Any, *, where: str = "TurboConfig") -> TurboConfig:
        """From a mapping as YAML holds it.

        Args:
            mapping: Key -> value; keys left out have their default.
            where: Prefix of error messages.

        Raises:
            ConfigError: Names the key, the value and the remedy.
        """
        check_keys(where, mapping, config_keys())
        given = dict(mapping)
        try:
            if "precision" in given:
                given["precision"] = Recipe.from_value(given["precision"])
            if "kernels" in given:
                given["kernels"] = KernelOrders.from_value(given["kernels"])
            if "attention_precision" in given:
                given["attention_precision"] = AttentionPrecision.from_value(given["attention_precision"])
            if "communication" in given:
                given["communication"] = Communication.from_value(given["communication"])
            if "modules" in given:
                given["modules"] = _modules(given["modules"])
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def from_yaml_text(cls, text: str, *, where: str = "YAML") -> TurboConfig:
        """From YAML text; raises as `from_dict`."""
        return cls.from_dict(parse_yaml(text, where), where=where)

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`: plain data, every key written out."""
        plain: dict[str, Any] = {key: getattr(self, key) for key in config_keys()}
        plain["precision"] = self.precision.to_value()
        plain["modules"] = {override.pattern: override.to_value() for override in self.modules}
        plain["kernels"] = self.kernels.to_value()
        plain["communication"] = self.communication.to_value()
        plain["attention_precision"] = self.attention_precision.to_value()
        return {key: value for key, value in plain.items() if value not in ({}, [], None)}

    def to_yaml(self) -> str:
        """The inverse of `from_yaml_text`."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=False)

    def quantized_by(self) -> tuple[str, ...]:
        """The settings that ask for quantisation, as they are written: `precision: mxfp4`, `modules['...']: mxfp8`."""
        written = [("precision", self.precision)]
        written += [(f"modules[{item.pattern!r}]", item.precision) for item in self.modules if item.precision]
        return tuple(f"{key}: {recipe.name}" for key, recipe in written if recipe.linear().is_quantized)

    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe that is named, the general one first."""
        return (self.precision, *(item.precision for item in self.modules if item.precision))

    def attention_quantized_by(self) -> tuple[str, ...]:
        """The settings that ask for quantised attention, as they are written."""
        written = [("attention_precision", self.attention_precision)]
        written += [
            (f"modules[{item.pattern!r}].attention_precision", item.attention_precision)
            for item in self.modules
            if item.attention_precision
        ]
        return tuple(f"{key}: {precision.format}" for key, precision in written if precision.is_quantized)

    def unmatched_patterns(self, paths: Iterable[str]) -> tuple[str, ...]:
        """The patterns that match none of `paths`, which must be those of the whole model, not of one pipeline stage."""
        known = list(paths)
        return tuple(item.pattern for item in self.modules if not any(item.matches(path) for path in known))

    def plan(self, module_path: str, layer_number: int | None = None, num_layers: int | None = None) -> ModulePlan:
        """What the module at `module_path` runs.

        Args:
            module_path: Full path, `decoder.layers.7.mlp.linear_fc1`, layers counted globally.
            layer_number: The layer's global number from 0; None for a module outside the decoder's layers: never pinned.
            num_layers: Decoder layers of the whole model.

        Raises:
            ConfigError: Pinned layers leave nothing to quantise, or a pattern asks for a quantised layer that is pinned.
        """
        recipe, reason = self.precision, "precision"
        padding, kernels, attention = self.padding, self.kernels, self.attention_precision
        for override in self.modules:
            if override.matches(module_path):
                if override.precision is not None:
                    recipe, reason = override.precision, f"modules[{override.pattern!r}]"
                padding = override.padding or padding
                kernels = kernels if override.kernels is None else override.kernels
                attention = override.attention_precision or attention
        pin = self._pinned_by(module_path, layer_number, num_layers)
        if pin is not None:
            if recipe.linear().is_quantized and re.search(rf"\blayers\.{layer_number}\.", reason):
                raise ConfigError(
                    f"{module_path}: {reason} asks for {recipe.name}, and {pin} keeps this layer in BF16. "
                    "Remove the pattern, or lower the number of BF16 layers."
                )
            recipe, reason, attention = Recipe(base="bf16"), pin, AttentionPrecision()
        precision = recipe.linear(padding=padding, signs_seed=self.signs_seed, rounding_seed=self.rounding_seed)
        return ModulePlan(
            path=module_path,
            precision=precision,
            kernels=kernels,
            tuning_file=self.tuning_file,
            recipe=recipe.name,
            reason=reason,
            layer_number=layer_number,
            communication=self.communication,
            attention=attention,
        )

    def _check_attention(self) -> None:
        asked = self.attention_quantized_by()
        if asked and self.attention != "turbo":
            raise ConfigError(
                f"attention: {self.attention!r} contradicts {asked[0]}: only this package's attention follows it. Set "
                "'attention: turbo', or leave attention_precision out and use the other provider's own settings."
            )

    def _pinned_by(self, path: str, layer_number: int | None, num_layers: int | None) -> str | None:
        """The key that keeps this layer in BF16, if one does."""
        first, last = self.bf16_first_layers, self.bf16_last_layers
        if layer_number is None or not first + last:
            return None
        if num_layers is None or not 0 <= layer_number < num_layers:
            raise ConfigError(
                f"{path}: layer number {layer_number} must lie in [0, num_layers), num_layers is {num_layers}"
            )
        asked = self.quantized_by() or self.attention_quantized_by()
        if first + last >= num_layers and asked:
            raise ConfigError(
                f"bf16_first_layers: {first} and bf16_last_layers: {last} leave none of the {num_layers} layers to "
                f"'{asked[0]}'. Lower them, or set 'precision: bf16'."
            )
        if layer_number < first:
            return "bf16_first_layers"
        return "bf16_last_layers" if layer_number >= num_layers - last else None


def config_keys() -> tuple[str, ...]:
    """The top-level keys of a YAML file, in the order they are written back."""
    return tuple(item.name for item in fields(TurboConfig))


def _modules(value: Any) -> tuple[ModuleOverride, ...]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"modules: must be a mapping from a path pattern to what it sets; got {value!r}")
    return tuple(ModuleOverride.from_value(pattern, item) for pattern, item in value.items())
