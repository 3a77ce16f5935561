"""How long a call takes on a GPU, with nothing found in its caches and no launch gaps counted.

Calls go round over several input sets inside one CUDA graph, so that each finds its inputs out of the cache; a replay is timed
with events. A call that cannot be captured is launched one by one, the cache overwritten before each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_MIN_CALLS = 6
_GRAPH_US = 4000.0
"""A graph of fewer calls is long enough, once it takes so many microseconds: launch gaps no longer count."""
_CACHE_EXCEEDING_BYTES = 1 << 29


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Times of one candidate in microseconds.

    Attributes:
        us: Median.
        low: 20th percentile.
        high: 80th percentile.
    """

    us: float
    low: float
    high: float

    @classmethod
    def of(cls, times: list[float]) -> Sample:
        """Of single measurements, at least one."""
        ordered = sorted(times)
        count = len(ordered)
        return cls(us=ordered[count // 2], low=ordered[count // 5], high=ordered[min(count * 4 // 5, count - 1)])


def sets_for(num_bytes: int) -> int:
    """How many input sets of this size exceed any GPU's caches several times."""
    return max(2, -(-_CACHE_EXCEEDING_BYTES // max(num_bytes, 1)))


class Stopwatch:
    """Times one function; made once, read as often as wanted.

    Args:
        function: Called with the number of an input set.
        num_sets: How many there are.
    """

    def __init__(self, function: Callable[[int], object], num_sets: int) -> None:
        self._function, self._num_sets = function, num_sets
        self._calls = num_sets * max(1, -(-self._least_calls() // num_sets))
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        self._kept: list[object] = []  # outputs stay, so that they rotate as well, up to a limit
        try:
            with torch.cuda.graph(self._graph):
                for call in range(self._calls):
                    output = function(call % num_sets)
                    if isinstance(output, torch.Tensor) and output.nbytes * len(self._kept) < _CACHE_EXCEEDING_BYTES:
                        self._kept.append(output)
        except RuntimeError:
            torch.cuda.synchronize()
            self._graph, self._kept = None, []

    def _least_calls(self) -> int:
        """Calls of a graph, from the time of warm ones."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._function(0)
        start.record()
        for index in range(self._num_sets):
            self._function(index)
        end.record()
        torch.cuda.synchronize()
        us = max(1e3 * start.elapsed_time(end) / self._num_sets, 1.0)
        return max(1, min(_MIN_CALLS, round(_GRAPH_US / us)))

    @property
    def is_graph(self) -> bool:
        """Whether calls are replayed from a graph; otherwise they are launched one by one."""
        return self._graph is not None

    def read(self, repeats: int) -> list[float]:
        """So many measurements, microseconds a call."""
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            if self._graph is not None:
                start.record()
                self._graph.replay()
            else:
                _flush_cache()
                start.record()
                self._function(0)
            end.record()
        torch.cuda.synchronize()
        calls = self._calls if self._graph is not None else 1
        return [1e3 * start.elapsed_time(end) / calls for start, end in pairs]


def _flush_cache() -> None:
    torch.empty(_CACHE_EXCEEDING_BYTES, dtype=torch.uint8, device="cuda").zero_()
