"""The Triton attention kernels compiled for AMD GPUs: run by the emulator against float64, and what the compiler made of them.

Nothing here needs or stands in for an AMD GPU: it shows that the compiled code computes the right numbers, without races, and
with which instructions, and says nothing about its speed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn.report.mca import find_llvm
from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.kernels.triton import attention_launch as launch
from primus_turbo_plugin.kernels.triton.attention import _fields
from primus_turbo_plugin.kernels.triton.attention_ops import _problem
from primus_turbo_plugin.kernels.triton.attention_tiles import Tile, tiles_for
from tests.kernels.triton.attention_cases import SMALL_ROOMS, AttentionCase, Problem, causal, full, make, packed, wrong
from tests.kernels.triton.test_attention import BARS

ARCHS = ("gfx942", "gfx950", "gfx1250")

CASES: dict[str, AttentionCase] = {
    "causal": AttentionCase(queries=70, heads=2, groups=1),
    "packed, window, sinks": AttentionCase(
        queries=65, keys=62, heads=2, groups=1, mask=packed(SMALL_ROOMS, window=(9, 4)), sinks=True
    ),
    "dropout, softcap": AttentionCase(queries=40, keys=50, heads=2, dropout=0.3, softcap=2.0, mask=full()),
    "two tiles of the head, fp16": AttentionCase(
        queries=33, heads=2, dim=96, v_dim=80, dtype=torch.float16, mask=causal(window=(20, 0))
    ),
}


def _execute(step: launch.Launch, arch: str) -> None:
    compiled = amdgcn.compile(step.kernel, arch, step.args, step.constants, **step.options)
    amdgcn.launch(compiled, step.grid if len(step.grid) > 1 else step.grid[0], step.args)


def _run(problem: Problem, arch: str) -> dict[str, Any]:
    q, k, v, dout = problem.tensors
    described = _problem(*_fields(problem.options, problem.sinks))
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"))
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    _execute(launch.forward_launch(q, k, v, out, lse, described, Tile(64, 32, 4, 2), tma=False), arch)
    _execute(launch.delta_launch(out, dout, lse, delta, lse2), arch)
    shared = (lse2, delta, described)
    ways: dict[str, Any] = {"tma": False, "both_ways": True}
    _execute(launch.dkdv_launch(q, k, v, dout, dk[None], dv[None], *shared, Tile(32, 32, 4, 2), **ways), arch)
    _execute(launch.dq_launch(q, k, v, dout, dq, *shared, Tile(64, 32, 4, 2), **ways), arch)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


EMULATED = [("gfx950", name) for name in CASES]
EMULATED += [("gfx942", "causal"), ("gfx942", "dropout, softcap")]
EMULATED += [("gfx1250", "packed, window, sinks"), ("gfx1250", "two tiles of the head, fp16")]
"""Every case on gfx950; the others, which compile much alike, share them."""


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), EMULATED)
def test_the_compiled_code_is_within_rounding_of_float64(name: str, arch: str, rng: torch.Generator) -> None:
    problem = make(CASES[name], rng)
    problem.expected.pop("dsinks", None)  # not a kernel's
    assert wrong(problem, _run(problem, arch), BARS[CASES[name].dtype]) == []


def _shipped(kind: str, arch: str, dim: int, *, causal_mask: bool) -> launch.Launch:
    """The launch of a large problem with the tiles that are shipped."""
    tokens, heads, groups = 4096, 8, 2
    q, k = (torch.empty(tokens, 1, n, dim, dtype=torch.bfloat16).transpose(0, 1) for n in (heads, groups))
    rows = torch.empty(1, heads, tokens)
    problem = launch.Problem(scale=0.1, right=0 if causal_mask else None)
    tiles = tiles_for(arch, dim)
    if not causal_mask:
        tiles = tiles._replace(dkdv=tiles.dkdv._replace(masked_stages=0))
    if kind == "forward":
        return launch.forward_launch(q, k, k, q, rows, problem, tiles.forward, tma=False)
    if kind == "dkdv":
        return launch.dkdv_launch(
            q, k, k, q, k[None], k[None], rows, rows, problem, tiles.dkdv, tma=False, both_ways=True
        )
    return launch.dq_launch(q, k, k, q, q, rows, rows, problem, tiles.dq, tma=False, both_ways=True)


TRANSPOSE_LOADS = {"gfx950": "ds_read_b64_tr_b16", "gfx1250": "ds_load_tr16_b128"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["forward", "dkdv", "dq"])
def test_nothing_spills_and_transposes_come_with_the_load(kind: str, arch: str) -> None:
    """D = 128, causal, the shipped tiles."""
    step = _shipped(kind, arch, 128, causal_mask=True)
    compiled = amdgcn.compile(step.kernel, arch, step.args, step.constants, **step.options)
    report = amdgcn.isa_report(compiled)
    required = (TRANSPOSE_LOADS[arch],) if arch in TRANSPOSE_LOADS else ()
    # Triton 3.9 moves two vector registers to accumulation registers on gfx942; nothing may go to memory.
    gate = amdgcn.IsaGate(max_spills=2, required=required, forbidden_anywhere=("scratch_.*",))
    assert amdgcn.check_gate(report, gate) == [], amdgcn.render(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [("forward", 0.57), ("dkdv", 0.55), ("dq", 0.55)])
def test_the_matrix_unit_is_busy_by_static_simulation_of_gfx950(kind: str, share: float) -> None:
    """57 % is the share of a published hand-written forward kernel under the same simulator.

    The report takes one of several loops with as many matrix instructions; here all are pipelined alike.
    """
    try:
        find_llvm()
    except UnsupportedError as error:
        pytest.skip(str(error))
    step = _shipped(kind, "gfx950", 128, causal_mask=False)
    compiled = amdgcn.compile(step.kernel, "gfx950", step.args, step.constants, **step.options)
    report = amdgcn.isa_report(compiled, mca=True)
    assert amdgcn.check_gate(report, amdgcn.IsaGate(min_mca_share=share)) == [], amdgcn.render(report)


def test_the_emulated_tests_would_notice_a_wrong_scale(rng: torch.Generator) -> None:
    """The bars can fail: a scale that is off by 3 % is seen in every tensor."""
    problem = make(CASES["causal"], rng)
    options = dataclasses.replace(problem.options, scale=problem.options.scale * 1.03)
    got = _run(dataclasses.replace(problem, options=options), "gfx950")
    found = wrong(problem, got, BARS[torch.bfloat16])
    assert {text.split(":")[0] for text in found} >= {"out", "lse", "dq", "dk"}
