"""Helpers shared by the tests: seeds, real processes, comparison."""

from __future__ import annotations

from tests.support.seeds import seeded

__all__ = ["seeded"]
