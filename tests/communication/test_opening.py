"""Which transport serves a group, what is said about it, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from primus_turbo_plugin.communication import opening
from primus_turbo_plugin.communication.costs import CHUNKS, MEASURED, Cut, best_cut, gemm_ms, pipeline_ms
from primus_turbo_plugin.communication.overlap import Overlap
from primus_turbo_plugin.communication.transports import engine_probe, shared_memory
from primus_turbo_plugin.communication.transports.base import Capabilities
from primus_turbo_plugin.communication.transports.device_api import device_api
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.precision.communication import Communication
from tests.support.distributed import RankInfo, ranks

CPU = torch.device("cpu")
H200 = MEASURED["sm90"]


def _opened(chosen: Communication) -> tuple[Overlap, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        overlap = opening.overlap_of(torch.distributed.group.WORLD, CPU, chosen)
    return overlap, said.getvalue()


@ranks(world_size=2)
def test_auto_is_shared_memory_on_a_cpu_and_opened_once(rank_info: RankInfo) -> None:
    overlap, said = _opened(Communication())
    assert isinstance(overlap.transport, SharedMemoryTransport)
    assert ("transport: shared_memory over 2 ranks, data moved by cpu threads" in said) == (rank_info.rank == 0)
    assert ("no costs have been measured for this device" in said) == (rank_info.rank == 0)
    again, said = _opened(Communication(gather=False))
    assert again is overlap
    assert said == ""
    other, _ = _opened(Communication(chunks=3, min_gemm_ms=0.0))
    assert other is not overlap
    assert other.chunks == 3
    opening.close_all()
    assert not opening._OPEN


@ranks(world_size=2)
def test_where_shared_memory_cannot_be_the_group_serves_and_the_reason_is_said(rank_info: RankInfo) -> None:
    shared_memory.socket.gethostname = lambda: f"host{rank_info.rank}"  # type: ignore[assignment]
    overlap, said = _opened(Communication())
    assert isinstance(overlap.transport, ProcessGroupTransport)
    if rank_info.rank == 0:
        assert "not chosen: shared_memory, because transport shared_memory: all ranks must be on one machine" in said
        assert "host0, host1" in said
    with pytest.raises(UnsupportedError, match="all ranks must be on one machine"):
        _opened(Communication(transport="shared_memory"))


@ranks(world_size=2)
def test_a_transport_that_is_named_is_used_or_an_error(rank_info: RankInfo) -> None:
    overlap, _ = _opened(Communication(transport="process_group"))
    assert isinstance(overlap.transport, ProcessGroupTransport)
    with pytest.raises(
        UnsupportedError, match=r"transport sdma: moves GPU tensors, not cpu. Set 'transport: shared_memory'"
    ):
        _opened(Communication(transport="sdma"))
    with pytest.raises(UnsupportedError, match="backend 'gloo' cannot move cuda tensors"):
        ProcessGroupTransport(torch.distributed.group.WORLD, torch.device("cuda", 0))


@ranks(world_size=2)
def test_a_full_shared_memory_is_refused_before_it_kills_the_process(rank_info: RankInfo) -> None:
    transport = SharedMemoryTransport(torch.distributed.group.WORLD, CPU)
    with pytest.raises(UnsupportedError, match=r"9,\d{3},.* bytes in .* cannot be had .*--shm-size"):
        transport.allocate(9 * 10**15)


@ranks(world_size=2, timeout_s=30)
def test_memory_that_one_rank_cannot_map_is_refused_on_all_and_no_file_stays(
    rank_info: RankInfo, tmp_path: Path
) -> None:
    """As in two containers of one host name, where the other's file is not there."""
    shared_memory._FOLDER = str(tmp_path)
    transport = SharedMemoryTransport(torch.distributed.group.WORLD, CPU)
    if rank_info.rank == 1:
        shared_memory._map = lambda path, nbytes: os.stat(f"{path}-elsewhere")  # type: ignore[assignment, return-value]
    with pytest.raises(UnsupportedError, match=r"rank 1 cannot map another rank's memory .*No such file"):
        transport.allocate(4096)
    torch.distributed.barrier()
    assert not list(tmp_path.iterdir())


@ranks(world_size=1)
def test_a_limit_in_ms_needs_measured_costs(rank_info: RankInfo) -> None:
    with pytest.raises(UnsupportedError, match=r"min_gemm_ms: 0.25 needs measured costs .*none for this cpu device"):
        _opened(Communication(min_gemm_ms=0.25))
    overlap, _ = _opened(Communication(min_gemm_ms=0.0))
    assert overlap.too_small(1, 1, 1) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_sdma_says_so() -> None:
    device_api.cache_clear()
    with pytest.raises(UnsupportedError, match=r"transport sdma: the CUDA driver cannot be used here .*libcuda"):
        device_api()


@pytest.mark.parametrize(
    ("comes_through", "engine"),
    [
        ([True], engine_probe.COPY_ENGINE),
        ([False, True], engine_probe.COMPUTE_UNITS),
        ([False, False], engine_probe.UNKNOWN),
    ],
)
def test_the_probe_trusts_itself_only_where_a_copy_from_the_host_comes_through(
    monkeypatch: pytest.MonkeyPatch, comes_through: list[bool], engine: str
) -> None:
    answers = iter(comes_through)
    monkeypatch.setattr(engine_probe, "_comes_through", lambda copy, device: next(answers))
    monkeypatch.setattr(engine_probe.torch, "ones", lambda *args, **kwargs: None)
    assert engine_probe.probe_engine(lambda stream: None, CPU) == engine
    assert next(answers, None) is None


def test_the_report_names_limits_and_their_source() -> None:
    class Fake:
        capabilities = Capabilities(name="sdma", device="cuda", one_sided=True, engine="copy engine", detail="how")
        world_size, rank = 2, 0

    overlap = Overlap(Fake(), costs=H200)  # type: ignore[arg-type]
    lines = opening.describe(overlap, None)
    assert lines[0] == "transport: sdma over 2 ranks, data moved by copy engine; how"
    assert f"GEMMs expected to take {H200.min_gemm_ms:g} ms or more" in lines[1]
    assert H200.source in lines[1]
    assert "in 2 chunk(s)" in opening.describe(Overlap(Fake(), costs=H200, chunks=2), "x, because y")[2]  # type: ignore[arg-type]


def test_gemms_below_the_measured_size_are_refused_with_both_numbers() -> None:
    class Fake:
        world_size, rank = 2, 0

    overlap = Overlap(Fake(), costs=H200)  # type: ignore[arg-type]
    assert overlap.too_small(8192, 14336, 4096) is None
    reason = overlap.too_small(512, 1024, 1024)
    assert reason is not None
    assert "is below min_gemm_ms 0.15" in reason
    assert Overlap(Fake(), costs=H200, min_gemm_ms=0.0).too_small(1, 1, 1) is None  # type: ignore[arg-type]
    assert Overlap(Fake()).too_small(1, 1, 1) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("k", "n"), [(8192, 1280), (4096, 3584)])
def test_a_gather_before_less_than_half_a_millisecond_of_gemm_is_one_chunk(k: int, n: int) -> None:
    gemm = gemm_ms(H200, 8192, n, k)
    assert gemm < H200.split_gemm_ms
    assert best_cut("gather", H200, gemm, 0.2, 2) == Cut()


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize("world_size", [2, 8])
def test_the_choice_is_the_models_best_and_copies_that_exceed_the_gemm_are_cut(kind: Any, world_size: int) -> None:
    for gemm, copy in ((1.25, 0.1), (1.0, 0.9), (3.0, 5.0)):
        cut = best_cut(kind, H200, gemm, copy, world_size)
        best = pipeline_ms(kind, H200, gemm, copy, world_size, cut)
        assert best <= min(pipeline_ms(kind, H200, gemm, copy, world_size, Cut(c)) for c in CHUNKS)
        assert best >= max(gemm, 0.0)
    assert best_cut("scatter", H200, 3.0, 5.0, 2).chunks > 1
    assert best_cut("scatter", None, 3.0, 5.0, 2) == Cut()


def test_senders_are_merged_where_their_rows_alone_would_not_fill_the_device() -> None:
    """8192 x 8192 x 1280 on eight ranks: 1024 rows x 1280 columns are a third of an H200's 132 tiles of 128 x 256."""
    gemm, copy = gemm_ms(H200, 8192, 1280, 8192), 8192 * 7 / 8 * 8192 * 2 / H200.copy_gb_s / 1e6
    cut = best_cut("gather", H200, gemm, copy, 8, outputs=8192 * 1280)
    assert cut.chunks == 1
    assert cut.merge > 1
    merged, apart = (pipeline_ms("gather", H200, gemm, copy, 8, c, outputs=8192 * 1280) for c in (cut, Cut()))
    assert merged < apart
    assert best_cut("gather", H200, 3.0, 5.0, 8, outputs=8192 * 57344).merge == 1  # waiting would cost more


def test_merging_all_senders_waits_for_the_last() -> None:
    gemm, copy = 1.0, 0.7
    costs = dataclasses.replace(H200, host_us=0.0, chunk_us=0.0)
    assert pipeline_ms("gather", costs, gemm, copy, 8, Cut(merge=7)) == pytest.approx(copy + gemm * 7 / 8)
    assert pipeline_ms("gather", costs, gemm, copy, 8, Cut(merge=3)) == pytest.approx(0.3 + gemm * 7 / 8)


def test_every_launch_costs_what_it_costs_however_many_senders_it_is_for() -> None:
    costs = dataclasses.replace(H200, host_us=0.0, chunk_us=10.0)
    for merge, launches in ((1, 7), (3, 3), (7, 1)):
        assert pipeline_ms("gather", costs, 1.0, 0.0, 8, Cut(merge=merge)) == pytest.approx(1.0 + launches * 0.01)
