"""The Triton GEMM against the float64 product of the values its operands stand for, on whatever GPU is here."""

from __future__ import annotations

import math

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton import gemm as turbo
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal
from primus_turbo_plugin.kernels.triton.gemm_key import Operand, key_of
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
@pytest.mark.parametrize("specs", [*SPECS, (None, None)], ids=str)
def test_a_given_result_is_written_whatever_it_holds(specs, rng) -> None:
    a, b = (_operand(spec, rows, 512, rng) for spec, rows in zip(specs, (192, 260), strict=True))
    whole = torch.full((500, 260), torch.nan, dtype=torch.bfloat16, device="cuda")
    expected = turbo.gemm_nt(a, b, out_dtype=torch.bfloat16)
    for first in (0, 101, 300):
        into = whole[first : first + 192]
        assert turbo.gemm_nt(a, b, out_dtype=torch.bfloat16, into=into) is into
        assert torch.equal(into, expected)
        into.fill_(torch.nan)
    assert whole.isnan().all()


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


POINTERS = GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=2)
TMA = {"loads": "descriptors", "epilogue_parts": 4}
CONFIGS = {
    "small tiles": GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4),
    "pointers": POINTERS,
    "persistent": GemmConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=2, persistent=True),
    "chiplets": GemmConfig(block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=2, num_xcds=8),
    "split": GemmConfig(block_m=128, block_n=64, block_k=128, num_warps=4, num_stages=2, split_k=4),
    "scratch": GemmConfig(block_m=128, block_n=128, block_k=64, decode="scratch"),
    "scratch split": GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, decode="scratch", split_k=3),
    "tma": GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=2, **TMA),
    "tma persistent": GemmConfig(block_m=128, block_n=256, block_k=64, num_stages=3, persistent=True, **TMA),
    "tma scratch": GemmConfig(block_m=128, block_n=256, block_k=64, persistent=True, decode="scratch", **TMA),
    "fp8 units": GemmConfig(block_m=128, block_n=128, block_k=128, num_stages=3, units="fp8"),
    "fp8 units tma": GemmConfig(block_m=128, block_n=128, block_k=128, persistent=True, units="fp8", **TMA),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
CONFIG_SPECS = [(None, None), *SPECS[:2], *SPECS[3:6], SPECS[7]]


def _or_skip(a: Operand, b: Operand, y: torch.Tensor, config: GemmConfig, **kinds: bool) -> None:
    length = min(x.padded_contraction if isinstance(x, QuantizedTensor) else x.shape[1] for x in (a, b))
    reason = refusal(key_of(a, b, y, length, **({"bias": False, "accumulate": False} | kinds)), config)
    if reason is not None:
        pytest.skip(reason)


@needs_gpu
@each_config
@pytest.mark.parametrize("specs", CONFIG_SPECS, ids=lambda specs: " x ".join(map(str, specs)))
def test_every_configuration_computes_the_product_with_the_same_bits_every_time(specs, config, rng) -> None:
    m, n, k = 400, 328, 1000
    a, b = _operand(specs[0], m, k, rng), _operand(specs[1], n, k, rng)
    want = _product(a, b)
    _or_skip(a, b, want.float(), config)
    got = turbo.gemm_nt(a, b, out_dtype=torch.float32, config=config)
    assert _snr_db(got, want) > SNR_DB
    assert _worst_tile_db(got, want) > SNR_DB
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.float32, config=config), got)
    bias = torch.randn(n, generator=rng).bfloat16().cuda()
    rounded = turbo.gemm_nt(a, b, out_dtype=torch.bfloat16, bias=bias, config=config)
    assert _snr_db(rounded, want + bias.double()) > SNR_DB
    out = torch.randn(m, n, generator=rng).cuda()
    want = want + out.double()
    turbo.gemm_nt(a, b, out_dtype=torch.float32, out=out, config=config)
    assert _snr_db(out, want) > SNR_DB


@needs_gpu
@pytest.mark.parametrize(
    "config", [CONFIGS[name] for name in ("pointers", "split", "tma", "tma scratch", "fp8 units tma")]
)
def test_a_product_like_an_earlier_one_reads_its_own_tensors(config, rng) -> None:
    """Later calls skip Triton's look at the arguments: other tensors, then another alignment, must still be seen."""
    spec = QuantSpec(format="mxfp4") if config.decode == "scratch" else None
    spec = QuantSpec(format="fp8", block="rowwise") if config.units == "fp8" else spec
    for _ in range(3):
        a, b = _operand(spec, 200, 512, rng), _operand(spec, 136, 512, rng)
        for out_dtype in (torch.float32, torch.bfloat16):
            y = turbo.gemm_nt(a, b, out_dtype=out_dtype, config=config)
            assert _snr_db(y, _product(a, b)) > SNR_DB
    if spec is None and config.loads == "pointers":
        wide = _operand(None, 200, 520, rng)
        for start in (1, 8, 3):
            a = wide[:, start : start + 512]
            assert _snr_db(turbo.gemm_nt(a, b, out_dtype=torch.float32, config=config), _product(a, b)) > SNR_DB


@needs_gpu
@pytest.mark.parametrize("specs", [(None, None), SPECS[0], SPECS[4]], ids=lambda specs: " x ".join(map(str, specs)))
@pytest.mark.parametrize(
    "shape", [(1024, 1024, 4096), (512, 4096, 4096), (64, 4096, 4096), (256, 256, 16384), (4096, 128, 4096)], ids=str
)
def test_small_products_by_default(shape, specs, rng) -> None:
    """Their defaults have smaller tiles, or share the contraction; twice, since later calls are launched another way."""
    m, n, k = shape
    a, b = _operand(specs[0], m, k, rng), _operand(specs[1], n, k, rng)
    want = _product(a, b)
    first = turbo.gemm_nt(a, b, out_dtype=torch.float32)
    assert _worst_tile_db(first, want) > SNR_DB
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.float32), first)
    assert _worst_tile_db(turbo.gemm_nt(a, b, out_dtype=torch.bfloat16), want) > SNR_DB


@needs_gpu
@each_config
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("shape", [(1, 17, 200), (130, 264, 72), (17, 1, 33), (200, 136, 8), (129, 33, 200)], ids=str)
def test_tails_in_every_layout(shape, layout, config, rng) -> None:
    """Small integers: any element lost, doubled or taken from beyond an edge changes a whole number."""
    m, n, k = shape
    a = torch.randint(-2, 3, (m, k), generator=rng).bfloat16().cuda()
    b = torch.randint(-2, 3, (n, k), generator=rng).bfloat16().cuda()
    want = (a.double() @ b.double().t()).float()
    a = a.t().contiguous().t() if layout[0] == "t" else a
    b = b.t().contiguous().t() if layout[1] == "n" else b
    _or_skip(a, b, want, config)
    frame = torch.full((m + 2, n + 2), float("nan"), device="cuda")
    out = frame[1:-1, 1:-1].zero_() if config.loads == "pointers" else torch.zeros_like(want)
    turbo.gemm_nt(a, b, out_dtype=torch.float32, out=out, config=config)
    assert torch.equal(out, want)
    if config.loads == "pointers":
        assert frame.isnan().sum() == frame.numel() - want.numel()
    assert torch.equal(turbo.gemm_nt(a, b, out_dtype=torch.bfloat16, config=config), want.bfloat16())


@needs_gpu
def test_operands_of_any_strides_and_alignment(rng) -> None:
    wide = torch.randint(-2, 3, (300, 2000), generator=rng).bfloat16().cuda()
    views = [
        wide[::2, ::3],
        wide[1:201, 1:301],
        wide[3:, 7:].t()[:250, :290],
        wide[:40, :].t()[5:400, ::2],
        wide[:1].expand(200, 2000),
    ]
    for a in views:
        for b in views:
            k = min(a.shape[1], b.shape[1])
            left, right = a[:, :k], b[:, :k]
            want = (left.double() @ right.double().t()).float()
            assert torch.equal(turbo.gemm_nt(left, right, out_dtype=torch.float32), want)


@needs_gpu
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_operands_and_results_of_over_2_to_the_31_elements(layout) -> None:
    """The last rows are where a 32-bit offset would have wrapped around."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB of GPU memory")
    rows, k = 66_000, 32_768
    big = torch.empty(k, rows, device="cuda", dtype=torch.bfloat16).t() if layout == "tn" else None
    a = torch.empty(rows, k, device="cuda", dtype=torch.bfloat16) if big is None else big
    a.fill_(0)
    a[-300:].normal_()
    a[:, -300:].normal_()
    b = torch.randn(80, k, device="cuda").bfloat16()
    b = b.t().contiguous().t() if layout == "tn" else b
    assert a.numel() > 2**31
    for config in (None, POINTERS):
        y = turbo.gemm_nt(a, b, out_dtype=torch.float32, config=config)
        assert _snr_db(y[-300:], a[-300:].double() @ b.double().t()) > SNR_DB
        assert _snr_db(y[:300], a[:300].double() @ b.double().t()) > SNR_DB
        small_a, small_b = a[:, -64:], a[:k, -64:]
        square = turbo.gemm_nt(small_a, small_b, out_dtype=torch.bfloat16, config=config)
        assert square.numel() > 2**31
        assert _snr_db(square[-300:, -300:], small_a[-300:].double() @ small_b[-300:].double().t()) > SNR_DB


@needs_gpu
def test_rows_so_far_apart_that_offsets_within_a_tile_need_64_bits(rng) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 16 << 30:
        pytest.skip("needs 16 GiB of GPU memory")
    wide = torch.empty(300, 9_000_008, device="cuda", dtype=torch.bfloat16)
    a = wide[:, :512].normal_()
    b = torch.randn(72, 512, generator=rng).bfloat16().cuda()
    assert a.stride(0) * 299 > 2**31
    for config in (None, POINTERS, CONFIGS["split"]):
        assert _snr_db(turbo.gemm_nt(a, b, out_dtype=torch.float32, config=config), _product(a, b)) > SNR_DB


@needs_gpu
def test_a_configuration_that_cannot_serve_a_product_is_an_error_and_not_replaced(rng) -> None:
    a, b = _operand(None, 64, 96, rng), _operand(None, 64, 96, rng)
    with pytest.raises(ConfigError, match="units fp8 multiply two FP8 operands"):
        turbo.gemm_nt(a, b, out_dtype=torch.float32, config=CONFIGS["fp8 units"])


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
