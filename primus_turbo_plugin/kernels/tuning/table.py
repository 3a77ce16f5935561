"""`TuningTable`: the tuned configurations that apply to this process, looked up by key.

A user's file goes first, then the entries this package ships:

    user's      must match in everything: key, torch, Triton, kernel version
    shipped     must match in key and kernel version; measured with some torch and Triton, they are a good start with others too

No entry: the op's own default, a function of the key. A table is immutable; what it remembers are answers it has given.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.tuning.codec import canonical, decode, encode
from primus_turbo_plugin.kernels.tuning.entry import Entry
from primus_turbo_plugin.kernels.tuning.file import read_entries
from primus_turbo_plugin.kernels.tuning.tunable import Tunable, tunables

K = TypeVar("K")
C = TypeVar("C")
_UNSEEN = object()
_MOST_ANSWERS = 1 << 16


@dataclass(frozen=True, eq=False)
class TuningTable:
    """Configurations by case.

    Attributes:
        entries: Case -> the entry that answers it.
        origins: Case -> where that entry is from, for reports: a file's name or `shipped`.
        notes: What a user should know: entries of a file that do not apply here, and why.
        source: The user's file, if there is one.
    """

    entries: Mapping[tuple[str, str], Entry] = field(default_factory=dict)
    origins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str | None = None
    _answers: dict[Any, Any] = field(default_factory=dict, repr=False)

    def config(self, tunable: Tunable[K, C], key: K) -> C:
        """The configuration of a case: tuned, or the op's default. A dictionary hit from the second call on.

        Raises:
            ConfigError: A tuned configuration cannot serve the case it is written down for; names the entry's origin.
        """
        asked = (tunable.op, key)
        answer = self._answers.get(asked, _UNSEEN)
        if answer is _UNSEEN:
            tuned = self.tuned(tunable, key)
            answer = tunable.default(key) if tuned is None else tuned
            if len(self._answers) >= _MOST_ANSWERS:  # experts have another number of tokens every time
                self._answers.clear()
            self._answers[asked] = answer
        return answer  # type: ignore[no-any-return]

    def tuned(self, tunable: Tunable[K, C], key: K) -> C | None:
        """The tuned configuration of a case, or None.

        Raises:
            ConfigError: As `config`.
        """
        case = (tunable.op, canonical(encode(key)))
        entry = self.entries.get(case)
        if entry is None:
            return None
        where = f"tuning ({self.origins[case]}): {key}"
        config = decode(tunable.config_type, entry.config, where)
        reason = tunable.refusal(key, config)
        if reason is not None:
            raise ConfigError(f"{where}: its configuration cannot serve it: {reason}. Remove the entry, or tune again.")
        return config

    @functools.cached_property
    def digest(self) -> str:
        """Equal for tables that choose alike, whatever else their entries say. For comparing ranks."""
        choices = sorted((case, canonical(entry.config)) for case, entry in self.entries.items())
        return hashlib.sha256(canonical(choices).encode()).hexdigest()[:16]

    def count(self, arch: str | None = None) -> dict[tuple[str, str], int]:
        """(origin, source) -> number of entries, of one architecture or of all."""
        counts: Counter[tuple[str, str]] = Counter()
        for case, entry in self.entries.items():
            if arch in (None, entry.arch):
                counts[self.origins[case], entry.source] += 1
        return dict(counts)


def build_table(
    shipped: Iterable[Entry],
    user: Iterable[Entry] = (),
    *,
    source: str | None = None,
    ops: Mapping[str, Tunable[Any, Any]] | None = None,
) -> TuningTable:
    """The table of these entries.

    Args:
        shipped: This package's own.
        user: Of the user's file.
        source: That file's name.
        ops: What can be tuned; None for all of this package.

    Raises:
        ConfigError: A key of the user's file is that of no case.
    """
    ops = tunables() if ops is None else ops
    entries: dict[tuple[str, str], Entry] = {}
    origins: dict[tuple[str, str], str] = {}
    for entry in shipped:
        tunable = ops.get(entry.op)
        if tunable is not None and entry.versions.kernels == tunable.version:
            entries[entry.case], origins[entry.case] = entry, "shipped"
    stale: Counter[str] = Counter()
    for entry in user:
        tunable = ops.get(entry.op)
        if tunable is None:
            stale[f"{entry.op}, an op that this package does not tune"] += 1
        elif entry.versions != tunable.versions:
            stale[f"{entry.op} with {entry.versions}; here is {tunable.versions}"] += 1
        else:
            _check_key(tunable, entry, f"tuning file {source!r}")
            entries[entry.case], origins[entry.case] = entry, str(source)
    notes = [
        f"tuning file {source}: {count} entries are not used: they are for {why}. Run `primus-turbo tune` again."
        for why, count in stale.items()
    ]
    return TuningTable(entries=entries, origins=origins, notes=tuple(notes), source=source)


def _check_key(tunable: Tunable[Any, Any], entry: Entry, where: str) -> None:
    """Refuses a key that no product has, such as one edited by hand: its entry would never be found, and nobody told."""
    remedy = "Remove the entry, or tune again."
    try:
        key = decode(tunable.key_type, entry.key, f"{where}: key of {entry.op}")
    except ConfigError as error:
        raise ConfigError(f"{error}. {remedy}") from error
    if canonical(encode(key)) != canonical(entry.key):
        raise ConfigError(f"{where}: key of {entry.op} is not complete: {dict(entry.key)}. {remedy}")


@functools.cache
def tuning_table(path: str | None = None) -> TuningTable:
    """The table of a process: what this package ships, and the user's file in front. A file is read once.

    Raises:
        ConfigError: The file cannot be used.
    """
    from primus_turbo_plugin.kernels.tuning.shipped import shipped_entries

    user = () if path is None else read_entries(path)
    return build_table(shipped_entries(), user, source=path)
