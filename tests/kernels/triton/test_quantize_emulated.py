"""The quantisation kernels compiled for AMD GPUs and executed by the emulator, against the reference, and their ISA gates.

Nothing here needs or stands in for an AMD GPU: it shows that the compiled code computes the right bytes, without races, spills or
scratch, and says nothing about its speed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn import IsaGate
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.triton import quantize_launch
from primus_turbo_plugin.kernels.triton.quantize_amax import ROWS, TILES, amax_words_kernel
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.kernels.triton.quantize_shared import quantize_shared_kernel
from primus_turbo_plugin.kernels.triton.quantize_tile import amax_kernel, quantize_kernel
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey

ARCHS = ("gfx942", "gfx950", "gfx1250")
LANES = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1250": 320 << 10}
TARGET = {"gfx942": "generic", "gfx950": "gfx950", "gfx1250": "generic"}
KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=4)
Pair = tuple[QuantSpec, QuantSpec]

NO_MEMORY_SPILLS = IsaGate(forbidden_anywhere=("scratch_.*",))

WORD_PAIRS: list[Pair] = [
    (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", hadamard=16)),
    (
        QuantSpec(format="mxfp4", block="32x32", scale_rule="floor"),
        QuantSpec(format="mxfp8", block="32x32", element="e5m2"),
    ),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp4", hadamard=32, random_signs=True)),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128", element="e5m2")),
    (QuantSpec(format="mxfp4", rounding="stochastic"), QuantSpec(format="mxfp8", rounding="stochastic")),
]
"""Pairs that quantize_shared.py makes of bf16."""

TILE_PAIRS: list[Pair] = [
    (QuantSpec(format="mxfp4", scale_rule="rceil"), QuantSpec(format="mxfp4", hadamard=32, random_signs=True)),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp4", rounding="stochastic")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", element="e5m2", block="rowwise")),
    (QuantSpec(format="fp8", block="tensorwise"), QuantSpec(format="fp8", element="e5m2", block="tensorwise")),
]


def _ids(pair: Pair) -> str:
    return " | ".join(map(str, pair))


def _compile_and_launch(
    kernel: Any, arch: str, grid: Any, args: dict[str, Any], constants: dict[str, Any], gate: IsaGate, **options: Any
) -> None:
    compiled = amdgcn.compile(kernel, arch, args, constants, **options)
    amdgcn.launch(compiled, grid, args)
    report = amdgcn.isa_report(compiled)
    assert not amdgcn.check_gate(report, gate), amdgcn.render(report)


def _values(rows: int, cols: int, rng: torch.Generator) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=rng) * torch.exp(2 * torch.randn(rows, 1, generator=rng))
    x[7] *= 2.0**-126
    x[3, 5] = float("nan")
    return x.bfloat16()


def _copies(x: torch.Tensor, pair: Pair, layout: Any = "plain") -> list[Any]:
    copies = [Copy.of(*x.shape, x.device, spec, side, KEY, 5, layout) for spec, side in zip(pair, (False, True))]
    for copy in copies:
        copy.data.fill_(0xAA)
    return copies


def _assert_reference(copies: list[Any], x: torch.Tensor, pair: Pair) -> None:
    for copy, want in zip(copies, reference.quantize_both(x, *pair, key=KEY, signs_seed=5)):
        assert torch.equal(copy.data, want.data)
        scale = want.with_scale_layout(copy.scale_layout).block_scale
        assert torch.equal(copy.block_scale.nan_to_num(-1.0), scale.nan_to_num(-1.0))


def _key_words(row: Any, col: Any) -> dict[str, int]:
    names = ("k0", "k1", "c2", "c3")
    words = {f"row_{name}": word for name, word in zip(names, row.words)}
    return words | {f"col_{name}": word for name, word in zip(names, col.words)}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pair", WORD_PAIRS, ids=_ids)
def test_the_kernel_of_aligned_bf16_equals_the_reference_in_every_byte(arch, pair, rng) -> None:
    """With tails in both directions. gfx950 must use its conversions, and takes its scales shuffled."""
    rows, cols = 100, 264
    x = _values(rows, cols, rng)
    layout = "gfx950" if arch == "gfx950" else "plain"
    row, col = copies = _copies(x, pair, layout)
    token_blocks = quantize_launch.tile_token_blocks(LDS[arch], pair)
    args = {
        "x_ptr": x.view(torch.int32), "gamma_ptr": None, "rstd_ptr": None, "sums_ptr": None,
        "row_data": row.data.view(torch.int32), "row_scale": row.block_scale, "row_amax": None, "row_signs": row.signs,
        "col_data": col.data.view(torch.int32), "col_scale": col.block_scale, "col_amax": None, "col_signs": col.signs,
        "rows": rows, "cols8": cols // 8, "row_stride16": cols // 8, **_key_words(row, col),
    }  # fmt: skip
    constants = {
        "ROW": row.meta, "COL": col.meta, "FRONT": None, "SUMS": False, "SHUFFLED": layout != "plain",
        "REVERSED": arch == "gfx942",
        "TB": token_blocks, "GROUP": 8, "LANES": LANES[arch], "EVEN": False, "TARGET": TARGET[arch],
    }  # fmt: skip
    conversions = {"e2m1": "v_cvt_scalef32_pk_fp4_f32", "e4m3": "v_cvt_pk_fp8_f32.*", "e5m2": "v_cvt_pk_bf8_f32.*"}
    required = tuple({conversions[str(spec.element)] for spec in pair}) if arch == "gfx950" else ()
    gate = IsaGate(
        required_anywhere=required, forbidden_anywhere=("scratch_.*",), min_workgroups=1 if "fp8(" in _ids(pair) else 2
    )
    grid = -(-rows // (32 * token_blocks)) * -(-cols // quantize_launch.TILE_COLS)
    warps = quantize_launch.num_warps(token_blocks, LANES[arch])
    _compile_and_launch(quantize_shared_kernel, arch, grid, args, constants, gate, num_warps=warps)
    _assert_reference(copies, x, pair)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_amax_of_rows_and_columns(arch, rng) -> None:
    rows, cols = 130, 136
    x = _values(rows, cols, rng)
    x[3, 5] = 1.0
    metas = [copy.meta for copy in _copies(x, (QuantSpec(format="fp8", block="rowwise"),) * 2)]
    args = {
        "x_ptr": x.view(torch.int32), "rows": rows, "cols8": cols // 8, "row_stride16": cols // 8,
    }  # fmt: skip
    grid = (-(-cols // (128 * TILES)), -(-rows // ROWS))
    parts = [torch.zeros(size, dtype=torch.int32) for size in (rows, cols)]
    args |= {"row_amax": parts[0], "col_amax": parts[1]}
    constants = {"ROW": metas[0], "COL": metas[1], "ROWS": ROWS, "TILES": TILES}
    _compile_and_launch(amax_words_kernel, arch, grid, args, constants, NO_MEMORY_SPILLS, num_warps=8)
    assert torch.equal(parts[0].view(torch.float32), x.float().abs().amax(1))
    assert torch.equal(parts[1].view(torch.float32), x.float().abs().amax(0))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pair", TILE_PAIRS, ids=_ids)
def test_the_tile_kernel_equals_the_reference_in_every_byte(arch, pair, rng) -> None:
    rows, cols = 70, 100
    x = _values(rows, cols, rng)
    row, col = copies = _copies(x, pair)
    block_m, block_n = quantize_launch.tile_shape(row.meta, col.meta)
    grid = (-(-max(rows, col.padded) // block_m), -(-max(cols, row.padded) // block_n))
    amax = {"row_amax": row.amax_buffer(), "col_amax": col.amax_buffer()}
    shared = {"x_ptr": x, "row_signs": row.signs, "col_signs": col.signs}
    shared |= {"rows": rows, "cols": cols, "stride_row": cols, "stride_col": 1}
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if any(buffer is not None for buffer in amax.values()):
        metas = {"ROW": row.meta if row.meta.needs_amax else None, "COL": col.meta if col.meta.needs_amax else None}
        _compile_and_launch(
            amax_kernel, arch, grid, {**shared, **amax}, {**metas, **tile}, NO_MEMORY_SPILLS, num_warps=4
        )
    args = {
        **shared, **amax, **_key_words(row, col),
        "row_data": row.data, "row_scale": row.block_scale, "col_data": col.data, "col_scale": col.block_scale,
        "row_padded": row.padded, "col_padded": col.padded,
    }  # fmt: skip
    constants = {"ROW": row.meta, "COL": col.meta, **tile}
    _compile_and_launch(quantize_kernel, arch, grid, args, constants, NO_MEMORY_SPILLS, num_warps=4)
    _assert_reference(copies, x, pair)
