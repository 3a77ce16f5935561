"""All-to-all over plain tensors, without autograd: slab t of each rank's tensor goes to rank t."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.communication.collectives import Group, Pending, group_size, ready
from primus_turbo_plugin.errors import ShapeError


def all_to_all(x: Tensor, group: Group | None) -> Pending[Tensor]:
    """Exchanges slabs: of the result, slab s is what rank s held for this rank.

    Args:
        x: [size, ...], slab t for rank t; the same shape and dtype on every rank, any strides.
        group: The ranks; None for this one alone.

    Returns:
        [size, ...] in x's dtype, contiguous.

    Raises:
        ShapeError: There is not one slab a rank.
    """
    size = group_size(group)
    if x.shape[0] != size:
        raise ShapeError(f"all_to_all: {list(x.shape)} must have one slab for each of the group's {size} ranks.")
    source = x.contiguous()
    if size == 1 or x.numel() == 0:
        return ready(source)
    result = source.new_empty(source.shape)
    work = dist.all_to_all_single(result, source, group=group, async_op=True)
    return Pending(lambda source=source: result, work)  # type: ignore[misc]  # holds the source until then
