"""Bytes that overlapped collectives send over each link in each step, against the least that any algorithm must send.

    python -m benchmarks.overlap_traffic [--ranks 2 4 8 16] [--tokens 8192] [--width 4096] [--chunks 2]

Counted from the schedules themselves; no GPU, no processes. Every rank of an all-gather must receive all rows but its own, and of
a reduce-scatter what the others have for it: (p - 1) / p of the tensor, which is the ideal for what leaves a rank and enters it.

    straight      to each peer directly: on a mesh of links all at once, behind a switch one after the other
    ring          to the right neighbour only; partial sums travel in fp32
    link          MiB over the busiest link, and the most in one step
    ideal         MiB in and out of a rank that no algorithm can do without
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from primus_turbo_plugin.communication import schedules
from primus_turbo_plugin.communication.schedules import Program
from primus_turbo_plugin.communication.schedules.rows import even_shares
from primus_turbo_plugin.communication.schedules.traffic import traffic

BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule, and the bytes of an element that travels."""

    collective: str
    way: str
    make: Callable[[int, tuple[int, ...], int], Program]
    element: int


CASES = (
    Case("AG + GEMM", "straight", lambda r, rows, c: schedules.all_gather_gemm(r, rows, chunks=c), BF16),
    Case("AG + GEMM", "ring", lambda r, rows, c: schedules.ring_all_gather_gemm(r, rows, chunks=c), BF16),
    Case("GEMM + RS", "straight", lambda r, rows, c: schedules.gemm_reduce_scatter(r, rows, chunks=c), BF16),
    Case("GEMM + RS", "ring", lambda r, rows, c: schedules.ring_gemm_reduce_scatter(r, rows), FP32),
    Case("bulk AG", "straight", lambda r, rows, c: schedules.all_gather(r, rows), BF16),
    Case("bulk AG", "ring", lambda r, rows, c: schedules.ring_all_gather(r, rows), BF16),
    Case("bulk RS", "straight", lambda r, rows, c: schedules.reduce_scatter(r, rows), BF16),
)
HEAD: tuple[str, ...] = ("collective", "way", "ranks", "links", "steps", "link, MiB", "in a step", "out of a rank")
HEAD += ("into a rank", "ideal", "x ideal")


def rows_of(case: Case, ranks: int, tokens: int, width: int, chunks: int) -> tuple[str, ...]:
    """One line of the table."""
    shares = even_shares(tokens, ranks)
    found = traffic([case.make(rank, shares, chunks) for rank in range(ranks)])
    mib = width * case.element / 2**20
    ideal = (tokens - min(shares)) * width * BF16 / 2**20
    out, into = max(found.out) * mib, max(found.into) * mib
    numbers = (found.most_on_a_link * mib, found.most_in_a_step * mib, out, into, ideal)
    counts = (str(ranks), str(len(found.links)), str(found.num_steps))
    return (case.collective, case.way, *counts, *(f"{n:.2f}" for n in numbers), f"{max(out, into) / ideal:.2f}")


def table(lines: list[tuple[str, ...]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (HEAD, ("---",) * len(HEAD), *lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.tokens} tokens x {options.width}, bf16, {options.chunks} chunks\n")
    sizes = (options.tokens, options.width, options.chunks)
    print(table([rows_of(case, ranks, *sizes) for case in CASES for ranks in options.ranks]))


if __name__ == "__main__":
    main()
