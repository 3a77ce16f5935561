"""Seeds of the emulated Gluon GEMMs: inputs differ from run to run and case to case."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import seeds


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return seeds.case_seed(request.node.nodeid)


@pytest.fixture
def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
