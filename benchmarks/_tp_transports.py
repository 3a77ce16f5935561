"""Who moves the data in benchmarks of tensor parallelism: this package's transports, and the process group's library."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from benchmarks._ranks import Ranks
from primus_turbo_plugin.communication.overlap import Overlap
from primus_turbo_plugin.communication.transports.base import Transport
from primus_turbo_plugin.communication.transports.process_group import ProcessGroupTransport
from primus_turbo_plugin.communication.transports.sdma import SdmaTransport
from primus_turbo_plugin.communication.transports.shared_memory import SharedMemoryTransport

_KINDS = {"sdma": SdmaTransport, "process_group": ProcessGroupTransport, "shared_memory": SharedMemoryTransport}
TRANSPORTS = tuple(_KINDS)
AT_ONCE, ONE_BY_ONE = "all peers at once", "peers in turn"


def open_transport(ranks: Ranks, name: str | None, *, memory: str | None = None) -> Transport:
    """The transport of that name, or the device's usual one."""
    kind = name or ("sdma" if ranks.device.type == "cuda" else "shared_memory")
    group = ranks.control if ranks.shares_gpu else ranks.group
    how = {"memory": memory} if kind == "sdma" else {}
    return _KINDS[kind](group, ranks.device, **how)  # type: ignore[no-any-return]


def ways_to_send(transport: Transport) -> dict[str, Overlap]:
    """Overlaps that send to all peers at once, and to one after the other, whatever the costs of the device say."""
    found = {name: Overlap(transport) for name in (AT_ONCE, ONE_BY_ONE)}
    found[AT_ONCE].lanes, found[ONE_BY_ONE].lanes = max(1, transport.world_size - 1), 1
    return found


class Library:
    """Collectives of the process group's own library."""

    def __init__(self, ranks: Ranks) -> None:
        self.group = ranks.group
        self.name = "NCCL" if "nccl" in dist.get_backend(self.group) and not ranks.shares_gpu else "gloo"
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_gather(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> dist.Work:
        return self._gather(out, x, group=self.group, async_op=async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> dist.Work:
        return self._scatter(out, x, group=self.group, async_op=async_op)
