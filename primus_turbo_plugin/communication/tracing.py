"""What happened when: every copy, GEMM and wait of the overlapped collectives of one process.

Marks are set where the work is done: events on the streams of a GPU, the clock of an engine thread on a CPU. A copy is *under
compute* while the compute lane of its own rank multiplies; what the caller computes between the two halves of a bulk collective
counts as compute too. `primus-turbo trace` turns on tracing through the environment and puts the ranks' files together.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from primus_turbo_plugin.communication.schedules.program import COMPUTE
from primus_turbo_plugin.errors import ConfigError

VARIABLE = "PRIMUS_TURBO_TRACE"
"""FOLDER or FOLDER:FIRST-LAST: trace optimizer steps FIRST to LAST (from 1) into the folder, one file a rank.

Read by the entry points, which hand its value to `trace_from_now_on`.
"""

Mark = Callable[[], float]
"""When something happened, in ms since the epoch; to be asked when all work is done."""


class _Clock(Protocol):
    """What a tracer needs of a transport."""

    capabilities: Any

    def mark(self, lane: int) -> Mark: ...


@dataclass(slots=True)
class _Piece:
    lane: int
    name: str
    start: Mark
    nbytes: int = 0
    end: Mark | None = None


@dataclass(slots=True)
class Span:
    """One collective."""

    label: str
    clock: _Clock
    pieces: list[_Piece] = field(default_factory=list)
    _whole: _Piece | None = None
    _callers: _Piece | None = None

    def __post_init__(self) -> None:
        two_sided = not self.clock.capabilities.one_sided
        self._whole = _Piece(0 if two_sided else COMPUTE, "exchange" if two_sided else "call", self.clock.mark(COMPUTE))
        self.pieces.append(self._whole)

    @contextlib.contextmanager
    def on(self, lane: int, name: str, nbytes: int) -> Iterator[None]:
        """Around a copy on a lane. Of a two-sided transport only the bytes are known here."""
        if not self.clock.capabilities.one_sided:
            assert self._whole is not None
            self._whole.nbytes += nbytes
            yield
            return
        piece = _Piece(lane, name, self.clock.mark(lane), nbytes)
        yield
        piece.end = self.clock.mark(lane)
        self.pieces.append(piece)

    @contextlib.contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Around a GEMM or a sum."""
        piece = _Piece(COMPUTE, name, self.clock.mark(COMPUTE))
        yield
        piece.end = self.clock.mark(COMPUTE)
        self.pieces.append(piece)

    def caller_computes(self) -> None:
        """Between the halves of a bulk collective."""
        self._callers = _Piece(COMPUTE, "caller's compute", self.clock.mark(COMPUTE))

    def caller_computed(self) -> None:
        if self._callers is not None:
            self._callers.end = self.clock.mark(COMPUTE)
            self.pieces.append(self._callers)

    def sends(self, nbytes: int) -> None:
        """What a library is given to send."""
        assert self._whole is not None
        self._whole.nbytes = nbytes

    def end(self) -> None:
        """The collective's result may be used."""
        assert self._whole is not None
        self._whole.end = self.clock.mark(COMPUTE)


class Tracer:
    """Collects spans while optimizer steps `first` ... `last` run, then writes them.

    Args:
        folder: For the files.
        first, last: Steps, from 1; both are traced.
    """

    def __init__(self, folder: Path, first: int = 2, last: int = 3) -> None:
        self.folder, self.first, self.last = folder, first, last
        self._step = 1
        self._optimizer: int | None = None
        self._spans: list[Span] = []
        self._handle = register_optimizer_step_post_hook(self._stepped)

    @property
    def is_on(self) -> bool:
        return self.first <= self._step <= self.last

    def begin(self, label: str, clock: _Clock) -> Span | None:
        """A collective begins; None outside the traced steps."""
        if not self.is_on:
            return None
        span = Span(label, clock)
        self._spans.append(span)
        return span

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = id(optimizer)
        if self._optimizer != id(optimizer):  # one of several that step together
            return
        self._step += 1
        if self._step == self.last + 1:
            self.write()

    def write(self) -> None:
        """One JSON file of this rank: a list of collectives with their pieces."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.folder.mkdir(parents=True, exist_ok=True)
        collectives = [
            {
                "label": span.label,
                "transport": span.clock.capabilities.name,
                "engine": span.clock.capabilities.engine,
                "pieces": [
                    {"lane": p.lane, "name": p.name, "start_ms": p.start(), "end_ms": p.end(), "bytes": p.nbytes}
                    for p in span.pieces
                    if p.end is not None
                ],
            }
            for span in self._spans
        ]
        content = json.dumps({"rank": rank, "steps": [self.first, self.last], "collectives": collectives})
        (self.folder / f"rank{rank}.json").write_text(content, encoding="utf-8")
        self._spans.clear()


class StreamClock:
    """Marks on the streams of a GPU, tied to the wall clock once.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        self._first.record()
        self._first.synchronize()
        self._epoch_ms = time.time() * 1e3

    def mark(self, stream: torch.cuda.Stream) -> Mark:
        """When everything issued on the stream so far was done."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return lambda: self._epoch_ms + self._first.elapsed_time(event)


@functools.cache
def stream_clock(device: torch.device) -> StreamClock:
    """The device's clock."""
    return StreamClock(device)


@dataclass(frozen=True, slots=True)
class _LibraryFacts:
    name: str
    engine: str
    one_sided: bool = False


class _LibraryClock:
    """Marks of a collective of the process group's library, as far as the caller's stream or thread sees it."""

    def __init__(self, backend: str, device: torch.device) -> None:
        self._device = device
        moves = "compute units" if device.type == "cuda" else "cpu threads"
        self.capabilities = _LibraryFacts(name=backend, engine=moves)

    def mark(self, lane: int) -> Mark:
        if self._device.type == "cuda":
            return stream_clock(self._device).mark(torch.cuda.current_stream(self._device))
        return host_mark()


def library_span(what: str, x: Tensor, group: dist.ProcessGroup) -> Span | None:
    """A collective of the group's library begins, and the caller computes until it waits; None where nothing is traced.

    Within a CUDA graph nothing is: its events have no time that could be read.
    """
    tracer = current_tracer()
    if tracer is None or not tracer.is_on:
        return None
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    shape = "x".join(map(str, x.shape))
    span = tracer.begin(f"{what} {shape}", _LibraryClock(dist.get_backend(group), x.device))
    if span is not None:
        span.sends(x.nbytes)
        span.caller_computes()
    return span


def host_mark() -> Mark:
    """Now, on the calling thread."""
    now = time.time() * 1e3
    return lambda: now


_CURRENT: list[Tracer] = []


def trace_from_now_on(value: str) -> None:
    """Makes the process's tracer, once; entry points pass the variable's value.

    Raises:
        ConfigError: The value is malformed.
    """
    if not _CURRENT:
        _CURRENT.append(parse(value))


def current_tracer() -> Tracer | None:
    """The process's tracer, if there is one."""
    return _CURRENT[0] if _CURRENT else None


def parse(value: str) -> Tracer:
    """The tracer that the variable's value describes; raises as `parse_value`."""
    return Tracer(*parse_value(value))


def parse_value(value: str) -> tuple[Path, int, int]:
    """Folder, first and last step.

    Raises:
        ConfigError: The value is malformed.
    """
    folder, colon, steps = value.rpartition(":")
    if not colon:
        return Path(value), 2, 3
    first, _, last = steps.partition("-")
    try:
        numbers = int(first), int(last or first)
    except ValueError:
        numbers = (0, 0)
    if not folder or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(
            f"{VARIABLE}={value}: must be FOLDER or FOLDER:FIRST-LAST with steps from 1, got steps {steps!r}."
        )
    return Path(folder), *numbers
