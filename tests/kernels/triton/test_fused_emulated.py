"""Ops fused with a quantisation, compiled for AMD GPUs and executed by the emulator, against the reference.

As in test_quantize_emulated.py, nothing here stands in for an AMD GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin.kernels.reference import fused as reference
from primus_turbo_plugin.kernels.triton import quantize_launch
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.kernels.triton.quantize_front import FrontMeta
from primus_turbo_plugin.kernels.triton.quantize_shared import quantize_shared_kernel
from primus_turbo_plugin.kernels.triton.row_sums import CHUNK, SUM_COLS, rstd_kernel, sum_rows_kernel
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.tree_sum import tree_sum
from tests.kernels.triton.test_quantize_emulated import LANES, LDS, NO_MEMORY_SPILLS, TARGET, _compile_and_launch

ARCHS = ("gfx950", "gfx1250")
SPECS = (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16))
ROWS, COLS = 100, 136


def _quantize(arch: str, x: torch.Tensor, front: FrontMeta | None, **arguments: Any) -> list[Any]:
    """Both copies, by the kernel with this front."""
    device = x.device
    row, col = copies = [Copy.of(ROWS, COLS, device, spec, side, None, 0) for spec, side in zip(SPECS, (False, True))]
    assert row is not None
    assert col is not None
    args = {
        "x_ptr": x.view(torch.int32), "gamma_ptr": None, "rstd_ptr": None, "sums_ptr": None,
        "row_data": row.data.view(torch.int32), "row_scale": row.block_scale, "row_amax": None, "row_signs": None,
        "col_data": col.data.view(torch.int32), "col_scale": col.block_scale, "col_amax": None, "col_signs": None,
        "rows": ROWS, "cols8": COLS // 8, "row_stride16": x.stride(0) // 8,
        **{f"{side}_{word}": 0 for side in ("row", "col") for word in ("k0", "k1", "c2", "c3")}, **arguments,
    }  # fmt: skip
    swiglu = front is not None and front.kind == "swiglu"
    token_blocks = quantize_launch.tile_token_blocks(LDS[arch], SPECS, tiles_held=2 if swiglu else 1)
    constants = {
        "ROW": row.meta, "COL": col.meta, "FRONT": front, "SUMS": arguments.get("sums_ptr") is not None,
        "SHUFFLED": False,
        "REVERSED": front is not None, "TB": token_blocks, "GROUP": 8, "LANES": LANES[arch], "EVEN": False,
        "TARGET": TARGET[arch],
    }  # fmt: skip
    warps = quantize_launch.num_warps(token_blocks, LANES[arch])
    options = {"num_warps": warps, "enable_fp_fusion": front is None}
    grid = 2 * -(-ROWS // (32 * token_blocks))
    _compile_and_launch(quantize_shared_kernel, arch, grid, args, constants, NO_MEMORY_SPILLS, **options)
    return copies


def _assert_equal(copies: list[Any], wanted: Any) -> None:
    for copy, want in zip(copies, wanted):
        assert torch.equal(copy.data, want.data)
        assert torch.equal(copy.block_scale, want.block_scale)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_rms_norm_in_front(arch, rng) -> None:
    x = (torch.randn(ROWS, COLS, generator=rng) * torch.logspace(-3, 3, ROWS).unsqueeze(1)).bfloat16()
    weight = torch.randn(COLS, generator=rng).bfloat16()
    row, col, want_rstd = reference.rms_norm_quantize(x, weight, 1e-5, *SPECS, zero_centered_gamma=True)
    rstd = torch.full((ROWS,), float("nan"))
    args = {"x_ptr": x, "rstd_ptr": rstd, "rows": ROWS, "hidden": COLS, "stride": COLS, "eps": 1e-5}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    constants = {"ROWS": 16, "LOG_HIDDEN": 8}
    _compile_and_launch(rstd_kernel, arch, -(-ROWS // 16), args, constants, NO_MEMORY_SPILLS, **options)
    assert torch.equal(rstd, want_rstd)
    front = FrontMeta("rms_norm", zero_centered=True)
    _assert_equal(_quantize(arch, x, front, gamma_ptr=weight, rstd_ptr=rstd), (row, col))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_swiglu_in_front(arch, rng) -> None:
    x = (torch.randn(ROWS, 2 * COLS, generator=rng) * 4).bfloat16()
    _assert_equal(_quantize(arch, x, FrontMeta("swiglu")), reference.swiglu_quantize(x, *SPECS))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_beside_it(arch, rng) -> None:
    x = torch.randn(ROWS, COLS, generator=rng).bfloat16()
    row, col, want = reference.quantize_and_sum(x, *SPECS)
    sums = torch.full((-(-ROWS // 128), COLS), float("nan"))
    _assert_equal(_quantize(arch, x, None, sums_ptr=sums), (row, col))
    total = torch.full((1, COLS), float("nan"))
    args = {"x_ptr": sums, "out_ptr": total, "rows": sums.shape[0], "cols": COLS}
    _compile_and_launch(sum_rows_kernel, arch, (1, -(-COLS // SUM_COLS)), args, {}, NO_MEMORY_SPILLS, num_warps=4)
    assert torch.equal(total[0], want)
    many = torch.randn(2 * CHUNK + 5, 72, generator=rng)
    parts = torch.full((3, 72), float("nan"))
    args = {"x_ptr": many, "out_ptr": parts, "rows": many.shape[0], "cols": 72}
    _compile_and_launch(sum_rows_kernel, arch, (3, 2), args, {}, NO_MEMORY_SPILLS, num_warps=4)
    assert torch.equal(tree_sum(parts, 0), tree_sum(many, 0))
