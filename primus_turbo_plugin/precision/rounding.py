"""Counter-based random bits for stochastic rounding: Philox4x32-10 in plain integer arithmetic.

Element i of a quantised operand gets 32 random bits that depend only on the key and on i, its index
`outer * padded_contraction + contraction` in the whole operand: not on how the work is chunked, nor on a layout, nor on how many
draws were made before. Element i takes word i % 4 of

    philox4x32_10(counter = (lo(i // 4), hi(i // 4), rank, k2 ^ copy), key = (k0, k1))
    (k0, k1, k2, _) = philox4x32_10(counter = (lo(draw), hi(draw), lo(tensor), hi(tensor)), key = (lo(seed), hi(seed)))

where lo and hi are the halves of a 64-bit integer and copy is 1 for a columnwise copy, so that the two copies of one tensor are
rounded independently.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from primus_turbo_plugin.errors import ConfigError

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingKey:
    """What makes the random bits of one quantisation its own. Negative values count modulo 2^64 (rank: 2^32).

    Attributes:
        seed: The run's rounding seed.
        draw: One number a forward pass, from the checkpointed CPU generator.
        tensor: Which tensor: a hash of module path and operand.
        rank: Global rank.
    """

    seed: int
    draw: int
    tensor: int
    rank: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"RoundingKey: {field.name} must be an int, got {value!r}.")

    def words(self, columnwise: bool = False) -> tuple[int, int, int, int]:
        """(k0, k1, c2, c3): the two key words and the two upper counter words of this quantisation."""
        counter = (*_halves(self.draw), *_halves(self.tensor))
        k0, k1, k2, _ = philox4x32_scalar(counter, _halves(self.seed))
        return k0, k1, self.rank & _MASK32, k2 ^ int(columnwise)


def _halves(value: int) -> tuple[int, int]:
    value &= _MASK64
    return value & _MASK32, value >> 32


def philox4x32_scalar(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return c0, c1, c2, c3


def philox4x32(counter: torch.Tensor, k0: int, k1: int, c2: int, c3: int) -> torch.Tensor:
    """Philox4x32-10 of the counters (lo(counter), hi(counter), c2, c3).

    Args:
        counter: int64 `[n]`, the low 64 bits of each counter.
        k0: First key word.
        k1: Second key word.
        c2: Third counter word.
        c3: Fourth counter word.

    Returns:
        int64 `[n, 4]`, four words in [0, 2^32) each.
    """
    # A product of two 32-bit words wraps in int64, but its 64 bits are right: hi and lo are masked out of them.
    x0, x1 = counter & _MASK32, (counter >> 32) & _MASK32
    x2, x3 = torch.full_like(counter, c2), torch.full_like(counter, c3)
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x2 = ((p1 >> 32) & _MASK32) ^ x1 ^ k0, ((p0 >> 32) & _MASK32) ^ x3 ^ k1
        x1, x3 = p1 & _MASK32, p0 & _MASK32
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return torch.stack((x0, x1, x2, x3), dim=-1)


def random_words(
    key: RoundingKey, start: int, count: int, *, columnwise: bool = False, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """32 random bits for each of the elements `start ... start + count - 1`.

    Args:
        key: Whose bits.
        start: Index of the first element in the whole operand.
        count: Number of elements.
        columnwise: Whether the operand is the columnwise copy.
        device: Where to compute.

    Returns:
        int64 `[count]`, values in [0, 2^32).
    """
    k0, k1, c2, c3 = key.words(columnwise)
    first, last = start // 4, -(-(start + count) // 4)
    counter = torch.arange(first, last, dtype=torch.int64, device=device)
    words = philox4x32(counter, k0, k1, c2, c3).view(-1)
    return words[start - 4 * first : start - 4 * first + count]
