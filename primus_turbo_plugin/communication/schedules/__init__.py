"""Schedules: who puts which rows where, who waits for what, what is multiplied when. Pure functions that give data."""

from primus_turbo_plugin.communication.schedules.gather import (
    all_gather,
    all_gather_gemm,
    ring_all_gather,
    ring_all_gather_gemm,
)
from primus_turbo_plugin.communication.schedules.program import Program, incoming
from primus_turbo_plugin.communication.schedules.scatter import (
    gemm_reduce_scatter,
    reduce_scatter,
    ring_gemm_reduce_scatter,
)

__all__ = [
    "Program",
    "all_gather",
    "all_gather_gemm",
    "gemm_reduce_scatter",
    "incoming",
    "reduce_scatter",
    "ring_all_gather",
    "ring_all_gather_gemm",
    "ring_gemm_reduce_scatter",
]
