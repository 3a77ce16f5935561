"""The Triton quantisation kernels give the reference's bytes, on whatever GPU is here."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.kernels.triton import quantize as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.support.shapes import UGLY

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")

KEY = RoundingKey(seed=11, draw=22, tensor=33, rank=4)
MXFP4 = QuantSpec(format="mxfp4")
RULES = ("floor", "even", "ceil", "rceil")

FAST_PAIRS = [
    *[
        (QuantSpec(format="mxfp4", scale_rule=rule), QuantSpec(format="mxfp4", scale_rule=rule, hadamard=16))
        for rule in RULES
    ],
    (MXFP4, QuantSpec(format="mxfp4", hadamard=32, random_signs=True)),
    (QuantSpec(format="mxfp4", block="32x32"), QuantSpec(format="mxfp4", block="32x32", scale_rule="floor")),
    (QuantSpec(format="mxfp4", hadamard=16), QuantSpec(format="mxfp8", block="32x32")),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8", element="e5m2", scale_rule="floor")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128", element="e5m2")),
    (QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8")),
    (QuantSpec(format="mxfp4", rounding="stochastic"), QuantSpec(format="mxfp8", rounding="stochastic")),
    (MXFP4, None),
    (None, MXFP4),
]
"""Pairs that quantize_shared.py makes when x is bf16."""

GENERAL_PAIRS = [
    (QuantSpec(format="mxfp4", hadamard=16), QuantSpec(format="mxfp4", hadamard=128, rounding="stochastic")),
    (QuantSpec(format="mxfp4", block="32x32"), QuantSpec(format="mxfp4", block="32x32", hadamard=16)),
    (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8", element="e5m2", rounding="stochastic")),
    (
        QuantSpec(format="mxfp8", scale_rule="even", block="32x32"),
        QuantSpec(format="mxfp8", hadamard=32, random_signs=True),
    ),
    (QuantSpec(format="fp8"), QuantSpec(format="fp8", element="e5m2", block="rowwise", rounding="stochastic")),
    (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128", element="e5m2")),
    (QuantSpec(format="fp8", block="rowwise", hadamard=16), QuantSpec(format="fp8", hadamard=64, random_signs=True)),
]


def _values(rows: int, cols: int, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Rows of very different size, zeros, subnormals, values near the ends of the range."""
    x = torch.randn(rows, cols, generator=rng) * torch.exp(3 * torch.randn(rows, 1, generator=rng))
    x[:, -1] *= 2.0**-120
    x[rows // 3] *= 2.0**-126
    x[rows // 2] = 0
    x[-1] *= 2.0**100
    return x.to(dtype).cuda()


def _assert_same(got: QuantizedTensor | None, want: QuantizedTensor | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    for name, a, b in (("data", got.data, want.data), ("block_scale", got.block_scale, want.block_scale)):
        # NaN scales are compared as NaN: their payload is not defined.
        equal = (a == b) | (a.isnan() & b.isnan()) if a.dtype.is_floating_point else a == b
        if not equal.all():
            row, col = (~equal).nonzero()[0].tolist()
            raise AssertionError(
                f"{want.spec}: {name}[{row}, {col}] is {a[row, col].item()}, the reference has {b[row, col].item()}; "
                f"{(~equal).sum().item()} of {equal.numel()} differ"
            )


def _compare(x: torch.Tensor, pair: tuple[QuantSpec | None, QuantSpec | None]) -> None:
    got = turbo.quantize_both(x, *pair, key=KEY, signs_seed=5)
    for mine, theirs in zip(got, reference.quantize_both(x, *pair, key=KEY, signs_seed=5)):
        _assert_same(mine, theirs)


@needs_gpu
@pytest.mark.parametrize("pair", FAST_PAIRS, ids=lambda pair: " | ".join(map(str, pair)))
@pytest.mark.parametrize("shape", [(256, 512), (136, 264)])
def test_aligned_bf16_equals_the_reference_in_every_byte(pair, shape, rng) -> None:
    _compare(_values(*shape, torch.bfloat16, rng), pair)


@needs_gpu
@pytest.mark.parametrize(
    "pair", [FAST_PAIRS[1], FAST_PAIRS[5], GENERAL_PAIRS[0]], ids=lambda p: " | ".join(map(str, p))
)
def test_scales_in_the_layout_of_the_matrix_units(pair, rng) -> None:
    """From either kernel: the tile kernel's scales are shuffled behind it."""
    x = _values(136, 264, torch.bfloat16, rng)
    got = turbo.quantize_both(x, *pair, key=KEY, signs_seed=5, scale_layout="gfx950")
    wanted = reference.quantize_both(x, *pair, key=KEY, signs_seed=5, scale_layout="gfx950")
    for mine, theirs in zip(got, wanted):
        assert mine is not None
        assert mine.scale_layout == "gfx950"
        _assert_same(mine, theirs)


@needs_gpu
@pytest.mark.parametrize("pair", GENERAL_PAIRS, ids=lambda pair: " | ".join(map(str, pair)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_format_equals_the_reference_in_every_byte(pair, dtype, rng) -> None:
    _compare(_values(150, 300, dtype, rng), pair)


@needs_gpu
@pytest.mark.parametrize("shape", UGLY)
def test_sizes_that_fit_no_tile(shape, rng) -> None:
    x = _values(*shape, torch.bfloat16, rng)
    _compare(x, (MXFP4, QuantSpec(format="mxfp4", hadamard=16)))
    _compare(x, (QuantSpec(format="fp8"), QuantSpec(format="fp8", block="rowwise")))


@needs_gpu
@pytest.mark.parametrize("shape", [(1000, 1544), (4096, 512)], ids=str)
def test_scales_that_span_an_axis_meet_from_all_programs(shape, rng) -> None:
    """Maxima of rows and columns come together by atomics from programs of 128 rows by 512 columns."""
    x = _values(*shape, torch.bfloat16, rng)
    x[-1, : shape[1] // 2] *= -1
    rowwise = QuantSpec(format="fp8", block="rowwise")
    for pair in ((rowwise, rowwise), (rowwise, QuantSpec(format="fp8", element="e5m2")), (None, rowwise)):
        _compare(x, pair)


@needs_gpu
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("block", ["tensorwise", "rowwise", "1x128", "128x128"])
def test_negative_numbers_that_round_to_zero_keep_their_sign(block, element, rng) -> None:
    """As the code 0x80, and -0 itself as well."""
    x = torch.randn(256, 256, generator=rng).bfloat16().cuda()
    x[:, 1::2] = -(2.0**-40)
    x[::3, ::5] = -0.0
    spec = QuantSpec(format="fp8", block=block, element=element)
    row, _ = turbo.quantize_both(x, spec, None)
    assert row is not None
    assert (row.data[:, 1::2] == 0x80).all()
    _compare(x, (spec, spec))


@needs_gpu
@pytest.mark.parametrize("rule", RULES)
def test_every_finite_bf16_value_rounds_as_the_reference_rounds_it(rule, rng) -> None:
    """All 65,280 of them, in random company, so that every value meets many scales."""
    bits = torch.randperm(1 << 16, generator=rng).to(torch.int32)
    x = bits.to(torch.int16).view(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 0.0).view(256, 256).cuda()
    spec = QuantSpec(format="mxfp4", scale_rule=rule)
    _compare(x, (spec, QuantSpec(format="mxfp4", scale_rule=rule, hadamard=16)))
    _compare(x.abs().sort(dim=0).values, (spec, spec))


@needs_gpu
@pytest.mark.parametrize(
    "pair", [FAST_PAIRS[1], GENERAL_PAIRS[2], GENERAL_PAIRS[4], GENERAL_PAIRS[5]], ids=lambda p: str(p[0])
)
def test_nan_and_inf_mark_their_block_and_no_other(pair, rng) -> None:
    x = _values(128, 256, torch.bfloat16, rng)
    x[3, 5], x[40, 200], x[77, 0] = float("nan"), float("inf"), float("-inf")
    _compare(x, pair)


@needs_gpu
def test_strided_inputs_are_read_in_place(rng) -> None:
    x = _values(130, 320, torch.bfloat16, rng)
    for view in (x.t(), x[::2], x[:, ::2], x[:, 8:200], x[1:, 3:99]):
        _compare(view, (MXFP4, QuantSpec(format="mxfp4", hadamard=16)))


@needs_gpu
def test_two_runs_give_the_same_bytes(rng) -> None:
    x = _values(300, 384, torch.bfloat16, rng)
    pair = (QuantSpec(format="mxfp4", rounding="stochastic"), QuantSpec(format="fp8"))
    for first, second in zip(turbo.quantize_both(x, *pair, key=KEY), turbo.quantize_both(x, *pair, key=KEY)):
        _assert_same(first, second)


@needs_gpu
def test_stochastic_rounding_is_unbiased_and_differs_between_copies() -> None:
    x = torch.full((512, 512), 2.3, device="cuda", dtype=torch.bfloat16)
    x[:, ::32] = 6.0
    spec = QuantSpec(format="mxfp4", rounding="stochastic")
    row, col = turbo.quantize_both(x, spec, spec, key=KEY)
    assert row is not None
    assert col is not None
    kept = torch.arange(512, device="cuda") % 32 != 0
    mean = row.dequantize()[:, kept].double().mean().item()
    exact = x[0, 1].item()
    # 2.3 lies between 2 and 3: one draw has deviation < 0.5, the mean of 254,000 of them < 0.001; 5 deviations.
    assert abs(mean - exact) < 5 * 0.5 / (512 * 496) ** 0.5
    assert not torch.equal(row.dequantize(), col.dequantize().t())


@needs_gpu
def test_empty_tensors_have_empty_copies() -> None:
    for shape in ((0, 64), (64, 0)):
        row, col = turbo.quantize_both(torch.empty(*shape, device="cuda"), MXFP4, QuantSpec(format="fp8"))
        want = reference.quantize_both(torch.empty(*shape), MXFP4, QuantSpec(format="fp8"))
        for got, expected in zip((row, col), want):
            assert got is not None
            assert got.data.shape == expected.data.shape
            assert torch.equal(got.block_scale.cpu(), expected.block_scale)


def test_a_cpu_tensor_is_refused_with_a_reason() -> None:
    request = QuantizeRequest.of(torch.zeros(2, 2), MXFP4)
    assert turbo.supports(request) == "runs on GPUs, the tensors are on cpu"
    with pytest.raises(ShapeError, match="use the reference backend"):
        turbo.quantize(torch.zeros(32, 32), MXFP4)


def test_a_bf16_spec_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use x itself"):
        turbo.quantize(torch.zeros(32, 32), QuantSpec.bf16())


@needs_gpu
def test_calls_that_come_again_do_not_reuse_what_belongs_to_other_tensors(rng) -> None:
    """Alike but for contents, address, strides or key: each in turn, several times."""
    base = torch.randn(130 * 264 + 16, generator=rng).bfloat16()
    places = [(0, 264, 1), (8, 264, 1), (1, 264, 1), (0, 272, 1), (0, 1, 130)]
    specs = QuantSpec(format="mxfp4", rounding="stochastic"), QuantSpec(format="mxfp8", rounding="stochastic")
    for step in range(3):
        values = torch.cat((base, base)) * 2.0**step
        on_gpu = values.cuda()
        for offset, *strides in places:
            shape = (128, 256)
            key = RoundingKey(seed=1, draw=step, tensor=offset, rank=0)
            got = turbo.quantize_both(on_gpu.as_strided(shape, strides, offset), *specs, key=key)
            want = reference.quantize_both(values.as_strided(shape, strides, offset), *specs, key=key)
            for mine, theirs in zip(got, want):
                assert torch.equal(mine.data.cpu(), theirs.data)
                assert torch.equal(mine.block_scale.cpu(), theirs.block_scale)
