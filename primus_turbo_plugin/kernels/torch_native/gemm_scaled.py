"""y = a @ b.T of two FP8 operands through torch._scaled_mm: cuBLASLt and CUTLASS on NVIDIA, hipBLASLt on ROCm.

Math      y[M, N] = (codes_a @ codes_b.T) * scale_a[M or 1] * scale_b[N or 1];  blocks of 128: scales inside the sum
Layout    codes [outer, contraction], contraction last in both. torch wants K and N in multiples of 16, cuBLASLt with scales of
          blocks M too: short operands are copied with zeros, which add nothing, and the result is cut
Numerics  Fast accumulation is off: Hopper's FP8 units keep about 14 bits of a sum, and cuBLASLt then adds parts of it in fp32.
          Results that torch cannot write itself (fp32 with a scale a row, a bias of another dtype) are computed in fp32 and
          finished in fp32, with one rounding
gfx942    reads the FNUZ encoding, in which the same bits are half the value (other bias), 0x80 is NaN and nothing else is. Codes
          are converted exactly (-0 to 0, NaN and Inf to NaN) and the factor 2 goes into the scale
Cost      2*M*N*K FLOPs on the FP8 units; gfx942: one pass over the codes more
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from primus_turbo_plugin.devices import Capabilities, detect
from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_MULTIPLE = 16
_ALIGNMENT = 256
"""What cuBLASLt supposes of an address it is told nothing about."""
_SQUARES_MULTIPLE = 512
"""cuBLASLt wants rows of 128x128 scales to be multiples of 16 bytes apart."""
_DTYPES = {
    ("e4m3", "ocp"): torch.float8_e4m3fn, ("e5m2", "ocp"): torch.float8_e5m2,
    ("e4m3", "fnuz"): torch.float8_e4m3fnuz, ("e5m2", "fnuz"): torch.float8_e5m2fnuz,
}  # fmt: skip
_FIRST_NAN = {"e4m3": 0x7F, "e5m2": 0x7C}
"""Magnitude codes from here on are NaN (E5M2: or Inf) in the OCP encoding."""
_FNUZ_NAN = 0x80
_BY_ROW = ("tensorwise", "rowwise")
_BY_BLOCK = (("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128"))


def gemm_nt(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """y = a @ b.T (+ bias).

    Args:
        a: `[M, K]`, FP8.
        b: `[N, K]`, FP8.
        out_dtype: dtype of the result; float32 when `out` is given.
        bias: `[N]`, added before the only rounding; not together with `out`.
        out: fp32 `[M, N]`, accumulated into in place and returned.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.

    Returns:
        `[M, N]` in `out_dtype`, or `out` or `into`.

    Raises:
        ShapeError: Shapes, dtypes, devices or rotations do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
    if into is not None:
        y = _written(a, b, into) if bias is None else None
        return into.copy_(gemm_nt(a, b, out_dtype=out_dtype, bias=bias)) if y is None else y
    common_length(a, b)
    if 0 in (*a.shape, b.shape[0]):
        y = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device) if out is None else out
        return y if bias is None else y + bias.to(out_dtype)
    with_scales = not _one_scale_a_row(a, b) or out_dtype == torch.bfloat16  # a scale a row: torch writes bf16 only
    fused = bias is None or bias.dtype == out_dtype == torch.bfloat16
    if with_scales and fused:
        y = _product(a, b, out_dtype, bias)
    elif with_scales and not _one_scale_a_row(a, b):
        y = _product(a, b, torch.float32)
    else:
        y = _product(_unscaled(a), _unscaled(b), torch.float32).mul_(a.block_scale).mul_(b.block_scale.t())
    if out is not None:
        return out.add_(y)
    return (y if fused else y + bias).to(out_dtype)


def _one_scale_a_row(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return "rowwise" in (a.spec.block, b.spec.block)


def _unscaled(operand: QuantizedTensor) -> QuantizedTensor:
    spec = replace(operand.spec, block="tensorwise")
    return replace(operand, spec=spec, block_scale=torch.ones(1, 1, device=operand.device))


def _written(a: QuantizedTensor, b: QuantizedTensor, into: Tensor) -> Tensor | None:
    """The product straight in `into`, or None where something is left to do behind `torch._scaled_mm`."""
    aligned = b.outer % _MULTIPLE == 0 and (a.spec.block_shape[1] == 0 or a.outer % _MULTIPLE == 0)
    by_row = _one_scale_a_row(a, b) and into.dtype != torch.bfloat16
    usable = into.is_contiguous() and into.data_ptr() % _ALIGNMENT == 0
    if by_row or not aligned or not usable or 0 in (*a.shape, b.shape[0]):
        return None
    common_length(a, b)
    return _product(a, b, into.dtype, into=into)


def _product(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """`torch._scaled_mm` with both operands padded to what it takes, the result cut back."""
    step = _SQUARES_MULTIPLE if "128x128" in (a.spec.block, b.spec.block) else _MULTIPLE
    length = -(-max(a.padded_contraction, b.padded_contraction) // step) * step
    cols = -(-b.outer // _MULTIPLE) * _MULTIPLE
    rows = a.outer if a.spec.block_shape[1] == 0 else -(-a.outer // _MULTIPLE) * _MULTIPLE
    if bias is not None and cols != b.outer:
        bias = pad(bias, (0, cols - b.outer))
    by_row = _one_scale_a_row(a, b)
    y = torch._scaled_mm(
        _codes(a, rows, length), _codes(b, cols, length).t(),
        _scale(a, rows, length, by_row), _scale(b, cols, length, by_row).t(),
        bias=bias, out_dtype=dtype, use_fast_accum=False, **({} if into is None else {"out": into}),
    )  # fmt: skip
    if into is not None or (rows, cols) == (a.outer, b.outer):
        return y
    return y[: a.outer, : b.outer].contiguous()  # a collective or a view may follow


def _codes(operand: QuantizedTensor, rows: int, length: int) -> Tensor:
    """FP8 `[rows, length]` in this GPU's encoding; what is added is zero."""
    data = grown(operand.data, rows, length)
    encoding = str(this_gpu().fp8_encoding or "ocp")
    if encoding == "fnuz":
        data = to_fnuz(data, operand.spec.element_type.name)
    return data.view(_DTYPES[operand.spec.element_type.name, encoding])


def grown(x: Tensor, rows: int, cols: int) -> Tensor:
    """x with zeros behind its rows and columns; x itself where it has that size already."""
    return x if tuple(x.shape) == (rows, cols) else pad(x, (0, cols - x.shape[1], 0, rows - x.shape[0]))


def to_fnuz(codes: Tensor, element: str) -> Tensor:
    """OCP codes as FNUZ codes of half the value, exactly; -0 becomes 0, NaN and Inf become NaN."""
    special = (codes & 0x7F) >= _FIRST_NAN[element]
    return codes.masked_fill(codes == _FNUZ_NAN, 0).masked_fill_(special, _FNUZ_NAN)


def _scale(operand: QuantizedTensor, rows: int, length: int, by_row: bool) -> Tensor:
    """fp32 scales in the shape and order by which `_scaled_mm` tells the kinds apart: `[1, 1]`, `[rows, 1]` or blocks."""
    scale = operand.block_scale * 2.0 if this_gpu().fp8_encoding == "fnuz" else operand.block_scale
    block_rows, block_length = operand.spec.block_shape
    if not block_length:
        if not by_row:
            return scale
        return grown(scale.expand(operand.outer, 1), rows, 1).contiguous()
    scale = grown(scale, -(-rows // block_rows), length // block_length)
    return scale.t().contiguous().t() if block_rows == 1 else scale.contiguous()


def supports(request: GemmRequest) -> str | None:
    """None, or why torch._scaled_mm cannot multiply these operands here."""
    specs = [kind for kind in (request.a, request.b) if isinstance(kind, QuantSpec) and kind.format is Format.FP8]
    if len(specs) < 2:
        return "multiplies two FP8 operands"
    if request.device != "cuda":
        return f"runs on GPUs, the tensors are on {request.device}"
    blocks = (str(specs[0].block), str(specs[1].block))
    if not (set(blocks) <= set(_BY_ROW) or blocks in _BY_BLOCK):
        return f"has no product of a {blocks[0]} and a {blocks[1]} operand"
    gpu = this_gpu()
    if gpu.fp8_encoding is None:
        return f"{gpu.arch} has no FP8 units"
    if gpu.vendor == "amd" and blocks in _BY_BLOCK:
        return "torch's ROCm builds have no product of FP8 blocks of 128"
    elements = (specs[0].element_type.name, specs[1].element_type.name)
    if gpu.vendor == "nvidia" and elements == ("e5m2", "e5m2"):
        return "cuBLASLt does not multiply two E5M2 operands"
    if gpu.vendor == "amd" and "rowwise" in blocks and elements[1] == "e5m2":
        return "hipBLASLt takes a scale a row only where the right operand is E4M3"
    return _build_refusal(elements, blocks, request.out_dtype, request.bias)


@functools.cache
def this_gpu() -> Capabilities:
    """The current GPU's row of the table of devices."""
    return detect().capabilities


@functools.cache
def _build_refusal(
    elements: tuple[str, str], blocks: tuple[str, str], out_dtype: torch.dtype, bias: bool
) -> str | None:
    """Why this build of torch cannot do such a product, or None; asked of the GPU by one small product."""
    if not torch.cuda.is_available():
        return None  # nothing will run; there is nobody to ask
    operands = []
    for element, block in zip(elements, blocks):
        spec = QuantSpec(format=Format.FP8, element=element, block=block)
        data = torch.zeros(512, 512, dtype=torch.uint8, device="cuda")
        scale = torch.ones(spec.scale_shape(512, 512), device="cuda")
        operands.append(QuantizedTensor(data, scale, spec, (512, 512)))
    try:
        for dtype in {out_dtype, torch.float32 if bias else out_dtype}:  # a bias of another dtype is added in fp32
            gemm_nt(*operands, out_dtype=dtype)
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        return f"torch {torch.__version__} cannot multiply {' and '.join(blocks)} here: {str(error).splitlines()[0]}"
    return None


BACKEND = Backend(
    name="scaled_mm",
    request=GemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units=dict.fromkeys(("sm89", "sm90", "sm100", "gfx942", "gfx950", "gfx1250"), ("fp8",)),
)
