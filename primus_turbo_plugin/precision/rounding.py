"""Counter-based random bits for stochastic rounding: Philox4x32-10 in plain integer arithmetic.

Element (o, c) of a quantised operand `[outer, padded_contraction]` gets 32 random bits that depend on the key and on (o, c)
alone: not on how the work is chunked, nor on a memory layout, nor on how many draws were made before. It takes word c % 4 of

    philox4x32_10(counter = (lo(i), hi(i), rank, k2 ^ columnwise), key = (k0, k1)),  i = o * ceil(padded_contraction / 4) + c // 4
    (k0, k1, k2, _) = philox4x32_10(counter = (lo(draw), hi(draw), lo(tensor), hi(tensor)), key = (lo(seed), hi(seed)))

where lo and hi are the halves of a 64-bit integer and columnwise is 1 for a columnwise copy: the two copies of one tensor are
rounded independently.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch

from primus_turbo_plugin.errors import ConfigError

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

WORDS_PER_COUNTER = 4


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
        k0, k1, k2, _ = philox4x32_scalar((*halves(self.draw), *halves(self.tensor)), halves(self.seed))
        return k0, k1, self.rank & _MASK32, k2 ^ int(columnwise)


def halves(value: int) -> tuple[int, int]:
    """(low, high) 32-bit halves of an integer modulo 2^64."""
    value &= _MASK64
    return value & _MASK32, value >> 32


@functools.lru_cache(maxsize=64)  # both copies of a tensor ask for their key in turn
def philox4x32_scalar(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of one counter, in Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return c0, c1, c2, c3


def philox4x32(counter: torch.Tensor, k0: int, k1: int, c2: int, c3: int) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of the counters (lo(counter), hi(counter), c2, c3) under the key (k0, k1).

    Args:
        counter: int64, any shape: the low 64 bits of each counter.
        k0: First key word.
        k1: Second key word.
        c2: Third counter word.
        c3: Fourth counter word.

    Returns:
        Four int64 tensors of that shape, words in [0, 2^32).
    """
    # A product of two 32-bit words wraps in int64, but its 64 bits are right: the low word is masked out of them late, as the
    # upper bits of x1 and x3 are masked away with those of the shifted product. Buffers are swapped, not allocated anew.
    x0, x1 = counter & _MASK32, (counter >> 32) & _MASK32
    x2, x3 = torch.full_like(counter, c2), torch.full_like(counter, c3)
    p0, p1 = torch.empty_like(counter), torch.empty_like(counter)
    for _ in range(_ROUNDS):
        torch.mul(x0, _M0, out=p0)
        torch.mul(x2, _M1, out=p1)
        torch.bitwise_right_shift(p1, 32, out=x0).bitwise_xor_(x1).bitwise_xor_(k0).bitwise_and_(_MASK32)
        torch.bitwise_right_shift(p0, 32, out=x2).bitwise_xor_(x3).bitwise_xor_(k1).bitwise_and_(_MASK32)
        x1, p1, x3, p0 = p1, x1, p0, x3
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return x0, x1.bitwise_and_(_MASK32), x2, x3.bitwise_and_(_MASK32)


def random_words(
    key: RoundingKey,
    outer: range,
    contraction: range,
    padded_contraction: int,
    *,
    columnwise: bool = False,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """32 random bits for each element of a piece of an operand `[outer, padded_contraction]`.

    Args:
        key: Whose bits.
        outer: Rows of the piece.
        contraction: Columns of the piece; it starts at a multiple of 4.
        padded_contraction: Stored length of the whole operand's contraction axis.
        columnwise: Whether the operand is a columnwise copy; the piece is then returned transposed, as its source lies.
        device: Where to compute.

    Returns:
        int64 `[len(outer), len(contraction)]`, or its transpose for a columnwise copy; values in [0, 2^32).
    """
    assert contraction.start % WORDS_PER_COUNTER == 0, contraction
    groups = torch.arange(
        contraction.start // WORDS_PER_COUNTER,
        -(-contraction.stop // WORDS_PER_COUNTER),
        dtype=torch.int64,
        device=device,
    )
    rows = torch.arange(outer.start, outer.stop, dtype=torch.int64, device=device)
    rows *= -(-padded_contraction // WORDS_PER_COUNTER)
    if columnwise:
        words = torch.stack(philox4x32(groups[:, None] + rows, *key.words(True)), dim=1)  # [groups, 4, outer]
        return words.view(-1, len(outer))[: len(contraction)]
    words = torch.stack(philox4x32(rows[:, None] + groups, *key.words()), dim=2)  # [outer, groups, 4]
    return words.view(len(outer), -1)[:, : len(contraction)]
