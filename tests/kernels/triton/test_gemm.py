"""The Triton GEMM against the float64 product of the values its operands stand for, on whatever GPU is here."""

from __future__ import annotations

import math

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton import gemm as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

SNR_DB = 40.0
"""The issue's bar. fp32 accumulation over K = 1000 gives about 120 dB, so a wrong scale or a lost block cannot hide below it."""

SPECS = [
    (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", block="32x32")),
    (QuantSpec(format="mxfp4", hadamard=16), QuantSpec(format="mxfp4", hadamard=16)),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8", element="e5m2")),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp4")),
    (QuantSpec(format="fp8"), QuantSpec(format="fp8", block="rowwise", element="e5m2")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="rowwise")),
    (QuantSpec(format="mxfp4"), None),
]


def _snr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.double() - want).norm()
    return math.inf if error == 0 else 20 * math.log10(float(want.norm() / error))


def _worst_tile_db(got: torch.Tensor, want: torch.Tensor, tile: int = 128) -> float:
    rows, cols = range(0, want.shape[0], tile), range(0, want.shape[1], tile)
    pieces = [(slice(r, r + tile), slice(c, c + tile)) for r in rows for c in cols]
    return min(_snr_db(got[piece], want[piece]) for piece in pieces)


def _exact(operand: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return operand.decode().double() if isinstance(operand, QuantizedTensor) else operand.double()


def _product(a: torch.Tensor | QuantizedTensor, b: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    left, right = _exact(a), _exact(b)
    length = min(left.shape[1], right.shape[1])  # past the shorter one the other is padding
    return left[:, :length] @ right[:, :length].t()


def _operand(spec: QuantSpec | None, rows: int, k: int, rng: torch.Generator) -> torch.Tensor | QuantizedTensor:
    x = (torch.randn(rows, k, generator=rng) * torch.exp(torch.randn(rows, 1, generator=rng))).bfloat16().cuda()
    return x if spec is None else reference.quantize(x, spec)


@needs_gpu
@pytest.mark.parametrize("specs", SPECS, ids=lambda specs: " x ".join(map(str, specs)))
@pytest.mark.parametrize("shape", [(300, 260, 1000), (640, 768, 512), (5, 1030, 96)])
def test_quantised_product_is_exact_up_to_the_order_of_additions(specs, shape, rng) -> None:
    m, n, k = shape
    a, b = _operand(specs[0], m, k, rng), _operand(specs[1], n, k, rng)
    want = _product(a, b)
    got = turbo.gemm_nt(a, b, out_dtype=torch.float32)
    assert got.isfinite().all()
    assert _snr_db(got, want) > SNR_DB
    assert _worst_tile_db(got, want) > SNR_DB


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_plain_product_of_small_integers_is_exact(dtype, layout, rng) -> None:
    """Sums stay below 2^11, so that every order of additions and every output dtype gives the same bits."""
    m, n, k = 515, 770, 200
    a = torch.randint(-2, 3, (m, k), generator=rng).to(dtype).cuda()
    b = torch.randint(-1, 2, (n, k), generator=rng).to(dtype).cuda()
    want = (a.double() @ b.double().t()).to(torch.float32)
    a = a.t().contiguous().t() if layout == "tn" else a
    b = b.t().contiguous().t() if layout in ("nn", "tn") else b
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.float32), want)
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.float16), want.half())


@needs_gpu
def test_bias_is_added_before_the_rounding(rng) -> None:
    a = torch.randint(-2, 3, (600, 128), generator=rng).bfloat16().cuda()
    b = torch.randint(-2, 3, (520, 128), generator=rng).bfloat16().cuda()
    bias = (torch.randint(-8, 9, (520,), generator=rng) / 4).bfloat16().cuda()
    want = (a.double() @ b.double().t() + bias.double()).bfloat16()
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias), want)


@needs_gpu
def test_accumulation_adds_to_main_grad_in_place(rng) -> None:
    spec = QuantSpec(format="mxfp4", hadamard=16)
    a, b = _operand(spec, 300, 512, rng), _operand(spec, 200, 512, rng)
    start = torch.randn(300, 200, generator=rng).cuda()
    out = start.clone()
    assert turbo.gemm_nt(a, b, out_dtype=torch.float32, out=out) is out
    assert _snr_db(out, start.double() + _product(a, b)) > SNR_DB


@needs_gpu
def test_a_nan_scale_reaches_every_output_of_its_row_and_no_other(rng) -> None:
    x = torch.randn(64, 256, generator=rng).bfloat16().cuda()
    x[7, 40] = float("nan")
    a = reference.quantize(x, QuantSpec(format="mxfp4"))
    b = _operand(QuantSpec(format="mxfp4"), 96, 256, rng)
    got = turbo.gemm_nt(a, b, out_dtype=torch.float32)
    assert got[7].isnan().all()
    assert got.isnan().sum() == 96


@needs_gpu
@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
def test_every_code_and_scale_decodes_to_its_value(element) -> None:
    """Against an identity: y is the decoded operand itself. Scale bytes whose values leave bf16's range are left out."""
    spec = QuantSpec(format="mxfp4" if element == "e2m1" else "mxfp8", element=element)
    low, high = (3, 240) if element == "e2m1" else (24, 240)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(high - low, 1)
    finite = {"e2m1": codes < 256, "e4m3": (codes & 0x7F) != 0x7F, "e5m2": (codes & 0x7F) < 0x7C}[element]
    codes = torch.where(finite, codes, 0)
    if element == "e2m1":
        codes = codes[:, :128].contiguous()
    scale = torch.arange(low, high, device="cuda").to(torch.uint8)[:, None].repeat(1, 8)
    a = QuantizedTensor(codes, scale, spec, (high - low, 256), 0)
    got = turbo.gemm_nt(a, torch.eye(256, device="cuda", dtype=torch.bfloat16), out_dtype=torch.float32)
    want = a.decode()
    kept = want.abs() < 2.0**127
    assert torch.equal(got[kept], want[kept])


@needs_gpu
def test_empty_products() -> None:
    a, b = torch.zeros(3, 0, device="cuda").bfloat16(), torch.zeros(5, 0, device="cuda").bfloat16()
    bias = torch.arange(5.0, device="cuda")
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.float32, bias=bias), bias.expand(3, 5))
    assert turbo.gemm_nt(
        torch.zeros(0, 8, device="cuda").bfloat16(), b.new_zeros(5, 8), out_dtype=torch.float32
    ).shape == (0, 5)


def test_what_it_cannot_multiply_is_refused_with_a_reason() -> None:
    mx = QuantSpec(format="mxfp4")
    request = GemmRequest(device="cpu", a=mx, b=mx, out_dtype=torch.bfloat16)
    assert turbo.supports(request) == "runs on GPUs, the tensors are on cpu"


@needs_gpu
def test_operands_it_cannot_hold_exactly_are_refused() -> None:
    mx = QuantSpec(format="mxfp4")
    fp32 = GemmRequest(device="cuda", a=torch.float32, b=torch.float32, out_dtype=torch.float32)
    mixed = GemmRequest(device="cuda", a=mx, b=torch.float16, out_dtype=torch.float32)
    assert turbo.supports(fp32) == "plain operands must both be bf16 or both fp16, got float32"
    assert turbo.supports(mixed) == "a quantised operand is multiplied with bf16, got float16"


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="same K"):
        turbo.gemm_nt(torch.zeros(2, 3), torch.zeros(2, 4), out_dtype=torch.float32)
