"""Engine threads: the copy lanes of a CPU process. Each does what it is given in order, while the caller computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
from torch.profiler import record_function

from primus_turbo_plugin.errors import UnsupportedError


class Engine(threading.Thread):
    """One lane. Copies release the interpreter's lock, so they run beside the caller's GEMMs.

    Args:
        name: Of the thread, as profilers show it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.start()

    @torch.no_grad()  # modes are a thread's own
    def run(self) -> None:
        while (item := self._work.get()) is not None:
            label, action = item
            try:
                if self._failure is None:
                    with record_function(label):
                        action()
                elif label == _JOIN:
                    action()  # whoever waits must not wait for ever
            except BaseException as failure:
                self._failure = failure

    def give(self, label: str, action: Callable[[], None]) -> None:
        """Queues an action."""
        self._work.put((label, action))

    def join_lane(self) -> None:
        """Returns when everything queued is done; raises what went wrong in it."""
        done = threading.Event()
        self.give(_JOIN, done.set)
        done.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what has gone wrong on this lane, if anything has."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._work.put(None)
        self.join()


_JOIN = "join"


def spin_until(reached: Callable[[], bool], limit_s: float, what: str) -> None:
    """Waits for another process, politely: cores may be fewer than processes.

    Raises:
        UnsupportedError: Nothing came for `limit_s`: the other rank has failed, or makes other calls than this one.
    """
    start, pause = time.monotonic(), 0.0
    while not reached():
        time.sleep(pause)
        pause = min(pause + 2e-5, 1e-3)
        if time.monotonic() - start > limit_s:
            raise UnsupportedError(
                f"{what} did not come within {limit_s:g} s. Another rank has failed or is at another collective; "
                "look for the first error of the other ranks."
            )
