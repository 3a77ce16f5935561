"""The Triton GEMM compiled for AMD GPUs and executed by the emulator, against float64; what the compiler made of it.

Every call is the one `gemm_nt` would make on that GPU. Nothing here needs or stands in for an AMD GPU: it shows that the compiled
code computes the right numbers without races, and says nothing about its speed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.kernels.gemm_checks import common_length
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.triton import gemm_launch
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal
from primus_turbo_plugin.kernels.triton.gemm_defaults import default_config
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey
from primus_turbo_plugin.kernels.triton.gemm_launch import plan
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from tests.kernels.triton.test_gemm import SNR_DB, _product, _snr_db

ARCHS = ("gfx942", "gfx950", "gfx1250")
COMPUTE_UNITS = 8
SMALL = GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2)
_OUT = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def emulate(
    a: Operand, b: Operand, arch: str, config: GemmConfig, *,
    bias: torch.Tensor | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
    """What `gemm_nt` would return on a GPU of that architecture, and the compiled kernels."""
    length = common_length(a, b)
    y = torch.full((a.shape[0], b.shape[0]), float("nan"), dtype=out_dtype) if out is None else out
    key = GemmKey(
        arch=arch, compute_units=COMPUTE_UNITS, rows=y.shape[0], cols=y.shape[1], contraction=length,
        a=OperandKey.of(a), b=OperandKey.of(b), out=_OUT[y.dtype], bias=bias is not None, accumulate=out is not None,
    )  # fmt: skip
    assert refusal(key, config) is None, refusal(key, config)
    compiled = []
    for call in plan(a, b, bias, y, key, config):
        compiled.append(amdgcn.compile(call.kernel, arch, call.args, call.constants, **call.options))
        amdgcn.launch(compiled[-1], call.grid, call.args)
    return y, compiled


def _plain(rng: torch.Generator, rows: int, k: int, outer: bool) -> torch.Tensor:
    x = torch.randn(rows, k, generator=rng).bfloat16()
    return x.t().contiguous().t() if outer else x


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_bf16_with_tails_in_every_direction(arch, layout, rng) -> None:
    """K = 200 is no multiple of the step, M and N none of the tile; bias before the only rounding, or into what is there."""
    m, n, k = (80, 72, 200) if layout == "tn" else (70, 66, 200)
    a, b = _plain(rng, m, k, layout[0] == "t"), _plain(rng, n, k, layout[1] == "n")
    bias = torch.randn(n, generator=rng)
    y, _ = emulate(a, b, arch, SMALL, bias=bias)
    assert _snr_db(y, _product(a, b) + bias.double()) > 100.0
    out = torch.randn(m, n, generator=rng)
    want = out.double() + _product(a, b)
    emulate(a, b, arch, SMALL, out=out)
    assert _snr_db(out, want) > 100.0


@pytest.mark.parametrize("arch", ARCHS)
def test_shares_of_a_contraction_on_all_chiplets_add_up(arch, rng) -> None:
    """Persistent programs walk over 4 tiles x 3 shares in the order of 8 chiplets; one share is short."""
    a, b = _plain(rng, 70, 200, False), _plain(rng, 66, 200, False)
    bias = torch.randn(66, generator=rng)
    y, _ = emulate(a, b, arch, replace(SMALL, split_k=3, num_xcds=8, persistent=True), bias=bias)
    assert _snr_db(y, _product(a, b) + bias.double()) > 100.0


@pytest.mark.parametrize("arch", ARCHS)
def test_offsets_in_64_bits_find_the_same_elements(arch, rng, monkeypatch) -> None:
    """What rows more than 2^30 elements apart from a tile's corner need, on rows that are not."""
    monkeypatch.setattr(gemm_launch, "_WIDE_OFFSET", 0)
    a, b = _plain(rng, 70, 200, False), _plain(rng, 66, 200, True)
    y, _ = emulate(a, b, arch, SMALL)
    assert _snr_db(y, _product(a, b)) > 100.0


MX4, MX8, MX8_E5 = QuantSpec(format="mxfp4"), QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8", element="e5m2")
ROW, ROW_E5 = QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8", block="rowwise", element="e5m2")
BLOCKS, SQUARES = QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")
STEP = replace(SMALL, block_k=128)
QUANTIZED: list[tuple[QuantSpec, QuantSpec | None, GemmConfig]] = [
    (MX4, None, STEP),
    (BLOCKS, SQUARES, STEP),
    (MX8, MX8_E5, replace(SMALL, decode="scratch")),
    (ROW, ROW, replace(SMALL, decode="scratch")),
    (MX4, QuantSpec(format="mxfp4", block="32x32"), replace(STEP, units="mx")),
    (MX8, MX8_E5, replace(STEP, units="mx", split_k=2)),
    (ROW, ROW_E5, replace(STEP, units="fp8")),
    (BLOCKS, ROW, replace(STEP, units="fp8")),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("left", "right", "config"), QUANTIZED, ids=[f"{a} x {b} {c.units} {c.decode}" for a, b, c in QUANTIZED]
)
def test_quantised_operands_on_every_kind_of_unit(arch, left, right, config, rng) -> None:
    if arch == "gfx942" and config.units == "mx":
        pytest.skip("gfx942 has no units for MX")
    if arch == "gfx942" and config.units == "fp8":
        config = replace(config, decode="scratch")  # its units read FNUZ codes
    k = 200 if config.units == "mx" or config.decode == "scratch" else 256
    plain = [torch.randn(rows, k, generator=rng).bfloat16() for rows in (70, 66)]
    a, b = (x if spec is None else reference.quantize(x, spec) for x, spec in zip(plain, (left, right)))
    if left is MX4:
        a = a.with_scale_layout("gfx950")
    y, compiled = emulate(a, b, arch, config)
    assert _snr_db(y, _product(a, b)) > SNR_DB
    if config.units != "half":
        assert any(re.search(r"v_(mfma|wmma)\w*(fp8|bf8|f8f6f4)", kernel.asm) for kernel in compiled)


SHIPPED: list[tuple[str, QuantSpec | None]] = [("nt", None), ("tn", None), ("nt", ROW), ("nt", MX4)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("layout", "spec"), SHIPPED, ids=["bf16 nt", "bf16 tn into fp32", "fp8", "mxfp4"])
def test_the_shipped_configuration_of_a_large_product(arch, layout, spec, rng) -> None:
    """The tile, pipeline and chiplet order that a 16384-token product would get, on one tile and a part of the next."""
    m, n, k = 304, 256, 768
    a, b = _plain(rng, m, k, layout == "tn"), _plain(rng, n, k, layout == "tn")
    left, right = (x if spec is None else reference.quantize(x, spec) for x in (a, b))
    kinds = {"a": OperandKey.of(left), "b": OperandKey.of(right), "accumulate": layout == "tn", "out": "fp32"}
    units = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}[arch]
    large = GemmKey(arch=arch, compute_units=units, rows=16384, cols=4096, contraction=4096, **kinds)
    out = torch.zeros(m, n) if layout == "tn" else None
    y, _ = emulate(left, right, arch, default_config(large), out=out)
    assert _snr_db(y, _product(left, right)) > 100.0
