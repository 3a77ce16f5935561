"""What a schedule sends where and when, counted from the programs themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from primus_turbo_plugin.communication.schedules.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Rows on their way.

    Attributes:
        links: (sender, receiver) -> step -> rows sent in it. A step is a round of the schedule: a chunk to one peer or, in a
            ring, what is passed on at once.
        out: By rank, rows sent.
        into: By rank, rows received.
    """

    links: dict[tuple[int, int], dict[int, int]]
    out: tuple[int, ...]
    into: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len({step for steps in self.links.values() for step in steps})

    @property
    def most_on_a_link(self) -> int:
        """Rows over the busiest link."""
        return max((sum(steps.values()) for steps in self.links.values()), default=0)

    @property
    def most_in_a_step(self) -> int:
        """Rows over one link in one step, the most."""
        return max((rows for steps in self.links.values() for rows in steps.values()), default=0)


def traffic(programs: Sequence[Program]) -> Traffic:
    """Of one call; what a rank puts into its own slot does not travel.

    Args:
        programs: Those of all ranks.
    """
    links: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for program in programs:
        for put in program.puts:
            if put.peer != program.rank:
                links[program.rank, put.peer][put.round] += len(put.source)
    ranks = range(len(programs))
    return Traffic(
        links={link: dict(steps) for link, steps in links.items()},
        out=tuple(sum(sum(steps.values()) for (a, _), steps in links.items() if a == rank) for rank in ranks),
        into=tuple(sum(sum(steps.values()) for (_, b), steps in links.items() if b == rank) for rank in ranks),
    )
