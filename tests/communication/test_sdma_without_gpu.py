"""The sdma transport's own logic in real CPU processes: streams are threads, peers' memory is mapped, copies are memmove.

What only a GPU can show (a copy engine that moves data, a stream that waits) is in tests/distributed/test_overlap_sdma.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import tempfile
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.communication import opening
from primus_turbo_plugin.communication.overlap import Overlap, Payload
from primus_turbo_plugin.communication.transports import peer_memory, sdma, watchdog
from primus_turbo_plugin.communication.transports.engines import Engine, spin_until
from primus_turbo_plugin.errors import UnsupportedError
from tests.support.distributed import RankInfo, ranks

K = 16


class _Stream:
    """A lane is an engine thread; the caller's stream is its thread."""

    by_handle: dict[int, _Stream] = {}  # noqa: RUF012

    def __init__(self, *_: Any, engine: bool = True, priority: int = 0) -> None:
        self.engine = Engine("fake stream") if engine else None
        self.cuda_stream = len(self.by_handle)
        self.by_handle[self.cuda_stream] = self

    def do(self, action: Any) -> None:
        if self.engine is None:
            action()
        else:
            self.engine.give("fake", action)

    def wait_event(self, event: _Event) -> None:
        self.do(event.happened.wait)

    def query(self) -> bool:
        event = _Event()
        event.record(self)
        return event.happened.wait(0.001)

    def wait_stream(self, other: _Stream) -> None:
        event = _Event()
        event.record(other)
        self.wait_event(event)


class _Event:
    def __init__(self, **_: Any) -> None:
        self.happened = threading.Event()

    def record(self, stream: _Stream) -> None:
        happened = self.happened = threading.Event()
        stream.do(happened.set)


class _Cuda:
    Stream, Event = _Stream, _Event
    current = _Stream(engine=False)

    def current_stream(self, device: Any = None) -> _Stream:
        return self.current

    def synchronize(self, device: Any = None) -> None:
        pass

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def is_current_stream_capturing(self) -> bool:
        return False


class _Torch:
    """torch, with the CPU in a GPU's place."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return torch.empty(*args, **kwargs)

    def arange(self, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return torch.arange(*args, **kwargs)


class _Api:
    copy_detail, signal_by = "memmove", "write"

    def __init__(self) -> None:
        self.maps: dict[int, tuple[mmap.mmap, str]] = {}

    def _map(self, path: str) -> int:
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.maps[address] = mapped, path
        return address

    def allocate(self, nbytes: int) -> int:
        handle, path = tempfile.mkstemp(dir=os.environ.get("FAKE_FOLDER"))
        os.truncate(handle, nbytes)
        os.close(handle)
        return self._map(path)

    def share(self, address: int) -> bytes:
        return self.maps[address][1].encode()

    def open_shared(self, handle: bytes) -> int:
        return self._map(handle.decode())

    def close_shared(self, address: int) -> None:
        del self.maps[address]

    def free(self, address: int) -> None:
        os.unlink(self.maps.pop(address)[1])

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        _Stream.by_handle[stream].do(lambda: ctypes.memmove(target, source, nbytes))

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.copy(target, source, nbytes, stream)

    def leave_captures_alone(self) -> None:
        pass

    def write(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_int32.from_address(address)
        _Stream.by_handle[stream].do(lambda: setattr(word, "value", value))

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        word = ctypes.c_int32.from_address(address)
        _Stream.by_handle[stream].do(lambda: spin_until(lambda: word.value >= value, 20, "a word"))

    def can_wait(self, device: int) -> bool:
        return True


class _Device:
    type, index = "cuda", 0


def _tensor_at(address: int, nbytes: int, device: Any) -> Tensor:
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _transport(signal_by: Any, **how: Any) -> sdma.SdmaTransport:
    fake = _Torch()
    api = _Api()
    sdma.torch = peer_memory.torch = fake  # type: ignore[attr-defined]
    sdma.device_api = lambda: api  # type: ignore[assignment]
    sdma.current_stream_handle = lambda device: _Cuda.current.cuda_stream
    peer_memory.tensor_at = _tensor_at
    return sdma.SdmaTransport(
        torch.distributed.group.WORLD,
        _Device(),  # type: ignore[arg-type]
        memory="ipc",
        signal_by=signal_by,
        probe=False,
        **how,
    )


@ranks(world_size=3, timeout_s=60)
def test_the_rank_that_a_gpu_waits_for_is_named_and_the_process_ends_at_the_limit(
    rank_info: RankInfo, tmp_path: Any
) -> None:
    """Rank 1 is late; rank 2 waits for it as rank 0 does, and is not the one that is named."""
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    given_up, said = threading.Event(), io.StringIO()
    watchdog._exit = given_up.set
    transport = _transport("copy", limit_s=0.9, warn_s=0.3)
    overlap = Overlap(transport)
    x = torch.ones(2, K)
    overlap.start_gather(Payload.plain(x), label="first").wait()
    torch.distributed.barrier()
    with contextlib.redirect_stderr(said):
        if rank_info.rank == 1:
            time.sleep(2.5)
        pending = overlap.start_gather(Payload.plain(x), label="layers.3.mlp.linear_fc1 fprop")
        pending.wait()
    torch.distributed.barrier()
    lines = said.getvalue().splitlines()
    if rank_info.rank == 1:
        assert lines == []
        assert not given_up.is_set()
        return
    start = f"primus-turbo: rank {rank_info.rank}: layers.3.mlp.linear_fc1 fprop has waited"
    assert all(
        line.startswith(start) and "for rank 1, last heard of 1 call(s) before this one" in line for line in lines
    )
    assert len(lines) >= 2
    assert given_up.is_set()
    assert "the process group's timeout, so this process ends" in lines[-1]
    assert "this process ends" not in lines[0]


def test_a_watchdog_is_quiet_while_there_is_progress() -> None:
    seen = iter([(1, 3), (2, 3), (2, 3), (3, 3)])
    dog = watchdog.Watchdog(0, [4, 5, 6], lambda arena, issued: next(seen), 100.0, warn_s=10.0)
    said, issued = io.StringIO(), watchdog.Issued(3, ((1, 0), (2, 0)), "fprop")
    with contextlib.redirect_stderr(said):
        for now in (
            0.0,
            9.0,
            18.0,
            27.0,
            40.0,
            60.0,
        ):  # issued; behind; moved; the same, not for long; there; not looked at
            dog.look(0, issued, now)
    assert said.getvalue() == ""
    assert "rank 4: fprop has waited 12 s for ranks 5, 6, last" in dog.describe(issued, (1, 1), 12.0)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in dog.describe(issued, None, 12.0)


@ranks(world_size=2, timeout_s=60)
def test_memory_that_one_rank_cannot_have_is_an_error_on_all_and_tried_twice(
    rank_info: RankInfo, tmp_path: Any
) -> None:
    """The slots are not of torch's cache, which may hold what is missing."""
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    transport = _transport("copy")
    allocate, tries = transport.api.allocate, []

    def out_of_memory(nbytes: int) -> int:
        tries.append(nbytes)
        if rank_info.rank == 1 and len(tries) <= failures:
            raise UnsupportedError("cuMemAlloc_v2 failed: out of memory")
        return allocate(nbytes)

    transport.api.allocate = out_of_memory  # type: ignore[method-assign]
    failures = 1
    transport.release(transport.allocate(1 << 12))
    tries.clear()
    failures = 2
    with pytest.raises(UnsupportedError, match=r"bytes that peers can write into cannot be had: rank 1: cuMemAlloc"):
        transport.allocate(1 << 12)
    overlap = Overlap(transport)
    (whole,) = overlap.start_gather(Payload.plain(torch.ones(2, K))).wait()  # and it may be tried again
    assert torch.equal(whole, torch.ones(4, K))


@ranks(world_size=2, timeout_s=60)
def test_memory_is_zero_before_a_peer_learns_of_it(rank_info: RankInfo, tmp_path: Any) -> None:
    """A memset is not waited for by the host: one behind queued work would wipe out a flag that a peer has raised meanwhile."""
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    transport = _transport("copy")
    order: list[str] = []
    allocate, share = transport.api.allocate, transport.api.share
    transport.api.allocate = lambda nbytes: (order.append("zeros"), allocate(nbytes))[1]  # type: ignore[func-returns-value, method-assign]
    transport.api.share = lambda address: (order.append("share"), share(address))[1]  # type: ignore[func-returns-value, method-assign]
    peer_memory.torch.cuda.synchronize = lambda device=None: order.append("wait")  # type: ignore[assignment]
    transport.allocate(1 << 12)
    assert order == ["zeros", "wait", "share"]


@ranks(world_size=2, timeout_s=60)
def test_a_gpu_is_watched_until_it_has_left_the_memory_that_is_given_up(rank_info: RankInfo, tmp_path: Any) -> None:
    """Growing slots waits for the last call on the smaller ones, and the peer of that call may have died."""
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    transport = _transport("copy")
    overlap, watched = Overlap(transport), []
    overlap.start_gather(Payload.plain(torch.ones(2, K)), label="the last").wait()
    sdma.torch.cuda.synchronize = lambda device=None: watched.append(  # type: ignore[assignment]
        [issued.label for issued in transport._watchdog.issued.values()]
    )
    overlap.start_gather(Payload.plain(torch.ones(999, K)), label="larger").wait()
    assert watched[0] == ["the last"]


@ranks(world_size=3, timeout_s=60)
def test_memory_that_one_rank_cannot_open_is_closed_by_all_and_freed(rank_info: RankInfo, tmp_path: Any) -> None:
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    transport = _transport("copy")
    open_shared, opened = transport.api.open_shared, []

    def limited(handle: bytes) -> int:
        if rank_info.rank == 2 and opened:  # the second of its peers'
            raise UnsupportedError("cuIpcOpenMemHandle_v2 failed: peer access is not supported")
        opened.append(open_shared(handle))
        return opened[-1]

    transport.api.open_shared = limited  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="cannot be had: rank 2: cuIpcOpenMemHandle_v2 failed"):
        transport.allocate(1 << 12)
    torch.distributed.barrier()
    assert opened
    assert not transport.api.maps
    assert not list(tmp_path.iterdir())


@ranks(world_size=2, timeout_s=60)
def test_a_call_asks_the_driver_no_more_than_it_must(rank_info: RankInfo, tmp_path: Any) -> None:
    """What limits short GEMMs is the host: a copy, a signal and a wait for each chunk, and one mark to fork and one to join."""
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    transport = _transport(None)
    asked: dict[str, int] = {}

    def counting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            asked[name] = asked.get(name, 0) + 1
            return original(*arguments)

        setattr(owner, name, counted)

    for name in ("copy", "write", "wait_at_least"):
        counting(transport.api, name)
    counting(_Event, "record")
    counting(_Stream, "wait_event")
    x, whole, y, out = torch.ones(4, K), torch.ones(8, K), torch.empty(8, 3), torch.empty(4, 3)

    def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None) -> None:
        out.fill_(1.0)

    for chunks, forks in ((1, 1), (2, 2)):
        overlap = Overlap(transport, chunks=chunks)
        for _ in range(2):  # the first makes memory and the plan
            asked.clear()
            overlap.gather_gemm(Payload.plain(x), multiply, y, K)
        assert asked == {"copy": chunks, "write": chunks, "wait_at_least": chunks, "record": 2, "wait_event": 2}
        for _ in range(2):
            asked.clear()
            overlap.gemm_scatter(Payload.plain(whole), multiply, out, K, can_add=True)
        marks = {"record": forks + 1, "wait_event": forks + 1}
        assert asked == {"copy": chunks, "write": chunks, "wait_at_least": chunks, **marks}


@ranks(world_size=2, timeout_s=60)
def test_auto_is_decided_by_what_all_ranks_have(rank_info: RankInfo) -> None:
    """A rank without a driver must not go its own way while the other waits for it."""
    reason = "transport sdma: the CUDA driver cannot be used here"
    refusals = {0: None, 1: reason}
    opening.SdmaTransport.local_refusal = staticmethod(lambda device: refusals[rank_info.rank])  # type: ignore[method-assign]
    opening.ProcessGroupTransport.__init__ = lambda self, group, device: None  # type: ignore[method-assign]
    transport, refused = opening._open(torch.distributed.group.WORLD, torch.device("cuda"), "auto")
    assert isinstance(transport, opening.ProcessGroupTransport)
    assert refused == f"sdma, because {reason} (rank 1)"
    with pytest.raises(UnsupportedError, match=r"driver cannot be used here \(rank 1\)"):
        opening._open(torch.distributed.group.WORLD, torch.device("cuda"), "sdma")


@ranks(world_size=[2, 3], timeout_s=60)
def test_collectives_over_changing_shapes_streams_and_numbers(rank_info: RankInfo, tmp_path: Any) -> None:
    os.environ["FAKE_FOLDER"] = str(tmp_path)
    g, size, rank = torch.Generator().manual_seed(rank_info.seed), rank_info.world_size, rank_info.rank
    for signal_by in ("copy", "write"):
        transport = _transport(signal_by)
        assert f"IPC memory; signals by {signal_by}, waits by stream wait-value" in transport.capabilities.detail
        overlap = Overlap(transport)
        for call in range(12):
            if call == 4:  # beyond the first part of the table of numbers
                torch.distributed.barrier()
                overlap._gathers._sequence = overlap._scatters._sequence = (1 << 16) - 2
            if call == 8:  # the caller goes to another stream
                _Cuda.current = _Stream(engine=False)
            overlap.chunks = 1 + call % 3
            rows = 1 + call * 5 % 7
            w = torch.randint(-3, 4, (8, K), generator=g).float()
            xs = [torch.randint(-3, 4, (rows, K), generator=g).float() for _ in range(size)]
            parts = [torch.randint(-3, 4, (rows * size, K), generator=g).float() for _ in range(size)]

            def multiply(planes: list[Tensor], out: Tensor, add: Tensor | None, w: Tensor = w) -> None:
                product = planes[0] @ w.t()
                out.copy_(product if add is None else product + add)

            y = torch.full((rows * size, 8), torch.nan)
            overlap.gather_gemm(Payload.plain(xs[rank]), multiply, y, K)
            assert torch.equal(y, torch.cat(xs) @ w.t()), call
            out = torch.full((rows, 8), torch.nan)
            overlap.gemm_scatter(Payload.plain(parts[rank]), multiply, out, K, can_add=True)
            assert torch.equal(out, (sum(parts[1:], parts[0]) @ w.t()).chunk(size)[rank]), call
            pending = overlap.start_gather(Payload.plain(xs[rank]))
            (whole,) = pending.wait()
            assert torch.equal(whole, torch.cat(xs)), call
            assert torch.equal(overlap.start_scatter(parts[rank]).wait(), sum(parts[1:], parts[0]).chunk(size)[rank])
