"""Register state of many waves at once.

All waves of a batch of work-groups live in arrays whose last axes are [wave, lane]; an instruction is executed for every
wave that stands at the same program counter (the *chosen* waves), so one numpy call serves them all. Registers start
with all bits set, which reads as NaN in every floating-point format, because hardware promises nothing about them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from primus_turbo_plugin.amdgcn.architecture import Architecture
from primus_turbo_plugin.amdgcn.assembly.operands import EXEC, NUM_SCALARS

U32 = np.uint32
U64 = np.uint64
Words = NDArray[np.uint32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

POISON = 0xFFFFFFFF


def pack_mask(lanes: Bools) -> Words:
    """Lane flags [waves, lanes] to mask words [waves, lanes / 32]."""
    return np.packbits(lanes, axis=1, bitorder="little").view(U32)


def unpack_mask(words: Words) -> Bools:
    """Mask words [waves, words] to lane flags [waves, words * 32]."""
    octets = np.ascontiguousarray(words, dtype=U32).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little").astype(bool)


class Waves:
    """Vector and scalar registers, the execution mask and the scalar condition code.

    Attributes:
        vgpr: [register, wave, lane], 32 bits.
        sgpr: [register, wave], 32 bits; special registers included (see `assembly.operands`).
        scc: [wave].
        chosen: Index of the waves the current instruction runs for (a slice where possible).
        indices: The same as an array of wave numbers.
        active: Execution mask of the chosen waves, [chosen, lane].
        full: Whether every lane of every chosen wave is active.
    """

    def __init__(self, arch: Architecture, num_waves: int, num_vgprs: int) -> None:
        self.lanes = arch.wave
        self.mask_words = arch.wave // 32
        self.num_waves = num_waves
        self.vgpr = np.full((num_vgprs, num_waves, self.lanes), POISON, U32)
        self.sgpr = np.full((NUM_SCALARS, num_waves), POISON, U32)
        self.scc = np.zeros(num_waves, bool)
        self.exec = np.ones((num_waves, self.lanes), bool)
        self.sgpr[EXEC] = POISON
        self.sgpr[EXEC + 1] = POISON if self.mask_words == 2 else 0
        self.chosen: slice | Ints = slice(None)
        self.indices: Ints = np.arange(num_waves)
        self.active: Bools = self.exec
        self.full = True

    # -- which waves run ------------------------------------------------------------------------------------------

    def choose(self, indices: Ints) -> None:
        """Make these waves (ascending) the ones the next instructions run for."""
        self.indices = indices
        contiguous = int(indices[-1]) - int(indices[0]) + 1 == len(indices)
        self.chosen = slice(int(indices[0]), int(indices[-1]) + 1) if contiguous else indices
        self._refresh()

    @property
    def count(self) -> int:
        return len(self.indices)

    def _refresh(self) -> None:
        self.active = self.exec[self.chosen]
        self.full = bool(self.active.all())

    # -- scalar registers -------------------------------------------------------------------------------------------

    def scalar(self, index: int) -> Words:
        """One scalar register of the chosen waves, [chosen]."""
        return self.sgpr[index, self.chosen]

    def scalar64(self, index: int) -> NDArray[np.uint64]:
        low, high = self.sgpr[index, self.chosen], self.sgpr[index + 1, self.chosen]
        return low.astype(U64) | (high.astype(U64) << U64(32))

    def write_scalar(self, index: int, value: Words) -> None:
        self.sgpr[index, self.chosen] = value
        if index in (EXEC, EXEC + 1):
            self.load_exec()

    def write_scalar64(self, index: int, value: NDArray[np.uint64]) -> None:
        self.sgpr[index, self.chosen] = (value & U64(0xFFFFFFFF)).astype(U32)
        self.sgpr[index + 1, self.chosen] = (value >> U64(32)).astype(U32)
        if index == EXEC:
            self.load_exec()

    def load_exec(self) -> None:
        """Recompute the lane flags from the EXEC register of the chosen waves."""
        words = np.stack([self.sgpr[EXEC + i, self.chosen] for i in range(self.mask_words)], axis=1)
        self.exec[self.chosen] = unpack_mask(words)
        self._refresh()

    def lane_mask(self, index: int) -> Bools:
        """A lane mask kept in scalar registers, [chosen, lane]."""
        words = np.stack([self.sgpr[index + i, self.chosen] for i in range(self.mask_words)], axis=1)
        return unpack_mask(words)

    def write_lane_mask(self, index: int, lanes: Bools) -> None:
        words = pack_mask(lanes)
        for i in range(self.mask_words):
            self.sgpr[index + i, self.chosen] = words[:, i]
        if index == EXEC:
            self.load_exec()

    # -- vector registers -------------------------------------------------------------------------------------------

    def vector(self, index: int) -> Words:
        """One vector register of the chosen waves, [chosen, lane]; a view where the waves are contiguous."""
        return self.vgpr[index, self.chosen]

    def vector64(self, index: int) -> NDArray[np.uint64]:
        return self.vector(index).astype(U64) | (self.vector(index + 1).astype(U64) << U64(32))

    def write_vector(self, index: int, value: Words, lanes: Bools | None = None) -> None:
        """Write the active lanes of one register.

        Args:
            value: Broadcastable to [chosen, lane].
            lanes: A further mask, [chosen, lane] or [1, lane].
        """
        if lanes is None and self.full:
            self.vgpr[index, self.chosen] = value
            return
        where = self.active if lanes is None else self.active & lanes
        if isinstance(self.chosen, slice):
            np.copyto(self.vgpr[index, self.chosen], value, where=where)
        else:
            self.vgpr[index, self.chosen] = np.where(where, value, self.vgpr[index, self.chosen])

    def spread(self, value: Words) -> Words:
        """Broadcast to [chosen, lane]."""
        return np.broadcast_to(value, (self.count, self.lanes))
