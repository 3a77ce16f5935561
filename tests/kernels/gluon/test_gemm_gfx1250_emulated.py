"""What is particular to the emulated gfx1250 GEMMs: planned LDS, waits and reads of the loop, and mutants of the code.

Nothing here was measured or has run on hardware; test_gemm_emulated.py compares every target with float64. The mutants
show that a missing wait, barrier, lane map or bound is noticed.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin.kernels.gluon import gemm_gfx1250

if (reason := gemm_gfx1250.triton_refusal()) is not None:
    pytest.skip(reason, allow_module_level=True)

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn.faults import EmulationError, MissingWaitError, OutOfBoundsError, RaceError
from primus_turbo_plugin.amdgcn.report.loops import hot_loop
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import lds_bytes, transfers
from primus_turbo_plugin.kernels.gluon.gemm_targets import quantized, values
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.kernels.gluon.emulated import GFX1250

ARCH = "gfx1250"
TARGETS = GFX1250.targets


def test_planned_lds_is_what_the_compiler_allocates() -> None:
    """The compiler adds padding between buffers and the scratch of epilogue vectors, no more."""
    for name, target in TARGETS.items():
        plan, compiled = target.constants["P"], target.compile(ARCH)
        if not plan.TRANSPOSE_LOAD:
            continue  # transposes through LDS of its own
        out_bytes = target.arguments()["c_ptr"].element_size()
        assert -512 <= compiled.shared - lds_bytes(plan, out_bytes) <= 2048, name


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.constants["P"].TDM])
def test_the_loop_waits_for_one_stage_and_leaves_the_others_in_flight(name: str) -> None:
    """Triton counts transfers back from a wait, and where it meets a loop it waits for all of them: right, but slow."""
    target = TARGETS[name]
    plan, loop = target.constants["P"], hot_loop(target.compile(ARCH).program)
    assert loop is not None
    waits = [item.text for item in loop.instructions if item.opcode == "s_wait_tensorcnt"]
    # Triton 3.9 also waits for ten outstanding transfers before each further one.
    assert [text for text in waits if text != "s_wait_tensorcnt 0xa"] == [
        f"s_wait_tensorcnt {(plan.STAGES - 2) * transfers(plan):#x}"
    ]


@pytest.mark.parametrize("name", ["gfx1250_bf16_nt", "gfx1250_bf16_tn", "gfx1250_mxfp4"])
def test_lds_reads_are_spread_over_the_matrix_instructions(name: str) -> None:
    """Left alone, LLVM reads half a stage (37 to 53 instructions) at a stretch in front of the barrier, which waits for them."""
    loop = hot_loop(TARGETS[name].compile(ARCH).program)
    assert loop is not None
    longest = run_length = 0
    for item in loop.instructions:
        run_length = 0 if "wmma" in item.opcode else run_length + item.opcode.startswith("ds_load")
        longest = max(longest, run_length)
    assert longest <= 24


def test_wgrad_of_experts_in_fp8_scales_every_expert_alike(numbers: np.random.Generator) -> None:
    """Row scales belong to rows of a and b, which all experts share."""
    spec, offsets = QuantSpec(format="fp8", block="rowwise"), torch.tensor([0, 96, 96, 159, 160])
    a, b = quantized(numbers, 40, 160, spec), quantized(numbers, 48, 160, spec)
    out = torch.full((4, 40, 48), float("nan"))
    GFX1250.run(gemm_gfx1250.depth_call(a, b, offsets, out, accumulate=False, cus=2, tile=GFX1250.small8))
    want = np.stack([values(a)[:, s:e] @ values(b)[:, s:e].T for s, e in itertools.pairwise(offsets.tolist())])
    np.testing.assert_allclose(out.double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


# -- mutants ------------------------------------------------------------------------------------------------------------
def mutated(name: str, pattern: str, replacement: str) -> None:
    """Emulates broken code."""
    result = amdgcn.emulate_target(TARGETS[name], ARCH, compiled=GFX1250.mutated(name, pattern, replacement))
    assert result.passed, result.failures


@pytest.mark.parametrize(
    ("name", "pattern", "replacement", "error"),
    [
        ("gfx1250_bf16_experts_fprop", r"s_wait_tensorcnt 0x\w+", "s_nop 0", RaceError),
        (
            "gfx1250_bf16_nt",
            r"s_wait_tensorcnt 0x1\b",
            "s_wait_tensorcnt 0x2",
            RaceError,
        ),  # LDS of a store that goes on
        ("gfx1250_fp16_nt_small", r"s_wait_tensorcnt 0x4", "s_wait_tensorcnt 0x5", RaceError),
        ("gfx1250_bf16_experts_fprop", r"s_wait_dscnt 0x\w+", "s_nop 0", MissingWaitError),
        ("gfx1250_bf16_experts_fprop", r"\ts_barrier_wait.*", "\ts_nop 0", RaceError),
        ("gfx1250_bf16_experts_wgrad", r"\ts_barrier_wait.*", "\ts_nop 0", RaceError),
        ("gfx1250_bf16_nt_without_tdm", r"s_wait_asynccnt 0x\w+", "s_nop 0", RaceError),
    ],
)
def test_a_missing_wait_or_barrier_is_caught(
    name: str, pattern: str, replacement: str, error: type[EmulationError]
) -> None:
    with pytest.raises(error, match=r"\.py:\d+"):
        mutated(name, pattern, replacement)


@pytest.mark.parametrize(
    ("name", "pattern", "replacement"),
    [
        ("gfx1250_bf16_experts_wgrad", "ds_load_tr16_b128", "ds_load_b128"),
        ("gfx1250_mxfp4_experts_fprop", r"(v_wmma_scale_f32_32x16x128_f4 .*), (v\d+), (v\d+)", r"\1, \3, \2"),
    ],
)
def test_a_wrong_lane_map_gives_a_wrong_result(name: str, pattern: str, replacement: str) -> None:
    with pytest.raises(AssertionError, match="elements are wrong"):
        mutated(name, pattern, replacement)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gfx1250_bf16_nt_without_tdm", "M"),  # N and K are multiples of 16 bytes there
        ("gfx1250_fp16_nt_small", "M"),
        ("gfx1250_fp16_nt_small", "N"),
        ("gfx1250_fp16_nt_small", "K"),
    ],
)
@pytest.mark.parametrize("by", [1, -1])
def test_a_bound_that_is_off_by_one_is_caught(name: str, size: str, by: int, seed: int) -> None:
    """One too many reads or writes outside, or mixes in a neighbour; one too few leaves something out."""
    target = TARGETS[name]

    def inputs(rng: np.random.Generator) -> dict[str, object]:
        args = target.inputs(rng)
        return args | {size: args[size] + by}

    fields = {item.name: getattr(target, item.name) for item in dataclasses.fields(KernelTarget)}
    mutant = KernelTarget(**fields | {"inputs": inputs})
    compiled = target.compile(ARCH)  # of the right sizes: the bound is a run-time argument
    try:
        result = amdgcn.emulate_target(
            mutant, ARCH, seed=seed, compiled=dataclasses.replace(compiled, divisible=frozenset())
        )
    except OutOfBoundsError:
        return
    assert not result.passed
