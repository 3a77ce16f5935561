"""Groups (experts) of the grouped GEMMs: offsets on the device, never read on the host."""

from __future__ import annotations

import torch

from primus_turbo_plugin.errors import ShapeError


def check_offsets(op: str, offsets: torch.Tensor) -> int:
    """Number of groups of `offsets` `[groups + 1]`.

    Raises:
        ShapeError: It is not a contiguous int32 or int64 vector of at least two.
    """
    kinds = (torch.int32, torch.int64)
    if offsets.dtype not in kinds or offsets.dim() != 1 or offsets.numel() < 2 or not offsets.is_contiguous():
        raise ShapeError(
            f"{op}: offsets must be contiguous int32 or int64 [groups + 1] with at least one group, got {offsets.dtype} "
            f"{list(offsets.shape)}."
        )
    return offsets.numel() - 1


def row_tiles(offsets: torch.Tensor, block_m: int, rows: int) -> torch.Tensor:
    """Which group each tile of rows belongs to, computed on the device.

    Args:
        offsets: `[groups + 1]`, the last one at most `rows`.
        block_m: Rows of a tile.
        rows: T.

    Returns:
        int32 `[groups + 1 + most]`: first tile of each group, number of tiles, then the group of every tile that may exist.
    """
    first = torch.nn.functional.pad(((offsets.diff() + block_m - 1) // block_m).cumsum(0), (1, 0))
    most = -(-rows // block_m) + offsets.numel() - 1
    groups = torch.searchsorted(first[1:], torch.arange(most, device=offsets.device), right=True)
    return torch.cat([first, groups]).to(torch.int32)
