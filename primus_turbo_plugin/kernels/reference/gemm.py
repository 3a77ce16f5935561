"""y = a @ b.T of plain or quantised operands (torch reference; the oracle of every other backend).

Math      y[M, N] = a[M, K] @ b[N, K].T (+ bias[N]),  or  out[M, N] += a @ b.T
Layout    contraction last in both operands; quantised ones are padded along it with zeros, which add nothing
Cost      2*M*N*K FLOPs in fp32, plus one decode of each operand (of a again for each 128 MiB piece of b)
Numerics  Operands become fp32, the product is accumulated in fp32 and rounded once. Each term is exact: an MX value is a code of
          at most 4 significant bits times a power of two and a bf16 value has 8, so a product has at most 16 of fp32's 24 bits.
          FP8 scales that cover a whole row are taken out of the sum; per-block FP8 scales round each operand once, to 24 bits.
          Only the order of the fp32 additions is left to torch.matmul
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_PIECE_ELEMENTS = 1 << 25
"""fp32 values of an operand held at once: 128 MiB, so both operands' pieces stay within 256 MiB."""


@torch.no_grad()
def gemm_nt(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = a @ b.T (+ bias), accumulated in fp32 and rounded once to `out_dtype`.

    Args:
        a: `[M, K]`, plain (any strides) or quantised.
        b: `[N, K]`, plain or quantised. If one operand is rotated, the other must be rotated alike.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added in fp32 before the rounding; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.

    Returns:
        `[M, N]` in `out_dtype`, or `out` or `into`.

    Raises:
        ShapeError: Shapes, dtypes, devices or rotations do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
    length = common_length(a, b)
    given = into if out is None else out
    y = given if given is not None else torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for b_rows, b_piece in _pieces(b, length):
        for a_rows, a_piece in _pieces(a, length):
            part = y[a_rows, b_rows]
            if out is not None and a_piece.row_scale is None and b_piece.row_scale is None:
                part.addmm_(a_piece.values, b_piece.values.t())
                continue
            product = a_piece.times(b_piece)
            if bias is not None:
                product += bias[b_rows]
            if out is not None:
                part += product
            else:
                part.copy_(product)
    return y


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of an operand: fp32 values `[rows, length]` and, where one scale covers a row, that scale apart, `[rows or 1]`."""

    values: torch.Tensor
    row_scale: torch.Tensor | None

    def times(self, other: _Piece) -> torch.Tensor:
        """fp32 `[rows, other rows]`."""
        product = self.values @ other.values.t()
        if self.row_scale is not None:
            product *= self.row_scale[:, None]
        if other.row_scale is not None:
            product *= other.row_scale
        return product


def _pieces(operand: torch.Tensor | QuantizedTensor, length: int) -> Iterator[tuple[slice, _Piece]]:
    """The operand in fp32, as many rows at once as `_PIECE_ELEMENTS` allows."""
    step = max(_PIECE_ELEMENTS // max(length, 1), 1)
    for start in range(0, operand.shape[0], step):
        rows = slice(start, min(start + step, operand.shape[0]))
        if isinstance(operand, QuantizedTensor):
            covers_row = operand.spec.block_shape[1] == 0
            values = operand.decode(rows.start, rows.stop, scaled=not covers_row)
            scale = operand.block_scale[rows if operand.spec.block_shape[0] else slice(None), 0] if covers_row else None
            yield rows, _Piece(values[:, :length], scale)
        else:
            yield rows, _Piece(operand[rows].float(), None)


def supports(request: GemmRequest) -> str | None:
    """None: the reference multiplies every pair of operands, on every device."""
    return None


BACKEND = Backend(name="reference", request=GemmRequest, kernels=sys.modules[__name__], supports=supports)
