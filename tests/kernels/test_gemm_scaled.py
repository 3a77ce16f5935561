"""The backend over torch._scaled_mm: on a GPU against float64, without one what it hands to torch and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from primus_turbo_plugin.devices import capabilities_of
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.torch_native import gemm_scaled
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

PAIRS = [
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("tensorwise", "rowwise"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
]
each_pair = pytest.mark.parametrize("blocks", PAIRS, ids="-".join)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fp8(block: str, element: str = "e4m3") -> QuantSpec:
    return QuantSpec(format="fp8", block=block, element=element)


def operand(rng: torch.Generator, rows: int, k: int, spec: QuantSpec) -> QuantizedTensor:
    x = torch.randn(rows, k, generator=rng) * torch.exp(torch.randn(rows, 1, generator=rng))
    return quantize(x.bfloat16().to(DEVICE), spec)


def product(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    left, right = a.decode().double(), b.decode().double()
    length = min(left.shape[1], right.shape[1])
    return left[:, :length] @ right[:, :length].t()


def snr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.double() - want).norm()
    return 20 * math.log10(float(want.norm() / error)) if error else math.inf


@needs_gpu
@each_pair
@pytest.mark.parametrize("shape", [(256, 512, 1024), (300, 130, 200), (1, 17, 640)], ids=str)
def test_products_on_the_fp8_units(blocks, shape, rng) -> None:
    m, n, k = shape
    a, b = (
        operand(rng, m, k, fp8(blocks[0])),
        operand(rng, n, k, fp8(blocks[1], "e5m2" if blocks[1] != "128x128" else "e4m3")),
    )
    reason = gemm_scaled.supports(GemmRequest.of(a, b, torch.float32))
    if reason is not None:
        pytest.skip(reason)
    want = product(a, b)
    y = gemm_scaled.gemm_nt(a, b, out_dtype=torch.float32)
    assert snr_db(y, want) > 40.0
    assert snr_db(gemm_scaled.gemm_nt(a, b, out_dtype=torch.bfloat16), want) > 40.0
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.full((m + 7, n), torch.nan, dtype=dtype, device=DEVICE)
        gemm_scaled.gemm_nt(a, b, out_dtype=dtype, into=whole[3 : m + 3])
        assert torch.equal(whole[3 : m + 3], gemm_scaled.gemm_nt(a, b, out_dtype=dtype))
        assert int(whole.isnan().sum()) == 7 * n
    for dtype in (torch.bfloat16, torch.float32):
        bias = torch.randn(n, generator=rng).to(DEVICE, dtype)
        assert snr_db(gemm_scaled.gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias), want + bias.double()) > 40.0
    out = torch.randn(m, n, generator=rng).to(DEVICE)
    want = want + out.double()
    assert gemm_scaled.gemm_nt(a, b, out_dtype=torch.float32, out=out) is out
    assert snr_db(out, want) > 40.0


def stand_in(
    left: torch.Tensor, right: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
) -> torch.Tensor:
    """`torch._scaled_mm` by its rules for FP8, on the CPU: what it refuses, and the product in float64."""
    (m, k), n = left.shape, right.shape[1]
    assert k % 16 == 0, k
    assert n % 16 == 0, n
    assert left.stride(1) == 1, left.stride()
    assert right.stride(0) == 1, right.stride()
    assert options.pop("use_fast_accum") is False
    bias, dtype = options.pop("bias"), options.pop("out_dtype")
    assert not options
    factors = []
    for scale, rows in ((scale_a, m), (scale_b.t(), n)):
        blocks = -(-k // 128)
        if scale.numel() == 1:
            factors.append(scale.expand(rows, k))
        elif scale.shape == (rows, 1):
            assert dtype == torch.bfloat16
            assert scale.is_contiguous()
            factors.append(scale.expand(rows, k))
        elif scale.shape == (rows, blocks):
            assert scale.stride() == (1, rows) or blocks == 1
            assert rows % 4 == 0
            factors.append(scale.repeat_interleave(128, 1))
        else:
            assert scale.shape == (-(-rows // 128), blocks), scale.shape
            assert blocks % 4 == 0
            assert scale.is_contiguous()
            factors.append(scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1))
    y = (left.double() * factors[0].double()) @ (right.t().double() * factors[1].double()).t()
    if bias is not None:
        assert bias.shape == (n,)
        assert bias.dtype == dtype == torch.bfloat16
        y = y + bias.double()
    return y.to(dtype)


@pytest.fixture(params=["sm90", "gfx942", "gfx950"])
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything but the product itself, as on that GPU."""
    monkeypatch.setattr(gemm_scaled, "this_gpu", lambda: capabilities_of(request.param))
    monkeypatch.setattr(torch, "_scaled_mm", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return request.param


@each_pair
@pytest.mark.parametrize("shape", [(40, 32, 256), (33, 17, 200)], ids=str)
def test_what_torch_gets_obeys_its_rules_and_means_the_product(arch, blocks, shape, rng) -> None:
    m, n, k = shape
    a, b = (quantize(torch.randn(rows, k, generator=rng), fp8(block)) for rows, block in zip((m, n), blocks))
    want = product(a, b)
    for out_dtype, bar in ((torch.float32, 120.0), (torch.bfloat16, 45.0), (torch.float16, 55.0)):
        assert snr_db(gemm_scaled.gemm_nt(a, b, out_dtype=out_dtype), want) > bar
        bias = torch.randn(n, generator=rng)
        assert snr_db(gemm_scaled.gemm_nt(a, b, out_dtype=out_dtype, bias=bias), want + bias.double()) > bar
    bias = bias.bfloat16()
    y = gemm_scaled.gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias)
    assert snr_db(y, want + bias.double()) > 45.0
    assert y.is_contiguous()  # also where columns were cut off: NCCL takes no other
    out = torch.randn(m, n, generator=rng)
    expected = out.double() + want
    assert gemm_scaled.gemm_nt(a, b, out_dtype=torch.float32, out=out) is out
    assert snr_db(out, expected) > 120.0


@pytest.mark.parametrize(("element", "ocp", "fnuz"), [
    ("e4m3", torch.float8_e4m3fn, torch.float8_e4m3fnuz), ("e5m2", torch.float8_e5m2, torch.float8_e5m2fnuz),
])  # fmt: skip
def test_every_code_becomes_the_fnuz_code_of_half_its_value(element, ocp, fnuz) -> None:
    codes = torch.arange(256).to(torch.uint8)
    want = codes.view(ocp).float() / 2
    want[want.isinf()] = math.nan
    got = gemm_scaled.to_fnuz(codes, element).view(fnuz).float()
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))


def test_refusals_name_what_is_missing(arch) -> None:
    def reason(a: object, b: object, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> str | None:
        return gemm_scaled.supports(GemmRequest(device=device, a=a, b=b, out_dtype=dtype))  # type: ignore[arg-type]

    assert reason(fp8("rowwise"), fp8("rowwise")) is None
    assert reason(fp8("tensorwise"), torch.bfloat16) == "multiplies two FP8 operands"
    assert reason(QuantSpec(format="mxfp8"), fp8("rowwise")) == "multiplies two FP8 operands"
    assert reason(fp8("rowwise"), fp8("rowwise"), device="cpu") == "runs on GPUs, the tensors are on cpu"
    assert reason(fp8("128x128"), fp8("128x128")) == "has no product of a 128x128 and a 128x128 operand"
    assert (reason(fp8("1x128"), fp8("128x128")) is None) == (arch == "sm90")
    e5m2 = reason(fp8("rowwise", "e5m2"), fp8("rowwise", "e5m2"))
    assert ("E5M2" in str(e5m2)) == (arch == "sm90")
    assert ("E4M3" in str(e5m2)) == (arch != "sm90")


def test_a_gpu_without_fp8_units_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(gemm_scaled, "this_gpu", lambda: capabilities_of("sm80"))
    request = GemmRequest(device="cuda", a=fp8("rowwise"), b=fp8("rowwise"), out_dtype=torch.bfloat16)
    assert gemm_scaled.supports(request) == "sm80 has no FP8 units"


def test_a_build_that_refuses_the_product_is_refused_with_its_words(monkeypatch) -> None:
    def too_old(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Invalid scaling configuration.\nmore")

    gemm_scaled._build_refusal.cache_clear()
    monkeypatch.setattr(gemm_scaled, "this_gpu", lambda: capabilities_of("sm90"))
    monkeypatch.setattr(gemm_scaled, "gemm_nt", too_old)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device, dtype: zeros(*shape, dtype=dtype))
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda shape, device: ones(shape))
    request = GemmRequest(device="cuda", a=fp8("1x128"), b=fp8("1x128"), out_dtype=torch.bfloat16)
    try:
        assert str(gemm_scaled.supports(request)).endswith(
            "cannot multiply 1x128 and 1x128 here: Invalid scaling configuration."
        )
    finally:
        gemm_scaled._build_refusal.cache_clear()


def test_empty_operands() -> None:
    a, b = (quantize(torch.ones(rows, 64), fp8("rowwise")) for rows in (0, 5))
    assert gemm_scaled.gemm_nt(a, b, out_dtype=torch.float32).shape == (0, 5)
