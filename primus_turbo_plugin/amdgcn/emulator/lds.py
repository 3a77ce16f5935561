"""Local data share of all work-groups of a batch, with bounds checks and (optionally) race tracking.

Uninitialised LDS reads as all ones, NaN in every floating-point format.

Hardware drops stores to addresses outside LDS (CDNA "LDS: out-of-range behaviour"), and Triton switches single lanes off by
storing to 0x7fffffff. Addresses that far out are dropped here too; anything nearer is a mistake and raises.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.emulator.memory import gather, scatter
from primus_turbo_plugin.amdgcn.emulator.races import RaceTracker
from primus_turbo_plugin.amdgcn.emulator.waves import Bools, Ints, Waves
from primus_turbo_plugin.amdgcn.faults import OutOfBoundsError

Bytes = NDArray[np.uint8]

SWITCHED_OFF = 0x4000_0000
"""A lane that stores to this address or beyond stores nothing."""


class LocalMemory:
    """LDS storage.

    Args:
        waves: Register state; its chosen waves make the accesses.
        group_of: Work-group of each wave.
        groups: Number of work-groups.
        size: Bytes one work-group allocated.
        races: Tracker, or None.
    """

    def __init__(self, waves: Waves, group_of: Ints, groups: int, size: int, races: RaceTracker | None) -> None:
        self._waves = waves
        self._group_of = group_of
        self.size = size
        self._pitch = (size + 15) // 16 * 16 + 16
        raw = np.full(groups * self._pitch + 64, 0xFF, np.uint8)
        skip = -raw.ctypes.data % 64
        self.storage: Bytes = raw[skip : skip + groups * self._pitch]
        self.races = races

    def base(self, waves: Ints) -> Ints:
        """Where the work-group of each wave begins in the storage."""
        return self._group_of[waves] * self._pitch

    def read(self, pc: int, addresses: Ints, width: int) -> Bytes:
        """Load for every active lane of the chosen waves.

        Args:
            pc: Instruction, for race reports.
            addresses: Byte addresses [chosen, lane].
            width: Bytes per lane.

        Returns:
            [chosen, lane, width]; inactive lanes hold bytes of address 0.
        """
        active, indices = self._waves.active, self._waves.indices
        self._check(addresses, active, width, "read")
        if self.races is not None:
            self.races.read(pc, *self.races.units(indices, addresses, active, width))
        if not self._waves.full:
            addresses = np.where(active, addresses, 0)
        return gather(self.storage, addresses + self.base(indices)[:, None], width)

    def write(self, pc: int, addresses: Ints, data: Bytes) -> None:
        """Store `data` [chosen, lane, width] for every active lane."""
        active, indices = self._waves.active & (addresses < SWITCHED_OFF), self._waves.indices
        width = data.shape[-1]
        self._check(addresses, active, width, "write")
        offsets = (addresses + self.base(indices)[:, None])[active]
        values = data[active]
        if self.races is None or not len(offsets):
            scatter(self.storage, offsets, values)
            return
        units, who = self.races.units(indices, addresses, active, width)
        span = len(units) // len(offsets)
        differs = (gather(self.storage, offsets, width) != values).any(axis=1)
        self.races.write(pc, units, who, np.repeat(differs, span))
        scatter(self.storage, offsets, values)
        lost = (gather(self.storage, offsets, width) != values).any(axis=1)
        if lost.any():
            self.races.clash(pc, units, who, np.repeat(lost, span))

    def group_bytes(self, wave: int) -> Bytes:
        """The LDS of one wave's work-group, as a view."""
        return self.bytes_of_group(int(self._group_of[wave]))

    def bytes_of_group(self, group: int) -> Bytes:
        """The LDS of a work-group, as a view."""
        return self.storage[group * self._pitch : group * self._pitch + self.size]

    def _check(self, addresses: Ints, active: Bools, width: int, action: str) -> None:
        bad = active & ((addresses < 0) | (addresses + width > self.size))
        if bad.any():
            where = int(addresses[bad][0])
            raise OutOfBoundsError(
                f"LDS {action} of {width} bytes at address {where} is outside the {self.size} bytes the work-group "
                f"allocated; {int(bad.sum())} lane(s) are out of bounds."
            )

    def check_flat(self, addresses: Ints, width: int, action: str) -> None:
        """Bounds check of a transfer's addresses, any shape."""
        self._check(addresses, np.ones(addresses.shape, bool), width, action)
