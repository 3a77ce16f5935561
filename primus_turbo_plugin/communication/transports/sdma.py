"""GPUs of one node: copy engines push rows straight into peers' memory, and no compute unit is taken from the GEMMs.

A lane is a stream. A put is one asynchronous copy per plane; a signal is a copy of 4 bytes behind it, from a table of sequence
numbers, so that it takes the same way; a wait is a stream operation on a word of this rank's own memory, or a kernel of one wave
where the driver has none. Nothing here makes the host wait.

Which engine moves the data is not assumed: see `engine_probe.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import COMPUTE, Put
from primus_turbo_plugin.communication.tracing import Mark, stream_clock
from primus_turbo_plugin.communication.transports.base import MAX_FLAGS, Arena, Capabilities, Expected, Transport
from primus_turbo_plugin.communication.transports.device_api import device_api
from primus_turbo_plugin.communication.transports.engine_probe import probe_engine
from primus_turbo_plugin.communication.transports.peer_memory import (
    PeerMemory,
    allocate_ipc,
    allocate_symmetric,
    free,
    symmetric_memory_refusal,
)
from primus_turbo_plugin.errors import UnsupportedError

_FLAG_BYTES = 64  # a cache line each: words that are written from different ranks share none
_TABLE = 1 << 16


@dataclass(slots=True)
class PeerArena(Arena):
    """An arena whose memory peers know.

    Attributes:
        memory: The allocation: flags first, then the data.
        flag_bytes: Size of the flags.
        numbers: Table of the sequence numbers from `base` on, for signals to copy from.
    """

    memory: PeerMemory
    flag_bytes: int
    numbers: Tensor
    base: int = 0


class SdmaTransport(Transport):
    """See the module's docstring.

    Args:
        group: The ranks, on one node.
        device: This rank's GPU.
        memory: `symmetric`, `ipc`, or None for the first that works.
        signal_by: `copy` (4 bytes behind the data) or `write` (a stream's write-value operation).
        probe: Find out which engine moves the data; False says `not probed`.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        *,
        memory: Literal["symmetric", "ipc"] | None = None,
        signal_by: Literal["copy", "write"] = "copy",
        probe: bool = True,
    ) -> None:
        super().__init__(group, device)
        if device.type != "cuda":
            raise UnsupportedError(
                f"transport sdma: moves GPU tensors, not {device.type}. Set 'transport: shared_memory'."
            )
        self.api, self.signal_by = device_api(), signal_by
        refusal = None if memory == "ipc" else symmetric_memory_refusal(group, device)
        if memory == "symmetric" and refusal is not None:
            raise UnsupportedError(f"transport sdma: torch's symmetric memory: {refusal}. Use memory 'ipc'.")
        self._symmetric = memory != "ipc" and refusal is None
        self._waits_in_stream = self.api.can_wait(device.index or 0)
        self._compute = torch.cuda.current_stream(device)  # asked once a call: it costs as much as an operation
        self._lanes: list[torch.cuda.Stream] = []
        self._forks: list[torch.cuda.Event] = []
        self._joins: list[torch.cuda.Event] = []
        where = "torch symmetric memory" if self._symmetric else f"IPC memory{f' ({refusal})' if refusal else ''}"
        waits = "stream wait-value" if self._waits_in_stream else "a one-wave kernel"
        self.capabilities = Capabilities(
            name="sdma",
            device="cuda",
            one_sided=True,
            engine=self._probe() if probe else "not probed",
            detail=f"{self.api.copy_detail} into {where}; waits by {waits}",
        )

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

        engine = probe_engine(copy, self.device)
        self.release(arena)
        found: list[str] = [""] * self.world_size
        dist.all_gather_object(found, engine, group=self.group)
        return " / ".join(sorted(set(found)))

    def allocate(self, nbytes: int) -> PeerArena:
        flag_bytes = self.world_size * MAX_FLAGS * _FLAG_BYTES
        total = flag_bytes + nbytes
        if self._symmetric:
            memory = allocate_symmetric(total, self.group, self.device)
        else:
            memory = allocate_ipc(total, self.group, self.device, self.api)
        numbers = torch.arange(_TABLE, dtype=torch.int32, device=self.device)
        return PeerArena(
            mine=memory.mine[flag_bytes:], nbytes=nbytes, memory=memory, flag_bytes=flag_bytes, numbers=numbers
        )

    def release(self, arena: Arena) -> None:
        assert isinstance(arena, PeerArena)
        free(arena.memory, self.group, self.api)

    def begin(self, arena: Arena, value: int, expected: Sequence[Expected], puts: Sequence[Put]) -> None:
        """The table moves on with the numbers: on compute, while no lane copies from it."""
        assert isinstance(arena, PeerArena)
        self._follow()
        if value - arena.base >= _TABLE:
            arena.numbers += _TABLE
            arena.base += _TABLE

    def resume(self, arena: Arena) -> None:
        self._follow()

    def _follow(self) -> None:
        """The caller may have gone to another stream; its calls stay in order all the same."""
        now = torch.cuda.current_stream(self.device)
        if now != self._compute:
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
        stream = self._lane(lane)
        self._forks[lane].record(self._compute)
        stream.wait_event(self._forks[lane])

    def join(self, arena: Arena, lane: int) -> None:
        self._joins[lane].record(self._lane(lane))
        self._compute.wait_event(self._joins[lane])

    def put(self, arena: Arena, op: Put, pieces: Sequence[tuple[int, Tensor]]) -> None:
        assert isinstance(arena, PeerArena)
        base, stream = arena.memory.addresses[op.peer] + arena.flag_bytes, self._lane(op.lane).cuda_stream
        for offset, source in pieces:
            if source.nbytes:
                self.api.copy(base + offset, source.data_ptr(), source.nbytes, stream)

    def signal(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, PeerArena)
        target = arena.memory.addresses[peer] + (self.rank * MAX_FLAGS + flag) * _FLAG_BYTES
        stream = self._lane(lane).cuda_stream
        if self.signal_by == "write":
            self.api.write(stream, target, value)
        else:
            self.api.copy(target, arena.numbers.data_ptr() + 4 * (value - arena.base), 4, stream)

    def wait(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, PeerArena)
        offset = (peer * MAX_FLAGS + flag) * _FLAG_BYTES
        stream = self._stream(lane)
        if self._waits_in_stream:
            self.api.wait_at_least(stream.cuda_stream, arena.memory.addresses[self.rank] + offset, value)
            return
        from primus_turbo_plugin.kernels.triton.wait_flag import wait_at_least

        with torch.cuda.stream(stream):
            wait_at_least(arena.memory.mine[offset : offset + 4].view(torch.int32), value)

    def mark(self, lane: int) -> Mark:
        return stream_clock(self.device).mark(self._stream(lane))
