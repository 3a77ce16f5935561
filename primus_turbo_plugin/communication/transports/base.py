"""What a transport offers to the executor of a schedule.

A transport serves one group of ranks. Lanes are numbered from 0; `COMPUTE` (-1) is where the caller's GEMMs run: the current
stream of a GPU, or this thread on a CPU. All ranks make the collective calls (`allocate`, `release`, `close`) in one order.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import Put
from primus_turbo_plugin.communication.tracing import Mark, host_mark

MAX_FLAGS = 64
"""Flags between two ranks: 16 ranks of a ring with 4 chunks each."""


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


class Transport(abc.ABC):
    """See the module's docstring.

    Args:
        group: The ranks.
        device: Of the tensors.
    """

    capabilities: Capabilities

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.world_size = group.rank(), group.size()

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Arena:
        """Memory of `nbytes` on every rank. Collective.

        Raises:
            UnsupportedError: There is none to be had; says why, and what to do.
        """

    @abc.abstractmethod
    def release(self, arena: Arena) -> None:
        """Frees it, once no rank uses it any more. Collective."""

    def begin(self, arena: Arena, value: int, expected: Sequence[Expected], puts: Sequence[Put]) -> None:  # noqa: B027
        """A call begins: its sequence number; for a two-sided transport, what will arrive and what this rank will put."""

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
