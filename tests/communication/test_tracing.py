"""Marks of real copies and GEMMs: in order, complete, of the traced steps only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication import tracing
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.tracing import Tracer, parse_value
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.diagnostics.trace.analysis import read_ranks, rows
from primus_turbo_plugin.errors import ConfigError
from tests.support.distributed import RankInfo, ranks


@ranks(world_size=2)
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_copies_under_the_callers_compute_are_seen(rank_info: RankInfo, transport: str, tmp_path: Path) -> None:
    """A bulk gather under 300 ms of compute is hidden, also on a busy machine; the same gather waited for at once is not."""
    kind = SharedMemoryTransport if transport == "shared_memory" else ProcessGroupTransport
    tracer = Tracer(tmp_path, first=2, last=2)
    overlap = Overlap(kind(torch.distributed.group.WORLD, torch.device("cpu")), tracer=tracer)
    step = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step
    x = torch.ones(2000, 500)

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        out.copy_(planes[0][:, :1])

    for number in (1, 2, 3):
        torch.distributed.barrier()
        pending = overlap.start_gather(Payload.plain(x), label=f"layers.{number}.hidden")
        time.sleep(0.3)
        pending.wait()
        overlap.gather_gemm(Payload.plain(x), multiply, torch.empty(4000, 1), 500, label="fused")
        step()
        other()
    torch.distributed.barrier()
    found = {row.name: row for row in rows(read_ranks(tmp_path))}
    assert set(found) == {"layers.*.hidden", "fused"}
    assert all(row.calls == 1 for row in found.values())
    assert found["layers.*.hidden"].hidden > 0.9
    assert found["fused"].copy_ms > 0
    assert found["layers.*.hidden"].nbytes == found["fused"].nbytes == x.nbytes
    content = json.loads((tmp_path / "rank1.json").read_text())
    assert [c["label"] for c in content["collectives"]] == ["layers.2.hidden", "fused"]
    for collective in content["collectives"]:
        for piece in collective["pieces"]:
            assert piece["start_ms"] <= piece["end_ms"]
    names = {p["name"] for c in content["collectives"] for p in c["pieces"]}
    assert {"gemm", "caller's compute"} <= names


@pytest.mark.parametrize(
    ("value", "expected"),
    [("out", ("out", 2, 3)), ("/a/b:4-7", ("/a/b", 4, 7)), ("x:5", ("x", 5, 5))],
)
def test_the_variable_is_read(value: str, expected: tuple[str, int, int]) -> None:
    folder, first, last = parse_value(value)
    assert (str(folder), first, last) == expected


@pytest.mark.parametrize("value", ["out:0-2", "out:3-2", "out:a-b", ":2-3"])
def test_a_malformed_variable_is_named(value: str) -> None:
    with pytest.raises(ConfigError, match="PRIMUS_TURBO_TRACE="):
        parse_value(value)


def test_the_library_is_not_traced_in_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock of a stream would synchronise, which a capture forbids, and its events have no time."""
    monkeypatch.setattr(tracing, "_CURRENT", [Tracer(tmp_path, first=1, last=1)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = SimpleNamespace(device=torch.device("cuda", 0), shape=(2, 2), nbytes=8)
    assert tracing.library_span("all_gather", x, None) is None  # type: ignore[arg-type]


@ranks(world_size=2)
def test_collectives_of_the_library_are_traced_too(rank_info: RankInfo, tmp_path: Path) -> None:
    """So that a run without overlap shows what there is to hide."""
    from primus_turbo_plugin.communication import tracing
    from primus_turbo_plugin.communication.collectives import all_gather, all_reduce, reduce_scatter

    group = torch.distributed.group.WORLD
    all_gather(torch.ones(4, 2), group).wait()  # before there is a tracer
    tracing.trace_from_now_on(f"{tmp_path}:1")
    tracing.trace_from_now_on("elsewhere")  # the first counts
    pending = reduce_scatter(torch.ones(4, 2), group)
    time.sleep(0.02)
    pending.wait()
    all_gather(torch.ones(3, 2), group).wait()
    all_reduce(torch.ones(5), group).wait()
    tracer = tracing.current_tracer()
    assert tracer is not None
    tracer.write()
    torch.distributed.barrier()
    found = {row.name: row for row in rows(read_ranks(tmp_path))}
    assert set(found) == {"reduce_scatter 4x2", "all_gather 3x2", "all_reduce 5"}
    assert found["reduce_scatter 4x2"].hidden > 0.5
    assert found["all_gather 3x2"].nbytes == 24
    assert {row.transport for row in found.values()} == {"gloo"}
