"""Attention over sequences that several ranks share: ring, all-to-all (Ulysses), both, or all-gather.

algorithm   which one, and between whom: `ContextParallel`
sequences   Megatron's zig-zag split as integers
schedule    the ring's steps as data: who multiplies what, and which tokens travel for it
ring, ulysses, gather   one engine each, forward and backward over plain tensors (engines)
calls, merge, messages  a step's kernel calls, partial results, buffers
function    the autograd function around an engine
"""

from primus_turbo_plugin.functional.context_parallel.algorithm import (
    DESCRIPTIONS,
    Algorithm,
    ContextParallel,
    parse_algorithm,
    reason_against_dealing_out,
)
from primus_turbo_plugin.functional.context_parallel.function import shared_attention

__all__ = [
    "DESCRIPTIONS",
    "Algorithm",
    "ContextParallel",
    "parse_algorithm",
    "reason_against_dealing_out",
    "shared_attention",
]
