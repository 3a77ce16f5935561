"""RMS norm and layer norm, forward and backward (torch reference; the oracle of every other backend).

Math      rms norm    rstd = rsqrt(mean(x^2) + eps);             xhat = x * rstd;           y = xhat * gamma
          layer norm  rstd = rsqrt(mean((x - mean)^2) + eps);    xhat = (x - mean) * rstd;  y = xhat * gamma + bias
          gamma = weight, or 1 + weight with a zero-centred gamma;  g = dy * gamma
          rms norm    dx = rstd * (g - xhat * mean(g * xhat));              dweight = sum_tokens dy * xhat
          layer norm  dx = rstd * (g - mean(g) - xhat * mean(g * xhat));    dweight as above;  dbias = sum_tokens dy
Layout    x, y, dy, dx [tokens, hidden];  weight, bias and their gradients [hidden];  rstd, mean [tokens]
Cost      memory-bound: forward 2 passes of tokens * hidden elements, backward 3, and fp32 copies of them meanwhile
Numerics  everything inside in fp32 (fp64 for fp64 inputs); y and dx are rounded once, at the end, to x's dtype; rstd,
          mean, dweight and dbias are returned in the inner precision. x and weight may differ in dtype. The sum of squares of the
          RMS norm has a fixed order (precision.tree_sum), and its rstd takes correctly rounded operations only: a kernel can
          give the same bits
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.precision.tree_sum import tree_sum


def rms_norm_fwd(x: Tensor, weight: Tensor, eps: float, *, zero_centered_gamma: bool = False) -> tuple[Tensor, Tensor]:
    """y = x * rsqrt(mean(x^2) + eps) * gamma.

    Args:
        x: [tokens, hidden], any float dtype and any strides.
        weight: [hidden], any float dtype.
        eps: Added to the mean square.
        zero_centered_gamma: gamma = 1 + weight.

    Returns:
        y [tokens, hidden] in x's dtype, and rstd [tokens] in fp32 (fp64 for fp64 inputs).
    """
    inner = _inner_dtype(x, weight)
    x_inner = x.to(inner)
    total = tree_sum(x_inner.square(), -1)
    mean_square = total / total.new_full(
        (), x.shape[-1]
    )  # torch multiplies by the reciprocal of a plain number on GPUs
    # torch's fp32 square root on CPUs is not always the nearest number; a float64 one rounded to fp32 is.
    rstd = 1.0 / torch.sqrt((mean_square + eps).double()).to(inner)
    y = x_inner * rstd.unsqueeze(-1) * _gamma(weight, zero_centered_gamma, inner)
    return y.to(x.dtype), rstd


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    zero_centered_gamma: bool = False,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm_fwd`.

    Args:
        dy: [tokens, hidden], gradient of y.
        x: [tokens, hidden], the forward's input.
        weight: [hidden].
        rstd: [tokens], from the forward.
        zero_centered_gamma: As in the forward.
        dresidual: [tokens, hidden], a second gradient of x, added to dx before it is rounded.

    Returns:
        dx [tokens, hidden] in x's dtype and dweight [hidden] in rstd's dtype.
    """
    inner = rstd.dtype
    dy_inner, rstd = dy.to(inner), rstd.unsqueeze(-1)  # [tokens, 1]
    x_hat = x.to(inner) * rstd
    grad_x_hat = dy_inner * _gamma(weight, zero_centered_gamma, inner)
    dx = rstd * (grad_x_hat - x_hat * (grad_x_hat * x_hat).mean(-1, keepdim=True))
    if dresidual is not None:
        dx = dx + dresidual.to(inner)
    dweight = (dy_inner * x_hat).sum(0)
    return dx.to(x.dtype), dweight


def layer_norm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean(x)) * rsqrt(var(x) + eps) * gamma + bias, with the biased variance.

    Args:
        x: [tokens, hidden], any float dtype and any strides.
        weight: [hidden], any float dtype.
        bias: [hidden], or None for no bias.
        eps: Added to the variance.
        zero_centered_gamma: gamma = 1 + weight.

    Returns:
        y [tokens, hidden] in x's dtype, and mean, rstd [tokens] in fp32 (fp64 for fp64 inputs).
    """
    inner = _inner_dtype(x, weight)
    x_inner = x.to(inner)
    mean = x_inner.mean(-1)
    centred = x_inner - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1) * _gamma(weight, zero_centered_gamma, inner)
    if bias is not None:
        y = y + bias.to(inner)
    return y.to(x.dtype), mean, rstd


def layer_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *, zero_centered_gamma: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `layer_norm_fwd`.

    Args:
        dy: [tokens, hidden], gradient of y.
        x: [tokens, hidden], the forward's input.
        weight: [hidden].
        mean: [tokens], from the forward.
        rstd: [tokens], from the forward.
        zero_centered_gamma: As in the forward.

    Returns:
        dx [tokens, hidden] in x's dtype, dweight and dbias [hidden] in rstd's dtype.
    """
    inner = rstd.dtype
    dy_inner, rstd = dy.to(inner), rstd.unsqueeze(-1)  # [tokens, 1]
    x_hat = (x.to(inner) - mean.unsqueeze(-1)) * rstd
    grad_x_hat = dy_inner * _gamma(weight, zero_centered_gamma, inner)
    projection = (grad_x_hat * x_hat).mean(-1, keepdim=True)
    dx = rstd * (grad_x_hat - grad_x_hat.mean(-1, keepdim=True) - x_hat * projection)
    dweight = (dy_inner * x_hat).sum(0)
    return dx.to(x.dtype), dweight, dy_inner.sum(0)


def _inner_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _gamma(weight: Tensor, zero_centered: bool, inner: torch.dtype) -> Tensor:
    gamma = weight.to(inner)
    return gamma + 1 if zero_centered else gamma


def supports(request: NormRequest) -> str | None:
    """Everything."""
    return None


BACKEND = Backend(name="reference", request=NormRequest, kernels=sys.modules[__name__], supports=supports)
