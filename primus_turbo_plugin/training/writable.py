"""Whether a path can be written, found out before the work whose result goes there; nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from primus_turbo_plugin.errors import ConfigError


def check_folder(flag: str, folder: str | Path) -> None:
    """Try whether `folder` can be created, or written to if it exists, in the nearest folder that does.

    Raises:
        ConfigError: It cannot; names flag, path and the system's reason.
    """
    existing = Path(folder).absolute()
    try:
        while not existing.exists():
            existing = existing.parent
        # Permission bits say little here (root, read-only and virtual file systems), so something is really created.
        with tempfile.TemporaryDirectory(prefix=".turbo-", dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder}: cannot be written ({existing}: {error.strerror}). Name another folder."
        ) from error


def check_file(flag: str, file: str | Path) -> None:
    """Try whether `file` can be appended to; its folder must exist.

    Raises:
        ConfigError: It cannot; names flag, path and the reason.
    """
    path = Path(file).absolute()
    if path.is_dir():
        raise ConfigError(f"{flag} {file}: is a folder. Name a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {file}: the folder {path.parent} does not exist. Make it, or name another file.")
    if not path.exists():
        check_folder(flag, path.parent)
    elif not os.access(path, os.W_OK):
        raise ConfigError(f"{flag} {file}: cannot be written (Permission denied). Name another file.")
