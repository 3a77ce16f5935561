"""How a candidate's numbers are judged: one wrong tile is enough, rounding is not."""

from __future__ import annotations

import math

import pytest
import torch

from primus_turbo_plugin.diagnostics.tune.gemm_case import MIN_SNR_DB, _runs, _sampled, launch_errors, worst_tile

BAR = MIN_SNR_DB[torch.bfloat16]


@pytest.mark.parametrize("shape", [(300, 500), (128, 128), (7, 1)])
def test_rounding_passes_and_one_wrong_element_does_not(rng: torch.Generator, shape: tuple[int, int]) -> None:
    want = torch.randn(256, shape[0], generator=rng).double().t() @ torch.randn(256, shape[1], generator=rng).double()
    rounded = want.bfloat16()
    assert worst_tile(rounded, want, BAR, "float64") is None
    row, col = (int(torch.randint(size, (), generator=rng)) for size in shape)
    rounded[row, col] += 32.0
    wrong = worst_tile(rounded, want, BAR, "float64")
    assert wrong is not None
    assert f"tile ({row // 128}, {col // 128})" in wrong
    assert "against float64" in wrong


def test_zeros_where_values_belong_values_where_zeros_belong_and_nan_are_wrong() -> None:
    ones, zeros = torch.ones(4, 200), torch.zeros(4, 200)
    assert worst_tile(zeros, zeros, BAR, "r") is None
    assert worst_tile(zeros, ones, BAR, "r") is not None
    assert worst_tile(ones, zeros, BAR, "r") is not None
    assert worst_tile(torch.full_like(ones, math.nan), ones, BAR, "r") is not None


def test_samples_cover_both_ends_and_the_middle() -> None:
    assert _sampled(5).tolist() == [0, 1, 2, 3, 4]
    picked = _sampled(16384).tolist()
    assert picked[0] == 0
    assert picked[-1] == 16383
    assert 8192 in picked
    assert len(picked) == 192
    assert _runs(_sampled(16384)) == [(0, 64), (8192, 8256), (16320, 16384)]
    assert _runs(torch.tensor([3])) == [(3, 4)]


def test_tritons_errors_are_a_candidates_failures() -> None:
    pytest.importorskip("triton")
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    assert issubclass(OutOfResources, launch_errors())
    assert issubclass(CompilationError, launch_errors())
    assert not issubclass(KeyError, launch_errors())
    assert not issubclass(KeyboardInterrupt, launch_errors())
