"""A neighbouring op and a quantisation as one (torch reference; the oracle of every other backend).

Math      rms_norm_quantize  quantise(y), y = bf16(x * rstd * gamma) as kernels.reference.norm.rms_norm_fwd; rstd as well
          swiglu_quantize    quantise(y), y = bf16(silu(gate) * up), x = [gate | up]
          quantize_and_sum   quantise(x), and sum of x over its rows in fp32
Numerics  the op in fp32, rounded to x's dtype once, then quantised: exactly the bytes that calling the op and then the
          quantisation gives. Every operation in front has a defined order and is correctly rounded, so that kernels can give the
          same bits: sums by `precision.tree_sum`, silu by the polynomial below
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.reference.norm import rms_norm_fwd
from primus_turbo_plugin.kernels.reference.quantize import quantize_both
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import FusedQuantizeRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout
from primus_turbo_plugin.precision.tree_sum import tree_sum

_ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: added to |t| < 2^22 it leaves the integer nearest to t in the low bits."""
_POWER_OF_TWO = (
    0.0013266970636323094,
    0.009675459936261177,
    0.05550742521882057,
    0.24022121727466583,
    0.6931469440460205,
    1.0000001192092896,
)
"""2^f on [-1/2, 1/2], highest power first: relative error below 1.5e-7 (least squares at Chebyshev points)."""
_RECIPROCAL_GUESS = 0x7EF311C7
"""This minus the bits of a positive d is 1 / d to 12 %; each Newton step squares the error."""


@torch.no_grad()
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    zero_centered_gamma: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """The copies of RMS norm(x), which is not returned itself.

    Args:
        x: `[tokens, hidden]`, bf16, fp16 or fp32.
        weight: `[hidden]`.
        eps: Added to the mean square.
        row_spec: Spec of the rowwise copy, or None.
        col_spec: Spec of the columnwise copy, or None.
        zero_centered_gamma: gamma = 1 + weight.
        key: As in `quantize_both`.
        signs_seed: As in `quantize_both`.
        scale_layout: As in `quantize_both`.

    Returns:
        The rowwise copy `[tokens, hidden]`, the columnwise copy `[hidden, tokens]`, and rstd `[tokens]` fp32 for `rms_norm_bwd`.
    """
    y, rstd = rms_norm_fwd(x, weight, eps, zero_centered_gamma=zero_centered_gamma)
    return *quantize_both(y, row_spec, col_spec, key=key, signs_seed=signs_seed, scale_layout=scale_layout), rstd


@torch.no_grad()
def swiglu_quantize(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> Copies:
    """The copies of silu(gate) * up.

    Args:
        x: `[tokens, 2 * hidden]`: gate, then up.
        row_spec: Spec of the rowwise copy, or None.
        col_spec: Spec of the columnwise copy, or None.
        key: As in `quantize_both`.
        signs_seed: As in `quantize_both`.
        scale_layout: As in `quantize_both`.

    Returns:
        The rowwise copy `[tokens, hidden]` and the columnwise copy `[hidden, tokens]`.

    Raises:
        ShapeError: x has an odd number of columns.
    """
    return quantize_both(swiglu_fwd(x), row_spec, col_spec, key=key, signs_seed=signs_seed, scale_layout=scale_layout)


@torch.no_grad()
def quantize_and_sum(
    x: Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """The copies of x `[rows, cols]` as `quantize_both` gives them, and its sum over rows, fp32 `[cols]`, by `tree_sum`."""
    return *quantize_both(x, row_spec, col_spec, key=key, signs_seed=signs_seed, scale_layout=scale_layout), tree_sum(
        x.float(), 0
    )


def swiglu_fwd(x: Tensor) -> Tensor:
    """silu(gate) * up of `[..., 2 * hidden]`, rounded to x's dtype once: `[..., hidden]`.

    Raises:
        ShapeError: x has an odd number of columns.
    """
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ShapeError(f"swiglu: x must be [..., 2 * hidden], gate then up, got {list(x.shape)}.")
    gate, up = x.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def swiglu_bwd(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient of `swiglu_fwd`: dgate = dy up s (1 + gate (1 - s)), dup = dy silu(gate), s = sigmoid(gate), rounded once.

    Args:
        dy: `[..., hidden]`.
        x: `[..., 2 * hidden]`, the forward's input.

    Returns:
        `[..., 2 * hidden]` in x's dtype.
    """
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, dy = torch.sigmoid(gate), dy.float()
    return torch.cat((dy * up * (sigmoid * (1 + gate * (1 - sigmoid))), dy * (gate * sigmoid)), dim=-1).to(x.dtype)


def silu(g: Tensor) -> Tensor:
    """g / (1 + exp(-g)) of fp32 to about 3e-7 relative, by multiplications, additions and integer arithmetic alone.

    exp(-g) is 2^n times a polynomial in the fraction f of -g log2(e) = n + f; the reciprocal takes three Newton steps. Beyond
    |g| = 87 the power is clamped: silu(-87) is -1e-36 instead of 0.
    """
    t = (g * -1.4426950408889634).clamp(-126.0, 126.0)
    shifted = t + _ROUND_TO_INTEGER
    f = t - (shifted - _ROUND_TO_INTEGER)
    p = torch.full_like(f, _POWER_OF_TWO[0])
    for coefficient in _POWER_OF_TWO[1:]:
        p = p * f + coefficient
    exponent = shifted.view(torch.int32) - 0x4B400000 + 127
    denominator = p * (exponent << 23).view(torch.float32) + 1.0
    r = (_RECIPROCAL_GUESS - denominator.view(torch.int32)).view(torch.float32)
    for _ in range(3):
        r = r * (2.0 - denominator * r)
    return g * r


def supports(request: FusedQuantizeRequest) -> str | None:
    """None, or why the reference cannot do it."""
    if request.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"quantises bf16, fp16 and fp32, not {request.dtype}"
    return None


BACKEND = Backend(name="reference", request=FusedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
