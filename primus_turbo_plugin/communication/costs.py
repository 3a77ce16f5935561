"""When to overlap, and in how many chunks: a model of the pipeline, fed with measured costs.

The costs are data, one row a device, with where they come from. A device without a row is not guessed at: it overlaps every
GEMM, in one chunk, and the start-up report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from primus_turbo_plugin.devices import detect

CHUNKS = (1, 2, 4)
"""What is considered; more launches than this cost the host more than any of the shapes measured can win."""

Kind = Literal["gather", "scatter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What one device has been measured to cost.

    Attributes:
        gemm_tflops: Of a large BF16 GEMM.
        copy_gb_s: Bytes a rank receives a second while copy engines push.
        memory_gb_s: Of the device's own memory, read plus written.
        chunk_us: What a GEMM loses each time it is cut (launch, last wave).
        host_us: Host time of one operation of a schedule.
        split_gemm_ms: Below so much GEMM one chunk is best.
        min_gemm_ms: Below so much GEMM nothing has been won.
        wave_outputs: Elements of a result that fill the device once: compute units times a tile.
        switched: Peers are behind a switch: puts to one peer after the other, each at full speed.
        source: Of the numbers.
    """

    gemm_tflops: float
    copy_gb_s: float
    memory_gb_s: float
    chunk_us: float
    host_us: float
    split_gemm_ms: float
    min_gemm_ms: float
    wave_outputs: int
    switched: bool
    source: str


MEASURED: Mapping[str, Costs] = {
    "sm90": Costs(
        gemm_tflops=750.0,
        copy_gb_s=350.0,
        memory_gb_s=4200.0,
        chunk_us=8.0,
        host_us=8.0,
        split_gemm_ms=0.5,
        min_gemm_ms=0.15,
        wave_outputs=132 * 128 * 256,
        switched=True,
        source="2 H200, torch 2.11, BF16: 8192 tokens, GEMMs of 0.16 to 1.25 ms; nothing smaller was measured",
    ),
}


def costs_of(device: torch.device) -> Costs | None:
    """The measured costs of this process's device."""
    return None if device.type == "cpu" else MEASURED.get(detect().capabilities.arch)


def gemm_ms(costs: Costs, rows: int, columns: int, contraction: int) -> float:
    """Expected time of a GEMM."""
    return 2e-9 * rows * columns * contraction / costs.gemm_tflops


@dataclass(frozen=True, slots=True)
class Cut:
    """How a collective and its GEMM are cut.

    Attributes:
        chunks: Pieces that each rank's rows travel in.
        add: The GEMM adds what has arrived (scatter, of two ranks).
        merge: How many senders' rows are multiplied at once (gather, in one chunk).
    """

    chunks: int = 1
    add: bool = False
    merge: int = 1


def pipeline_ms(
    kind: Kind, costs: Costs, gemm: float, copy: float, world_size: int, cut: Cut, *, outputs: float = math.inf
) -> float:
    """Expected time of an overlapped collective.

    Args:
        kind: All-gather before the GEMM, or reduce-scatter after it.
        costs: Of the device.
        gemm: Time of the whole GEMM, ms.
        copy: Time of all copies into one rank, ms.
        world_size: Ranks.
        cut: Into which pieces.
        outputs: Elements of the whole GEMM's result. One that does not fill the device takes as long as one that does.
    """
    remote = (world_size - 1) * cut.chunks
    least = gemm * costs.wave_outputs / outputs if outputs else 0.0
    share, launch, transfer = gemm / world_size / cut.chunks, costs.chunk_us / 1e3, copy / remote
    own, piece = max(gemm / world_size, least), max(share, least) + launch
    now = 0.0
    if kind == "gather":
        now = own
        for last in range(cut.merge - 1, remote + cut.merge - 1, cut.merge):
            arrived = min(last, remote - 1)
            senders = cut.merge - (last - arrived)
            now = max(now, (arrived + 1) * transfer) + max(senders * share, least) + launch
        launches = -(-remote // cut.merge)
    else:
        lane, arrivals = 0.0, []
        for _ in range(remote):
            now += piece
            lane = max(lane, now) + transfer
            arrivals.append(lane)
        if cut.add:
            for chunk in range(cut.chunks):
                now = max(now, arrivals[chunk]) + piece
        else:
            part = copy / (world_size - 1) * costs.copy_gb_s / costs.memory_gb_s
            now = max(now + own, lane) + (world_size + 1) * part  # the sum reads every rank's part and writes one
        launches = remote
    host = costs.host_us * (6 * world_size + 2 * remote + 2 * launches) / 1e3
    return max(now, host)


def best_cut(
    kind: Kind,
    costs: Costs | None,
    gemm: float,
    copy: float,
    world_size: int,
    *,
    can_add: bool = False,
    outputs: float = math.inf,
) -> Cut:
    """The quickest cut by the model; one chunk without measured costs. Arguments as above; `can_add`: whether the GEMM may."""
    if costs is None or world_size == 1:
        return Cut()
    if kind == "gather":
        cuts = [Cut(merge=merge) for merge in range(1, world_size)]
        cuts += [Cut(chunks) for chunks in CHUNKS[1:] if gemm >= costs.split_gemm_ms]
    else:
        cuts = [
            Cut(chunks, add) for chunks in CHUNKS for add in ((False, True) if can_add and chunks > 1 else (False,))
        ]
    return min(cuts, key=lambda cut: pipeline_ms(kind, costs, gemm, copy, world_size, cut, outputs=outputs))
