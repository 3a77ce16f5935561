"""Frozen dataclasses of plain values to JSON and back, and one text for equal ones."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from primus_turbo_plugin.errors import ConfigError

T = TypeVar("T")
Plain = Mapping[str, Any]


def encode(value: Any) -> Any:
    """A dataclass as a mapping, nested ones included; plain values (None, bool, int, float, str) as they are.

    Raises:
        TypeError: Anything else, which would not come back equal from a file.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"tuning: keys and configurations hold plain values, got {value!r}")


def canonical(plain: Any) -> str:
    """The same text for equal values, whatever the order of their names."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def decode(kind: type[T], plain: Any, where: str) -> T:
    """The inverse of `encode`. A field that is left out has its default.

    Args:
        kind: The dataclass.
        plain: Its fields by name.
        where: Prefix of error messages.

    Raises:
        ConfigError: A field is unknown, missing, of another type, or refused by the dataclass itself.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: must be a mapping with fields {', '.join(fields)}, got {plain!r}")
    types = typing.get_type_hints(kind)
    for name in plain:
        if name not in fields:
            near = get_close_matches(name, list(fields), n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(f"{where}: unknown field {name!r}{hint}; known: {', '.join(fields)}")
    given = {name: _decode_field(types[name], value, f"{where}.{name}") for name, value in plain.items()}
    missing = [name for name, field in fields.items() if name not in given and _is_required(field)]
    if missing:
        raise ConfigError(f"{where}: misses {', '.join(missing)}")
    try:
        return kind(**given)
    except (ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode_field(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return decode(kind, value, where)  # type: ignore[arg-type]
    allowed = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if allowed and value not in allowed:
        raise ConfigError(f"{where}: must be one of {', '.join(map(str, allowed))}, got {value!r}")
    if kind in (int, str, bool) and type(value) is not kind:
        raise ConfigError(f"{where}: must be {kind.__name__}, got {value!r}")
    return value
