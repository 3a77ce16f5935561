"""Overrides of a preset: which level they are written at, in which order they apply, what is ambiguous.

Levels, from general to specific; a later level wins:

    hadamard: 0                       everything
    w: {block: 1x32}                  one operand, in both GEMMs that read it
    fprop: {scale_rule: floor}        one GEMM, both operands
    fprop: {w: {scale_rule: ceil}}    one operand of one GEMM

An operand-wide and a GEMM-wide override that meet in one operand and disagree are an error: neither is more specific.
`preset` at a level takes the operands from another preset, `format` resets them to that format's defaults; what more
general levels set is then forgotten, and further keys of the same level apply on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.formats import FORMAT_BLOCKS, FORMAT_ELEMENTS, Format, ScaleRule
from primus_turbo_plugin.precision.presets import ALIASES, GEMM_OPERANDS, PRESETS, SLOTS
from primus_turbo_plugin.precision.quant_spec import ROUNDINGS, QuantSpec
from primus_turbo_plugin.precision.vocabulary import check_choice, check_int, check_keys

#: (path, key, value): path is '' (everything), 'w', 'fprop' or 'fprop.w'.
Override = tuple[str, str, str | int | bool]
Slot = tuple[str, str]
#: Path -> key -> value.
Levels = Mapping[str, Mapping[str, Any]]

OPERANDS = ("x", "w", "dy")
FIELDS = ("format", "element", "scale_rule", "block", "hadamard", "random_signs", "rounding")
RESETS = ("preset", "format")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "preset": (*ALIASES, *PRESETS),
    "format": tuple(item.value for item in Format),
    "scale_rule": tuple(item.value for item in ScaleRule),
    "element": tuple(dict.fromkeys(name for names in FORMAT_ELEMENTS.values() for name in names)),
    "block": tuple(dict.fromkeys(name for names in FORMAT_BLOCKS.values() for name in names)),
    "rounding": ROUNDINGS,
}


def _check_value(where: str, key: str, value: Any) -> str | int | bool:
    if key in _CHOICES:
        return check_choice(where, value, _CHOICES[key])
    if key == "hadamard":
        return check_int(where, value)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: must be true or false; got {value!r}")
    return value


def _flatten_fields(path: str, fields: Any, where: str, children: Iterable[str]) -> list[Override]:
    """The fields of one level, and those of its `children` (operands or GEMMs written inside it)."""
    if isinstance(fields, str):
        fields = {"preset": fields}
    children = tuple(children)
    check_keys(where, fields, [*(("preset",) if path else ()), *FIELDS, *children])
    if "preset" in fields and "format" in fields:
        raise ConfigError(f"{where}: 'preset' and 'format' both say where to start from; keep one of them")
    found: list[Override] = []
    for key, value in fields.items():
        if key in children:
            child_path = f"{path}.{key}" if path else key
            grandchildren = GEMM_OPERANDS.get(key, ()) if not path else ()
            found += _flatten_fields(child_path, value, f"{where}.{key}", grandchildren)
        else:
            found.append((path, key, _check_value(f"{where}.{key}", key, value)))
    return found


def flatten(mapping: Mapping[str, Any], where: str) -> tuple[Override, ...]:
    """A nested mapping of overrides as a sorted tuple, so that equal recipes are equal and hash alike.

    Raises:
        ConfigError: A key or a value is unknown.
    """
    return tuple(sorted(_flatten_fields("", mapping, where, (*OPERANDS, *GEMM_OPERANDS))))


def nest(overrides: Iterable[Override]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    nested: dict[str, Any] = {}
    for path, key, value in overrides:
        level = nested
        for part in path.split(".") if path else ():
            level = level.setdefault(part, {})
        level[key] = value
    return nested


def _check_ambiguous(slot: Slot, levels: Levels) -> None:
    """`w:` and `fprop:` meet in fprop's w: they may not disagree there unless `fprop: {w: ...}` settles it."""
    gemm, operand = slot
    wide, deep, settled = levels[operand], levels[gemm], levels[f"{gemm}.{operand}"]
    if not wide or not deep or any(key in settled for key in RESETS) or "bf16" in (deep.get(key) for key in RESETS):
        return  # a GEMM that is not quantised has no use for what its operands would get
    clashes = [key for key in wide if key in deep and wide[key] != deep[key] and key not in settled]
    clashes += [key for key in RESETS if (key in wide) != (key in deep)]
    if clashes:
        raise ConfigError(
            f"{gemm}.{operand}: '{operand}' sets {wide} and '{gemm}' sets {deep}: neither is more specific, and they "
            f"disagree about {clashes[0]}. Write '{gemm}: {{{operand}: {{...}}}}', or remove one of the two."
        )


def _slot_fields(base: str, slot: Slot, levels: Levels) -> dict[str, Any]:
    """The fields of one operand after all levels.

    Raises:
        ConfigError: Weights would be rounded stochastically without having been named: who rounds "everything" stochastically
            nearly always means gradients.
    """
    gemm, operand = slot
    fields = dict(PRESETS[ALIASES.get(base, base)][slot])
    rounding_from = None
    for path in ("", operand, gemm, f"{gemm}.{operand}"):
        level = dict(levels[path])
        if "preset" in level:
            name = level.pop("preset")
            fields = dict(PRESETS[ALIASES.get(name, name)][slot])
        elif "format" in level:
            fields = {}
        fields.update(level)
        rounding_from = path if "rounding" in level else rounding_from
    if operand == "w" and fields.get("rounding") == "stochastic" and rounding_from in ("", gemm):
        place = f"'{gemm}'" if rounding_from else "the whole recipe"
        raise ConfigError(
            f"rounding 'stochastic' for {place} includes the weights of {gemm}. Name the operands it is for "
            "('dy: {rounding: stochastic}', 'x: ...'), or say what weights get: 'w: {rounding: nearest}' (or stochastic)."
        )
    return fields


def resolve_fields(base: str, overrides: Iterable[Override]) -> dict[tuple[str, str], QuantSpec]:
    """The six `QuantSpec`s of preset `base` with `overrides`.

    Raises:
        ConfigError: Overrides are ambiguous, or a spec is impossible; names the GEMM and the operand.
    """
    paths = ["", *OPERANDS, *GEMM_OPERANDS, *(f"{gemm}.{operand}" for gemm, operand in SLOTS)]
    levels: dict[str, dict[str, Any]] = {path: {} for path in paths}
    for path, key, value in overrides:
        levels[path][key] = value
    specs = {}
    for slot in SLOTS:
        _check_ambiguous(slot, levels)
        fields = _slot_fields(base, slot, levels)
        try:
            specs[slot] = QuantSpec(**fields)
        except ConfigError as error:
            raise ConfigError(f"{'.'.join(slot)}: {error}") from error
    return specs
