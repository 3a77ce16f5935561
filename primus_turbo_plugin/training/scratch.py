"""Output that is complete or absent: a scratch folder that takes its place at the end, whatever ends the program."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primus_turbo_plugin.errors import ConfigError


@contextlib.contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
    """A scratch folder beside `out` that takes its place if the block succeeds; if it fails, the ranks' logs are kept in
    `<out>.failed-logs`, and the error says so; if it is interrupted, nothing is.

    Raises:
        ConfigError: The folder cannot be made.
    """
    out = Path(os.path.abspath(out))  # `--out .` has a name only then
    scratch = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.filename}: {error.strerror}).") from error
    try:
        yield scratch
        old = out.with_name(f".{out.name}.old")
        if out.exists():
            out.rename(old)
        scratch.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        keep_logs(scratch, out.with_name(f"{out.name}.failed-logs"), error)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def keep_logs(scratch: Path, kept: Path, error: Exception) -> None:
    """Move the `logs` folder of every run in `scratch` to `kept/<run>`, in place of an earlier failure's, and say where."""
    from primus_turbo_plugin.training.launch import RanksFailed

    logs = [folder for folder in sorted(scratch.glob("*/logs")) if any(folder.iterdir())]
    if not logs:
        return
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for folder in logs:
        folder.rename(kept / folder.parent.name)
    words = f"The processes' logs are in {kept}."
    if isinstance(error, RanksFailed):
        error.add(words)
    else:
        print(words, file=sys.stderr)


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside the block SIGTERM ends the program as Ctrl-C does: processes are stopped, and scratch files removed."""

    def leave(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleaning up
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
