"""The MX backend over torch._scaled_mm. No GPU here has such units: tested are what it hands to torch, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from primus_turbo_plugin.devices import capabilities_of
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.torch_native import gemm_scaled_mx
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.scale_layout import shuffled_index
from tests.support.exact_mx import E2M1

MACHINES = [
    ("gfx950", "7.0.51831", "plain", "plain"),
    ("gfx950", "7.13.1", "gfx950", "plain"),
    ("gfx950", "7.14.0", "gfx950", "gfx950"),
    ("gfx1250", "7.14.0", "gfx950", "gfx950"),
    ("sm100", None, "none", "cublas"),
]
"""(architecture, ROCm, scale layout of MXFP4, scale layout of MXFP8)."""


def place(layout: str, row: int, block: int, rows: int, blocks: int) -> int:
    """Byte of a scale in each layout, one at a time, from its definition."""
    if layout == "plain":
        return row * blocks + block
    if layout == "gfx950":
        line, column = shuffled_index(row, block)
        return line * blocks * 32 + column
    piece = row // 128 * (blocks // 4) + block // 4
    return piece * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4


def values(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return codes.double()
    table = torch.tensor([float(v) for v in E2M1] + [-float(v) for v in E2M1], dtype=torch.float64)
    byte = codes.view(torch.uint8).int()
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=-1).flatten(1)


def stand_in(layouts: dict[bool, str]) -> Callable[..., torch.Tensor]:
    """`torch._scaled_mm` by its rules for MX operands, on the CPU in float64."""

    def scaled_mm(
        left: torch.Tensor, right: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        factors = []
        for codes, scale in ((left, scale_a), (right.t(), scale_b)):
            assert codes.stride(1) == 1
            assert scale.dtype == torch.float8_e8m0fnu
            assert scale.is_contiguous()
            x = values(codes)
            rows, blocks = x.shape[0], x.shape[1] // 32
            assert rows % 32 == 0
            assert x.shape[1] % 128 == 0
            assert (
                scale.numel()
                == -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
                == -(-rows // 32) * 32 * (-(-blocks // 8) * 8)
            )
            layout = layouts[codes.dtype == torch.float4_e2m1fn_x2]
            order = torch.tensor([[place(layout, r, c, rows, blocks) for c in range(blocks)] for r in range(rows)])
            exponent = scale.view(torch.uint8).flatten()[order].double() - 127
            factors.append(x * torch.exp2(exponent).repeat_interleave(32, 1))
        assert options.keys() == {"out_dtype"}
        return (factors[0] @ factors[1].t()).to(options["out_dtype"])

    return scaled_mm


def on_machine(monkeypatch: pytest.MonkeyPatch, arch: str, rocm: str | None, layouts: dict[bool, str]) -> None:
    monkeypatch.setattr(gemm_scaled_mx, "this_gpu", lambda: capabilities_of(arch))
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch, "_scaled_mm", stand_in(layouts))


def snr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.double() - want).norm()
    return 20 * math.log10(float(want.norm() / error)) if error else math.inf


@pytest.mark.parametrize(("arch", "rocm", "fp4", "fp8"), MACHINES, ids=lambda value: str(value))
@pytest.mark.parametrize("specs", [("mxfp4", "1x32"), ("mxfp8", "32x32"), ("mxfp8", "1x32")], ids="-".join)
def test_what_torch_gets_means_the_product(arch, rocm, fp4, fp8, specs, rng, monkeypatch) -> None:
    """Ragged M, N and K; each scale is looked for where the layout's definition puts it."""
    fmt, block = specs
    on_machine(monkeypatch, arch, rocm, {True: fp4, False: fp8})
    left, right = QuantSpec(format=fmt, block=block), QuantSpec(format=fmt, element="e5m2" if fmt == "mxfp8" else None)
    m, n, k = 130, 40, 200
    a, b = (
        quantize(torch.randn(rows, k, generator=rng) * torch.exp(torch.randn(rows, 1, generator=rng)), spec)
        for rows, spec in ((m, left), (n, right))
    )
    reason = gemm_scaled_mx.supports(GemmRequest(device="cuda", a=left, b=right, out_dtype=torch.bfloat16))
    if fmt == "mxfp4" and arch == "sm100":
        assert reason == "cuBLASLt has no MXFP4 product, only NVFP4"
        return
    assert reason is None
    want = a.decode().double() @ b.decode().double().t()
    for operand in (a, a.with_scale_layout("gfx950")):
        y = gemm_scaled_mx.gemm_nt(operand, b, out_dtype=torch.bfloat16)
        assert y.shape == (m, n)
        assert snr_db(y, want) > 45.0
        assert y.is_contiguous()
    bias = torch.randn(n, generator=rng)
    assert snr_db(gemm_scaled_mx.gemm_nt(a, b, out_dtype=torch.float16, bias=bias), want + bias.double()) > 45.0


def test_refusals_name_what_is_missing(monkeypatch) -> None:
    def reason(arch: str, rocm: str | None, a: str = "mxfp4", b: str = "mxfp4", **other: Any) -> str | None:
        on_machine(monkeypatch, arch, rocm, {})
        fields = {"device": "cuda", "out_dtype": torch.bfloat16} | other
        return gemm_scaled_mx.supports(GemmRequest(a=QuantSpec(format=a), b=QuantSpec(format=b), **fields))

    assert reason("gfx950", "6.4.1") == "needs torch for ROCm 7.0 on gfx950, got ROCm 6.4.1"
    assert reason("gfx1250", "7.2.0") == "needs torch for ROCm 7.14 on gfx1250, got ROCm 7.2.0"
    assert reason("gfx942", "7.2.0") == "gfx942 has no MXFP4 units"
    assert reason("sm90", None, "mxfp8", "mxfp8") == "sm90 has no MXFP8 units"
    assert reason("gfx950", "7.0.0", "mxfp4", "mxfp8") == "multiplies two MX operands of one format"
    assert reason("gfx950", "7.0.0", "mxfp4", "fp8") == "multiplies two MX operands of one format"
    assert reason("gfx950", "7.0.0", out_dtype=torch.float32, accumulate=True) == "writes bf16 or fp16, not float32"
    assert reason("gfx950", "7.0.0", device="cpu") == "runs on GPUs, the tensors are on cpu"
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    assert reason("gfx950", "7.0.0") == f"torch {torch.__version__} has no torch.float4_e2m1fn_x2"


def test_empty_operands() -> None:
    a, b = (quantize(torch.ones(rows, 64), QuantSpec(format="mxfp4")) for rows in (0, 5))
    assert isinstance(a, QuantizedTensor)
    assert gemm_scaled_mx.gemm_nt(a, b, out_dtype=torch.bfloat16).shape == (0, 5)
