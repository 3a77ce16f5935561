"""y = a @ b.T of two MX operands through torch._scaled_mm: hipBLASLt on gfx950 and gfx1250, cuBLASLt (MXFP8) on Blackwell.

Math      y[M, N] = sum over K of code_a 2^(scale_a - 127) code_b 2^(scale_b - 127)
Layout    codes [outer, contraction], FP4 two a byte, the even one in the low nibble;  E8M0 scales, one a row and 32 elements:
            plain      [rows, K / 32], row-major: ROCm 7.0 and on, MXFP4 until 7.12, MXFP8 until 7.13
            gfx950     pieces of 32 rows x 8 blocks (precision/scale_layout.py): later ROCm
            cublas     pieces of 128 rows x 4 blocks, byte of (row, block) of a piece at 16 (row % 32) + 4 (row // 32) + block
          M and N are padded to 128 and K to 256 with zeros, which add nothing; the result is cut
Numerics  bf16 or fp16 results, as the libraries write them; a bias is added in that dtype, a second rounding
Limits    never run on the GPUs it is for: tested on what it hands to torch. Source of the layouts: torch's own checks
          (aten/src/ATen/native/cuda/ScaledBlas.cpp) and cuBLAS's documentation of 1D block scales
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.gemm_checks import check_gemm_nt, common_length
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.torch_native.gemm_scaled import grown, this_gpu
from primus_turbo_plugin.precision.formats import MX_BLOCK_SIZE, Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.scale_layout import shuffle_scale

_ROWS_MULTIPLE, _LENGTH_MULTIPLE = 128, 256
_DTYPES = {"e2m1": "float4_e2m1fn_x2", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_SCALE_DTYPE = "float8_e8m0fnu"
_FIRST_ROCM = {"gfx950": (7, 0), "gfx1250": (7, 14)}
_SHUFFLED_SINCE = {Format.MXFP4: (7, 13), Format.MXFP8: (7, 14)}
"""ROCm version from which torch wants shuffled scales."""


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
        a: `[M, K]`, MXFP4 or MXFP8.
        b: `[N, K]`, the same format.
        out_dtype: bf16 or fp16.
        bias: `[N]`, added after the product was rounded to `out_dtype`.
        out: Must be None: the libraries write no fp32.
        into: `[M, N]` in `out_dtype`, written and returned; not together with `out`.

    Returns:
        `[M, N]` in `out_dtype`, or `into`.

    Raises:
        ShapeError: Shapes, dtypes, devices or rotations do not fit.
    """
    check_gemm_nt(a, b, out_dtype=out_dtype, bias=bias, out=out, into=into)
    if into is not None:  # a copy: what is padded has another shape
        return into.copy_(gemm_nt(a, b, out_dtype=out_dtype, bias=bias))
    common_length(a, b)
    if 0 in (*a.shape, b.shape[0]):
        y = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    else:
        length = _up(max(a.padded_contraction, b.padded_contraction), _LENGTH_MULTIPLE)
        (left, scale_a), (right, scale_b) = _handed_over(a, length), _handed_over(b, length)
        whole = torch._scaled_mm(left, right.t(), scale_a, scale_b, out_dtype=out_dtype)
        y = whole[: a.outer, : b.outer].contiguous()  # a collective or a view may follow
    return y if bias is None else (y + bias).to(out_dtype)


def _handed_over(operand: QuantizedTensor, length: int) -> tuple[Tensor, Tensor]:
    """Codes `[rows, length]` and scales as torch wants them on this GPU."""
    operand = operand.plain()
    rows, element = _up(operand.outer, _ROWS_MULTIPLE), operand.spec.element_type
    data = grown(operand.data, rows, length // element.codes_per_byte)
    scale, block_rows = operand.block_scale, operand.spec.block_shape[0]
    if block_rows > 1:
        scale = scale.repeat_interleave(block_rows, 0)[: operand.outer]
    scale = grown(scale, rows, length // MX_BLOCK_SIZE)
    if this_gpu().vendor == "nvidia":
        scale = cublas_scale(scale)
    elif _rocm_version() >= _SHUFFLED_SINCE[operand.spec.format]:
        scale = shuffle_scale(scale, rows)
    return data.view(getattr(torch, _DTYPES[element.name])), scale.contiguous().view(getattr(torch, _SCALE_DTYPE))


def cublas_scale(scale: Tensor) -> Tensor:
    """Plain scales `[rows, blocks]`, multiples of 128 and 4, in cuBLAS's pieces of 128 x 4; flat."""
    rows, blocks = scale.shape
    pieces = scale.view(rows // 128, 4, 32, blocks // 4, 4)  # row = 128 m2 + 32 m1 + m0, block = 4 c1 + c0
    return pieces.permute(0, 3, 2, 1, 4).reshape(-1)


def supports(request: GemmRequest) -> str | None:
    """None, or why torch._scaled_mm cannot multiply these operands here."""
    specs = [kind for kind in (request.a, request.b) if isinstance(kind, QuantSpec) and kind.is_mx]
    if len(specs) < 2 or specs[0].format is not specs[1].format:
        return "multiplies two MX operands of one format"
    if request.device != "cuda":
        return f"runs on GPUs, the tensors are on {request.device}"
    if request.out_dtype not in (torch.bfloat16, torch.float16):
        return f"writes bf16 or fp16, not {str(request.out_dtype).removeprefix('torch.')}"
    missing = [
        name for name in (*(_DTYPES[s.element_type.name] for s in specs), _SCALE_DTYPE) if not hasattr(torch, name)
    ]
    if missing:
        return f"torch {torch.__version__} has no torch.{missing[0]}"
    return _gpu_refusal(specs[0].format)


def _gpu_refusal(fmt: Format) -> str | None:
    gpu = this_gpu()
    if gpu.arch in _FIRST_ROCM:
        first = _FIRST_ROCM[gpu.arch]
        if _rocm_version() < first:
            return f"needs torch for ROCm {first[0]}.{first[1]} on {gpu.arch}, got ROCm {torch.version.hip}"
        return None
    if str(fmt) not in gpu.native_formats:
        return f"{gpu.arch} has no {str(fmt).upper()} units"
    if fmt is Format.MXFP4:
        return "cuBLASLt has no MXFP4 product, only NVFP4"
    return None


def _rocm_version() -> tuple[int, int]:
    major, minor, *_ = (torch.version.hip or "0.0").split(".")
    return int(major), int(minor)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


BACKEND = Backend(
    name="scaled_mm_mx",
    request=GemmRequest,
    kernels=sys.modules[__name__],
    supports=supports,
    matrix_units={"gfx950": ("mxfp8", "mxfp4"), "gfx1250": ("mxfp8", "mxfp4"), "sm100": ("mxfp8",)},
)
