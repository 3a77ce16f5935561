"""The kernels that quantise experts' tokens, compiled for AMD GPUs and emulated: the bytes of the reference."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.reference import grouped_quantize as reference
from primus_turbo_plugin.kernels.triton import grouped_quantize as turbo
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.support.grouped import on_device, tokens

ARCHS = ("gfx942", "gfx950", "gfx1250")
COUNTS = (5, 0, 130, 1)
TENSORWISE = QuantSpec(format="fp8", block="tensorwise")
STOCHASTIC = QuantSpec(format="fp8", block="rowwise", element="e5m2", rounding="stochastic")
KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=0)


def _run(arch, calls) -> None:
    for call in calls:
        compiled = amdgcn.compile(call.kernel, arch, call.args, call.constants, **call.options)
        amdgcn.launch(compiled, call.grid, call.args)


def test_millions_of_tokens_fit_a_launch() -> None:
    """CUDA's grids end at 65,535 in their second and third axis, which 2 million rows passed."""
    rows, features = 1 << 23, 512
    x = torch.empty(rows, features, dtype=torch.bfloat16, device="meta")
    groups = on_device((rows - 7, 7), "cpu")
    padded = groups.padded(128)
    row = Copy.of(rows, features, x.device, TENSORWISE, False, None, 0)
    col = Copy.of(padded.total, features, x.device, TENSORWISE, True, None, 0)
    scales = [torch.empty(0, device="meta")] * 2
    moved = x.new_empty(padded.total, features)
    calls = [
        turbo.move_apart_call(x, moved, groups, padded),
        *turbo.whole_axis_calls(x, row, col, scales, groups, padded),
    ]
    for call in calls:
        assert math.prod(call.grid) == padded.total * features // (call.constants["ROWS"] * call.constants["COLS"])
        assert max(call.grid[1:], default=0) <= 65535


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_are_moved_to_their_padded_places(arch, rng) -> None:
    x, groups = tokens(rng, COUNTS, 600)[:, ::2], on_device(COUNTS, "cpu")
    padded = groups.padded(32)
    out = torch.full((padded.total, 300), float("nan"), dtype=torch.bfloat16)
    _run(arch, [turbo.move_apart_call(x, out, groups, padded)])
    assert torch.equal(out, reference.move_apart(x, groups, padded))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "specs", [(TENSORWISE, TENSORWISE), (None, STOCHASTIC), (TENSORWISE, None)], ids=["both", "rowwise", "row only"]
)
def test_fp8_scales_of_one_expert(arch, specs, rng) -> None:
    x, groups = tokens(rng, COUNTS, 136), on_device(COUNTS, "cpu")
    x[140 - 5, 3] = float("nan")  # of the last expert
    padded = groups.padded(128)
    row = Copy.of(*x.shape, x.device, specs[0], False, KEY, 0)
    col = Copy.of(padded.total, x.shape[1], x.device, specs[1], True, KEY, 0)
    sizes = (x.shape[0], 1), (x.shape[1], padded.total // 128)
    scales = [None if copy is None else torch.empty(size) for copy, size in zip((row, col), sizes)]
    _run(arch, turbo.whole_axis_calls(x, row, col, scales, groups, padded))
    wanted = reference.grouped_quantize(x, *specs, groups, padded, key=KEY)
    for copy, scale, want in zip((row, col), scales, wanted):
        assert (copy is None) == (want is None)
        if copy is not None:
            assert torch.equal(copy.data, want.data)
            assert torch.equal(scale.nan_to_num(-1.0), want.block_scale.nan_to_num(-1.0))
