"""Negative controls: kernels broken on purpose must be caught, and say where."""

from __future__ import annotations

import importlib
import re

import pytest

from primus_turbo_plugin.amdgcn.faults import EmulationError, MissingWaitError, OutOfBoundsError, RaceError
from primus_turbo_plugin.amdgcn.targets import KernelTarget, emulate_target

pytest.importorskip("triton", reason="Triton is not installed: no kernel can be compiled")


def target(module: str, name: str) -> KernelTarget:
    found = importlib.import_module(f"tests.amdgcn.kernels.{module}").isa_targets()
    return next(item for item in found if item.name == name)


def broken(module: str, name: str, arch: str, pattern: str, replacement: str) -> tuple[KernelTarget, str]:
    """The target's assembly with a pattern replaced everywhere."""
    found = target(module, name)
    text = found.compile(arch).asm
    edited = re.sub(pattern, replacement, text)
    assert edited != text, f"{pattern!r} does not occur: the mutant is the original"
    return found, edited


def emulate(found: KernelTarget, arch: str, text: str) -> list[str]:
    compiled = found.compile(arch)
    return emulate_target(found, arch, compiled=compiled.with_assembly(text)).failures


WAITS = [
    ("gemm", "gemm_nt_gfx942", "gfx942", r"s_waitcnt vmcnt\(\d+\)", MissingWaitError),
    ("gemm", "gemm_nt_gfx942", "gfx942", r"s_waitcnt lgkmcnt\(\d+\)", MissingWaitError),
    ("gluon_gemm", "gluon_async_copy_nt", "gfx950", r"s_waitcnt vmcnt\(\d+\)", EmulationError),
    ("gluon_gemm", "gluon_async_copy_tn", "gfx950", r"s_waitcnt vmcnt\(\d+\)(?= lgkmcnt)", EmulationError),
    ("gemm", "gemm_nn_gfx1250", "gfx1250", r"s_wait_asynccnt 0x\w+", RaceError),
    ("gemm", "gemm_tdm_nt", "gfx1250", r"s_wait_tensorcnt 0x\w+", RaceError),
    ("gemm", "gemm_tdm_nt", "gfx1250", r"s_wait_dscnt 0x\w+", MissingWaitError),
    ("gluon_gemm", "gluon_tensor_mover_3_buffers", "gfx1250", r"s_wait_tensorcnt 0x\w+", RaceError),
]


@pytest.mark.parametrize(("module", "name", "arch", "pattern", "error"), WAITS)
def test_a_removed_wait_is_caught(
    module: str, name: str, arch: str, pattern: str, error: type[EmulationError], seed: int
) -> None:
    replacement = "s_waitcnt" if "(?=" in pattern else "s_nop 0 ;"
    found, text = broken(module, name, arch, pattern, replacement)
    with pytest.raises(error, match=r"\.py:\d+"):  # names the kernel's source line
        emulate(found, arch, text)


def test_a_wait_that_lets_one_transfer_too_many_through_is_caught() -> None:
    """Three buffers, so the right wait leaves some transfers outstanding; one more is one too many."""
    found = target("gluon_gemm", "gluon_tensor_mover_3_buffers")
    text = found.compile("gfx1250").asm
    edited = re.sub(r"s_wait_tensorcnt 0x(\w+)", lambda m: f"s_wait_tensorcnt {int(m[1], 16) + 1:#x}", text)
    with pytest.raises(RaceError, match="in flight"):
        emulate(found, "gfx1250", edited)


BARRIERS = [
    ("gemm", "gemm_nt_gfx942", "gfx942", r"\ts_barrier\b"),
    ("gemm", "gemm_tn_gfx950", "gfx950", r"\ts_barrier\b"),
    ("attention", "attention_causal", "gfx950", r"\ts_barrier\b"),
    ("quantize", "quantize_h16", "gfx1250", r"\ts_barrier_wait.*"),
    ("gluon_gemm", "gluon_tensor_mover_2_buffers", "gfx1250", r"\ts_barrier_wait.*"),
    ("gluon_gemm", "gluon_tensor_mover_barrier", "gfx1250", r"\ts_barrier_wait.*"),
]


@pytest.mark.parametrize(("module", "name", "arch", "pattern"), BARRIERS)
def test_a_removed_barrier_is_caught(module: str, name: str, arch: str, pattern: str) -> None:
    found, text = broken(module, name, arch, pattern, "\ts_nop 0")
    with pytest.raises(RaceError, match="race on"):
        emulate(found, arch, text)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
def test_an_off_by_one_tail_is_an_out_of_bounds_error_with_the_source_line(arch: str) -> None:
    from tests.amdgcn.kernels import elementwise

    found = target("elementwise", "vector_add")
    fields = {name: getattr(found, name) for name in KernelTarget.__dataclass_fields__}
    mutant = KernelTarget(**fields | {"kernel": elementwise.vector_add_without_tail_mask})
    with pytest.raises(
        OutOfBoundsError, match=r"elementwise\.py:\d+\].*at byte 4000 of buffer '\w_ptr', which has 4000"
    ):
        emulate_target(mutant, arch)


@pytest.mark.parametrize(
    ("module", "name", "arch", "pattern", "replacement"),
    [
        ("gemm", "gemm_nn_gfx950", "gfx950", "ds_read_b64_tr_b16", "ds_read_b64"),
        ("gemm", "gemm_tn_gfx1250", "gfx1250", "ds_load_tr16_b128", "ds_load_b128"),
        ("quantize", "quantize_h32", "gfx942", r"quad_perm:\[1,0,3,2\]", "quad_perm:[0,1,3,2]"),
        ("attention", "attention_full", "gfx1250", "v_permlanex16_b32", "v_permlane16_b32"),
        ("mx_gemm", "mx_gemm_e2m1_nt", "gfx1250", "MATRIX_SCALE_ROW1", "MATRIX_SCALE_ROW0"),
        (
            "mx_gemm",
            "mx_gemm_e2m1_nt",
            "gfx950",
            r"(v_mfma_scale\S* .*) op_sel_hi:\[\d,\d,0\]",
            r"\1 op_sel_hi:[0,0,0]",
        ),
    ],
)
def test_a_wrong_lane_map_gives_a_wrong_result(
    module: str, name: str, arch: str, pattern: str, replacement: str
) -> None:
    found, text = broken(module, name, arch, pattern, replacement)
    failures = emulate(found, arch, text)
    assert failures
    assert "elements are wrong" in failures[0]
