"""gemm_nt of the reference and torch backends: exactness, accumulation, bias, padding, rotation, and the toy check of the law."""

from __future__ import annotations

import itertools

import pytest
import torch

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference import gemm as reference
from primus_turbo_plugin.kernels.reference.gemm import gemm_nt
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.torch_native import gemm as torch_native
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotate
from tests.kernels.quantize_cases import ALL_BLOCKS, gaussian, on_grid, spec
from tests.tolerances import accumulation_bound

BACKENDS = {"reference": gemm_nt, "torch": torch_native.gemm_nt}
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_block = pytest.mark.parametrize(("fmt", "block"), ALL_BLOCKS, ids=lambda value: value)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_out_dtype = pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)


def assert_within_accumulation_error(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    error = (y.double() - a.double() @ b.double().t()).abs()
    assert (error <= accumulation_bound(a, b, y.dtype)).all(), error.max()


@each_out_dtype
@pytest.mark.parametrize("hadamard", [0, 16])
@pytest.mark.parametrize(("fmt", "block"), [b for b in ALL_BLOCKS if b[0].startswith("mx")], ids=str)
def test_mx_product_is_the_sum_of_exact_terms(
    fmt: str, block: str, hadamard: int, out_dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Against fp64 on the very values the codes stand for: only fp32 additions and one rounding may differ."""
    any_spec = spec(fmt, block=block, hadamard=hadamard)
    a, b = (quantize(gaussian(rng, rows, 160), any_spec) for rows in (70, 45))
    assert_within_accumulation_error(gemm_nt(a, b, out_dtype=out_dtype), a.decode(), b.decode())


@pytest.mark.parametrize("hadamard", [0, 16])
@each_block
def test_small_integers_give_the_exact_product(fmt: str, block: str, hadamard: int, rng: torch.Generator) -> None:
    """Inputs the format holds exactly, sums exact in fp32: any wrong nibble, scale or padding changes a whole number."""
    any_spec = spec(fmt, block=block, hadamard=hadamard)
    a, b = (torch.zeros(rows, 100) for rows in (9, 13))
    for x in (a, b):  # one element of a run: rotating spreads it, and quantising then loses nothing
        index = torch.arange(0, 100, 16)
        x[:, index] = torch.randint(0, 2, (x.shape[0], len(index)), generator=rng) * 8.0 - 4.0
    y = gemm_nt(quantize(a, any_spec), quantize(b, any_spec), out_dtype=torch.float32)
    assert torch.equal(y, a @ b.t()) if any_spec.is_mx else torch.allclose(y, a @ b.t(), rtol=1e-5, atol=1e-4)


@each_block
def test_fp8_and_mx_products_approximate_the_unquantised_one(fmt: str, block: str, rng: torch.Generator) -> None:
    a, b = gaussian(rng, 256, 512), gaussian(rng, 128, 512)
    any_spec = spec(fmt, block=block)
    y = gemm_nt(quantize(a, any_spec), quantize(b, any_spec), out_dtype=torch.float32)
    exact = a @ b.t()
    bar = {"mxfp4": 0.22, "mxfp8": 0.045, "fp8": 0.045}[
        fmt
    ]  # sqrt(2) times an operand's error, 2D blocks somewhat more
    tiles = (y - exact).view(2, 128, 1, 128).norm(dim=(1, 3)) / exact.view(2, 128, 1, 128).norm(dim=(1, 3))
    assert tiles.max() < bar  # the worst 128x128 tile, not only the whole


@pytest.mark.parametrize("block", ["tensorwise", "rowwise"])
def test_fp8_row_scales_are_applied_outside_the_sum(block: str, rng: torch.Generator) -> None:
    """Products of codes are exact; the two scales multiply the finished sum."""
    a, b = (quantize(gaussian(rng, rows, 96), spec("fp8", block=block)) for rows in (5, 7))
    sums = a.decode(scaled=False).double() @ b.decode(scaled=False).double().t()
    expected = sums * a.block_scale.double() * b.block_scale.double().t()
    torch.testing.assert_close(gemm_nt(a, b, out_dtype=torch.float32).double(), expected, rtol=1e-5, atol=1e-5)


@each_block
def test_ragged_contraction_adds_nothing_from_the_padding(fmt: str, block: str, rng: torch.Generator) -> None:
    """K not a multiple of 32 (or 256): the product is that of the values, not of what lies behind them."""
    for contraction, hadamard in itertools.product((1, 33, 300), (0, 16)):
        any_spec = spec(fmt, block=block, hadamard=hadamard)
        a, b = (quantize(gaussian(rng, rows, contraction), any_spec) for rows in (6, 10))
        y = gemm_nt(a, b, out_dtype=torch.float32).double()
        expected = a.dequantize().double() @ b.dequantize().double().t()
        if hadamard:  # the rotated tail of the padding takes part: use the stored values
            expected = a.decode().double() @ b.decode().double().t()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


def test_operands_padded_to_different_blocks_multiply(rng: torch.Generator) -> None:
    a, b = gaussian(rng, 6, 200), gaussian(rng, 7, 200)
    qa, qb = quantize(a, spec("mxfp8")), quantize(b, spec("fp8", block="1x128"))
    y = gemm_nt(qa, qb, out_dtype=torch.float32)
    torch.testing.assert_close(y, qa.dequantize() @ qb.dequantize().t(), rtol=1e-5, atol=1e-4)


@each_out_dtype
def test_a_quantised_and_a_plain_operand_multiply(out_dtype: torch.dtype, rng: torch.Generator) -> None:
    a, b = quantize(gaussian(rng, 6, 100), spec("mxfp4")), gaussian(rng, 7, 100).bfloat16()
    assert_within_accumulation_error(gemm_nt(a, b, out_dtype=out_dtype), a.dequantize(), b)
    assert_within_accumulation_error(gemm_nt(b, a, out_dtype=out_dtype), b, a.dequantize())


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plain_product_is_accurate_to_fp32_accumulation(dtype: torch.dtype, backend: str, rng: torch.Generator) -> None:
    a, b = gaussian(rng, 33, 200).to(dtype), gaussian(rng, 21, 200).to(dtype)
    for out_dtype in {dtype, torch.float32}:
        y = BACKENDS[backend](a, b, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        assert_within_accumulation_error(y, a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torch_backend_gives_megatrons_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Megatron's linears: matmul(x, w.t()) then + bias in the same dtype; dgrad dy @ w; wgrad dy.t() @ x."""
    x, w, bias = gaussian(rng, 64, 96).to(dtype), gaussian(rng, 48, 96).to(dtype), gaussian(rng, 48).to(dtype)
    dy = gaussian(rng, 64, 48).to(dtype)
    nt = torch_native.gemm_nt
    assert torch.equal(nt(x, w, out_dtype=dtype), torch.matmul(x, w.t()))
    assert torch.equal(nt(x, w, out_dtype=dtype, bias=bias), torch.matmul(x, w.t()) + bias)
    assert torch.equal(nt(dy, w.t(), out_dtype=dtype), dy.matmul(w))
    assert torch.equal(nt(dy.t(), x.t(), out_dtype=dtype), dy.t().matmul(x))


@each_backend
def test_accumulating_adds_in_fp32_in_place(backend: str, rng: torch.Generator) -> None:
    """A bf16 wgrad must reach an fp32 main_grad without being rounded to bf16, over several microbatches."""
    out = gaussian(rng, 20, 30)
    expected, pointer = out.double().clone(), out.data_ptr()
    for _ in range(3):
        a, b = gaussian(rng, 20, 64).bfloat16(), gaussian(rng, 30, 64).bfloat16()
        result = BACKENDS[backend](a, b, out_dtype=torch.float32, out=out)
        assert result is out
        expected += a.double() @ b.double().t()
    assert out.data_ptr() == pointer
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@each_backend
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2], ids=str
)
def test_a_given_result_is_written_whatever_it_holds(
    backend: str, dtypes: tuple[torch.dtype, torch.dtype], rng: torch.Generator
) -> None:
    """Rows of a larger tensor, as overlapped collectives give them; the neighbours stay."""
    dtype, out_dtype = dtypes
    a, b = gaussian(rng, 20, 64).to(dtype), gaussian(rng, 30, 64).to(dtype)
    whole = torch.full((60, 30), torch.nan, dtype=out_dtype)
    into = whole[20:40]
    assert BACKENDS[backend](a, b, out_dtype=out_dtype, into=into) is into
    assert torch.equal(into, BACKENDS[backend](a, b, out_dtype=out_dtype))
    assert whole[:20].isnan().all()
    assert whole[40:].isnan().all()
    bias = gaussian(rng, 30).to(out_dtype)
    expected = BACKENDS[backend](a, b, out_dtype=out_dtype, bias=bias)
    assert torch.equal(BACKENDS[backend](a, b, out_dtype=out_dtype, bias=bias, into=into), expected)


@each_block
def test_a_quantised_product_is_written_into_a_given_result(fmt: str, block: str, rng: torch.Generator) -> None:
    a, b = (quantize(gaussian(rng, rows, 64), spec(fmt, block=block)) for rows in (8, 9))
    into = torch.full((8, 9), torch.nan, dtype=torch.bfloat16)
    assert torch.equal(gemm_nt(a, b, out_dtype=torch.bfloat16, into=into), gemm_nt(a, b, out_dtype=torch.bfloat16))
    assert torch.equal(into, gemm_nt(a, b, out_dtype=torch.bfloat16))


@each_block
def test_accumulating_a_quantised_product_equals_adding_it(fmt: str, block: str, rng: torch.Generator) -> None:
    a, b = (quantize(gaussian(rng, rows, 64), spec(fmt, block=block)) for rows in (8, 9))
    out = gaussian(rng, 8, 9)
    expected = out + gemm_nt(a, b, out_dtype=torch.float32)
    torch.testing.assert_close(gemm_nt(a, b, out_dtype=torch.float32, out=out), expected, rtol=1e-5, atol=1e-5)


def test_accumulating_into_a_strided_part_of_a_buffer_leaves_the_rest_alone(rng: torch.Generator) -> None:
    buffer = torch.zeros(8, 40)
    a, b = gaussian(rng, 8, 64), gaussian(rng, 20, 64)
    gemm_nt(a, b, out_dtype=torch.float32, out=buffer[:, 10:30])
    torch.testing.assert_close(buffer[:, 10:30], a @ b.t(), rtol=1e-5, atol=1e-5)
    assert not buffer[:, :10].any()
    assert not buffer[:, 30:].any()


@each_out_dtype
def test_bias_is_added_before_the_only_rounding(out_dtype: torch.dtype, rng: torch.Generator) -> None:
    a, b = (quantize(on_grid(rng, rows, 32), spec("mxfp4")) for rows in (6, 9))
    bias = gaussian(rng, 9)
    exact = a.dequantize().double() @ b.dequantize().double().t() + bias.double()
    assert torch.equal(gemm_nt(a, b, out_dtype=out_dtype, bias=bias), exact.float().to(out_dtype))


@each_backend
@pytest.mark.parametrize("shape", [(0, 5, 32), (5, 0, 32), (5, 6, 0), (0, 0, 0)], ids=str)
def test_empty_operands_give_empty_or_zero_results(shape: tuple[int, int, int], backend: str) -> None:
    m, n, k = shape
    y = BACKENDS[backend](torch.ones(m, k), torch.ones(n, k), out_dtype=torch.float32)
    assert torch.equal(y, torch.zeros(m, n))
    out = torch.ones(m, n)
    BACKENDS[backend](torch.ones(m, k), torch.ones(n, k), out_dtype=torch.float32, out=out)
    assert torch.equal(out, torch.ones(m, n))


@each_block
@pytest.mark.parametrize("shape", [(0, 5, 32), (5, 0, 32), (5, 6, 0)], ids=str)
def test_empty_quantised_operands_give_empty_or_zero_results(shape: tuple[int, int, int], fmt: str, block: str) -> None:
    m, n, k = shape
    a, b = (quantize(torch.ones(rows, k), spec(fmt, block=block)) for rows in (m, n))
    assert torch.equal(gemm_nt(a, b, out_dtype=torch.bfloat16), torch.zeros(m, n, dtype=torch.bfloat16))


def test_nan_reaches_exactly_its_row_of_the_product(rng: torch.Generator) -> None:
    x = gaussian(rng, 4, 64)
    x[2, 50] = float("nan")
    y = gemm_nt(quantize(x, spec("mxfp4")), quantize(gaussian(rng, 5, 64), spec("mxfp4")), out_dtype=torch.bfloat16)
    assert y.isnan().any(1).tolist() == [False, False, True, False]
    assert y[2].isnan().all()


def test_pieces_do_not_change_the_product(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (quantize(on_grid(rng, rows, 64), spec("mxfp4", block="32x32")) for rows in (100, 70))
    whole = gemm_nt(a, b, out_dtype=torch.float32)
    monkeypatch.setattr(reference, "_PIECE_ELEMENTS", 64 * 17)
    assert torch.equal(gemm_nt(a, b, out_dtype=torch.float32), whole)
    monkeypatch.setattr(reference, "_PIECE_ELEMENTS", 1)
    bias = gaussian(rng, 70)
    assert torch.equal(gemm_nt(a, b, out_dtype=torch.float32, bias=bias), whole + bias)


def wgrad_error(x: torch.Tensor, dy: torch.Tensor, any_spec: QuantSpec) -> float:
    """Relative error of dW = dY^T X with both quantised along tokens."""
    exact = dy.double().t() @ x.double()
    operands = (quantize(t, any_spec, columnwise=True) for t in (dy, x))
    return ((gemm_nt(*operands, out_dtype=torch.float32) - exact).norm() / exact.norm()).item()


def test_the_toy_check_of_the_law(rng: torch.Generator) -> None:
    """1024 tokens: no gain from H16 on Gaussian numbers (.155); with 1 % of tokens scaled by 30, .147 falls to .063."""
    tokens = 1024
    x, dy = gaussian(rng, tokens, 256), gaussian(rng, tokens, 256)
    plain, rotated = spec("mxfp4"), spec("mxfp4", hadamard=16)
    assert wgrad_error(x, dy, plain) == pytest.approx(0.155, abs=0.006)
    assert wgrad_error(x, dy, rotated) == pytest.approx(0.156, abs=0.006)
    outlier = torch.ones(tokens, 1)
    outlier[torch.arange(10) * 100 + torch.randint(0, 100, (10,), generator=rng)] = 30
    assert wgrad_error(x * outlier, dy * outlier, plain) == pytest.approx(0.147, abs=0.010)
    assert wgrad_error(x * outlier, dy * outlier, rotated) == pytest.approx(0.063, abs=0.010)


def test_rotating_along_tokens_helps_and_along_hidden_does_not(rng: torch.Generator) -> None:
    """The wrong axis keeps an outlier token's numbers together in their blocks: the error stays where it was."""
    outlier = torch.ones(512, 1)
    outlier[::100] = 30
    x, dy = gaussian(rng, 512, 128) * outlier, gaussian(rng, 512, 128) * outlier
    plain = wgrad_error(x, dy, spec("mxfp4"))
    assert wgrad_error(x, dy, spec("mxfp4", hadamard=16)) < 0.6 * plain
    assert wgrad_error(rotate(x, 16, dim=1), rotate(dy, 16, dim=1), spec("mxfp4")) > 0.9 * plain


def test_operands_rotated_differently_are_refused(rng: torch.Generator) -> None:
    """Their product would be silently meaningless."""
    x = gaussian(rng, 8, 64)
    plain, h16, h32 = (quantize(x, spec("mxfp4", hadamard=n)) for n in (0, 16, 32))
    signed = [quantize(x, spec("mxfp4", hadamard=16, random_signs=True), signs_seed=seed) for seed in (1, 2)]
    pairs: list[tuple[QuantizedTensor | torch.Tensor, QuantizedTensor]] = [
        (plain, h16), (h16, h32), (h16, signed[0]), (signed[0], signed[1]), (x, h16)
    ]  # fmt: skip
    for a, b in pairs:
        with pytest.raises(ShapeError, match="rotated alike"):
            gemm_nt(a, b, out_dtype=torch.float32)
    gemm_nt(signed[0], signed[0], out_dtype=torch.float32)


@each_backend
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"a": torch.zeros(4, 8), "b": torch.zeros(4, 9)}, "same K"),
        ({"a": torch.zeros(4, 8, 1), "b": torch.zeros(4, 8)}, "same K"),
        ({"bias": torch.zeros(3)}, r"bias must be \[N\] = \[4\], got \[3\]"),
        ({"out": torch.zeros(5, 5)}, r"out must be float32 \[5, 4\]"),
        ({"out": torch.zeros(5, 4, dtype=torch.bfloat16)}, "out must be float32"),
        ({"out": torch.zeros(5, 4), "out_dtype": torch.bfloat16}, "with out_dtype float32"),
        ({"out": torch.zeros(5, 4), "bias": torch.zeros(4)}, "exclude each other"),
        ({"into": torch.zeros(5, 5)}, r"into must be torch.float32 \[5, 4\], got torch.float32 \[5, 5\]"),
        ({"into": torch.zeros(5, 4), "out_dtype": torch.bfloat16}, "into must be torch.bfloat16"),
        ({"into": torch.zeros(5, 4), "out": torch.zeros(5, 4)}, "into and out exclude each other"),
        ({"b": torch.zeros(4, 8, device="meta")}, "one device"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, object], words: str, backend: str) -> None:
    defaults = {"a": torch.zeros(5, 8), "b": torch.zeros(4, 8), "out_dtype": torch.float32}
    with pytest.raises(ShapeError, match=words):
        BACKENDS[backend](**(defaults | arguments))


def test_a_build_that_cannot_widen_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older torch lacks `mm(out_dtype=)`, some ROCm builds refuse it: the next backend must get the request, with a reason."""
    from primus_turbo_plugin.kernels.requests import GemmRequest
    from primus_turbo_plugin.kernels.torch_native import gemm as native

    def old_mm(*args: object, **kwargs: object) -> None:
        raise TypeError("mm() got an unexpected keyword argument 'out_dtype'")

    monkeypatch.setattr(native.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(native.torch, "ones", lambda *args, **kwargs: None)
    monkeypatch.setattr(native.torch, "mm", old_mm)
    native._widening_refusal.cache_clear()
    try:
        bf16, fp32 = torch.bfloat16, torch.float32
        into_main_grad = GemmRequest(device="cuda", a=bf16, b=bf16, out_dtype=fp32, accumulate=True)
        assert "unexpected keyword argument 'out_dtype'" in str(native.supports(into_main_grad))
        assert native.supports(GemmRequest(device="cuda", a=bf16, b=bf16, out_dtype=bf16)) is None
        assert native.supports(GemmRequest(device="cuda", a=fp32, b=fp32, out_dtype=fp32, accumulate=True)) is None
        assert native.supports(GemmRequest(device="cpu", a=bf16, b=bf16, out_dtype=fp32, accumulate=True)) is None
    finally:
        native._widening_refusal.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("strided", [False, True])
def test_accumulation_on_a_gpu_is_in_place_whoever_adds(fused, strided, rng, monkeypatch) -> None:
    """By the GEMM itself, or after it where torch's build cannot: the same sums, in the buffer that was given."""
    if not fused:
        monkeypatch.setattr(torch_native, "_adds_in_the_gemm", lambda dtype: False)
    a, b = gaussian(rng, 96, 512).bfloat16().cuda(), gaussian(rng, 160, 512).bfloat16().cuda()
    buffer = gaussian(rng, 96, 320).cuda()
    out = buffer[:, 100:260] if strided else buffer[:, :160].contiguous()
    around = buffer[:, 260:].clone()
    expected = out.double() + a.double() @ b.double().t()
    assert torch_native.gemm_nt(a, b, out_dtype=torch.float32, out=out) is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(buffer[:, 260:], around)
