"""Turns a mistake in the input into one line, and leaves everything else alone."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from primus_turbo_plugin.errors import ConfigError, TurboError


@contextlib.contextmanager
def refusals(doing: str) -> Iterator[None]:
    """Report what Megatron refuses while it checks settings as a `ConfigError` in one line.

    Megatron checks its settings with assertions and `ValueError`s. Only code that checks settings belongs inside: in the
    training loop the same exceptions are faults, and their traceback matters.

    Args:
        doing: What was going on, for the message: "model configuration".
    """
    try:
        yield
    except TurboError:
        raise
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{doing}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The error's message on one line; for a bare assertion, the condition that didn't hold and where it stands."""
    text = " ".join(str(error).split())
    if text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return type(error).__name__
    last = frames[-1]
    condition = (last.line or "").removeprefix("assert ").strip()
    return f"Megatron requires {condition!r} ({Path(last.filename).name}:{last.lineno})"
