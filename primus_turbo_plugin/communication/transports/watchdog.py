"""Says which rank keeps this one's GPU waiting, and ends the process where it has waited too long.

A GPU that waits for a peer's signal waits without a limit, and its host may not notice: it stands in the next synchronisation.
This thread looks at how far the peers' flags have come while no call is issued. It reports ranks that are behind after `warn_s`,
again after twice as long each time, and after `limit_s` prints where every thread stands and exits, as process groups' watchdogs
do; the launcher then ends the other ranks. Replays of a CUDA graph are not seen.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from primus_turbo_plugin.communication.collectives import Group

WARN_S = 30.0
_DEFAULT_LIMIT_S = 600.0  # of process groups
_PATIENCE_S = 5.0  # with a look that is being taken


@dataclass(frozen=True, slots=True)
class Issued:
    """The last call on an arena.

    Attributes:
        value: Its sequence number.
        waits: (peer, flag) of all its waits.
        label: Its name.
    """

    value: int
    waits: tuple[tuple[int, int], ...]
    label: str


@dataclass(slots=True)
class _Watched:
    issued: Issued | None = None
    since: float = 0.0
    seen: tuple[int, ...] | None = None
    done: bool = False
    next_warning_s: float = 0.0


class Watchdog:
    """See the module's docstring.

    Args:
        rank: This one, in the group.
        ranks: Global ranks of the group's, as users know them.
        read: Flags of the waits of a call on arena number n, or None where they cannot be read now.
        limit_s: When to give up.
        warn_s: When to report first.
        give_up: Ends the process.
    """

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        read: Callable[[int, Issued], tuple[int, ...] | None],
        limit_s: float,
        *,
        warn_s: float = WARN_S,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        self._rank, self._ranks, self._read = rank, ranks, read
        self._limit_s, self._warn_s, self._give_up = limit_s, min(warn_s, limit_s), give_up or _exit
        self.issued: dict[int, Issued] = {}
        """By arena: the last call. The transport writes it; this thread only reads it."""
        self.lock = threading.Lock()
        """Held while flags are read: an arena must not be freed meanwhile."""
        self._watched: dict[int, _Watched] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turbo watchdog", daemon=True)

    def start(self) -> None:
        """Once; later calls cost nothing."""
        if self._thread.ident is None:
            atexit.register(self.stop)  # no call of the driver while the interpreter is taken down
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; it looks at nothing more."""
        self._stopped.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        while not self._stopped.wait(self._warn_s / 6):
            with self.lock:
                for arena, issued in list(self.issued.items()):
                    self.look(arena, issued, time.monotonic())

    def look(self, arena: int, issued: Issued, now: float) -> None:
        """Looks at one arena once."""
        watched = self._watched.setdefault(arena, _Watched())
        if watched.issued is not issued:  # the host is getting on
            self._watched[arena] = _Watched(issued, now, next_warning_s=self._warn_s)
            return
        if watched.done:
            return
        flags = self._read(arena, issued)
        if flags is not None and all(flag >= issued.value for flag in flags):
            watched.done = True
        elif flags is not None and flags != watched.seen:  # the GPU is getting on
            watched.seen, watched.since, watched.next_warning_s = flags, now, self._warn_s
        elif now - watched.since >= min(watched.next_warning_s, self._limit_s):
            self._report(issued, flags, now - watched.since)
            watched.next_warning_s *= 2

    def _report(self, issued: Issued, flags: tuple[int, ...] | None, waited_s: float) -> None:
        print(f"primus-turbo: {self.describe(issued, flags, waited_s)}", file=sys.stderr, flush=True)
        if waited_s >= self._limit_s:
            self._give_up()

    def describe(self, issued: Issued, flags: tuple[int, ...] | None, waited_s: float) -> str:
        """Who is missing, in words."""
        what = f"rank {self._ranks[self._rank]}: {issued.label or 'an overlapped collective'}"
        if flags is None:
            return (
                f"{what} has not ended for {waited_s:.0f} s, and its signals cannot be read: the GPU's queues are full. "
                "With CUDA_DEVICE_MAX_CONNECTIONS=1 they are one; unset it."
            )
        reached = [(flag, peer) for (peer, _), flag in zip(issued.waits, flags, strict=True) if flag < issued.value]
        last = min(flag for flag, _ in reached)
        missing = sorted({self._ranks[peer] for flag, peer in reached if flag == last})
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        end = ""
        if waited_s >= self._limit_s:
            end = " That is the process group's timeout, so this process ends (--distributed-timeout-minutes sets it)."
        return (
            f"{what} has waited {waited_s:.0f} s for {names}, last heard of {issued.value - last} call(s) before this one. "
            f"Look for the first error there, or for what keeps it (a checkpoint, an evaluation, a breakpoint).{end}"
        )


def group_timeout_s(group: Group) -> float:
    """How long the group's own collectives wait."""
    try:
        backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
        return float(backend.options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend that does not tell
        return _DEFAULT_LIMIT_S


def _exit() -> None:
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(1)
