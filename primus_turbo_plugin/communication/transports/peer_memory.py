"""GPU memory that every rank of one node can write into: torch's symmetric memory, or memory shared by IPC handles.

Symmetric memory is tried first; some ROCm builds have none, and it refuses ranks that share a GPU. IPC handles work wherever the
ranks see each other's devices. Which one serves, and why not the other, is in the transport's `Capabilities.detail`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.communication.transports.device_api import DeviceApi, tensor_at
from primus_turbo_plugin.errors import UnsupportedError

T = TypeVar("T")


@dataclass(slots=True)
class PeerMemory:
    """One allocation on every rank.

    Attributes:
        mine: uint8 [nbytes], zeros at first.
        addresses: By rank, where this process sees it.
        kept: What must live as long as the memory.
        opened: Addresses to close; `owned`: the address to free.
    """

    mine: Tensor
    addresses: tuple[int, ...]
    kept: Any = None
    opened: tuple[int, ...] = field(default=())
    owned: int | None = None


def symmetric_memory_refusal(group: Group, device: torch.device) -> str | None:
    """Why torch's symmetric memory cannot serve these ranks, or None. Collective."""
    try:
        import torch.distributed._symmetric_memory
        from torch._C._distributed_c10d import _SymmetricMemory  # noqa: F401
    except ImportError:
        own = f"torch {torch.__version__} has none in this build"
    else:
        own = ""
    told: list[tuple[str, str, int | None]] = [("", "", None)] * group.size()
    dist.all_gather_object(told, (own, socket.gethostname(), device.index), group=group)
    reasons = {reason for reason, _, _ in told if reason}
    if reasons:
        return ", ".join(sorted(reasons))
    if len({host for _, host, _ in told}) > 1:
        return "ranks are on several machines"
    if len({index for _, _, index in told}) < len(told):
        return "two ranks share a GPU"
    failure = ""
    try:
        allocate_symmetric(1, group, device)
    except (RuntimeError, UnsupportedError) as error:  # a driver or container that forbids it
        failure = str(error).splitlines()[0]
    tried: list[str] = [""] * group.size()
    dist.all_gather_object(tried, failure, group=group)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(tried) if text), None)


def allocate_symmetric(nbytes: int, group: Group, device: torch.device) -> PeerMemory:
    """By torch. Collective; an error of one rank is raised on all.

    Raises:
        UnsupportedError: Some rank cannot make the memory.
    """
    from torch.distributed import _symmetric_memory

    mine, failure = None, ""
    try:
        mine = _again_without_cache(lambda: _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device))
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    _raise_on_all(failure, nbytes, group)
    assert mine is not None
    handle = _symmetric_memory.rendezvous(mine, group.group_name)
    offset = getattr(handle, "offset", 0)
    mine.zero_()
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
    return PeerMemory(mine, addresses, kept=(mine, handle))


def _again_without_cache(allocate: Callable[[], T]) -> T:
    """The memory of slots is not torch's, which may hold what is missing without using it."""
    try:
        return allocate()
    except RuntimeError:
        torch.cuda.empty_cache()
        return allocate()


def _raise_on_all(failure: str, nbytes: int, group: Group) -> None:
    told: list[str] = [""] * group.size()
    dist.all_gather_object(told, failure, group=group)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
    if failures:
        raise UnsupportedError(
            f"transport sdma: {nbytes:,} bytes that peers can write into cannot be had: {'; '.join(failures)}. They hold two of "
            "the largest tensor that is gathered or scattered: use a smaller micro-batch, leave layers out with "
            "communication.except_for, or set 'transport: process_group'."
        )


def allocate_ipc(nbytes: int, group: Group, device: torch.device, api: DeviceApi) -> PeerMemory:
    """By IPC handles. Collective; an error of one rank is raised on all.

    Raises:
        UnsupportedError: Some rank cannot make or open the memory.
    """
    size, rank = group.size(), group.rank()
    owned, handle, failure = 0, b"", ""
    try:
        owned = _again_without_cache(lambda: api.allocate(nbytes))
        torch.cuda.synchronize(device)  # its zeros are there before a peer knows of it: flags may be raised at once
        handle = api.share(owned)
    except UnsupportedError as error:
        failure = str(error)
    told: list[tuple[bytes, str, str]] = [(b"", "", "")] * size
    dist.all_gather_object(told, (handle, socket.gethostname(), failure), group=group)
    addresses: dict[int, int] = {rank: owned}
    failures = [f"rank {peer}: {text}" for peer, (_, _, text) in enumerate(told) if text]
    hosts = {host for _, host, _ in told}
    if len(hosts) > 1:
        failures.append(f"ranks are on {len(hosts)} machines")
    if not failures:
        try:
            for peer in range(size):
                if peer != rank:
                    addresses[peer] = api.open_shared(told[peer][0])
        except UnsupportedError as error:
            failure = str(error)
    opened: list[str] = [""] * size
    dist.all_gather_object(opened, failure, group=group)
    failures += [f"rank {peer}: {text}" for peer, text in enumerate(opened) if text and not told[peer][2]]
    peers = tuple(address for peer, address in addresses.items() if peer != rank)
    if failures:
        _close_and_free(peers, owned, group, api)
        raise UnsupportedError(
            f"transport sdma: {nbytes:,} bytes that peers can write into cannot be had: {'; '.join(failures)}. "
            "Set 'transport: process_group', or make the slots smaller (docs/communication.md, Memory)."
        )
    everyones = tuple(addresses[peer] for peer in range(size))
    return PeerMemory(tensor_at(owned, nbytes, device), everyones, opened=peers, owned=owned)


def free(memory: PeerMemory, group: Group, api: DeviceApi) -> None:
    """Once no rank uses it. Collective."""
    torch.cuda.synchronize()
    dist.barrier(group=group)
    _close_and_free(memory.opened, memory.owned or 0, group, api)
    memory.kept, memory.opened, memory.owned = None, (), None


def _close_and_free(opened: tuple[int, ...], owned: int, group: Group, api: DeviceApi) -> None:
    for address in opened:
        api.close_shared(address)
    dist.barrier(group=group)  # a mapping must not outlive its memory
    if owned:
        api.free(owned)
