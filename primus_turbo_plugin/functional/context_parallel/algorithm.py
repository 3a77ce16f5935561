"""Which way keys and values travel between the ranks that share a sequence: Megatron's `cp_comm_type`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus_turbo_plugin.communication.collectives import Group
from primus_turbo_plugin.errors import ConfigError

Algorithm = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]

DESCRIPTIONS: dict[Algorithm, str] = {
    "p2p": "ring attention: keys and values travel from rank to rank under the attention of the step before",
    "all_gather": "all keys and values are gathered before attention",
    "a2a": "all-to-all (Ulysses): each rank attends over the whole sequence with its share of the heads",
    "a2a+p2p": "all-to-all within the inner groups, ring attention between them",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextParallel:
    """The ranks that share sequences, rank r holding chunks r and 2 * size - 1 - r of every one, and how they attend.

    Attributes:
        group: The ranks.
        algorithm: How keys and values travel.
        levels: For `a2a+p2p`: this rank's all-to-all group (consecutive ranks of `group`) and its ring (the ranks with its
            place in each of those), as Megatron's `hierarchical_context_parallel_sizes` makes them.

    Raises:
        ConfigError: The levels don't go with the algorithm or the group.
    """

    group: Group
    algorithm: Algorithm = "p2p"
    levels: tuple[Group, Group] | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in DESCRIPTIONS:
            raise ConfigError(
                f"context parallelism: algorithm must be one of {', '.join(DESCRIPTIONS)}, got {self.algorithm!r}."
            )
        if self.algorithm != "a2a+p2p":
            return
        if self.levels is None:
            raise ConfigError(
                "context parallelism: cp_comm_type=a2a+p2p needs two levels of groups and there are none. Set "
                "hierarchical_context_parallel_sizes to [a2a size, p2p size], or cp_comm_type to p2p."
            )
        inner, outer = self.levels
        place = (self.group.rank() % inner.size(), self.group.rank() // inner.size())
        if inner.size() * outer.size() != self.size or (inner.rank(), outer.rank()) != place:
            raise ConfigError(
                f"context parallelism: groups of {inner.size()} (a2a) and {outer.size()} (p2p) ranks don't make up the "
                f"context-parallel group of {self.size}. Set hierarchical_context_parallel_sizes to two sizes with that product."
            )

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def all_to_all_group(self) -> Group | None:
        """The ranks among which heads are dealt out, if they are."""
        if self.algorithm == "a2a+p2p":
            assert self.levels is not None
            return self.levels[0]
        return self.group if self.algorithm == "a2a" else None

    @property
    def ring_group(self) -> Group | None:
        """The ranks among which keys travel step by step, if they do."""
        if self.algorithm == "a2a+p2p":
            assert self.levels is not None
            return self.levels[1]
        return self.group if self.algorithm == "p2p" else None


def parse_algorithm(cp_comm_type: str | None) -> Algorithm:
    """Megatron's spelling of an algorithm; None is its default, p2p.

    Raises:
        ConfigError: No such algorithm.
    """
    if cp_comm_type is None:
        return "p2p"
    known: dict[str, Algorithm] = {name.replace("_", ""): name for name in DESCRIPTIONS}
    found = known.get(cp_comm_type.replace("_", "").lower())
    if found is None:
        raise ConfigError(f"cp_comm_type must be {', '.join(DESCRIPTIONS)}, got {cp_comm_type!r}.")
    return found


def reason_against_dealing_out(heads: int, groups: int, size: int) -> str | None:
    """Why an all-to-all over `size` ranks cannot deal out this rank's heads; None if it can.

    Each rank gets heads / size query heads and the groups they share: groups / size of them, or, with fewer groups than
    ranks, one that size / groups ranks have alike.
    """
    if heads % size == 0 and (groups % size == 0 or size % groups == 0):
        return None
    return (
        f"an all-to-all over {size} ranks deals out heads, and {heads} query heads with {groups} key heads can't be dealt out "
        f"evenly: the query heads must be a multiple of {size}, the key heads a multiple or a divisor of it. Set cp_comm_type to "
        "p2p or all_gather (heads count after the split over tensor-parallel ranks)."
    )
