"""CPU processes of one machine: memory they all map, filled by engine threads. The schedules of GPUs run on it for real.

Files live in /dev/shm (where there is one) only until every rank has mapped them, so that nothing is left behind by a process
that dies. Flags are 8-byte words, written after the data by the same thread; taking and releasing a lock on either side keeps the
two in order on processors that would reorder them.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import COMPUTE, Put
from primus_turbo_plugin.communication.tracing import Mark, host_mark
from primus_turbo_plugin.communication.transports.base import (
    FLAG_SETS,
    MAX_FLAGS,
    Arena,
    Capabilities,
    Transport,
    as_bytes,
)
from primus_turbo_plugin.communication.transports.engines import Engine, spin_until
from primus_turbo_plugin.errors import UnsupportedError

_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


@dataclass(slots=True)
class SharedArena(Arena):
    """Every rank's memory and flags as this process sees them.

    Attributes:
        data: By rank, uint8 [nbytes].
        flags: By rank, int64 [FLAG_SETS * world_size * MAX_FLAGS], see `_word`.
    """

    data: list[Tensor] = field(default_factory=list)
    flags: list[Tensor] = field(default_factory=list)


class SharedMemoryTransport(Transport):
    """See the module's docstring.

    Args:
        group: The ranks; all on one machine.
        device: The CPU.
        limit_s: How long to wait for another rank before saying so.
    """

    def __init__(self, group: Group, device: torch.device, *, limit_s: float = 300.0) -> None:
        super().__init__(group, device)
        hosts: list[str] = [""] * self.world_size
        dist.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1:
            raise UnsupportedError(
                f"transport shared_memory: all ranks must be on one machine, got {', '.join(sorted(set(hosts)))}. "
                "Set 'transport: process_group'."
            )
        self.limit_s = limit_s
        self._fence = threading.Lock()
        self._engines: list[Engine] = []
        self.capabilities = Capabilities(
            name="shared_memory",
            device="cpu",
            one_sided=True,
            engine="cpu threads",
            detail=f"one-sided puts into memory mapped from {_FOLDER}",
        )

    def allocate(self, nbytes: int) -> SharedArena:
        flag_bytes = 8 * FLAG_SETS * self.world_size * MAX_FLAGS
        failure, own = "", ""
        try:
            own = self._create(flag_bytes + nbytes)
        except UnsupportedError as error:
            failure = str(error)
        try:
            files = self._agreed(own, failure)
            maps, failure = [], ""
            try:
                maps = [torch.frombuffer(_map(file, flag_bytes + nbytes), dtype=torch.uint8) for file in files]
            except OSError as error:  # containers of one name, each with a folder of its own
                failure = (
                    f"transport shared_memory: rank {self.rank} cannot map another rank's memory in {_FOLDER} "
                    f"({error.strerror}). Let all ranks share that folder, or set 'transport: process_group'."
                )
            self._agreed("", failure)  # everyone has mapped everything
        finally:  # also where another rank has died meanwhile
            if own:
                os.unlink(own)
        data = [m[flag_bytes:] for m in maps]
        flags = [m[:flag_bytes].view(torch.int64) for m in maps]
        return SharedArena(mine=data[self.rank], nbytes=nbytes, data=data, flags=flags)

    def _agreed(self, own: str, failure: str) -> list[str]:
        """What every rank has to say; a failure of one is raised on all, so that none waits for it."""
        told: list[tuple[str, str]] = [("", "")] * self.world_size
        dist.all_gather_object(told, (own, failure), group=self.group)
        failures = [text for _, text in told if text]
        if failures:
            raise UnsupportedError(failures[0])
        return [file for file, _ in told]

    def _create(self, nbytes: int) -> str:
        """A file of zeros; reserved now, since a full /dev/shm would kill the process at its first write."""
        handle, path = tempfile.mkstemp(prefix="turbo-arena-", dir=_FOLDER)
        try:
            os.posix_fallocate(handle, 0, nbytes)
        except OSError as error:
            os.unlink(path)
            raise UnsupportedError(
                f"transport shared_memory: {nbytes:,} bytes in {_FOLDER} cannot be had ({error.strerror}). Give the container "
                "more (docker run --shm-size=2g), or set 'transport: process_group'."
            ) from error
        finally:
            os.close(handle)
        return path

    def release(self, arena: Arena) -> None:
        assert isinstance(arena, SharedArena)
        dist.barrier(group=self.group)
        arena.data.clear()
        arena.flags.clear()

    def _engine(self, lane: int) -> Engine:
        while len(self._engines) <= lane:
            self._engines.append(Engine(f"turbo copy lane {len(self._engines)}"))
        return self._engines[lane]

    def fork(self, arena: Arena, lane: int) -> None:
        """Nothing to do: what this thread has computed is there."""

    def join(self, arena: Arena, lane: int) -> None:
        self._engine(lane).join_lane()

    def put(self, arena: Arena, op: Put, pieces: Sequence[tuple[int, Tensor]]) -> None:
        assert isinstance(arena, SharedArena)
        target = arena.data[op.peer]

        def copy() -> None:
            for offset, source in pieces:
                target[offset : offset + source.nbytes].copy_(as_bytes(source))

        self._engine(op.lane).give(f"turbo put to rank {op.peer}", copy)

    def signal(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, SharedArena)
        flags, index = arena.flags[peer], self._word(self.rank, flag)

        def raise_flag() -> None:
            with self._fence:
                pass
            flags[index] = value

        self._engine(lane).give("turbo signal", raise_flag)

    def wait(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, SharedArena)
        flags, index = arena.flags[self.rank], self._word(peer, flag)

        def reached() -> bool:
            for (
                engine
            ) in self._engines:  # a lane that failed sends nothing: the peers would wait for us, and we for them
                engine.raise_failure()
            return int(flags[index]) >= value

        def wait_for_flag() -> None:
            what = f"rank {self.rank}: signal {value} of rank {peer} (flag {flag})"
            spin_until(reached, self.limit_s, what)
            with self._fence:
                pass

        if lane == COMPUTE:
            wait_for_flag()
        else:
            self._engine(lane).give(f"turbo wait for rank {peer}", wait_for_flag)

    def clear(self, arena: Arena, flag_set: int) -> None:
        assert isinstance(arena, SharedArena)
        of_a_set = self.world_size * MAX_FLAGS
        arena.flags[self.rank][flag_set * of_a_set : (flag_set + 1) * of_a_set] = 0

    def _word(self, writer: int, flag: int) -> int:
        """Index of a flag among those of the rank that it tells something: the sets one after the other, in each the writers."""
        flag_set, flag = divmod(flag, MAX_FLAGS)
        return (flag_set * self.world_size + writer) * MAX_FLAGS + flag

    def mark(self, lane: int) -> Mark:
        if lane == COMPUTE:
            return host_mark()
        seen: list[Mark] = []
        self._engine(lane).give("turbo mark", lambda: seen.append(host_mark()))
        return lambda: seen[0]()

    def close(self) -> None:
        for engine in self._engines:
            engine.stop()
        self._engines.clear()


def _map(path: str, nbytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)
