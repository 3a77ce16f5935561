"""The exceptions of this package.

Every message says where, what is required, what was got and what to do about it, so that the one line an entry script
prints is enough. Mistakes a user can make raise one of these; `assert` is kept for our own invariants.
"""

from __future__ import annotations

from collections.abc import Mapping


class TurboError(Exception):
    """Base of everything this package raises on purpose; entry scripts print it as one line, without a traceback."""


class ConfigError(TurboError, ValueError):
    """A setting is unknown, contradictory or impossible. Names the key, the value and the remedy."""


class ShapeError(TurboError, ValueError):
    """A tensor's shape, dtype or layout is not what the operation takes."""


class UnsupportedError(TurboError, RuntimeError):
    """What was asked for cannot be had here, and nothing else is used silently in its place.

    Args:
        message: What was asked for and the remedy.
        reasons: For each backend that was considered, why it refused; appended to the message, one line each.
    """

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        lines = [message] + [f"  {backend}: {reason}" for backend, reason in self.reasons.items()]
        super().__init__("\n".join(lines))
