"""Run-wide set-up: one seed for all workers, one thread a process, repeat instructions on failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported anywhere: two workers on two cores, and forked ranks, must not each start a pool of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "0")

import pytest
import torch

from tests.support import seeds


def pytest_configure(config: pytest.Config) -> None:
    seeds.run_seed()
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    return f"inputs repeat with {seeds.VARIABLE}={seeds.run_seed()}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call" and report.failed:
        report.sections.append(("repeat with", f"{seeds.VARIABLE}={seeds.run_seed()} pytest '{item.nodeid}'"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A generator for this case: fresh in every run, the same when the run's seed is set again."""
    return seeds.seeded(request)
