"""communication/ring_exchange.py and all_to_all.py in real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from primus_turbo_plugin.communication.all_to_all import all_to_all
from primus_turbo_plugin.communication.ring_exchange import connect, exchange
from primus_turbo_plugin.errors import ShapeError
from tests.support.distributed import RankInfo, ranks


@ranks(world_size=[2, 3])
def test_a_ring_of_large_messages_does_not_block(rank_info: RankInfo) -> None:
    """Larger than any socket's buffer, two of them in flight, every distance, in a group of its own."""
    rank, world, group = rank_info.rank, rank_info.world_size, dist.new_group(list(range(rank_info.world_size)))
    connect(group, torch.device("cpu"))
    size = 1 << 21
    for distance in range(1, world):
        receiver, sender = (rank + distance) % world, (rank - distance) % world
        pending = [
            exchange(torch.full((size,), float(10 * rank + i)), receiver, torch.empty(size), sender, group)
            for i in range(2)
        ]
        for i, message in enumerate(pending):
            received = message.wait()
            assert received is not None
            assert torch.equal(received, torch.full((size,), float(10 * sender + i)))


@ranks(world_size=3)
def test_a_rank_may_only_send_or_only_receive_or_neither(rank_info: RankInfo) -> None:
    """As the first and last chunks of a window do; empty messages are none."""
    rank, group = rank_info.rank, dist.group.WORLD
    sent = torch.full((4,), 7.0) if rank == 0 else torch.empty(0)
    received = torch.empty(4 if rank == 1 else 0)
    got = exchange(sent, (rank + 1) % 3, received, (rank - 1) % 3, group).wait()
    assert got is received
    assert rank != 1 or got.tolist() == [7.0] * 4
    assert exchange(None, 1, None, 2, group).wait() is None


@ranks(world_size=[1, 3])
def test_slabs_change_places(rank_info: RankInfo) -> None:
    rank, world = rank_info.rank, rank_info.world_size
    x = (100 * rank + torch.arange(world * 6)).view(6, world).t().unflatten(1, (2, 3))  # [world, 2, 3], strided
    got = all_to_all(x, dist.group.WORLD).wait()
    mine = torch.arange(world * 6).view(6, world)[:, rank].view(2, 3)
    assert torch.equal(got, torch.stack([100 * source + mine for source in range(world)]))
    with pytest.raises(ShapeError, match=rf"one slab for each of the group's {world} ranks"):
        all_to_all(x.new_empty(world + 1, 2), dist.group.WORLD)
