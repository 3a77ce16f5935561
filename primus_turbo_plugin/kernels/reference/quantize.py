"""Quantisation in torch: the oracle of every other kernel.  (first, simple version)"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.precision.formats import ElementType
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotate, rotation_signs
from primus_turbo_plugin.precision.rounding import RoundingKey, random_words
from primus_turbo_plugin.precision.scaling import e8m0_reciprocal, e8m0_scale, fp8_scale


def quantize(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    columnwise: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> QuantizedTensor:
    """Quantise x along its last axis, or along its first for a columnwise copy: rotate, scale, round, all in fp32.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]`, any strides.
        spec: A quantised spec.
        columnwise: Quantise x.T `[cols, rows]` instead.
        key: Random bits; required for, and only read by, stochastic rounding.
        signs_seed: Seed of the rotation's signs, read when `spec.random_signs`.

    Returns:
        The quantised operand, `[rows, cols]`, or `[cols, rows]` for a columnwise copy.

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: The spec is bf16, or rounds stochastically and there is no key.
    """
    _check(x, spec, key)
    source = (x.t() if columnwise else x).float()
    outer, contraction = source.shape
    padded = spec.padded(contraction)
    values = torch.nn.functional.pad(source, (0, padded - contraction))
    if spec.hadamard:
        signs = rotation_signs(spec.hadamard, signs_seed).to(x.device) if spec.random_signs else None
        values = rotate(values, spec.hadamard, signs)
    block_outer, block_contraction = spec.block_shape
    block_outer, block_contraction = block_outer or max(outer, 1), block_contraction or max(padded, 1)
    rows = -(-outer // block_outer)
    blocks = torch.nn.functional.pad(values, (0, 0, 0, rows * block_outer - outer))
    blocks = blocks.view(rows, block_outer, -1 if padded else 0, block_contraction)
    amax = blocks.abs().amax((1, 3)) if blocks.numel() else blocks.new_zeros(spec.scale_shape(outer, contraction))
    if spec.is_mx:
        assert spec.scale_rule is not None
        byte = e8m0_scale(amax, spec.scale_rule, spec.element_type)
        block_scale = byte.to(torch.uint8)
        scaled = blocks * e8m0_reciprocal(byte)[:, None, :, None]
        valid = (byte != 255)[:, None, :, None].expand_as(blocks)
    else:
        block_scale = fp8_scale(amax, spec.element_type)
        scaled = blocks / block_scale[:, None, :, None]
        valid = ~block_scale.isnan()[:, None, :, None].expand_as(blocks)
    scaled = torch.where(valid, scaled, 0.0)
    scaled = scaled.reshape(-1, padded)[:outer]
    valid = valid.reshape(-1, padded)[:outer]
    words = None
    if spec.rounding == "stochastic":
        assert key is not None
        words = random_words(key, 0, outer * padded, columnwise=columnwise, device=x.device).view(outer, padded)
    codes = _round(scaled, spec.element_type, words)
    codes = torch.where(valid, codes, 0)
    if spec.element_type.codes_per_byte == 2:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return QuantizedTensor(codes.to(torch.uint8), block_scale, spec, (outer, contraction), signs_seed)


def quantize_both(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The row copy and the columnwise copy of x; a copy whose spec is None or bf16 is None."""
    row = quantize(x, row_spec, key=key, signs_seed=signs_seed) if row_spec and row_spec.is_quantized else None
    col = None
    if col_spec and col_spec.is_quantized:
        col = quantize(x, col_spec, columnwise=True, key=key, signs_seed=signs_seed)
    return row, col


def supports(request: QuantizeRequest) -> str | None:
    """The reference serves everything."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x must be bf16, fp16 or fp32, got {request.dtype}"
    return None


def _round(v: torch.Tensor, element: ElementType, words: torch.Tensor | None) -> torch.Tensor:
    """Codes (int32) of v: v / step is an integer multiple in v's binade; steps are powers of two."""
    bits = v.view(torch.int32)
    sign = (bits >> 31) & 1
    magnitude = v.abs().clamp_max(element.max_value)
    emin = 128 - element.bias
    exponent = (magnitude.view(torch.int32) >> 23).clamp_min(emin)
    inverse_step = ((254 - exponent + element.mantissa_bits) << 23).view(torch.float32)
    steps = magnitude * inverse_step
    if words is None:
        steps = steps.round()
    else:
        floor = steps.floor()
        steps = floor + ((words >> 8).float() * 2.0**-24 < steps - floor)
    code = steps.int() + ((exponent - emin) << element.mantissa_bits)
    return code.clamp_max(element.max_code) | (sign << (element.bits - 1))


def _check(x: torch.Tensor, spec: QuantSpec, key: RoundingKey | None) -> None:
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ShapeError(f"quantize: x must be bf16, fp16 or fp32 [rows, cols], got {x.dtype} {list(x.shape)}.")
    if not spec.is_quantized:
        raise ConfigError("quantize: the spec must be quantised, got bf16. Use x itself.")
    if spec.rounding == "stochastic" and key is None:
        raise ConfigError("quantize: rounding: stochastic needs a RoundingKey, got none. Pass key=, or round to nearest.")


BACKEND = Backend(name="reference", request=QuantizeRequest, kernels=sys.modules[__name__], supports=supports)
