"""What numbers must satisfy together, said in the words of whichever script takes them: each comes with its flag."""

from __future__ import annotations

from typing import NamedTuple

from primus_turbo_plugin.errors import ConfigError


class Size(NamedTuple):
    """A number and the flag it was given with."""

    flag: str
    value: int

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"


def at_least(size: Size, least: int = 1) -> None:
    """Raises ConfigError if it is smaller."""
    if size.value < least:
        raise ConfigError(f"{size.flag}: at least {least}, got {size.value}.")


def divides(part: Size, whole: Size) -> None:
    """Raises ConfigError, with the numbers that would do, unless `part` divides `whole`."""
    if whole.value % part.value:
        allowed = [size for size in range(1, whole.value + 1) if whole.value % size == 0]
        some = ", ".join(map(str, allowed[:12])) + (" ..." if len(allowed) > 12 else "")
        raise ConfigError(f"{part} does not divide {whole}. Take one of {some}, or another {whole.flag}.")


def is_multiple(size: Size, of: int, why: str) -> None:
    """Raises ConfigError, with the next number that would do, unless `size` is a multiple of `of`."""
    if size.value % of:
        raise ConfigError(f"{size} must be a multiple of {why}. Take {-(-size.value // of) * of}.")


def attention(heads: Size, groups: Size | None, tensor: Size, *, groups_are_cut: bool = True) -> None:
    """Heads over tensor-parallel ranks, and heads over query groups.

    Args:
        heads: Attention heads.
        groups: Query groups, each with one key and value head; None without grouped-query attention.
        tensor: Tensor-parallel size.
        groups_are_cut: Every rank needs a whole number of groups, as TurboDotProductAttention demands.

    Raises:
        ConfigError: One doesn't divide the other.
    """
    divides(tensor, heads)
    if groups is None:
        return
    divides(groups, heads)
    if groups_are_cut:
        divides(tensor, groups)


def batch(whole: Size, micro: Size, data_parallel: int) -> None:
    """The global batch is a number of micro batches on every data-parallel rank.

    Raises:
        ConfigError: It is not.
    """
    step = micro.value * data_parallel
    is_multiple(whole, step, f"{micro} x {data_parallel} data-parallel ranks = {step}")


def sequence(length: Size, tensor: int, context: int, *, sequence_parallel: bool) -> None:
    """The sequence is cut for sequence and context parallelism.

    Raises:
        ConfigError: Into unequal pieces.
    """
    shards = (tensor if sequence_parallel else 1) * (2 * context if context > 1 else 1)
    why = f"{shards}, because the sequence is cut for tensor ({tensor}) and context ({context}) parallelism"
    is_multiple(length, shards, why)
