"""Compiles candidates in several processes, so that the search finds them in Triton's cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from primus_turbo_plugin.diagnostics.tune.gemm_case import GemmCase
from primus_turbo_plugin.diagnostics.tune.gemm_tasks import GemmTask
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig

_cases: dict[GemmTask, GemmCase] = {}
"""In a worker: the case it works on."""


def make_pool(jobs: int) -> ProcessPoolExecutor | None:
    """So many workers, each with a GPU context of its own; None for one, which is this process itself."""
    if jobs < 2:
        return None
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def precompile(pool: ProcessPoolExecutor, task: GemmTask, configs: Sequence[GemmConfig]) -> None:
    """Launches every candidate once in some worker. What fails there fails again, and is judged, in the search."""
    futures = [pool.submit(_launch, task, config) for config in configs]
    for future in as_completed(futures):
        future.result()


def _launch(task: GemmTask, config: GemmConfig) -> bool:
    if task not in _cases:
        _cases.clear()
        _cases[task] = GemmCase(task, default_registry(), sets=1)
    case = _cases[task]
    try:
        case.launch(config)
    except case.errors:
        return False
    return True
