"""The Gluon backend of grouped GEMMs as the registry runs it: on AMD's code, in the emulator, against float64.

The kernels have tests of their own (test_gemm_emulated.py); these show that what experts hand over is what they take.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.gluon import entries, gemm_gfx950, grouped_gemm
from primus_turbo_plugin.kernels.requests import GroupedGemmRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.support.grouped import depth_operands, experts, products, rows_operands, tokens, weights

COUNTS = (5, 0, 70, 1)
MX4, ROTATED = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16)
SQUARES, MX8 = QuantSpec(format="mxfp4", block="32x32"), QuantSpec(format="mxfp8")
TENSORWISE = QuantSpec(format="fp8", block="tensorwise")
ROWS: dict[str, tuple[QuantSpec | None, QuantSpec | None]] = {
    "bf16": (None, None),
    "mxfp4": (MX4, SQUARES),
    "fp8": (TENSORWISE, TENSORWISE),
}
DEPTH = {"bf16": None, "mxfp4": ROTATED, "mxfp8": MX8}

needs_triton = pytest.mark.skipif(gemm_gfx950.triton_refusal() is not None, reason=str(gemm_gfx950.triton_refusal()))


@pytest.fixture(params=["gfx950", "gfx1250"])
def arch(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The registry's kernels believe in such a GPU, and the emulator stands for it."""

    def run(call: Any, output: torch.Tensor) -> None:
        compiled = amdgcn.compile(call.kernel, request.param, call.args, call.constants, **call.options)
        amdgcn.launch(compiled, call.grid, call.args)

    monkeypatch.setattr(grouped_gemm, "this_arch", lambda: request.param)
    monkeypatch.setattr(entries, "_run", run)
    return str(request.param)


@needs_triton
@pytest.mark.parametrize("name", ROWS)
def test_rows(arch, name, rng) -> None:
    specs, n, k = ROWS[name], 96, 136
    x, weight = tokens(rng, COUNTS, k), torch.randn(len(COUNTS), n, k, generator=rng).bfloat16()
    a, b, groups = rows_operands(x, weight, COUNTS, specs, "cpu")
    y = grouped_gemm.grouped_gemm_nt(a, b, groups, out_dtype=torch.float32)
    found = products(experts(x, COUNTS, specs[0], columnwise=False), weights(weight, specs[1]))
    for got, (want, bound) in zip(y.split(COUNTS), found):
        assert bool(((got.double() - want).abs() <= bound).all())


@needs_triton
@pytest.mark.parametrize("name", DEPTH)
def test_depth(arch, name, rng) -> None:
    spec, m, n = DEPTH[name], 72, 80
    dy, x = tokens(rng, COUNTS, m), tokens(rng, COUNTS, n)
    a, b, padded = depth_operands(dy, x, COUNTS, (spec, spec), "cpu")
    before = torch.randn(len(COUNTS), m, n, generator=rng)
    out = before.clone()
    grouped_gemm.grouped_gemm_depth(a, b, padded, out, accumulate=True)
    found = products(*(experts(t, COUNTS, spec, columnwise=True) for t in (dy, x)))
    assert torch.equal(out[1], before[1])
    for got, start, (want, bound) in zip(out, before.double(), found):
        assert bool(((got.double() - want - start).abs() <= bound + 2.0**-22 * (want.abs() + start.abs())).all())


def test_refusals_name_the_reason(monkeypatch) -> None:
    request = GroupedGemmRequest(device="cuda", kind="depth", a=MX8, b=MX8, out_dtype=torch.float32)
    assert "this GPU is" in str(grouped_gemm.supports(request))
    monkeypatch.setattr("primus_turbo_plugin.kernels.gluon.gemm.this_arch", lambda: "gfx950")
    blocks = QuantSpec(format="fp8", block="1x128")
    wgrad = GroupedGemmRequest(device="cuda", kind="depth", a=blocks, b=blocks, out_dtype=torch.float32)
    assert "blocks of 1x128" in str(grouped_gemm.supports(wgrad))
