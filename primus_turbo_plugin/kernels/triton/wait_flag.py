"""Kernels that watch a word of memory (Triton): a wait for drivers that have none, and watchers that fill a GPU.

Math      none
Layout    int32 words, each in a cache line of its own
Cost      `wait_at_least`: one wave until the word comes; `fill_and_watch`: every compute unit, for at most PATIENCE rounds
Limits    an atomic read at system scope, since peers and copy engines write the word
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PATIENCE = 20_000
"""Rounds of a watcher before it gives up: one atomic read each, some ten milliseconds together."""

_THREADS = 1024
_WATCHERS_PER_UNIT = 4  # more than fit into an SM or CU (2048 threads), so that no room is left while some wait outside


@triton.jit
def _wait_kernel(word, value):
    now = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    while now < value:
        now = tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def _watch_kernel(word, seen, patience):
    now = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    rounds = 0
    while (now == 0) & (rounds < patience):
        now = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        rounds += 1
    tl.store(seen + tl.program_id(0), now)


def wait_at_least(word: torch.Tensor, value: int) -> None:
    """The current stream waits until the word, int32 [1], is at least `value`."""
    _wait_kernel[(1,)](word, value, num_warps=1)


def fill_and_watch(word: torch.Tensor, *, patience: int) -> torch.Tensor:
    """More programs than fit watch `word`, int32 [1], for `patience` rounds.

    Returns:
        int32 [programs]: what each saw last.
    """
    properties = torch.cuda.get_device_properties(word.device)
    count = properties.multi_processor_count * _WATCHERS_PER_UNIT
    seen = torch.zeros(count, dtype=torch.int32, device=word.device)
    wave = 64 if torch.version.hip and "gfx9" in properties.gcnArchName else 32
    _watch_kernel[(count,)](word, seen, patience, num_warps=_THREADS // wave)
    return seen
