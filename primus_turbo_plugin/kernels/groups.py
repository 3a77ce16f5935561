"""Groups of a grouped GEMM: the stretches of rows that belong to one expert each.

Offsets live where the rows do and are computed there; nothing here reads them on the host. Only `on_host` does, and waits for the
GPU where the number of tokens was not known on the host from the start.

Padding: a copy that is quantised along tokens has blocks of 32 or 128 of them. So that none holds tokens of two experts, its rows
are moved apart until every expert starts at a multiple, with zeros in between. Its length is bounded without reading the offsets:
every expert that has a token wastes less than one multiple.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows offsets[g] ... offsets[g + 1] - 1 of `total` rows belong to group g; rows past the last offset to nobody.

    Attributes:
        offsets: int64 `[groups + 1]`, on the device of the rows.
        total: Rows.
        host: The offsets where the host knows them without asking the device, else None.
        multiple: What all offsets are known to be multiples of.
    """

    offsets: Tensor
    total: int
    host: tuple[int, ...] | None = None
    multiple: int = 1

    @classmethod
    def of(cls, tokens_per_group: Tensor, total: int, device: torch.device, *, multiple: int = 1) -> Groups:
        """The groups of rows that are sorted by group.

        Args:
            tokens_per_group: int32 or int64 `[groups]`, on the CPU or on `device`; sums to `total`. On a GPU the sum is checked
                there, without waiting: a wrong one stops the program with torch's device-side assertion.
            total: Rows.
            device: Of the rows.
            multiple: What every group's rows are a multiple of, as where a router or dispatcher pads them: such rows need not be
                moved apart to be quantised along tokens. Checked as the sum is.

        Raises:
            ShapeError: Not a vector of integers, on another device, or (known on the host) of another sum, negative, or no
                multiples.
        """
        if tokens_per_group.dim() != 1 or tokens_per_group.dtype not in _INTEGERS or not tokens_per_group.numel():
            raise ShapeError(
                f"grouped GEMM: tokens_per_expert must be int32 or int64 [experts] with at least one expert, got "
                f"{tokens_per_group.dtype} {list(tokens_per_group.shape)}. Pass one count an expert."
            )
        if tokens_per_group.device.type not in ("cpu", device.type):
            raise ShapeError(
                f"grouped GEMM: tokens_per_expert must be on the CPU or with the tokens on {device}, got "
                f"{tokens_per_group.device}. Move it to either."
            )
        counts = tokens_per_group.detach().to(torch.int64)
        if counts.device.type != "cpu":
            ends = counts.cumsum(0)
            torch._assert_async(
                ends[-1] == total, f"grouped GEMM: tokens_per_expert must sum to {total}, the rows of x"
            )
            if multiple > 1:
                wanted = f"grouped GEMM: tokens_per_expert must be multiples of {multiple}, as said"
                torch._assert_async((counts % multiple == 0).all(), wanted)
            return cls(torch.nn.functional.pad(ends, (1, 0)), total, multiple=multiple)
        host = (0, *counts.cumsum(0).tolist())
        if host[-1] != total or min(counts.tolist()) < 0:
            raise ShapeError(
                f"grouped GEMM: tokens_per_expert must be non-negative and sum to the rows of x, {total}; got "
                f"{_shown(counts)} with sum {host[-1]}. Pass the counts that belong to these rows."
            )
        if any(offset % multiple for offset in host):
            raise ShapeError(
                f"grouped GEMM: tokens_per_expert must be multiples of {multiple}, as said; got {_shown(counts)}. "
                "Pad every expert's rows, or leave multiple= out."
            )
        return cls(_on_device(host, device), total, host, math.gcd(*host))

    @property
    def count(self) -> int:
        """Groups, empty ones included."""
        return self.offsets.numel() - 1

    def on_host(self) -> tuple[int, ...]:
        """The offsets as numbers. Waits for the GPU where only it knows them."""
        return self.host if self.host is not None else tuple(self.offsets.tolist())

    def of_rows(self) -> Tensor:
        """Group of every row, int64 `[total]`; rows of nobody count to the last one."""
        rows = torch.arange(self.total, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True).clamp_(max=self.count - 1)

    def padded(self, multiple: int) -> Groups:
        """The groups when each one's rows are padded to a multiple; these groups where that is known to change nothing."""
        if self.multiple % multiple == 0:  # 0 is a multiple of everything: no row at all
            return self
        sizes = (self.offsets.diff() + multiple - 1) // multiple * multiple
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        if self.host is None:
            most = self.total + min(self.count, self.total) * (multiple - 1)
            return Groups(offsets, most // multiple * multiple, multiple=multiple)
        host = [0]
        for start, stop in pairwise(self.host):
            host.append(host[-1] + -(-(stop - start) // multiple) * multiple)
        return Groups(offsets, host[-1], tuple(host), multiple)

    def places_in(self, padded: Groups) -> Tensor:
        """Row of `padded` that each row moves to, int64 `[total]`."""
        shift = (padded.offsets - self.offsets)[:-1]
        return torch.arange(self.total, device=shift.device) + shift[self.of_rows()]


def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 `[numbers]`. Into a CUDA graph nothing is copied from the host; there each is filled in, and stays what it is."""
    if _is_captured(device):
        return torch.stack([torch.full((), number, dtype=torch.int64, device=device) for number in numbers])
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _shown(counts: Tensor) -> str:
    values = counts.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
