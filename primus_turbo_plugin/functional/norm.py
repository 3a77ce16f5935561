"""RMS norm and layer norm as differentiable functions over plain tensors.

fprop   y = xhat * gamma (+ bias); formulas, backward included, in kernels/reference/norm.py
Saved   x, weight and the row statistics (fp32 [tokens], two for layer norm). y is never saved and x is saved as it came
        (a strided view stays a view), so a norm adds 4 or 8 bytes a token to what the layer before it already keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.registry import default_registry


class NormChoice:
    """Whose kernels run a norm: chosen in its first call, and again where the device, a dtype or the width is another.

    Args:
        order: Backends that may serve it, first choice first; None for the registry's order.
    """

    def __init__(self, order: Sequence[str] | None = None) -> None:
        self._order = order
        self._chosen: dict[tuple[Any, ...], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return NormChoice, (self._order,)  # kernels are modules, which cannot be copied

    def kernels(self, kind: Literal["rms_norm", "layer_norm"], x: Tensor, weight: Tensor) -> Any:
        """The kernels for x [..., hidden] and weight [hidden].

        Raises:
            UnsupportedError: No backend of the order can do it.
        """
        key = (kind, x.device, x.dtype, weight.dtype, x.shape[-1])
        if key not in self._chosen:
            request = NormRequest.of(kind, x, weight)
            self._chosen[key] = default_registry().select("norm", request, self._order).kernels
        return self._chosen[key]


Kernels: TypeAlias = NormChoice | Sequence[str] | None
"""A choice that is kept from call to call, or an order of backends for this call alone; None is the registry's order."""


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered_gamma: bool = False, kernels: Kernels = None
) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the last dimension.

    Args:
        x: [..., hidden], any float dtype, any strides, any number of elements (none too).
        weight: [hidden], any float dtype.
        eps: Added to the mean square.
        zero_centered_gamma: gamma = 1 + weight.
        kernels: Backends that may serve it, first choice first, or a choice that is kept; None for the registry's order.

    Returns:
        [..., hidden] in x's dtype.

    Raises:
        ShapeError: weight does not match x's last dimension, or a dtype is not a float.
        UnsupportedError: No backend of `kernels` can do it.
    """
    _check("rms_norm", x, weight=weight)
    return _RMSNorm.apply(x, weight, eps, zero_centered_gamma, choose("rms_norm", x, weight, kernels))


def rms_norm_residual(
    x: Tensor, weight: Tensor, eps: float, *, zero_centered_gamma: bool = False, kernels: Kernels = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and x again for the residual branch, whose gradient is added inside the norm's backward.

    The sum of the two gradients of x is rounded once and costs no pass of its own.

    Returns:
        y [..., hidden] as `rms_norm`'s, and x.
    """
    _check("rms_norm", x, weight=weight)
    return _RMSNormResidual.apply(x, weight, eps, zero_centered_gamma, choose("rms_norm", x, weight, kernels))


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered_gamma: bool = False,
    kernels: Kernels = None,
) -> Tensor:
    """y = (x - mean(x)) * rsqrt(var(x) + eps) * gamma + bias over the last dimension.

    Args:
        x: [..., hidden], any float dtype, any strides, any number of elements (none too).
        weight: [hidden], any float dtype.
        bias: [hidden], any float dtype, or None.
        eps: Added to the variance.
        zero_centered_gamma: gamma = 1 + weight.
        kernels: Backends that may serve it, first choice first, or a choice that is kept; None for the registry's order.

    Returns:
        [..., hidden] in x's dtype.

    Raises:
        ShapeError: weight or bias does not match x's last dimension, or a dtype is not a float.
        UnsupportedError: No backend of `kernels` can do it.
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    return _LayerNorm.apply(x, weight, bias, eps, zero_centered_gamma, choose("layer_norm", x, weight, kernels))


def choose(kind: Literal["rms_norm", "layer_norm"], x: Tensor, weight: Tensor, kernels: Kernels) -> Any:
    """The kernels that `kernels` says for x [..., hidden] and weight [hidden]."""
    choice = kernels if isinstance(kernels, NormChoice) else NormChoice(kernels)
    return choice.kernels(kind, x, weight)


class _RMSNorm(Function):
    """Saves x, weight, rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool, kernels: Any) -> Tensor:
        y, rstd = kernels.rms_norm_fwd(_rows(x), weight, eps, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered_gamma, ctx.kernels = zero_centered_gamma, kernels
        return _like(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dresidual: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = ctx.kernels.rms_norm_bwd(
            _rows(dy),
            _rows(x),
            weight,
            rstd,
            zero_centered_gamma=ctx.zero_centered_gamma,
            dresidual=None if dresidual is None else _rows(dresidual),
        )
        return _like(dx, x), dweight.to(weight.dtype), None, None, None


class _RMSNormResidual(_RMSNorm):
    """As `_RMSNorm`, with x as a second output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool, kernels: Any
    ) -> tuple[Tensor, Tensor]:
        return _RMSNorm.forward(ctx, x, weight, eps, zero_centered_gamma, kernels), x.view_as(x)


class _LayerNorm(Function):
    """Saves x, weight, mean, rstd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool, kernels: Any
    ) -> Tensor:
        y, mean, rstd = kernels.layer_norm_fwd(_rows(x), weight, bias, eps, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.zero_centered_gamma, ctx.kernels = zero_centered_gamma, kernels
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _like(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.kernels.layer_norm_bwd(
            _rows(dy), _rows(x), weight, mean, rstd, zero_centered_gamma=ctx.zero_centered_gamma
        )
        dbias = None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype)
        return _like(dx, x), dweight.to(weight.dtype), dbias, None, None, None


def _rows(x: Tensor) -> Tensor:
    """[..., hidden] as [tokens, hidden]; a copy only where the strides need one. Works for tensors without elements."""
    return x if x.dim() == 2 else x.reshape(x.numel() // x.shape[-1], x.shape[-1])


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """[tokens, hidden] in x's shape."""
    return rows if x.dim() == 2 else rows.view(x.shape)


def _check(op: str, x: Tensor, **parameters: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ShapeError(f"{op}: x must be [..., hidden] with hidden >= 1, got {list(x.shape)}.")
    if not x.is_floating_point():
        raise ShapeError(f"{op}: x must be a float tensor, got {x.dtype}. Cast it first.")
    for name, value in parameters.items():
        if value is None:
            continue
        if value.shape != x.shape[-1:]:
            raise ShapeError(
                f"{op}: {name} must have x's hidden size, [{x.shape[-1]}], got {list(value.shape)} for x {list(x.shape)}."
            )
        if not value.is_floating_point():
            raise ShapeError(f"{op}: {name} must be a float tensor, got {value.dtype}. Cast it first.")
