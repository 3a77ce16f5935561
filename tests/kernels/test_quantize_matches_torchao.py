"""MX codes and scales equal torchao's bit for bit, under all four rules; where our law differs on purpose, a test says so."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.formats import ELEMENT_TYPES
from tests.kernels.quantize_cases import DTYPES, INPUTS, MX_ELEMENTS, RULES, spec

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
mx_kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")


def torchao_mx(x: torch.Tensor, element: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale bytes, one code a byte) as torchao computes them."""
    mode = mx_tensor.ScaleCalculationMode[rule.upper()]
    scale, data = mx_tensor.to_mx(x.contiguous(), ELEMENT_TYPES[element].torch_dtype, 32, mode)
    data = data.view(torch.uint8)
    return scale.view(torch.uint8), mx_kernels.unpack_uint4(data.contiguous()) if element == "e2m1" else data


def ours(x: torch.Tensor, fmt: str, element: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantize(x, spec(fmt, element=element, scale_rule=rule))
    return q.block_scale, mx_kernels.unpack_uint4(q.data) if element == "e2m1" else q.data


def without_log2_accidents(x: torch.Tensor, element: str) -> torch.Tensor:
    """Drops blocks whose amax / max lies within 2^-16 above a power of two: torchao's fp32 log2 rounds there (see below)."""
    blocks = x.view(-1, 8 * 32)
    ratio = blocks.view(-1, 8, 32).abs().amax(-1).double() / ELEMENT_TYPES[element].max_value
    mantissa, _ = torch.frexp(ratio)
    accident = ((mantissa > 0.5) & (mantissa < 0.5 + 2.0**-17)).any(-1)
    assert accident.float().mean() < 0.01
    return blocks[~accident]


def test_differs_on_purpose_where_torchaos_rceil_loses_a_ratio_just_above_a_power_of_two() -> None:
    """torchao takes ceil(log2(ratio)) in fp32: for 2^100 (1 + 2^-22) the log is exactly 100 there. The law looks at the bits."""
    x = torch.full((1, 32), 6 * 2.0**100 * (1 + 2.0**-22))
    assert ours(x, "mxfp4", "e2m1", "rceil")[0].item() == 100 + 127 + 1
    assert torchao_mx(x, "e2m1", "rceil")[0].item() == 100 + 127


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_random_input_gives_torchaos_bits(
    fmt: str, element: str, rule: str, dtype: torch.dtype, kind: str, rng: torch.Generator
) -> None:
    x = INPUTS[kind](rng, 512, 256).to(dtype)
    if rule == "rceil":
        x = without_log2_accidents(x, element)
    for mine, theirs in zip(ours(x, fmt, element, rule), torchao_mx(x, element, rule)):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_columnwise_copy_gives_torchaos_bits_of_the_transpose(
    fmt: str, element: str, rule: str, rng: torch.Generator
) -> None:
    x = INPUTS["wide_rows"](rng, 96, 200).bfloat16()
    q = quantize(x, spec(fmt, element=element, scale_rule=rule), columnwise=True)
    scale, codes = torchao_mx(x.t(), element, rule)
    assert torch.equal(q.block_scale, scale)
    assert torch.equal(mx_kernels.unpack_uint4(q.data) if element == "e2m1" else q.data, codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_every_finite_bf16_as_amax_and_as_element(fmt: str, element: str, rule: str) -> None:
    """Each block holds one bf16 number, its half, its third and so on: every amax a bf16 tensor can have."""
    numbers = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    blocks = (numbers[:, None] / torch.arange(1, 33)).bfloat16()
    scale, codes = ours(blocks, fmt, element, rule)
    their_scale, their_codes = torchao_mx(blocks, element, rule)
    assert torch.equal(scale, their_scale)
    clamped = scale[:, 0] == 0  # see the next test
    assert torch.equal(codes[~clamped], their_codes[~clamped])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_differs_on_purpose_in_blocks_of_scale_2_to_minus_127(fmt: str, element: str, rule: str) -> None:
    """Byte 0 means 2^-127. torchao divides by 2^-126 there (by 1 with RCEIL) and multiplies by 2^-127 again; ours is exact."""
    block = (torch.arange(1, 33) * 2.0**-132)[None]
    scale, codes = ours(block, fmt, element, rule)
    their_scale, their_codes = torchao_mx(block, element, rule)
    assert scale.tolist() == their_scale.tolist() == [[0]]
    assert not torch.equal(codes, their_codes)
    q = quantize(block, spec(fmt, element=element, scale_rule=rule))
    assert ((q.dequantize() - block).abs() <= block.abs().amax() / 4).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_nan_blocks_agree_on_the_scale_and_differ_on_purpose_in_the_codes(fmt: str, element: str, rule: str) -> None:
    """0xFF already says NaN for the whole block; our codes are 0 there, torchao's depend on the element."""
    x = torch.randn(4, 64)
    x[1, 3] = x[2, 40] = float("nan")
    scale, codes = ours(x, fmt, element, rule)
    their_scale, their_codes = torchao_mx(x, element, rule)
    assert torch.equal(scale, their_scale)
    assert scale[1, 0] == scale[2, 1] == 0xFF
    number = (scale != 0xFF).repeat_interleave(32, 1)
    assert torch.equal(codes[number], their_codes[number])
    assert not codes[~number].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_differs_on_purpose_for_inf_which_is_nan_here(fmt: str, element: str, rule: str) -> None:
    """torchao saturates an Inf to a large number; a training run must see it."""
    x = torch.ones(1, 32)
    x[0, 5] = float("inf")
    scale, _ = ours(x, fmt, element, rule)
    assert scale.tolist() == [[0xFF]]
    assert torchao_mx(x, element, rule)[0].item() != 0xFF
    assert quantize(x, spec(fmt, element=element, scale_rule=rule)).dequantize().isnan().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("fmt", "element"), MX_ELEMENTS)
def test_zero_blocks_get_byte_0_and_keep_their_signs(fmt: str, element: str, rule: str) -> None:
    """Some public stacks write 127 for a zero block; byte 0 is the law here, and torchao's."""
    x = torch.zeros(2, 64)
    x[0, :32] = -0.0
    scale, codes = ours(x, fmt, element, rule)
    their_scale, their_codes = torchao_mx(x, element, rule)
    assert not scale.any()
    assert torch.equal(scale, their_scale)
    assert torch.equal(codes, their_codes)
    dequantized = quantize(x, spec(fmt, element=element, scale_rule=rule)).dequantize()
    assert torch.equal(dequantized, torch.zeros(2, 64))
    assert dequantized[0, :32].signbit().all()


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_dequantised_values_equal_torchaos(fmt: str, rng: torch.Generator) -> None:
    x = INPUTS["wide_rows"](rng, 64, 128).bfloat16()
    element = dict(MX_ELEMENTS[:2])[fmt]
    mode = mx_tensor.ScaleCalculationMode.EVEN
    scale, data = mx_tensor.to_mx(x, ELEMENT_TYPES[element].torch_dtype, 32, mode)
    theirs = mx_tensor.to_dtype(data, scale, ELEMENT_TYPES[element].torch_dtype, 32, torch.float32)
    assert torch.equal(quantize(x, spec(fmt, scale_rule="even")).dequantize(), theirs)
