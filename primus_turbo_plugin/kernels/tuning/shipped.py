"""The tuned configurations this package ships: `defaults/<arch>.json`, one tuning file an architecture.

`sm90` takes measured entries only. An entry of an AMD architecture that was not measured is a heuristic and says its rule: no AMD
GPU has run this code yet. An entry is there where it beats the default of `kernels/triton/gemm_defaults.py`; docs/tuning.md says
what was searched, and that so far nothing did.
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
