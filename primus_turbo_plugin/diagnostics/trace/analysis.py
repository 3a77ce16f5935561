"""From the ranks' files to numbers: how long each collective's copies took, and how much of that lay under compute."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primus_turbo_plugin.communication.schedules.program import COMPUTE
from primus_turbo_plugin.errors import ConfigError

Interval = tuple[float, float]
_WHOLE = "call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One kind of collective, over all traced steps and ranks; layers that differ in their number only are one kind.

    Attributes:
        name: Which layer and GEMM.
        calls: How many a rank.
        copy_ms: Time that data was on its way, a call; copies that ran at once count once.
        nbytes: Sent by a rank, a call.
        hidden: Share of that time during which the rank's compute lane was busy.
        exposed_ms: The rest, a call.
        engine: What moved the data.
        transport: By which transport.
    """

    name: str
    calls: float
    copy_ms: float
    nbytes: float
    hidden: float
    exposed_ms: float
    engine: str
    transport: str


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The files that traced processes have left, by rank.

    Raises:
        ConfigError: There are none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
    if not found:
        raise ConfigError(
            f"trace: no process has written into {folder}. Either the run ended before the last traced step, or it has no "
            "overlapped collective: turn them on with --tp-comm-overlap or 'communication: {tp_overlap: true}', and see the "
            "start-up report."
        )
    return sorted(found, key=lambda rank: rank["rank"])


def rows(ranks: Sequence[dict[str, Any]]) -> list[Row]:
    """One row a kind of collective, in the order they first ran on the first rank."""
    seen: dict[str, list[tuple[float, float, float, str, str]]] = {}
    for rank in ranks:
        busy = merged(piece for c in rank["collectives"] for piece in c["pieces"] if _is_compute(piece))
        for collective in rank["collectives"]:
            copies = [piece for piece in collective["pieces"] if piece["lane"] != COMPUTE]
            spans = merged(copies)
            total = sum(b - a for a, b in spans)
            facts = (total, common(spans, busy), sum(p["bytes"] for p in copies))
            name = re.sub(r"\blayers\.\d+\.", "layers.*.", collective["label"])
            seen.setdefault(name, []).append((*facts, collective["engine"], collective["transport"]))
    return [_row(name, calls, len(ranks)) for name, calls in seen.items()]


def _row(name: str, calls: list[tuple[float, float, float, str, str]], num_ranks: int) -> Row:
    count, copy_ms, hidden_ms = len(calls), sum(c[0] for c in calls), sum(c[1] for c in calls)
    return Row(
        name=name,
        calls=count / num_ranks,
        copy_ms=copy_ms / count,
        nbytes=sum(c[2] for c in calls) / count,
        hidden=hidden_ms / copy_ms if copy_ms else 1.0,
        exposed_ms=(copy_ms - hidden_ms) / count,
        engine=" / ".join(sorted({c[3] for c in calls})),
        transport=" / ".join(sorted({c[4] for c in calls})),
    )


def merged(pieces: Iterable[dict[str, Any]]) -> list[Interval]:
    """The time that any of the pieces covers, as intervals in order that do not touch."""
    result: list[Interval] = []
    for start, end in sorted((piece["start_ms"], piece["end_ms"]) for piece in pieces):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def common(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """How much time lies in both."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def _is_compute(piece: dict[str, Any]) -> bool:
    return piece["lane"] == COMPUTE and piece["name"] != _WHOLE


def table(found: Sequence[Row]) -> str:
    """The rows as text, and a line that sums them up."""
    head = ("collective", "calls", "MB", "copy ms", "under compute", "exposed ms", "moved by", "transport")
    cells = [
        (
            row.name,
            f"{row.calls:g}",
            f"{row.nbytes / 1e6:.2f}",
            f"{row.copy_ms:.3f}",
            f"{row.hidden:.0%}",
            f"{row.exposed_ms:.3f}",
            row.engine,
            row.transport,
        )
        for row in found
    ]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in (head, *cells)]
    copy = sum(row.calls * row.copy_ms for row in found)
    exposed = sum(row.calls * row.exposed_ms for row in found)
    lines.append(f"all: {copy:.2f} ms of copies a rank, {1 - exposed / copy if copy else 1:.0%} under compute")
    return "\n".join(lines)


def chrome_trace(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Events for chrome://tracing or Perfetto: one process a rank, one line a lane, one range a copy, GEMM and collective."""
    pieces = [piece for rank in ranks for c in rank["collectives"] for piece in c["pieces"]]
    zero = min((piece["start_ms"] for piece in pieces), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        lanes = {piece["lane"] for c in rank["collectives"] for piece in c["pieces"]}
        events.append(
            {"name": "process_name", "ph": "M", "pid": rank["rank"], "args": {"name": f"rank {rank['rank']}"}}
        )
        for lane in sorted(lanes):
            name = "compute" if lane == COMPUTE else f"copy lane {lane}"
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank["rank"], "tid": lane + 1, "args": {"name": name}}
            )
        for collective in rank["collectives"]:
            for piece in collective["pieces"]:
                whole = piece["name"] == _WHOLE
                events.append(
                    {
                        "name": collective["label"] if whole else f"{piece['name']} ({collective['label']})",
                        "cat": collective["transport"],
                        "ph": "X",
                        "pid": rank["rank"],
                        "tid": piece["lane"] + 1,
                        "ts": (piece["start_ms"] - zero) * 1e3,
                        "dur": (piece["end_ms"] - piece["start_ms"]) * 1e3,
                        "args": {"bytes": piece["bytes"], "engine": collective["engine"]},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
