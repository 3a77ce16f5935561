"""The grouped Triton GEMMs compiled for AMD GPUs and executed by the emulator, against float64; what the compiler made of them.

Every call is one that the registry's kernels would make on that GPU. Experts without tokens, with one, and with more than a tile.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.triton import grouped_gemm, grouped_gemm_key
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.grouped_gemm_launch import plan_depth, plan_rows
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.support.grouped import depth_operands, experts, products, rows_operands, tokens, weights

ARCHS = ("gfx942", "gfx950", "gfx1250")
COMPUTE_UNITS = 8
SMALL = GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2, persistent=True)
STEP = replace(SMALL, block_k=128)
COUNTS = (5, 0, 70, 1)

MX4, MX8 = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp8")
ROW, BLOCKS = QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8", block="1x128")
SQUARES = QuantSpec(format="mxfp4", block="32x32")
CASES: dict[str, tuple[QuantSpec | None, QuantSpec | None, GemmConfig]] = {
    "bf16": (None, None, replace(SMALL, num_xcds=8)),
    "mxfp4 decoded in the tile": (MX4, SQUARES, STEP),
    "mxfp8 decoded once": (MX8, MX8, replace(SMALL, decode="scratch")),
    "fp8 rowwise": (ROW, ROW, replace(STEP, units="fp8")),
    "mxfp4 on scaled units": (MX4, SQUARES, replace(STEP, units="mx")),
    "fp8 blocks": (BLOCKS, BLOCKS, replace(STEP, units="fp8")),
}


class _Emulated:
    """Stands for the launches of a grouped product on a GPU of that architecture."""

    def __init__(self, arch: str, monkeypatch: Any) -> None:
        self.arch, self.compiled = arch, []  # type: ignore[var-annotated]
        monkeypatch.setattr(grouped_gemm_key, "gpu_of", lambda index: (arch, COMPUTE_UNITS))

    def run(self, calls: list[Any]) -> None:
        for call in calls:
            self.compiled.append(amdgcn.compile(call.kernel, self.arch, call.args, call.constants, **call.options))
            amdgcn.launch(self.compiled[-1], call.grid, call.args)


def _config(arch: str, name: str) -> GemmConfig:
    config = CASES[name][2]
    if arch == "gfx942" and config.units == "mx":
        pytest.skip("gfx942 has no units for MX")
    if arch == "gfx942" and config.units == "fp8":
        return replace(config, decode="scratch")  # its units read FNUZ codes
    return config


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_rows_with_an_empty_expert_and_tails_in_every_direction(arch, name, monkeypatch, rng) -> None:
    left, right, _ = CASES[name]
    config, n, k = _config(arch, name), 72, 136
    if left is MX4 and right is SQUARES:
        n = 96  # square blocks of a weight hold one expert's rows; others are kept for each row
    x, weight = tokens(rng, COUNTS, k), torch.randn(len(COUNTS), n, k, generator=rng).bfloat16()
    a, b, groups = rows_operands(x, weight, COUNTS, (left, right), "cpu")
    emulated = _Emulated(arch, monkeypatch)
    y = torch.full((sum(COUNTS), n), float("nan"))
    key = grouped_gemm_key.rows_key(a, b, n, groups, y.dtype)
    assert grouped_gemm_key.refusal(key, config) is None
    emulated.run(plan_rows(a, b, groups, y, key, config))
    found = products(experts(x, COUNTS, left, columnwise=False), weights(weight, right))
    for got, (want, bound) in zip(y.split(COUNTS), found):
        assert bool(((got.double() - want).abs() <= bound).all())
    if config.units != "half":
        assert any(re.search(r"v_(mfma|wmma)\w*(fp8|bf8|f8f6f4)", kernel.asm) for kernel in emulated.compiled)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_depth_adds_to_every_expert_but_the_empty_one(arch, name, monkeypatch, rng) -> None:
    left, _, _ = CASES[name]
    config, m, n = _config(arch, name), 72, 80
    dy, x = tokens(rng, COUNTS, m), tokens(rng, COUNTS, n)
    a, b, padded = depth_operands(dy, x, COUNTS, (left, left), "cpu")
    emulated = _Emulated(arch, monkeypatch)
    before = torch.randn(len(COUNTS), m, n, generator=rng)
    out = before.clone()
    by_expert = name == "fp8 rowwise"
    key = grouped_gemm_key.depth_key(a, b, padded, out, accumulate=True, scales_by_expert=by_expert)
    assert grouped_gemm_key.refusal(key, config) is None
    multiple = grouped_gemm.offset_multiple(a, b)
    emulated.run(plan_depth(a, b, padded, out, key, config, multiple=multiple))
    found = products(*(experts(t, COUNTS, left, columnwise=True) for t in (dy, x)))
    assert torch.equal(out[1], before[1])
    for got, start, (want, bound) in zip(out, before.double(), found):
        assert bool(((got.double() - want - start).abs() <= bound + 2.0**-23 * (want + start).abs()).all())


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["bf16", "mxfp8 decoded in the tile", "mxfp8 on scaled units", "fp8 rowwise"])
def test_a_written_wgrad_of_an_empty_expert_is_zero_and_a_nan_stays_with_its_expert(
    arch, name, monkeypatch, rng
) -> None:
    """Steps reach past an expert's tokens, where the next one's codes and scales lie; empty experts have none of their own."""
    counts = (40, 0, 5, 30, 20, 0)
    specs = {"bf16": (None, SMALL), "fp8 rowwise": (ROW, CASES["fp8 rowwise"][2])}
    spec, config = specs.get(name, (MX8, replace(STEP, units="mx" if "units" in name else "half")))
    if arch == "gfx942" and config.units != "half":
        if config.units == "mx":
            pytest.skip("gfx942 has no units for MX")
        config = replace(config, decode="scratch")
    dy, x = tokens(rng, counts, 24), tokens(rng, counts, 40)
    x[:40] = x[45:75] = float("nan")
    a, b, groups = depth_operands(dy, x, counts, (spec, spec), "cpu")
    out = torch.full((len(counts), 24, 40), float("nan"))
    emulated = _Emulated(arch, monkeypatch)
    key = grouped_gemm_key.depth_key(a, b, groups, out, accumulate=False, scales_by_expert=spec is ROW)
    multiple = grouped_gemm.offset_multiple(a, b)
    emulated.run(plan_depth(a, b, groups, out, key, config, multiple=multiple))
    assert torch.equal(out[[1, 5]], torch.zeros(2, 24, 40))
    assert bool(out[[0, 3]].isnan().all())
    assert bool(out[[2, 4]].isfinite().all())


@pytest.mark.parametrize("arch", ARCHS)
def test_a_weight_that_dgrad_reads_transposed(arch, monkeypatch, rng) -> None:
    dy, weight = tokens(rng, COUNTS, 100), torch.randn(len(COUNTS), 100, 72, generator=rng).bfloat16()
    groups = Groups.of(torch.tensor(COUNTS), sum(COUNTS), torch.device("cpu"))
    emulated = _Emulated(arch, monkeypatch)
    y = torch.full((sum(COUNTS), 72), float("nan"))
    b = weight.transpose(1, 2)
    key = grouped_gemm_key.rows_key(dy, b, 72, groups, y.dtype)
    emulated.run(plan_rows(dy, b, groups, y, key, SMALL))
    for got, piece, w in zip(y.split(COUNTS), dy.split(COUNTS), weight.double()):
        bound = 106 * 2.0**-24 * (piece.double().abs() @ w.abs())
        assert bool(((got.double() - piece.double() @ w).abs() <= bound + 1e-30).all())
