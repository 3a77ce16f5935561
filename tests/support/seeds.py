"""Fresh random inputs that can be repeated.

`TURBO_TEST_SEED` is drawn once for a run (tests/conftest.py prints it) and mixed with the test's own name, so that every
run sees new inputs and a failure is repeated by setting the variable to what the header showed.
"""

from __future__ import annotations

import os
import secrets
import zlib

import pytest
import torch

VARIABLE = "TURBO_TEST_SEED"


def run_seed() -> int:
    """The seed of this test run, drawn at the first call in a process tree."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(secrets.randbelow(2**31))
    return int(os.environ[VARIABLE])


def case_seed(name: str) -> int:
    """A seed for one case: the same for a name within a run, unrelated for other names."""
    return zlib.crc32(f"{run_seed()}/{name}".encode())


def seeded(request: pytest.FixtureRequest | str) -> torch.Generator:
    """A CPU generator for the test (or the name) at hand."""
    name = request if isinstance(request, str) else request.node.nodeid
    return torch.Generator().manual_seed(case_seed(name))
