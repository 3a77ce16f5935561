"""One message out, one message in, both under way while the caller computes: the step of ring attention.

    KV, step i     rank r sends to r + i what that rank needs of its keys and values, and receives from r - i
    dKV, step i    the way back: what rank r found for the keys of r - i, and what r + i found for its own

Every rank owns its message's buffer until `wait()`. On a GPU the transfers are ordered behind the work already on the current
stream, and run on the process group's own stream beside whatever comes next; `wait()` makes the current stream wait, not the
host. Sends and receives of one step are started as one batch, receives first, so that two ranks that send to each other, or a
ring of ranks that all send, cannot wait for one another. All ranks must go through the steps in the same order; a rank
without a message in a step leaves it out, and so does its partner.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group, Pending, ready


def exchange(
    sent: Tensor | None, receiver: int, received: Tensor | None, sender: int, group: Group
) -> Pending[Tensor | None]:
    """Starts sending `sent` and filling `received`.

    Args:
        sent: Contiguous, not to be written before `wait()`; None or empty: nothing to send.
        receiver: Rank in the group that gets it.
        received: Contiguous, not to be touched before `wait()`; None or empty: nothing is coming.
        sender: Rank in the group that fills it, with as many elements.
        group: The ranks.

    Returns:
        `received`, filled.
    """
    operations = []
    if received is not None and received.numel():
        operations.append(dist.P2POp(dist.irecv, received, dist.get_global_rank(group, sender), group))
    if sent is not None and sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, dist.get_global_rank(group, receiver), group))
    if not operations:
        return ready(received)
    works = dist.batch_isend_irecv(operations)
    return Pending(lambda sent=sent: received, *works)  # type: ignore[misc]  # holds both buffers until then


@functools.lru_cache(maxsize=64)
def connect(group: Group, device: torch.device) -> None:
    """Makes the group's communicator, once. To be called by all of its ranks before the first `exchange` among some of them:
    NCCL and RCCL make it in the first call and wait there for every rank, also for those that have nothing to send."""
    if device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
