"""The overlap of a group, opened at its first use and shared by all layers of the group.

Which transport serves is decided by one rule, and said on rank 0 when it is decided:

    named in the configuration    that one, or an error with its reason
    auto, GPUs                    sdma; where it refuses on any rank, process_group on all
    auto, CPU processes           shared_memory; where it refuses on any rank, process_group on all

Every rank says what it lacks before one of them opens anything, and each later step that can fail on one rank is answered for by
all, so that all decide alike and none waits for another. The decision stays for the job: memory that cannot be had later, for
larger tensors, is an error on all ranks, not a change of transport.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # torch.compiler.disable would import dynamo at once, a second of start-up

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.costs import Costs, costs_of
from primus_turbo_plugin.communication.overlap import Overlap
from primus_turbo_plugin.communication.tracing import current_tracer
from primus_turbo_plugin.communication.transports.base import Capabilities, Transport
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.sdma import SdmaTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.precision.communication import Communication

_KINDS: Mapping[str, type[Transport]] = {
    "sdma": SdmaTransport,
    "shared_memory": SharedMemoryTransport,
    "process_group": ProcessGroupTransport,
}
_OPEN: dict[tuple[object, ...], tuple[Group, Overlap]] = {}
_NOTED: set[tuple[str, str]] = set()


@_disable_dynamo
def overlap_of(group: Group, device: torch.device, chosen: Communication) -> Overlap:
    """The overlapped collectives of a group. Collective at its first call for these arguments, and never traced by torch.compile.

    Args:
        group: The ranks; more than one.
        device: Of the tensors.
        chosen: Transport, chunks, smallest GEMM.

    Raises:
        UnsupportedError: The transport or the limit asked for cannot be had.
    """
    key = (id(group), device, chosen.transport, chosen.min_gemm_ms, chosen.chunks, chosen.ring)
    if key not in _OPEN:
        costs = costs_of(device)
        if costs is None and chosen.min_gemm_ms:
            raise UnsupportedError(
                f"communication.min_gemm_ms: {chosen.min_gemm_ms:g} needs measured costs of the device to tell how long a GEMM "
                f"will take, and there are none for this {device.type} device. Leave it out, or name layers in except_for."
            )
        transport, refused = _open(group, device, chosen.transport)
        overlap = Overlap(
            transport,
            costs=costs,
            min_gemm_ms=chosen.min_gemm_ms,
            chunks=chosen.chunks,
            ring=chosen.ring,
            tracer=current_tracer(),
        )
        _say(
            "\n".join(f"  {line}" for line in ["primus-turbo: tensor-parallel overlap", *describe(overlap, refused)])[
                2:
            ]
        )
        _OPEN[key] = group, overlap  # the group is kept, so that its id is not given to another
    return _OPEN[key][1]


def close_all() -> None:
    """Stops the lanes of every transport; for tests and for the end of a process."""
    for _, overlap in _OPEN.values():
        overlap.transport.close()
    _OPEN.clear()


def describe(overlap: Overlap, refused: str | None) -> list[str]:
    """The lines of the start-up report."""
    has: Capabilities = overlap.transport.capabilities
    lines = [f"transport: {has.name} over {overlap.world_size} ranks, data moved by {has.engine}; {has.detail}"]
    if refused is not None:
        lines.append(f"not chosen: {refused}")
    lines.append(_limits(overlap, overlap.costs))
    return lines


def _limits(overlap: Overlap, costs: Costs | None) -> str:
    if costs is None:
        return f"overlapped: every GEMM, in {overlap.chunks or 1} chunk(s); no costs have been measured for this device"
    chunks = f"{overlap.chunks} chunk(s)" if overlap.chunks else "as many chunks as measured costs say"
    return f"overlapped: GEMMs expected to take {overlap.min_gemm_ms:g} ms or more, in {chunks} ({costs.source})"


def note_not_overlapped(what: str, why: str) -> None:
    """Says once on rank 0 what is not overlapped though overlap is on."""
    if (what, why) not in _NOTED:
        _NOTED.add((what, why))
        _say(f"primus-turbo: tensor-parallel overlap: {what} is not overlapped: {why}")


def _open(group: Group, device: torch.device, name: str) -> tuple[Transport, str | None]:
    first = name
    if name == "auto":
        first = "sdma" if device.type == "cuda" else "shared_memory"
    try:
        _refuse_together(group, _KINDS[first].local_refusal(device))
        return _KINDS[first](group, device), None
    except UnsupportedError as error:
        if name != "auto":
            raise
        return ProcessGroupTransport(group, device), f"{first}, because {error}"


def _refuse_together(group: Group, refusal: str | None) -> None:
    """Raises on all ranks what one of them lacks."""
    told: list[str | None] = [None] * group.size()
    dist.all_gather_object(told, refusal, group=group)
    refusals: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text:
            refusals.setdefault(text, []).append(dist.get_global_rank(group, rank))
    if refusals:
        raise UnsupportedError("; ".join(f"{text} (rank {_listed(ranks)})" for text, ranks in refusals.items()))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)
