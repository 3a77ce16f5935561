"""Attribute patches that are data: applied in order, undone in reverse, each with the reason it exists."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()


def _everywhere() -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Shim:
    """One attribute that differs while Megatron runs on a CPU.

    Attributes:
        target: ``"module:attribute"``; the attribute may be dotted (``"torch:cuda.synchronize"``).
        make: Called with the original object (`None` if the attribute doesn't exist), returns the replacement.
        why: What fails, or is wrong, on a CPU without it.
        needed: Whether this installation needs it at all; decides on a fact, not on a version number.
    """

    target: str
    make: Callable[[Any], Any]
    why: str
    needed: Callable[[], bool] = _everywhere

    def owner(self) -> tuple[Any, str]:
        """The object that holds the attribute, and the attribute's name."""
        module_name, _, path = self.target.partition(":")
        holder: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            holder = getattr(holder, parent)
        return holder, name

    def current(self) -> Any:
        """The object in place now; `MISSING` if there is none."""
        holder, name = self.owner()
        # vars(), not getattr: what a class inherits must not be written back onto it.
        return vars(holder).get(name, MISSING)


@contextlib.contextmanager
def patched(shims: Iterable[Shim]) -> Iterator[None]:
    """Apply the shims that are needed here, and put back exactly what was there before."""
    resolved = [(shim, *shim.owner()) for shim in shims]  # imports first: they must see an unpatched torch
    with contextlib.ExitStack() as undo:
        for shim, holder, name in resolved:
            if shim.needed():
                original = shim.current()
                undo.callback(_restore, holder, name, original)
                setattr(holder, name, shim.make(None if original is MISSING else original))
        yield


def _restore(holder: Any, name: str, original: Any) -> None:
    if original is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, original)
