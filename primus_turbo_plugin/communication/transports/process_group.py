"""Any process group (gloo, NCCL, RCCL): the puts of a round become one batch of sends and receives.

Two-sided, so a round travels once all of its rows exist on this rank and every rank has come to it. A message's arrival is its
signal. On GPUs the library's own kernels move the data, on the compute units they take from the GEMMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.schedules.program import Put
from primus_turbo_plugin.communication.tracing import Mark, host_mark, stream_clock
from primus_turbo_plugin.communication.transports.base import Arena, Capabilities, Exchange, Transport, as_bytes
from primus_turbo_plugin.errors import UnsupportedError

_MAX_ROUNDS = 256


@dataclass(slots=True)
class _Round:
    """Puts of one round as they are collected, what will arrive in it, and the transfers once they are under way."""

    missing: int = 0
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)
    works: list[dist.Work] | None = None


@dataclass(slots=True)
class RoundsArena(Arena):
    """An arena, and the rounds of its present call.

    Attributes:
        tag: Of its messages, so that calls on several arenas may be under way at once.
        rounds: By number.
        round_of: (sender, flag) -> the round that brings its rows.
    """

    tag: int
    rounds: dict[int, _Round] = field(default_factory=dict)
    round_of: dict[tuple[int, int], int] = field(default_factory=dict)


class ProcessGroupTransport(Transport):
    """See the module's docstring."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group, device)
        backend = dist.get_backend(group)
        known = "nccl" in backend if device.type == "cuda" else "gloo" in backend
        if not known:
            raise UnsupportedError(
                f"transport process_group: the group's backend {backend!r} cannot move {device.type} tensors. "
                "Use gloo on a CPU and nccl (which is RCCL on AMD) on GPUs."
            )
        self._arenas = 0
        self.capabilities = Capabilities(
            name="process_group",
            device=device.type,
            one_sided=False,
            engine="cpu threads" if device.type == "cpu" else "compute units",
            detail=f"batches of sends and receives through {backend}",
        )

    def allocate(self, nbytes: int) -> RoundsArena:
        self._arenas += 1
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return RoundsArena(mine=memory, nbytes=nbytes, tag=self._arenas * _MAX_ROUNDS)

    def release(self, arena: Arena) -> None:
        arena.mine = arena.mine.new_empty(0)

    def capture_id(self) -> int:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "transport process_group: the overlapped collectives of a process group cannot be captured in a CUDA graph. "
                "Set 'transport: sdma', or turn CUDA graphs or 'tp_overlap' off."
            )
        return 0

    def begin(self, arena: Arena, value: int, exchange: Exchange, label: str) -> None:
        assert isinstance(arena, RoundsArena)
        arena.rounds, arena.round_of = {}, {}
        for put in exchange.puts:
            if put.peer != self.rank:
                arena.rounds.setdefault(put.round, _Round()).missing += 1
        for arriving in exchange.expected:
            of = arena.rounds.setdefault(arriving.put.round, _Round())
            of.receives += [(arriving.sender, piece) for piece in arriving.pieces]
            arena.round_of[arriving.sender, arriving.put.flag] = arriving.put.round

    def put(self, arena: Arena, op: Put, pieces: Sequence[tuple[int, Tensor]]) -> None:
        if op.peer == self.rank:
            for offset, source in pieces:
                arena.mine[offset : offset + source.nbytes].copy_(as_bytes(source))
            return
        assert isinstance(arena, RoundsArena)
        of = arena.rounds[op.round]
        of.sends += [(op.peer, as_bytes(source)) for _, source in pieces]
        of.missing -= 1
        if not of.missing:
            self._post(arena, op.round)

    def _post(self, arena: RoundsArena, number: int) -> None:
        of, tag = arena.rounds[number], arena.tag + number
        ranks = dist.get_process_group_ranks(self.group)
        batch = [dist.P2POp(dist.isend, t, ranks[peer], self.group, tag) for peer, t in of.sends]
        batch += [dist.P2POp(dist.irecv, as_bytes(t), ranks[peer], self.group, tag) for peer, t in of.receives]
        of.works = dist.batch_isend_irecv(batch) if batch else []

    def fork(self, arena: Arena, lane: int) -> None:
        """Nothing to do: a batch starts after what was issued on the current stream."""

    def signal(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        """Nothing to do: the message is the signal."""

    def wait(self, arena: Arena, lane: int, peer: int, flag: int, value: int) -> None:
        assert isinstance(arena, RoundsArena)
        number = arena.round_of.get((peer, flag))
        if number is None:
            return  # no rows come with this flag
        of = arena.rounds[number]
        if of.works is None:
            assert not of.missing, (number, of.missing)
            self._post(arena, number)  # nothing to send in this round
        _finish(of)

    def mark(self, lane: int) -> Mark:
        if self.device.type == "cuda":
            return stream_clock(self.device).mark(torch.cuda.current_stream(self.device))
        return host_mark()

    def join(self, arena: Arena, lane: int) -> None:
        """The sends too must be over before the caller may write to their rows."""
        assert isinstance(arena, RoundsArena)
        for of in arena.rounds.values():
            _finish(of)


def _finish(of: _Round) -> None:
    """Waits for the round's transfers; once only, since gloo would wait for a second message."""
    works, of.works = of.works, []
    for work in works or ():
        work.wait()
