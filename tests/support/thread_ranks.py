"""Ranks of a ring as threads of one process and one device: messages go through mailboxes.

What real processes cannot do: many ranks in no time, and a GPU's kernels under a ring on a machine with one GPU. Engines are
called directly, since autograd has one backward thread a device, and ranks would wait for each other in it.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Pending, ready
from primus_turbo_plugin.functional.context_parallel import ring

_TIMEOUT_S = 60.0


class ThreadGroup:
    """What an engine asks of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def run_thread_ranks(monkeypatch: pytest.MonkeyPatch, size: int, body: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`body(group)` on every rank; the results in rank order, or the first failure."""
    boxes: dict[tuple[int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
    lock = threading.Lock()

    def box(sender: int, receiver: int) -> queue.Queue[Tensor]:
        with lock:
            return boxes[sender, receiver]

    def exchange(sent: Any, receiver: int, received: Any, sender: int, group: ThreadGroup) -> Pending[Any]:
        if sent is not None and sent.numel():
            box(group.rank(), receiver).put(sent.clone())
        if received is None or not received.numel():
            return ready(received)

        def finish() -> Tensor:
            arrived = box(sender, group.rank()).get(timeout=_TIMEOUT_S)
            assert arrived.shape == received.shape, "both ends must have the same message in mind"
            return received.copy_(arrived)

        return Pending(finish)

    monkeypatch.setattr(ring, "exchange", exchange)
    monkeypatch.setattr(ring, "connect", lambda group, device: None)
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = body(ThreadGroup(rank, size))
        except BaseException as failure:
            results[rank] = failure

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise next((f for f in failures if not isinstance(f, queue.Empty)), failures[0])
    return results
