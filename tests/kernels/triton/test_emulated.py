"""The Triton kernels compiled for AMD GPUs and executed by the emulator, against the reference; what the compiler made of them.

Nothing here needs or stands in for an AMD GPU: it shows that the compiled code computes the right bytes, without races, spills or
scratch, and says nothing about its speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.triton import quantize
from primus_turbo_plugin.kernels.triton.quantize_mxfp4_bf16 import quantize_mxfp4_bf16_kernel
from primus_turbo_plugin.kernels.triton.quantize_tile import amax_kernel, quantize_kernel
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey

ARCHS = ("gfx942", "gfx950", "gfx1250")
KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=4)
Pair = tuple[QuantSpec, QuantSpec]

MXFP4_PAIRS: list[Pair] = [
    (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16)),
    (
        QuantSpec(format="mxfp4", block="32x32", scale_rule="floor"),
        QuantSpec(format="mxfp4", block="32x32", scale_rule="floor"),
    ),
]
TILE_PAIRS: list[Pair] = [
    (QuantSpec(format="mxfp4", scale_rule="rceil"), QuantSpec(format="mxfp4", hadamard=32, random_signs=True)),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp4", rounding="stochastic")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", element="e5m2", block="rowwise")),
]
"""FP8 tensorwise is left out: its scalar atomic uses s_ff1_i32_b64, which the emulator does not know."""


def _compile_and_launch(
    kernel: Any, arch: str, grid: Any, args: dict[str, Any], constants: dict[str, Any], **options: Any
) -> Any:
    compiled = amdgcn.compile(kernel, arch, args, constants, **options)
    amdgcn.launch(compiled, grid, args)
    report = amdgcn.isa_report(compiled)
    assert report.vgpr_spills == report.scratch_bytes == 0, amdgcn.render(report)
    return compiled


def _values(rows: int, cols: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=rng) * torch.exp(2 * torch.randn(rows, 1, generator=rng))
    x[7] *= 2.0**-126
    x[3, 5] = float("nan")
    return x.to(dtype)


def _copies(x: torch.Tensor, pair: Pair) -> list[Any]:
    copies = [quantize._Copy.of(x, spec, columnwise, KEY, 5) for spec, columnwise in zip(pair, (False, True))]
    for copy in copies:
        copy.data.fill_(0xAA)
    return copies


def _assert_reference(copies: list[Any], x: torch.Tensor, pair: Pair) -> None:
    for copy, want in zip(copies, reference.quantize_both(x, *pair, key=KEY, signs_seed=5)):
        assert torch.equal(copy.data, want.data)
        assert torch.equal(copy.block_scale.nan_to_num(-1.0), want.block_scale.nan_to_num(-1.0))


@pytest.mark.slow
@pytest.mark.parametrize("pair", MXFP4_PAIRS, ids=lambda pair: " | ".join(map(str, pair)))
def test_mxfp4_of_bf16_equals_the_reference_in_every_byte(pair, rng) -> None:
    """On gfx950, with its conversion instruction; the other architectures take the tile kernel."""
    x = _values(100, 264, torch.bfloat16, rng)
    row, col = copies = _copies(x, pair)
    row_scales, col_blocks = 9, 4
    args = {
        "x_ptr": x.view(torch.int32),
        "row_data": row.data.view(torch.int32), "row_scale": row.block_scale,
        "col_data": col.data.view(torch.int32), "col_scale": col.block_scale,
        "signs_ptr": None, "rows": 100, "cols8": 33, "row_scales": row_scales, "col_blocks": col_blocks,
        "row_stride16": 33, "row_data_words": 4 * row_scales,
    }  # fmt: skip
    constants = {
        "ROW": row.meta, "COL": col.meta, "TOKEN_BLOCKS": 4, "COL_GROUPS": 32, "GROUP": 8, "EVEN": False,
        "TARGET": "gfx950",
    }  # fmt: skip
    compiled = _compile_and_launch(quantize_mxfp4_bf16_kernel, "gfx950", 3, args, constants, num_warps=4)
    _assert_reference(copies, x, pair)
    assert "v_cvt_scalef32_pk_fp4_f32" in compiled.asm


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pair", TILE_PAIRS, ids=lambda pair: " | ".join(map(str, pair)))
def test_the_tile_kernel_equals_the_reference_in_every_byte(arch, pair, rng) -> None:
    x = _values(70, 100, torch.bfloat16, rng)
    row, col = copies = _copies(x, pair)
    block_m, block_n = quantize.tile_shape(row.meta, col.meta)
    grid = (-(-max(70, col.padded) // block_m), -(-max(100, row.padded) // block_n))
    amax = {"row_amax": row.amax_buffer(), "col_amax": col.amax_buffer()}
    shared = {"x_ptr": x, "row_signs": row.signs, "col_signs": col.signs}
    shared |= {"rows": 70, "cols": 100, "stride_row": 100, "stride_col": 1}
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if any(buffer is not None for buffer in amax.values()):
        metas = {"ROW": row.meta if row.meta.needs_amax else None, "COL": col.meta if col.meta.needs_amax else None}
        _compile_and_launch(amax_kernel, arch, grid, {**shared, **amax}, {**metas, **tile}, num_warps=4)
    names = ("k0", "k1", "c2", "c3")
    words = {f"row_{name}": word for name, word in zip(names, row.words)}
    words |= {f"col_{name}": word for name, word in zip(names, col.words)}
    args = {
        **shared, **amax, **words,
        "row_data": row.data, "row_scale": row.block_scale, "col_data": col.data, "col_scale": col.block_scale,
        "row_padded": row.padded, "col_padded": col.padded,
    }  # fmt: skip
    _compile_and_launch(quantize_kernel, arch, grid, args, {"ROW": row.meta, "COL": col.meta, **tile}, num_warps=4)
    _assert_reference(copies, x, pair)
