"""Groups (experts) of the grouped GEMMs: offsets on the device, never read on the host."""

from __future__ import annotations

import torch

from primus_turbo_plugin.errors import ShapeError


def num_groups(op: str, offsets: torch.Tensor) -> int:
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


def check_offsets(op: str, offsets: torch.Tensor, total: int, multiple: int, on_device: bool) -> None:
    """Checks the values of offsets, where that costs no wait.

    Args:
        total: What the last offset may be at most.
        multiple: What every offset must be a multiple of.
        on_device: Check on a GPU as well, without waiting for it: wrong values stop the program with torch's device-side
            assertion, which names `op` and the rule. On the CPU they are always checked.

    Raises:
        ShapeError: The values are known and wrong.
    """
    wanted = f"{op}: offsets must not decrease, be multiples of {multiple} and lie in 0 ... {total}"
    if offsets.device.type == "cpu":
        if not bool(_right(offsets, total, multiple)):
            values = offsets.tolist()
            least = [0, *values]
            bad = [i for i, end in enumerate(values) if end % multiple or not least[i] <= end <= total]
            raise ShapeError(f"{wanted}; got {values[bad[0]]} as offset {bad[0]} of {len(values)}. Pad every group.")
    elif on_device:
        torch._assert_async(_right(offsets, total, multiple), wanted)


def _right(offsets: torch.Tensor, total: int, multiple: int) -> torch.Tensor:
    """Whether the values are, as a tensor of one element."""
    return (offsets[0] >= 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= total) & (offsets % multiple == 0).all()


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
