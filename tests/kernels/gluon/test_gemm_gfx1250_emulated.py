"""The gfx1250 GEMMs compiled and emulated against float64, with deferred transfers and race checks, and held to ISA gates.

Nothing here was measured or has run on hardware. The mutants show that a missing wait, barrier, lane map or bound is noticed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

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
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_plan import lds_bytes, tiles_for, transfers
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_targets import isa_targets
from primus_turbo_plugin.kernels.gluon.gemm_targets import plain, quantized, values
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.support import seeds

ARCH = "gfx1250"
TARGETS = {target.name: target for target in isa_targets()}


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return seeds.case_seed(request.node.nodeid)


@pytest.fixture
def numbers(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("name", TARGETS)
def test_the_emulated_kernel_agrees_with_float64_and_its_code_passes_the_gate(name: str, seed: int) -> None:
    target = TARGETS[name]
    compiled = target.compile(ARCH)
    assert target.gate is not None
    assert amdgcn.check_gate(amdgcn.isa_report(compiled), target.gate) == []
    result = amdgcn.emulate_target(target, ARCH, seed=seed, compiled=compiled)
    assert result.passed, result.failures
    assert result.report.unlanded == 0, "every transfer is waited for before the work-group ends"


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


def run(call: gemm_gfx1250.KernelCall) -> torch.Tensor:
    """Emulates a call."""
    compiled = amdgcn.compile(call.kernel, ARCH, call.args, call.constants, **call.options)
    amdgcn.launch(compiled, call.grid, call.args)
    return call.args["c_ptr"]


SMALL = tiles_for("bf16", "bf16")[1]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 130, 65), (257, 1, 127), (64, 129, 512)], ids=str)
@pytest.mark.parametrize("k_inner", [(True, True), (False, True)], ids=["NT", "TT"])
def test_odd_sizes(sizes: tuple[int, int, int], k_inner: tuple[bool, bool], numbers: np.random.Generator) -> None:
    rows, cols, depth = sizes
    a, b = plain(numbers, rows, depth, k_inner[0]), plain(numbers, cols, depth, k_inner[1])
    y = torch.full((rows, cols), float("nan"))
    run(gemm_gfx1250.gemm_call(a, b, y, programs=4, tile=SMALL))
    np.testing.assert_allclose(y.double(), values(a) @ values(b).T, atol=2.0**-18 * depth, rtol=0)


def test_wgrad_of_experts_in_fp8_scales_every_expert_alike(numbers: np.random.Generator) -> None:
    """Row scales belong to rows of a and b, which all experts share."""
    spec, offsets = QuantSpec(format="fp8", block="rowwise"), torch.tensor([0, 96, 96, 159, 160])
    a, b = quantized(numbers, 40, 160, spec), quantized(numbers, 48, 160, spec)
    out = torch.full((4, 40, 48), float("nan"))
    run(gemm_gfx1250.depth_call(a, b, offsets, out, accumulate=False, programs=2, tile=tiles_for("e4m3", "e4m3")[-1]))
    want = np.stack([values(a)[:, s:e] @ values(b)[:, s:e].T for s, e in itertools.pairwise(offsets.tolist())])
    np.testing.assert_allclose(out.double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


def test_views_into_larger_tensors_and_outputs_with_a_pitch(numbers: np.random.Generator) -> None:
    """Rows further apart than they are long, and neighbours that must stay as they are."""
    a = plain(numbers, 140, 200, True)[3:133, 8:144]
    b = plain(numbers, 150, 140, False)[5:140, 2:138]
    whole = torch.full((134, 150), 7.0, dtype=torch.bfloat16)
    y = whole[2:132, 8:143]
    run(gemm_gfx1250.gemm_call(a, b, y, programs=2, tile=SMALL))
    want = values(a) @ values(b).T
    np.testing.assert_allclose(y.double(), want, atol=2.0**-8 * np.abs(want).max(), rtol=0)
    whole[2:132, 8:143] = 7.0
    assert bool((whole == 7.0).all())


def test_a_nan_scale_stays_visible_in_its_row_and_nowhere_else(numbers: np.random.Generator) -> None:
    spec = QuantSpec(format="mxfp4")
    a, b = quantized(numbers, 130, 288, spec), quantized(numbers, 40, 288, spec)
    a.block_scale[129, 8] = 0xFF
    y = torch.empty(130, 40)
    run(gemm_gfx1250.gemm_call(a, b, y, programs=1, tile=tiles_for("e2m1", "e2m1")[2]))
    assert bool(y[129].isnan().all())
    want = values(a)[:129] @ values(b).T
    np.testing.assert_allclose(y[:129].double(), want, atol=2.0**-18 * np.abs(want).max(), rtol=0)


def test_sums_that_are_exact_in_fp32_give_the_same_bits(numbers: np.random.Generator) -> None:
    """Small integers: any order of additions gives the same result, so nothing may differ at all."""
    a, b = (torch.from_numpy(numbers.integers(-8, 9, (rows, 264))).bfloat16() for rows in (140, 130))
    y = torch.empty(140, 130)
    run(gemm_gfx1250.gemm_call(a, b, y, programs=2, tile=SMALL))
    assert torch.equal(y.double(), a.double() @ b.double().T)


# -- mutants ------------------------------------------------------------------------------------------------------------
def mutated(name: str, pattern: str, replacement: str) -> None:
    target = TARGETS[name]
    compiled = target.compile(ARCH)
    text = re.sub(pattern, replacement, compiled.asm)
    assert text != compiled.asm, f"{pattern!r} does not occur: the mutant is the original"
    result = amdgcn.emulate_target(target, ARCH, compiled=compiled.with_assembly(text))
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
