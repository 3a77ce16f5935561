"""GPUs of one node: copy engines push rows straight into peers' memory, and no compute unit is taken from the GEMMs.

A lane is a stream. A put is one asynchronous copy per plane; a signal is a stream's write of a word behind it, or a copy of 4
bytes from a table of sequence numbers where such writes would be kernels; a wait is a stream operation on a word of this rank's
own memory, or a kernel of one wave where the driver has none. Nothing here makes the host wait.

Which engine moves the data is not assumed: see `engine_probe.py`. A rank that waits for another's signal for long says so: see
`watchdog.py`.

The steps of a plan hold addresses and raw streams and call the driver directly, so that the host is not what limits an overlapped
call. All of it may be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import COMPUTE, Put
from primus_turbo_plugin.communication.tracing import Mark, stream_clock
from primus_turbo_plugin.communication.transports.base import (
    FLAG_SETS,
    MAX_FLAGS,
    Arena,
    Capabilities,
    Exchange,
    Piece,
    Transport,
)
from primus_turbo_plugin.communication.transports.device_api import current_stream_handle, device_api
from primus_turbo_plugin.communication.transports.engine_probe import probe_engine
from primus_turbo_plugin.communication.transports.peer_memory import (
    PeerMemory,
    allocate_ipc,
    allocate_symmetric,
    free,
    symmetric_memory_refusal,
)
from primus_turbo_plugin.communication.transports.watchdog import WARN_S, Issued, Watchdog, group_timeout_s
from primus_turbo_plugin.errors import UnsupportedError

if TYPE_CHECKING:
    from primus_turbo_plugin.communication.plan import Call, Step

_FLAG_BYTES = 64  # a cache line each: words that are written from different ranks share none
_TABLE = 1 << 16
_PATIENCE, _PAUSE_S = 200, 0.01  # of the watchdog with a copy of the flags


@dataclass(slots=True)
class PeerArena(Arena):
    """An arena whose memory peers know.

    Attributes:
        memory: The allocation: flags first, then the data.
        flag_bytes: Size of the flags.
        numbers: Table of the sequence numbers from `base` on, for signals to copy from.
        one: Holds 1, for those that a graph replays.
    """

    memory: PeerMemory
    flag_bytes: int
    numbers: Tensor
    one: Tensor
    base: int = 0


class SdmaTransport(Transport):
    """See the module's docstring.

    Args:
        group: The ranks, on one node.
        device: This rank's GPU.
        memory: `symmetric`, `ipc`, or None for the first that works.
        signal_by: `copy` (4 bytes behind the data) or `write` (a stream's write-value operation); None takes the driver's
            quicker one, and `copy` where it cannot write to a peer.
        probe: Find out which engine moves the data; False says `not probed`.
        limit_s: How long to wait for another rank before the process ends; None takes the group's timeout.
        warn_s: How long before it is said.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        memory: Literal["symmetric", "ipc"] | None = None,
        signal_by: Literal["copy", "write"] | None = None,
        probe: bool = True,
        limit_s: float | None = None,
        warn_s: float = WARN_S,
    ) -> None:
        super().__init__(group, device)
        if (reason := self.local_refusal(device)) is not None:
            raise UnsupportedError(reason)
        self.api = device_api()
        self.signal_by = signal_by or self.api.signal_by
        refusal = None if memory == "ipc" else symmetric_memory_refusal(group, device)
        if memory == "symmetric" and refusal is not None:
            raise UnsupportedError(f"transport sdma: torch's symmetric memory: {refusal}. Use memory 'ipc'.")
        self._symmetric = memory != "ipc" and refusal is None
        self._waits_in_stream = self.api.can_wait(device.index or 0)
        self._compute = torch.cuda.current_stream(device)
        self._lanes: list[torch.cuda.Stream] = []
        self._forks: list[torch.cuda.Event] = []
        self._joins: list[torch.cuda.Event] = []
        self._arenas: dict[int, PeerArena] = {}
        self._watchdog = Watchdog(
            self.rank,
            dist.get_process_group_ranks(group),
            self._read_flags,
            group_timeout_s(group) if limit_s is None else limit_s,
            warn_s=warn_s,
        )
        self._side: tuple[torch.cuda.Stream, Tensor] | None = None  # of the watchdog
        where = "torch symmetric memory" if self._symmetric else f"IPC memory{f' ({refusal})' if refusal else ''}"
        waits = "stream wait-value" if self._waits_in_stream else "a one-wave kernel"
        self.capabilities = Capabilities(
            name="sdma",
            device="cuda",
            one_sided=True,
            engine=self._probe() if probe else "not probed",
            detail=f"{self.api.copy_detail} into {where}; signals by {self.signal_by}, waits by {waits}",
        )

    @staticmethod
    def local_refusal(device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"transport sdma: moves GPU tensors, not {device.type}. Set 'transport: shared_memory'."
        try:
            device_api()
        except UnsupportedError as error:
            return str(error)
        return None

    def _probe(self) -> str:
        """Of a copy to the right neighbour. Collective."""
        if importlib.util.find_spec("triton") is None:
            return "an engine that was not asked for, since Triton is missing"
        arena = self.allocate(1 << 22)
        peer = (self.rank + 1) % self.world_size
        source = torch.ones(1 << 22, dtype=torch.uint8, device=self.device)
        target = arena.memory.addresses[peer] + arena.flag_bytes

        def copy(stream: int) -> None:
            self.api.copy(target, source.data_ptr(), source.nbytes, stream)

        try:
            engine = probe_engine(copy, self.device)
        except (RuntimeError, UnsupportedError) as error:  # the others must not wait for this rank
            engine = f"an engine that could not be found out ({str(error).splitlines()[0]})"
        self.release(arena)
        found: list[str] = [""] * self.world_size
        dist.all_gather_object(found, engine, group=self.group)
        return " / ".join(sorted(set(found)))

    def allocate(self, nbytes: int) -> PeerArena:
        flag_bytes = FLAG_SETS * self.world_size * MAX_FLAGS * _FLAG_BYTES
        total = flag_bytes + nbytes
        if self._symmetric:
            memory = allocate_symmetric(total, self.group, self.device)
        else:
            memory = allocate_ipc(total, self.group, self.device, self.api)
        numbers = torch.arange(_TABLE, dtype=torch.int32, device=self.device)
        arena = PeerArena(
            mine=memory.mine[flag_bytes:],
            nbytes=nbytes,
            memory=memory,
            flag_bytes=flag_bytes,
            numbers=numbers,
            one=numbers[1:2].clone(),
        )
        self._arenas[id(arena)] = arena
        if self.signal_by == "write":
            self._try_to_write(arena)
        return arena

    def _try_to_write(self, arena: PeerArena) -> None:
        """A word that this rank alone writes and that is 0 already."""
        last = self._word(self.rank, FLAG_SETS * MAX_FLAGS - 1)
        stream = self._lane(0).cuda_stream
        try:
            for address in arena.memory.addresses:
                self.api.write(stream, address + last, 0)
        except UnsupportedError:
            self.signal_by = "copy"

    def release(self, arena: Arena) -> None:
        assert isinstance(arena, PeerArena)
        torch.cuda.synchronize(self.device)  # watched still: a peer may keep this GPU waiting
        with self._watchdog.lock:
            self._watchdog.issued.pop(id(arena), None)
            del self._arenas[id(arena)]
        free(arena.memory, self.group, self.api)

    def capture_id(self) -> int:
        if not torch.cuda.is_current_stream_capturing():
            return 0
        return self.api.capture_id(torch.cuda.current_stream(self.device).cuda_stream)

    def begin(self, arena: Arena, value: int, exchange: Exchange, label: str) -> None:
        """The table moves on with the numbers: on compute, while no lane copies from it."""
        assert isinstance(arena, PeerArena)
        self._follow()
        if value - arena.base >= _TABLE:
            arena.numbers += _TABLE
            arena.base += _TABLE
        if exchange.waits:
            self._watchdog.start()
            self._watchdog.issued[id(arena)] = Issued(value, exchange.waits, label)

    def close(self) -> None:
        self._watchdog.stop()

    def _read_flags(self, number: int, issued: Issued) -> tuple[int, ...] | None:
        """By the watchdog's thread, past whatever the GPU waits for; None if that takes seconds."""
        if self._side is None:
            torch.cuda.set_device(self.device)
            self.api.leave_captures_alone()
            nbytes = self.world_size * MAX_FLAGS * _FLAG_BYTES
            self._side = torch.cuda.Stream(self.device), torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        (stream, host), arena = self._side, self._arenas[number]
        self.api.download(host.data_ptr(), arena.memory.addresses[self.rank], host.nbytes, stream.cuda_stream)
        for _ in range(_PATIENCE):
            if stream.query():
                words = host.view(torch.int32)
                return tuple(int(words[self._word(peer, flag) // 4]) for peer, flag in issued.waits)
            time.sleep(_PAUSE_S)
        return None

    def resume(self, arena: Arena) -> None:
        self._follow()

    def _follow(self) -> None:
        """The caller may have gone to another stream; its calls stay in order all the same. A capture has none before it."""
        if current_stream_handle(self.device) != self._compute.cuda_stream:
            now = torch.cuda.current_stream(self.device)
            if not torch.cuda.is_current_stream_capturing():
                now.wait_stream(self._compute)
            self._compute = now

    def _lane(self, lane: int) -> torch.cuda.Stream:
        while len(self._lanes) <= lane:
            self._lanes.append(torch.cuda.Stream(self.device, priority=-1))
            self._forks.append(torch.cuda.Event())
            self._joins.append(torch.cuda.Event())
        return self._lanes[lane]

    def _stream(self, lane: int) -> torch.cuda.Stream:
        return self._compute if lane == COMPUTE else self._lane(lane)

    def fork(self, arena: Arena, lane: int) -> None:
        self.fork_step(arena, (lane,))(None)  # type: ignore[arg-type]

    def join(self, arena: Arena, lane: int) -> None:
        self.join_step(arena, lane)(None)  # type: ignore[arg-type]

    def fork_step(self, arena: Arena, lanes: tuple[int, ...]) -> Step:
        """One mark on compute, for which every lane waits."""
        streams, event = [self._lane(lane) for lane in lanes], self._forks[lanes[0]]

        def step(call: Call) -> None:
            event.record(self._compute)
            for stream in streams:
                stream.wait_event(event)

        return step

    def join_step(self, arena: Arena, lane: int) -> Step:
        stream, event = self._lane(lane), self._joins[lane]

        def step(call: Call) -> None:
            event.record(stream)
            self._compute.wait_event(event)

        return step

    def put(self, arena: Arena, op: Put, pieces: Sequence[tuple[int, Tensor]]) -> None:
        assert isinstance(arena, PeerArena)
        base, stream = arena.memory.addresses[op.peer] + arena.flag_bytes, self._lane(op.lane).cuda_stream
        for offset, source in pieces:
            if source.nbytes:
                self.api.copy(base + offset, source.data_ptr(), source.nbytes, stream)

    def put_step(self, arena: Arena, op: Put, pieces: tuple[Piece, ...]) -> Step:
        assert isinstance(arena, PeerArena)
        copy, stream = self.api.copy, self._lane(op.lane).cuda_stream
        base = arena.memory.addresses[op.peer] + arena.flag_bytes
        found = [(p.plane, base + p.target, p.source, p.nbytes) for p in pieces if p.nbytes]
        buffer = op.source.buffer

        def step(call: Call) -> None:
            planes = call.planes[buffer]
            for plane, target, source, nbytes in found:
                copy(target, planes[plane].data_ptr() + source, nbytes, stream)

        return step

    def signal(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, PeerArena)
        target, stream = arena.memory.addresses[peer] + self._word(self.rank, flag), self._lane(lane).cuda_stream
        if self.signal_by == "write":
            self.api.write(stream, target, value)
        elif flag >= MAX_FLAGS:
            self.api.copy(target, arena.one.data_ptr(), 4, stream)
        else:
            self.api.copy(target, arena.numbers.data_ptr() + 4 * (value - arena.base), 4, stream)

    def signal_step(self, arena: Arena, lane: int, peer: int, flag: int) -> Step:
        assert isinstance(arena, PeerArena)
        target, stream = arena.memory.addresses[peer] + self._word(self.rank, flag), self._lane(lane).cuda_stream
        write, copy, numbers, one = self.api.write, self.api.copy, arena.numbers.data_ptr(), arena.one.data_ptr()
        if self.signal_by == "write":
            return lambda call: write(stream, target, call.value)
        if flag >= MAX_FLAGS:  # not one of those that count
            return lambda call: copy(target, one, 4, stream)
        return lambda call: copy(target, numbers + 4 * (call.value - arena.base), 4, stream)

    def wait(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, PeerArena)
        offset, stream = self._word(peer, flag), self._stream(lane)
        if self._waits_in_stream:
            self.api.wait_at_least(stream.cuda_stream, arena.memory.addresses[self.rank] + offset, value)
            return
        from primus_turbo_plugin.kernels.triton.wait_flag import wait_at_least

        with torch.cuda.stream(stream):
            wait_at_least(arena.memory.mine[offset : offset + 4].view(torch.int32), value)

    def wait_step(self, arena: Arena, lane: int, peer: int, flag: int) -> Step:
        assert isinstance(arena, PeerArena)
        if not self._waits_in_stream:
            return lambda call: self.wait(arena, lane, peer, flag, call.value)
        wait, address = self.api.wait_at_least, arena.memory.addresses[self.rank] + self._word(peer, flag)
        if lane == COMPUTE:
            return lambda call: wait(self._compute.cuda_stream, address, call.value)
        stream = self._lane(lane).cuda_stream
        return lambda call: wait(stream, address, call.value)

    def clear(self, arena: Arena, flag_set: int) -> None:
        assert isinstance(arena, PeerArena)
        of_a_set = self.world_size * MAX_FLAGS * _FLAG_BYTES
        arena.memory.mine[flag_set * of_a_set : (flag_set + 1) * of_a_set].zero_()

    def _word(self, writer: int, flag: int) -> int:
        """Byte offset of a flag in the arena of the rank that it tells something: set after set, in each the writers."""
        flag_set, flag = divmod(flag, MAX_FLAGS)
        return ((flag_set * self.world_size + writer) * MAX_FLAGS + flag) * _FLAG_BYTES

    def mark(self, lane: int) -> Mark:
        return stream_clock(self.device).mark(self._stream(lane))
