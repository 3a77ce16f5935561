"""Whole kernels of our own, compiled and emulated against numpy, with deferred transfers and race checks on."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.faults import RaceError
from primus_turbo_plugin.amdgcn.report.gate import check_gate
from primus_turbo_plugin.amdgcn.report.isa import isa_report
from primus_turbo_plugin.amdgcn.targets import KernelTarget, emulate_target

triton = pytest.importorskip("triton", reason="Triton is not installed: no kernel can be compiled")

MODULES = (
    *("elementwise", "gemm", "mx_gemm", "quantize", "attention", "gluon_gemm"),
    *("tutorial_rows", "tutorial_products", "tutorial_order"),
)


def cases() -> list[tuple[KernelTarget, str]]:
    found = []
    for name in MODULES:
        for target in importlib.import_module(f"tests.amdgcn.kernels.{name}").isa_targets():
            found += [(target, arch) for arch in target.archs]
    return found


def label(value: object) -> str:
    return value.name if isinstance(value, KernelTarget) else str(value)


@pytest.mark.parametrize(("target", "arch"), cases(), ids=label)
def test_the_emulated_kernel_agrees_with_numpy(target: KernelTarget, arch: str, seed: int) -> None:
    result = emulate_target(target, arch, seed=seed)
    assert result.passed, result.failures
    assert result.errors, "the target has a reference"


@pytest.mark.parametrize(
    ("target", "arch"), [(target, arch) for target, arch in cases() if target.gate is not None], ids=label
)
def test_the_compiled_kernel_passes_its_gate(target: KernelTarget, arch: str) -> None:
    assert target.gate is not None
    assert check_gate(isa_report(target.compile(arch)), target.gate) == []


def test_fp4_packed_along_m_is_wrong_with_triton_3_8_on_gfx1250() -> None:
    """A compiler fault the emulator shows; when it passes, `mx_gemm` can list gfx1250 for this target."""
    from tests.amdgcn.kernels import mx_gemm

    target = next(item for item in mx_gemm.isa_targets() if item.name == "mx_gemm_e2m1_tn")
    kwargs = {name: getattr(target, name) for name in KernelTarget.__dataclass_fields__} | {"archs": ("gfx1250",)}
    result = emulate_target(KernelTarget(**kwargs), "gfx1250")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    assert result.passed == (version >= (3, 9)), triton.__version__


def test_a_reduction_whose_waves_round_differently_is_reported_as_it_stands() -> None:
    """Welford's combination is not symmetric to the last bit: two waves hold the same mean a rounding apart, and store both."""
    from tests.amdgcn.kernels import tutorial_order

    target = next(item for item in tutorial_order.isa_targets() if item.name == "arg_reductions")
    two_waves = dataclasses.replace(target, options={"num_warps": 2})
    with pytest.raises(RaceError, match=r"WAW race .*ds_store_b128 .*tutorial_order\.py"):
        emulate_target(two_waves, "gfx1250", seed=5)
    assert emulate_target(two_waves, "gfx1250", seed=5, race=False).passed


def test_the_same_seed_gives_the_same_bits() -> None:
    from tests.amdgcn.kernels import attention

    target = attention.isa_targets()[0]
    first, second = (emulate_target(target, "gfx950", seed=3).arguments["o_ptr"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
