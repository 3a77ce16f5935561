"""What a transport offers to the executor of a schedule.

A transport serves one group of ranks. Lanes are numbered from 0; `COMPUTE` (-1) is where the caller's GEMMs run: the current
stream of a GPU, or this thread on a CPU. All ranks make the collective calls (`allocate`, `release`, `close`) in one order.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import Buffer, Put
from primus_turbo_plugin.communication.tracing import Mark, host_mark

if TYPE_CHECKING:
    from primus_turbo_plugin.communication.plan import Call, Step

MAX_FLAGS = 64
"""Flags between two ranks, in each set: 16 ranks of a ring with 4 chunks each."""
FLAG_SETS = 4
"""Flag f of set s is number s * MAX_FLAGS + f; the executor says what the sets are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a transport is.

    Attributes:
        name: `sdma`, `process_group`, `shared_memory`.
        device: `cuda` or `cpu`; of the tensors it moves.
        one_sided: Rows arrive without the receiver's doing.
        engine: What moves the data, as found out by running it where that can differ: `copy engine`, `compute units`...
        detail: How it does it, for the start-up report.
    """

    name: str
    device: str
    one_sided: bool
    engine: str
    detail: str


@dataclass(slots=True)
class Arena:
    """Memory that peers write into, and the flags that tell of it.

    Attributes:
        mine: This rank's, uint8 [nbytes].
        nbytes: The same on every rank.
    """

    mine: Tensor
    nbytes: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Rows that a peer will put into this rank's slot.

    Attributes:
        sender: The peer.
        put: Its operation; its `flag` and `round` are known to both sides.
        pieces: Where they go, one piece a plane.
    """

    sender: int
    put: Put
    pieces: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a call is going to do, for a transport that must know it beforehand.

    Attributes:
        expected: What peers will put into this rank's slot (two-sided transports only).
        puts: What this rank will put (the same).
        waits: (peer, flag) of every wait on a number that only grows.
    """

    expected: tuple[Expected, ...]
    puts: tuple[Put, ...]
    waits: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The rows of one plane that a put moves.

    Attributes:
        buffer, plane: Of the call's tensors, the one they are of.
        rows: First and last + 1, of the plane.
        source: Byte offset in that tensor.
        nbytes: How many bytes.
        target: Byte offset in the peer's arena.
    """

    buffer: Buffer
    plane: int
    rows: tuple[int, int]
    source: int
    nbytes: int
    target: int


class Transport(abc.ABC):
    """See the module's docstring. The `..._step` methods make steps of a plan; a transport may have quicker ones.

    Args:
        group: The ranks.
        device: Of the tensors.
    """

    capabilities: Capabilities

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = group.rank(), group.size()

    @staticmethod
    def local_refusal(device: torch.device) -> str | None:
        """Why this process cannot use it, as far as it can tell without the others; asked of all ranks before one opens it."""
        return None

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Arena:
        """Memory of `nbytes` on every rank. Collective.

        Raises:
            UnsupportedError: There is none to be had; says why, and what to do.
        """

    @abc.abstractmethod
    def release(self, arena: Arena) -> None:
        """Frees it, once no rank uses it any more. Collective."""

    def capture_id(self) -> int:
        """A number of the CUDA graph that is being captured on the current stream; 0 where none is.

        Raises:
            UnsupportedError: One is, and this transport cannot be captured.
        """
        return 0

    def begin(self, arena: Arena, value: int, exchange: Exchange, label: str) -> None:  # noqa: B027
        """A call begins: its sequence number, what it will do, and its name for messages."""

    def resume(self, arena: Arena) -> None:  # noqa: B027
        """The second half of a call begins, maybe on another thread or stream than the first."""

    @abc.abstractmethod
    def fork(self, arena: Arena, lane: int) -> None:
        """The lane waits for what has been issued on compute."""

    @abc.abstractmethod
    def join(self, arena: Arena, lane: int) -> None:
        """Compute waits for what has been issued on the lane."""

    @abc.abstractmethod
    def put(self, arena: Arena, op: Put, pieces: Sequence[tuple[int, Tensor]]) -> None:
        """Copies contiguous tensors to byte offsets of the peer's arena, on the operation's lane."""

    @abc.abstractmethod
    def signal(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        """Raises a flag of the peer, after everything issued on the lane before."""

    @abc.abstractmethod
    def wait(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        """The lane (or `COMPUTE`) waits until the flag that `peer` raises has reached `value`."""

    def clear(self, arena: Arena, flag_set: int) -> None:
        """Zeroes this rank's flags of a set, after what has been issued on compute, into which every lane has been joined."""
        raise NotImplementedError(f"{self.capabilities.name} cannot be captured")

    def fork_step(self, arena: Arena, lanes: tuple[int, ...]) -> Step:
        """`fork` of several lanes at the same point of compute."""

        def step(call: Call) -> None:
            for lane in lanes:
                self.fork(arena, lane)

        return step

    def join_step(self, arena: Arena, lane: int) -> Step:
        return lambda call: self.join(arena, lane)

    def put_step(self, arena: Arena, op: Put, pieces: tuple[Piece, ...]) -> Step:
        def step(call: Call) -> None:
            self.put(arena, op, [(p.target, call.planes[p.buffer][p.plane][slice(*p.rows)]) for p in pieces])

        return step

    def signal_step(self, arena: Arena, lane: int, peer: int, flag: int) -> Step:
        return lambda call: self.signal(arena, lane, peer, flag, call.value)

    def wait_step(self, arena: Arena, lane: int, peer: int, flag: int) -> Step:
        return lambda call: self.wait(arena, lane, peer, flag, call.value)

    def mark(self, lane: int) -> Mark:
        """When everything issued on the lane so far was done."""
        return host_mark()

    def settle(self) -> None:  # noqa: B027
        """Host work at the end of a call, when every lane has been joined."""

    def close(self) -> None:  # noqa: B027
        """Stops threads and frees what is not an arena's."""


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [nbytes]."""
    return t.reshape(-1).view(torch.uint8)
