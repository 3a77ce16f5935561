"""Clusters of work-groups: multicast transfers, the cluster's barrier, and that a mistake in either is noticed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed: no kernel can be compiled")

from primus_turbo_plugin.amdgcn.compiled import CompiledKernel
from primus_turbo_plugin.amdgcn.faults import DeadlockError, EmulationError, RaceError, UnknownInstructionError
from primus_turbo_plugin.amdgcn.targets import EmulationResult, KernelTarget, emulate_target
from tests.amdgcn.kernels.gluon_gemm import cluster_target
from tests.amdgcn.single import run_lines


@pytest.fixture(scope="module")
def target() -> KernelTarget:
    return cluster_target()


@pytest.fixture(scope="module")
def code(target: KernelTarget) -> CompiledKernel:
    compiled = target.compile("gfx1250")
    assert "s_barrier_signal -3" in compiled.asm, "the barrier of a cluster"
    return compiled


def mutant(target: KernelTarget, code: CompiledKernel, pattern: str, replacement: str) -> EmulationResult:
    text, count = re.subn(pattern, replacement, code.asm)
    assert count, f"the code has nothing like {pattern!r}"
    return emulate_target(target, "gfx1250", compiled=code.with_assembly(text))


@pytest.mark.parametrize(
    ("pattern", "replacement", "error"),
    [
        (r"\ts_barrier_(signal|wait) -3", "\ts_nop 0", "RAW race"),
        (r"\ts_barrier_wait -3", "\ts_nop 0", "(WAR|RAW) race"),
        (r"\ts_wait_tensorcnt 0x0", "\ts_nop 0", "in flight"),
    ],
    ids=["no barrier", "no waiting", "no wait for transfers"],
)
def test_work_groups_that_do_not_wait_for_each_other_are_caught(
    target: KernelTarget, code: CompiledKernel, pattern: str, replacement: str, error: str
) -> None:
    """Another work-group's transfer would fill what is still read, or arrive after the reads."""
    with pytest.raises(RaceError, match=rf"{error}.*gluon_gemm\.py:\d+"):
        mutant(target, code, pattern, replacement)


def test_waiting_for_a_work_group_that_never_arrives_is_a_deadlock(target: KernelTarget, code: CompiledKernel) -> None:
    with pytest.raises(DeadlockError, match=r"gluon_gemm\.py"):
        mutant(target, code, r"\ts_barrier_signal -3", "\ts_nop 0")


def test_a_mask_that_names_the_wrong_receivers_is_noticed(target: KernelTarget, code: CompiledKernel) -> None:
    half = r"s_lshl_b32 (s\d+), 5, (s\d+)"  # work-groups 0 and 2, or 1 and 3
    assert not mutant(target, code, half, r"s_lshl_b32 \1, 3, \2").passed
    with pytest.raises(EmulationError, match=r"work-group 4 of the cluster, which has 4"):
        mutant(target, code, half, r"s_lshl_b32 \1, 17, \2")


def test_named_barriers_are_refused() -> None:
    with pytest.raises(UnknownInstructionError, match=r"work-group \(-1\) and of the cluster \(-3\)"):
        run_lines("gfx1250", "s_barrier_signal 2")
