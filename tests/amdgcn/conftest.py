"""Set-up of the AMD emulator's tests: compiled kernels are kept between runs, inputs differ from run to run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support import seeds


def pytest_configure(config: pytest.Config) -> None:
    cache = Path(str(config.rootpath)) / ".pytest_cache" / "triton"
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache))


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> np.random.Generator:
    """A numpy generator for this case: fresh in every run, repeatable with the run's seed."""
    return np.random.default_rng(seeds.case_seed(request.node.nodeid))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this case."""
    return seeds.case_seed(request.node.nodeid)
