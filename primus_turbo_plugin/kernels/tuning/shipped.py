"""The tuned configurations this package ships: `defaults/<arch>.json`, one tuning file an architecture.

`sm90` holds measured entries only. AMD architectures hold heuristics, and say so, until someone measures: no AMD GPU has run this
code yet.
"""

from __future__ import annotations

import functools
from importlib import resources

from primus_turbo_plugin.kernels.tuning.entry import Entry
from primus_turbo_plugin.kernels.tuning.file import parse_entries

ARCHITECTURES = ("sm90", "gfx942", "gfx950", "gfx1250")


@functools.cache
def shipped_entries() -> tuple[Entry, ...]:
    """Entries of all architectures."""
    folder = resources.files("primus_turbo_plugin.kernels.tuning") / "defaults"
    found: list[Entry] = []
    for arch in ARCHITECTURES:
        found += parse_entries((folder / f"{arch}.json").read_text(encoding="utf-8"), f"shipped tuning of {arch}")
    return tuple(found)
