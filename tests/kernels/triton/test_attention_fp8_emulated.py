"""FP8 attention's Triton kernels compiled for AMD GPUs: run by the emulator against the reference's bits, and their instructions.

Nothing here needs or stands in for an AMD GPU: it says nothing about speed.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.triton import attention_fp8_launch as launch
from primus_turbo_plugin.kernels.triton.attention_fp8_tiles import fp8_tile_for
from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem
from primus_turbo_plugin.kernels.triton.attention_tiles import Tile
from tests.kernels.triton.attention_cases import SMALL_ROOMS, AttentionCase, causal, full, make, packed
from tests.kernels.triton.fp8_attention_runs import decoded_gradient, differences, forward

UNITS: dict[str, launch.Units] = {"gfx942": "fnuz", "gfx950": "ocp", "gfx1250": "ocp"}
PRODUCTS = {"gfx942": "v_mfma_f32_.*_fp8_fp8", "gfx950": "v_mfma_f32_.*_f8f6f4", "gfx1250": "v_wmma_f32_.*_fp8_fp8"}

CASES: dict[str, AttentionCase] = {
    "causal": AttentionCase(queries=150, heads=2, groups=1),
    "packed, window, sinks": AttentionCase(
        queries=65, keys=62, heads=2, groups=1, mask=packed(SMALL_ROOMS, window=(9, 4)), sinks=True
    ),
    "dropout, softcap, two tiles of the head": AttentionCase(
        queries=40, keys=50, heads=2, dropout=0.3, softcap=2.0, mask=full(), dim=96, v_dim=80, dtype=torch.float16
    ),
    "three blocks, negative scale": AttentionCase(
        queries=40, keys=290, heads=1, groups=1, scale=-0.2, mask=causal(window=(280, 0))
    ),
}


def _execute(step: Launch, arch: str) -> None:
    compiled = amdgcn.compile(step.kernel, arch, step.args, step.constants, **step.options)
    amdgcn.launch(compiled, step.grid if len(step.grid) > 1 else step.grid[0], step.args)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arch", [*UNITS, "gfx950 without its FP8 units"])
def test_the_compiled_code_gives_the_references_numbers(arch: str, name: str, rng: torch.Generator) -> None:
    """Codes, scales and decoded numbers bit for bit; out but for probabilities that lie on a rounding boundary."""
    problem = make(CASES[name], rng)
    if name.startswith("three blocks"):  # scales of v that differ between blocks, and a block of zeros
        values = problem.tensors[2]
        values[:, 128:256] *= 2.0**20
        values[:, 256:] = 0
    execute = partial(_execute, arch=arch.split()[0])
    got = forward(problem, UNITS.get(arch), Tile(64, 32, 4, 2), execute)
    assert differences(problem, got) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", UNITS)
def test_the_gradient_of_the_output_is_decoded_bit_for_bit(arch: str, rng: torch.Generator) -> None:
    problem = make(dataclasses.replace(CASES["packed, window, sinks"], strided=False), rng)
    mine, want = decoded_gradient(problem, partial(_execute, arch=arch))
    assert torch.equal(mine.float(), want)


def shipped(arch: str, dim: int) -> Launch:
    """The launch of a large causal problem with the tile that is shipped."""
    q, k, out = (torch.empty(4096, 1, n, dim, dtype=torch.bfloat16).transpose(0, 1) for n in (8, 2, 8))
    problem = Problem(scale=0.1, right=0)
    slots = launch.query_slots(4096, problem)
    codes = tuple(
        launch.new_codes(x, slots, UNITS[arch], rows=number < 2, columns=number == 2)
        for number, x in enumerate((q, k, k))
    )
    tile = fp8_tile_for(arch, dim)
    lse = torch.empty(1, 8, 4096)
    return launch.forward_launch(q, k, k, codes, out, lse, problem, tile, units=UNITS[arch], tma=False)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("arch", UNITS)
def test_fp8_matrix_instructions_and_no_spills_at_128(arch: str) -> None:
    """Nothing goes to memory; bf16 products would mean that the codes had been widened."""
    step = shipped(arch, 128)
    report = amdgcn.isa_report(amdgcn.compile(step.kernel, arch, step.args, step.constants, **step.options))
    gate = amdgcn.IsaGate(
        max_spills=0, required=(PRODUCTS[arch],), forbidden_anywhere=("scratch_.*", ".*mfma.*bf16", ".*wmma.*bf16")
    )
    assert amdgcn.check_gate(report, gate) == [], amdgcn.render(report)
