"""The tuning file: JSON, written whole or not at all.

    {"format": "primus_turbo_plugin tuning", "schema": 1, "entries": [...]}      entries as in `entry.Entry`

Two processes that tune into one file do not lose each other's entries: a merge reads, adds and replaces under a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.tuning.entry import Entry

FORMAT = "primus_turbo_plugin tuning"
SCHEMA = 1
_REMEDY = "Give a file that `primus-turbo tune --out FILE` wrote, or remove it and tune again."


def read_entries(path: str | Path) -> tuple[Entry, ...]:
    """The entries of a tuning file.

    Raises:
        ConfigError: It cannot be read, is no tuning file, is damaged, of another schema, or says one thing twice; names the file,
            what is wrong and the remedy.
    """
    where = f"tuning file {str(path)!r}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{where}: {reason}. {_REMEDY}") from error
    return parse_entries(text, where)


def parse_entries(text: str, where: str) -> tuple[Entry, ...]:
    """As `read_entries`, of a file's text."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: damaged or no JSON ({error}). {_REMEDY}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{where}: is no tuning file: 'format' must be {FORMAT!r}. {_REMEDY}")
    if content.get("schema") != SCHEMA:
        raise ConfigError(
            f"{where}: has schema {content.get('schema')!r}, this package reads {SCHEMA}. "
            "Use the version of the package that wrote it, or remove it and tune again."
        )
    entries = content.get("entries")
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: 'entries' must be a list, got {type(entries).__name__}. {_REMEDY}")
    try:
        found = tuple(Entry.from_plain(item, f"entries[{index}]") for index, item in enumerate(entries))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}. {_REMEDY}") from error
    seen: dict[Any, int] = {}
    for index, entry in enumerate(found):
        first = seen.setdefault(entry.identity, index)
        if first != index:
            raise ConfigError(f"{where}: entries[{first}] and entries[{index}] answer the same case. {_REMEDY}")
    return found


def merged(old: Iterable[Entry], new: Iterable[Entry]) -> tuple[Entry, ...]:
    """Both; where they answer the same case with the same versions, the new one."""
    by_identity = {entry.identity: entry for entry in old}
    by_identity |= {entry.identity: entry for entry in new}
    return tuple(
        sorted(by_identity.values(), key=lambda entry: (entry.op, entry.arch, entry.case, str(entry.versions)))
    )


def to_text(entries: Iterable[Entry]) -> str:
    """The text of a file with these entries: one line each, so that a change reads well in a diff."""
    lines = ",\n".join("    " + json.dumps(entry.to_plain()) for entry in entries)
    return f'{{\n  "format": {json.dumps(FORMAT)},\n  "schema": {SCHEMA},\n  "entries": [\n{lines}\n  ]\n}}\n'


def write_entries(path: str | Path, entries: Iterable[Entry]) -> None:
    """Replaces the file in one step: a reader sees the old content or the new, never half of it.

    Raises:
        ConfigError: The folder cannot be written.
    """
    path = Path(path)
    text = to_text(entries)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"tuning file {str(path)!r}: {error.strerror}. Give a path in a writable folder.") from error


def merge_into(path: str | Path, new: Iterable[Entry]) -> tuple[Entry, ...]:
    """Adds entries to a file, made if it is not there, and returns all it then holds.

    Raises:
        ConfigError: The file is there and is no sound tuning file (it is left as it is), or cannot be written.
    """
    path = Path(path)
    with _locked(path):
        old = read_entries(path) if path.exists() else ()
        entries = merged(old, new)
        write_entries(path, entries)
    return entries


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One merge at a time. The lock lies beside the file, since the file itself is replaced."""
    import fcntl

    try:
        lock = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise ConfigError(f"tuning file {str(path)!r}: {error.strerror}. Give a path in a writable folder.") from error
    with lock:
        yield
