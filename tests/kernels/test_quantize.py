"""Reference quantisation: layouts, padding, chunking, blocks, special values and refusals."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.reference.element import unpack_fp4
from primus_turbo_plugin.kernels.reference.quantize import quantize, quantize_both
from primus_turbo_plugin.precision.formats import E4M3
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import hadamard_matrix, rotate, rotation_signs
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.kernels.quantize_cases import (
    ALL_BLOCKS,
    DTYPES,
    MX_ELEMENTS,
    RULES,
    every_spec,
    gaussian,
    on_grid,
    same_tensor,
    spec,
    wide,
    wide_rows,
)
from tests.support import exact_mx
from tests.tolerances import GAUSSIAN_RELATIVE_ERROR, GAUSSIAN_RELATIVE_ERROR_SPREAD

KEY = RoundingKey(seed=5, draw=6, tensor=7, rank=1)
each_block = pytest.mark.parametrize(("fmt", "block"), ALL_BLOCKS, ids=lambda value: value)
each_spec = pytest.mark.parametrize("any_spec", every_spec(), ids=str)


def codes_of(q: QuantizedTensor) -> torch.Tensor:
    """One code a byte, `[outer, padded contraction]`."""
    return unpack_fp4(q.data) if q.spec.element == "e2m1" else q.data


@pytest.mark.parametrize("make", [gaussian, wide, wide_rows, on_grid], ids=lambda f: f.__name__)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_blocks_equal_exact_arithmetic(fmt: str, element: str, rule: str, make: object, rng: torch.Generator) -> None:
    """Runs where torchao is not installed too, and covers the scale 2^-127 and RCEIL's corner, where torchao differs."""
    x = make(rng, 12, 64)  # type: ignore[operator]
    x[0] *= 2.0**-132
    x[1] *= 2.0**-144
    q = quantize(x, spec(fmt, element=element, scale_rule=rule))
    codes = codes_of(q)
    for row, block in itertools.product(range(12), range(2)):
        values = x[row, 32 * block : 32 * block + 32].tolist()
        byte, expected = exact_mx.quantize_block(values, rule, element)
        assert q.block_scale[row, block] == byte
        assert codes[row, 32 * block : 32 * block + 32].tolist() == expected


def test_the_packing_example_of_the_law() -> None:
    """x0 = 4, x1 = 1 with scale byte 127 is the byte 0x26."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 4, 1
    q = quantize(x, spec("mxfp4"))
    assert (q.block_scale.item(), q.data[0, 0].item()) == (127, 0x26)


@pytest.mark.parametrize("any_spec", [s for s in every_spec() if s.rounding == "nearest"], ids=str)
def test_columnwise_copy_is_the_quantised_transpose(any_spec: QuantSpec, rng: torch.Generator) -> None:
    x = wide_rows(rng, 75, 140)
    columnwise = quantize(x, any_spec, columnwise=True, signs_seed=9)
    assert columnwise.shape == (140, 75)
    assert same_tensor(columnwise, quantize(x.t().contiguous(), any_spec, signs_seed=9))


@each_spec
def test_both_copies_at_once_are_the_two_copies_apart(any_spec: QuantSpec, rng: torch.Generator) -> None:
    x, other = gaussian(rng, 70, 100).bfloat16(), spec("mxfp8", hadamard=32)
    row, col = quantize_both(x, any_spec, other, key=KEY, signs_seed=4)
    assert same_tensor(row, quantize(x, any_spec, key=KEY, signs_seed=4))
    assert same_tensor(col, quantize(x, other, columnwise=True))
    row, col = quantize_both(x, other, any_spec, key=KEY, signs_seed=4)
    assert same_tensor(col, quantize(x, any_spec, columnwise=True, key=KEY, signs_seed=4))


def test_a_copy_that_nobody_asked_for_is_not_made(rng: torch.Generator) -> None:
    x = gaussian(rng, 32, 32)
    assert quantize_both(x, None, QuantSpec.bf16()) == (None, None)
    row, col = quantize_both(x, spec("mxfp4"), None)
    assert row is not None
    assert col is None


@each_spec
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_bits_do_not_depend_on_the_tile_size(
    any_spec: QuantSpec, columnwise: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wide_rows(rng, 300, 260).bfloat16()
    whole = quantize(x, any_spec, columnwise=columnwise, key=KEY)
    for elements in (5000, 1 << 30):
        monkeypatch.setattr(reference, "_TILE_ELEMENTS", {"cpu": elements})
        assert same_tensor(quantize(x, any_spec, columnwise=columnwise, key=KEY), whole)


@each_spec
def test_strides_do_not_matter_and_the_input_is_left_alone(any_spec: QuantSpec, rng: torch.Generator) -> None:
    base = gaussian(rng, 200, 330)
    views = [base.t(), base[::2, 10:150], base[5:80, ::3], base[:1].expand(64, 330)]
    for view in views:
        before = base.clone()
        q = quantize(view, any_spec, key=KEY)
        assert same_tensor(q, quantize(view.contiguous(), any_spec, key=KEY))
        assert torch.equal(base, before)


@each_block
@pytest.mark.parametrize("hadamard", [0, 16, 64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (33, 31), (7, 129), (64, 4100)], ids=str)
def test_a_ragged_contraction_is_as_if_padded_with_zeros(
    shape: tuple[int, int], hadamard: int, fmt: str, block: str, rng: torch.Generator
) -> None:
    x = gaussian(rng, *shape)
    padded_spec = spec(fmt, block=block, hadamard=hadamard)
    padding = padded_spec.padded(shape[1]) - shape[1]
    explicit = quantize(torch.nn.functional.pad(x, (0, padding)), padded_spec)
    q = quantize(x, padded_spec)
    assert q.shape == shape
    assert torch.equal(q.data, explicit.data)
    assert torch.equal(q.block_scale, explicit.block_scale)
    assert q.dequantize().shape == shape


@each_spec
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_empty_tensors_give_empty_codes(shape: tuple[int, int], columnwise: bool, any_spec: QuantSpec) -> None:
    """An expert or a pipeline stage without tokens."""
    q = quantize(torch.zeros(shape), any_spec, columnwise=columnwise, key=KEY)
    assert q.data.numel() == 0
    assert q.dequantize().shape == (shape[::-1] if columnwise else shape)
    if any_spec.format.value == "fp8" and q.block_scale.numel():
        assert (q.block_scale == 1).all()


@each_block
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_one_token_works_in_both_directions(columnwise: bool, fmt: str, block: str, rng: torch.Generator) -> None:
    x = gaussian(rng, 1, 96)
    q = quantize(x, spec(fmt, block=block), columnwise=columnwise)
    values = q.dequantize()
    assert ((values.t() if columnwise else values) - x).norm() < 0.3 * x.norm()


@each_block
def test_all_zero_input_dequantises_to_zero(fmt: str, block: str) -> None:
    q = quantize(torch.zeros(64, 256), spec(fmt, block=block))
    assert not q.data.any()
    assert torch.equal(q.dequantize(), torch.zeros(64, 256))
    assert (q.block_scale == (0 if q.spec.is_mx else 1)).all()


@each_block
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_nan_and_inf_stay_visible_and_stay_in_their_block(
    dtype: torch.dtype, bad: float, fmt: str, block: str, rng: torch.Generator
) -> None:
    x = gaussian(rng, 160, 300).to(dtype)
    clean = quantize(x, spec(fmt, block=block)).dequantize()
    x[70, 140] = bad
    q = quantize(x, spec(fmt, block=block))
    values = q.dequantize()
    height, width = (size or 10_000 for size in q.spec.block_shape)
    rows, cols = slice(70 // height * height, (70 // height + 1) * height), 140 // width * width
    inside = torch.zeros_like(x, dtype=torch.bool)
    inside[rows, cols : cols + width] = True
    assert values[inside].isnan().all()
    assert torch.equal(values[~inside], clean[~inside])
    assert not codes_of(q)[:, :300][inside].any()  # defined, so that every kernel can give the same bytes
    if q.spec.is_mx:
        assert (q.block_scale == 0xFF).sum() == 1


@pytest.mark.parametrize("rule", RULES)
def test_fp32_numbers_of_every_size_are_quantised_to_the_formats_precision(rule: str) -> None:
    """From the smallest fp32 subnormal (scale byte clamped to 0) to nearly the largest number, without overflow."""
    exponents = torch.arange(-149, 126)
    x = 2.0 ** exponents.double()
    x = (x[:, None] * torch.tensor([1.0] * 31 + [1.75], dtype=torch.float64)).float()
    q = quantize(x, spec("mxfp8", scale_rule=rule))
    values = q.dequantize()
    normal = exponents > -127 - 8  # below, the scale cannot shrink further and E4M3 runs out of bits
    error = ((values - x).abs() / x)[normal]
    assert error.max() <= 1 / 8
    assert values.isfinite().all()
    tiny = quantize(x[:4], spec("mxfp4", scale_rule=rule))
    assert not tiny.block_scale.any()
    assert not tiny.dequantize().any()  # 2^-149 is far below half of 2^-128


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
def test_scale_byte_254_is_never_needed(rule: str) -> None:
    largest = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert quantize(largest, spec("mxfp4", scale_rule=rule)).block_scale.item() <= 253


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_2d_block_scale_serves_both_directions(fmt: str, rng: torch.Generator) -> None:
    """A weight in 32x32 blocks: the columnwise copy holds the same values as the rowwise one, so dgrad sees fprop's weight."""
    w = wide_rows(rng, 100, 200).bfloat16()
    row, col = quantize_both(w, spec(fmt, block="32x32"), spec(fmt, block="32x32"))
    assert row is not None
    assert col is not None
    assert row.block_scale.shape == (4, 7)
    assert torch.equal(row.block_scale, col.block_scale.t())
    assert torch.equal(row.dequantize(), col.dequantize().t())
    one = quantize(w, spec(fmt))
    assert not torch.equal(one.dequantize(), quantize(w, spec(fmt), columnwise=True).dequantize().t())


@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
@pytest.mark.parametrize("rule", RULES)
def test_2d_blocks_equal_flattened_1d_blocks_of_the_same_numbers(
    fmt: str, element: str, rule: str, rng: torch.Generator
) -> None:
    """Independent of the 2D code: every 1x32 row given the 2D block's amax as one element more must get the same codes."""
    x = wide_rows(rng, 64, 96)
    q = quantize(x, spec(fmt, element=element, scale_rule=rule, block="32x32"))
    for i, j in itertools.product(range(2), range(3)):
        block = x[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
        byte, expected = exact_mx.quantize_block(block.flatten().tolist(), rule, element)
        assert q.block_scale[i, j] == byte
        codes = codes_of(q)[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]
        assert codes.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("block", "height", "width"),
    [("tensorwise", 256, 384), ("rowwise", 1, 384), ("1x128", 1, 128), ("128x128", 128, 128)],
)
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_blocks_equal_torchs_own_cast(
    element: str, block: str, height: int, width: int, rng: torch.Generator
) -> None:
    x = gaussian(rng, 256, 384)
    q = quantize(x, spec("fp8", element=element, block=block))
    largest, dtype = q.spec.element_type.max_value, q.spec.element_type.torch_dtype
    tiles = x.view(256 // height, height, 384 // width, width)
    scale = tiles.abs().amax((1, 3)) / largest
    expected = (tiles / scale[:, None, :, None]).clamp(-largest, largest).view(256, 384).to(dtype)
    assert torch.equal(q.block_scale, scale)
    assert torch.equal(q.data, expected.view(torch.uint8))


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_rotation_runs_along_the_contraction_axis_before_the_scale(
    n: int, signed: bool, columnwise: bool, rng: torch.Generator
) -> None:
    """Equals quantising the explicitly rotated fp32 tensor; a rotation along the other axis would not."""
    x = (gaussian(rng, 128, 256) * 10).bfloat16()
    rotated = spec("mxfp4", hadamard=n, random_signs=signed)
    signs = rotation_signs(n, 77) if signed else None
    source = (x.t() if columnwise else x).float()
    expected = quantize(rotate(source, n, signs), spec("mxfp4"))
    q = quantize(x, rotated, columnwise=columnwise, signs_seed=77)
    assert torch.equal(q.data, expected.data)
    assert torch.equal(q.block_scale, expected.block_scale)


def test_rotated_values_are_not_rounded_to_bf16_a_second_time(rng: torch.Generator) -> None:
    """H16 sums of bf16 numbers need more than bf16's bits: rounding them in between changes codes."""
    x = gaussian(rng, 512, 256).bfloat16()
    exact = x.double().view(512, 16, 16) @ hadamard_matrix(16).double()
    exact_fp32 = exact.view(512, 256).float()
    rounded_twice = exact_fp32.bfloat16().float()
    q = quantize(x, spec("mxfp4", hadamard=16))
    assert torch.equal(q.data, quantize(exact_fp32, spec("mxfp4")).data)
    assert not torch.equal(q.data, quantize(rounded_twice, spec("mxfp4")).data)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "fp8"])
def test_gaussian_error_is_what_the_format_can_give(fmt: str, rng: torch.Generator) -> None:
    x = gaussian(rng, 256, 256)
    error = ((quantize(x, spec(fmt)).dequantize() - x).norm() / x.norm()).item()
    assert error == pytest.approx(GAUSSIAN_RELATIVE_ERROR[fmt], rel=GAUSSIAN_RELATIVE_ERROR_SPREAD)


@pytest.mark.parametrize("any_spec", [spec("mxfp4"), spec("fp8", block="rowwise"), spec("mxfp4", hadamard=16)], ids=str)
def test_fp16_and_gradients_are_accepted_and_nothing_is_recorded(any_spec: QuantSpec, rng: torch.Generator) -> None:
    x = gaussian(rng, 64, 64).half().requires_grad_()
    q = quantize(x, any_spec)
    assert same_tensor(q, quantize(x.detach().float(), any_spec))
    assert not q.dequantize().requires_grad


def test_temporaries_stay_small_for_a_large_weight() -> None:
    """A 1024x28672 weight, 112 MiB in fp32: rotated and quantised in both directions within 32 MiB of working memory."""
    script = (
        "import resource, torch; torch.set_num_threads(1)\n"
        "from primus_turbo_plugin.kernels.reference.quantize import quantize_both\n"
        "from primus_turbo_plugin.precision.quant_spec import QuantSpec\n"
        "small = torch.ones(64, 64); s = QuantSpec(format='mxfp4', hadamard=16); quantize_both(small, s, s)\n"
        "w = torch.full((1024, 28672), 0.37, dtype=torch.bfloat16)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "copies = quantize_both(w, s, s)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(peak - sum(q.nbytes for q in copies) // 1024)\n"
    )
    unit = 1024 if sys.platform == "darwin" else 1
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert int(run.stdout) / unit < 32 * 1024, f"{int(run.stdout)} KiB beyond the result"


@pytest.mark.parametrize("x", [torch.zeros(32), torch.zeros(2, 3, 32), torch.zeros(2, 32, dtype=torch.float64)])
def test_wrong_shapes_and_dtypes_are_refused_with_what_was_got(x: torch.Tensor) -> None:
    with pytest.raises(ShapeError, match=r"bf16, fp16 or fp32 \[rows, cols\], got torch"):
        quantize(x, spec("mxfp4"))


def test_bf16_spec_and_missing_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be quantised"):
        quantize(torch.zeros(2, 32), QuantSpec.bf16())
    with pytest.raises(ConfigError, match="needs a RoundingKey"):
        quantize(torch.zeros(2, 32), spec("mxfp4", rounding="stochastic"))


def test_fp8_saturates_instead_of_overflowing_when_the_scale_rounds_down() -> None:
    """amax / (amax / 448) can come out one ulp above 448; E4M3 would turn a larger number into NaN."""
    amax = torch.linspace(1, 2, 4097)[:, None]
    q = quantize(amax, spec("fp8", block="rowwise"))
    assert (q.data == E4M3.max_code).all()
