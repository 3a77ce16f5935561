"""A process of the self-test (selftest_guard.py): runs the cases it is given, one after another, and says how they ended."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from primus_turbo_plugin.diagnostics.selftest import SelfTest, in_order, selftests
from primus_turbo_plugin.kernels.registry import default_registry


def run_cases(torch_device: str, cores: int, pipe: Connection) -> None:
    """Runs the cases of the default registry that it is given.

    Args:
        torch_device: The device.
        cores: Of the CPU, for torch.
        pipe: To the process that gives them; see `serve`.
    """
    torch.set_num_threads(cores)
    serve(selftests(default_registry(), torch_device), torch_device, pipe)


def serve(tests: Any, torch_device: str, pipe: Connection) -> None:
    """Says what there is to run, then runs the cases whose numbers come, until the device serves no longer.

    Sends `("ready", names, results of those that need no run, numbers of the others in order)`, then for each number
    `("ended", result, whether the device still serves)`.
    """
    _end_with_parent()
    device = torch.device(torch_device)
    unneeded = {i: test.run(device) for i, test in enumerate(tests) if not test.is_to_run}
    pipe.send(("ready", [(test.op, test.backend, test.case) for test in tests], unneeded, in_order(tests)))
    while True:
        try:
            number = pipe.recv()
        except EOFError:  # nobody is there any more
            return
        test: SelfTest = tests[number]
        result = test.run(device)
        device_serves = _device_serves(device)
        if not device_serves and result.outcome == "passed":
            result = dataclasses.replace(result, outcome="failed", detail="the device serves its process no longer")
        pipe.send(("ended", result, device_serves))
        if not device_serves:
            return


def _end_with_parent() -> None:
    """This process ends when the one that started it does, however that ended and whatever hangs here."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _device_serves(device: torch.device) -> bool:
    """Whether the device still runs what it is given: after a fault on NVIDIA it refuses this process everything."""
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def usable_cores() -> int:
    """Cores of the CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
