"""Device memory: one arena holding the registered buffers, with guard space between them.

Every access is checked against the buffers, so an address one element past the end faults instead of reading what
happens to lie there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.emulator.waves import Ints
from primus_turbo_plugin.amdgcn.faults import OutOfBoundsError

_GUARD = 4096
_FIRST_PAGES = 1 << 16
"""Addresses below are null pointers with an offset."""
_ALIGN = 256


def gather(storage: NDArray[np.uint8], offsets: Ints, width: int) -> NDArray[np.uint8]:
    """Read `width` bytes at each offset.

    Args:
        storage: Flat bytes, its own address aligned to 16.
        offsets: Any shape.
        width: Bytes per element (1, 2, 4, 8, 12 or 16).

    Returns:
        `offsets.shape + (width,)` bytes.
    """
    element = _ELEMENT.get(width)
    if element is None or (offsets & (width - 1)).any():
        return storage[offsets[..., None] + np.arange(width)]
    values = storage.view(element)[offsets >> (width.bit_length() - 1)]
    return np.ascontiguousarray(values)[..., None].view(np.uint8)


def scatter(storage: NDArray[np.uint8], offsets: Ints, data: NDArray[np.uint8]) -> None:
    """Write bytes at each offset of a flat list; on equal offsets the last one wins, as lanes do."""
    width = data.shape[-1]
    element = _ELEMENT.get(width)
    if element is None or (offsets & (width - 1)).any():
        storage[offsets[..., None] + np.arange(width)] = data
        return
    storage.view(element)[offsets >> (width.bit_length() - 1)] = np.ascontiguousarray(data).view(element)[..., 0]


# Element types are carriers only: complex128 is the one 16-byte type numpy copies fast.
_ELEMENT: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128,
}  # fmt: skip


class DeviceMemory:
    """An arena of buffers at device addresses.

    Args:
        capacity: Bytes to start with; the arena grows as buffers are added.
    """

    BASE = 0x7F12_0000_0000

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.storage = self._aligned(capacity)
        self._top = _GUARD
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []
        self._bounds: tuple[Ints, Ints] | None = None

    @staticmethod
    def _aligned(size: int) -> NDArray[np.uint8]:
        raw = np.zeros(size + 64, np.uint8)
        skip = -raw.ctypes.data % 64
        return raw[skip : skip + size // 16 * 16]

    def add(self, data: NDArray[np.uint8], name: str, phase: int = 0) -> int:
        """Register a buffer and return its device address.

        Args:
            data: Its bytes, copied.
            name: For error messages.
            phase: Wanted address modulo 256.
        """
        start = self._top + (phase - self._top) % _ALIGN
        end = start + data.size
        if end + _GUARD > self.storage.size:
            grown = self._aligned(max(2 * self.storage.size, end + 2 * _GUARD))
            grown[: self._top] = self.storage[: self._top]
            self.storage = grown
        self.storage[start:end] = data
        self._starts.append(start)
        self._ends.append(end)
        self._names.append(name)
        self._bounds = None
        self._top = end + _GUARD
        return self.BASE + start

    def bytes_at(self, address: int, size: int) -> NDArray[np.uint8]:
        """The bytes behind a device address, as a view."""
        start = address - self.BASE
        return self.storage[start : start + size]

    def offsets(self, addresses: Ints, width: int, action: str) -> Ints:
        """Turn device addresses into arena offsets, after checking each against the buffers.

        Raises:
            OutOfBoundsError: With the first bad address, the nearest buffer and how many lanes are out.
        """
        offsets = addresses - self.BASE
        if offsets.size == 0:
            return offsets
        if self._bounds is None:
            self._bounds = (np.array(self._starts), np.array(self._ends))
        starts, ends = self._bounds
        slot = np.searchsorted(starts, offsets, side="right") - 1
        bad = (slot < 0) | (offsets + width > ends[np.maximum(slot, 0)])
        if bad.any():
            self._fault(int(offsets[bad][0]), width, int(bad.sum()), action)
        return offsets

    def _fault(self, offset: int, width: int, lanes: int, action: str) -> None:
        slot = int(np.searchsorted(np.array(self._starts), offset, side="right")) - 1
        if 0 <= offset + self.BASE < _FIRST_PAGES:
            near = f"{offset + self.BASE} bytes from address 0 (an argument None, or a service of the host, which is not here)"
        elif slot < 0:
            near = "before every buffer"
        else:
            size, into = self._ends[slot] - self._starts[slot], offset - self._starts[slot]
            near = f"at byte {into} of buffer {self._names[slot]!r}, which has {size} bytes"
        raise OutOfBoundsError(f"{action} of {width} bytes out of bounds, {near}; {lanes} lane(s) are out of bounds.")

    def read(self, addresses: Ints, width: int) -> NDArray[np.uint8]:
        """Checked gather, `addresses.shape + (width,)` bytes."""
        return gather(self.storage, self.offsets(addresses, width, "read"), width)

    def write(self, addresses: Ints, data: NDArray[np.uint8]) -> None:
        """Checked scatter of a flat list of elements."""
        scatter(self.storage, self.offsets(addresses, data.shape[-1], "write"), data)
