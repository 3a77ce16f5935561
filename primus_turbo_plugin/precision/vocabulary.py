"""Checks of user-given names and values, with the nearest known name in the error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from primus_turbo_plugin.errors import ConfigError


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint, `; did you mean 'x'?`, for a name close to a known one, else ''."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_choice(where: str, value: Any, choices: Iterable[str]) -> str:
    """`value` if it is one of `choices`.

    Raises:
        ConfigError: Names `where`, the value, what is known and the nearest name.
    """
    known = list(choices)
    if isinstance(value, str) and str(value) in known:
        return str(value)
    hint = nearest(value, known) if isinstance(value, str) else ""
    raise ConfigError(f"{where}: must be one of {', '.join(known)}; got {value!r}{hint}")


def check_keys(where: str, mapping: Any, known: Iterable[str]) -> Mapping[str, Any]:
    """`mapping` if it is a mapping whose keys are all known.

    Raises:
        ConfigError: Names `where`, every unknown key and the nearest known one.
    """
    names = list(known)
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: must be a mapping with keys {', '.join(names)}; got {mapping!r}")
    for key in mapping:
        if key not in names:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(str(key), names)} (known: {', '.join(names)})")
    return mapping


def check_int(where: str, value: Any, *, minimum: int = 0) -> int:
    """`value` if it is an integer (not a bool) of at least `minimum`.

    Raises:
        ConfigError: Names `where` and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{where}: must be an integer >= {minimum}; got {value!r}")
    return value
