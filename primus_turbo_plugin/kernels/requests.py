"""What is asked of a kernel: one typed request per op. A backend answers it with None or with a reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Base of all requests. A subclass names its op, the functions a backend must have for it, and examples.

    Attributes:
        device: Device type the tensors are on, `cpu` or `cuda` (which is also ROCm).
    """

    op: ClassVar[str] = ""
    functions: ClassVar[tuple[str, ...]] = ()

    device: str

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        """Typical requests on a device; `KernelRegistry.explain` reports who serves each."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeRequest(Request):
    """Quantise x `[rows, cols]`, along the rows, the columns or both.

    Attributes:
        dtype: dtype of x.
        row_spec: Spec of the copy with contraction along cols, or None.
        col_spec: Spec of the columnwise copy, contraction along rows, or None.
    """

    op: ClassVar[str] = "quantize"
    functions: ClassVar[tuple[str, ...]] = ("quantize", "quantize_both")

    dtype: torch.dtype
    row_spec: QuantSpec | None = None
    col_spec: QuantSpec | None = None

    @classmethod
    def of(cls, x: torch.Tensor, row_spec: QuantSpec | None, col_spec: QuantSpec | None = None) -> QuantizeRequest:
        return cls(device=x.device.type, dtype=x.dtype, row_spec=row_spec, col_spec=col_spec)

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        rotated = QuantSpec(format=Format.MXFP4, hadamard=16)
        formats = [QuantSpec(format=name) for name in (Format.MXFP4, Format.MXFP8, Format.FP8)]
        pairs = [(formats[0], rotated), (formats[1], formats[1]), (formats[2], formats[2])]
        return tuple(cls(device=device, dtype=torch.bfloat16, row_spec=row, col_spec=col) for row, col in pairs)

    def __str__(self) -> str:
        specs = [f"rows {self.row_spec}"] if self.row_spec else []
        specs += [f"columns {self.col_spec}"] if self.col_spec else []
        return f"{self.op} {_short(self.dtype)} on {self.device}: {', '.join(specs)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedQuantizeRequest(Request):
    """Quantise what a neighbouring op makes of x, in the same pass.

    Attributes:
        kind: `rms_norm` and `swiglu` are computed in front of the quantisation; `sums` adds up x over its rows beside it, for a
            bias gradient.
        dtype: dtype of x.
        hidden: Columns of what is quantised.
        weight_dtype: dtype of the norm's weight; None for the others.
        row_spec: As `QuantizeRequest`'s.
        col_spec: As `QuantizeRequest`'s.
    """

    op: ClassVar[str] = "fused_quantize"
    functions: ClassVar[tuple[str, ...]] = ("rms_norm_quantize", "swiglu_quantize", "quantize_and_sum")

    kind: Literal["rms_norm", "swiglu", "sums"]
    dtype: torch.dtype
    hidden: int
    weight_dtype: torch.dtype | None = None
    row_spec: QuantSpec | None = None
    col_spec: QuantSpec | None = None

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        bf16 = torch.bfloat16
        copies = {"row_spec": QuantSpec(format=Format.MXFP4), "col_spec": QuantSpec(format=Format.MXFP4, hadamard=16)}
        return (
            cls(device=device, kind="rms_norm", dtype=bf16, hidden=4096, weight_dtype=bf16, **copies),
            cls(device=device, kind="swiglu", dtype=bf16, hidden=14336, **copies),
            cls(device=device, kind="sums", dtype=bf16, hidden=4096, **copies),
        )

    def __str__(self) -> str:
        what = {"rms_norm": "RMS norm and quantise", "swiglu": "SwiGLU and quantise", "sums": "quantise and sum rows"}
        specs = [f"rows {self.row_spec}"] if self.row_spec else []
        specs += [f"columns {self.col_spec}"] if self.col_spec else []
        return f"{what[self.kind]} {_short(self.dtype)} hidden {self.hidden} on {self.device}: {', '.join(specs)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmRequest(Request):
    """y[M, N] = a[M, K] @ b[N, K].T, with fp32 accumulation.

    Attributes:
        a: dtype of a plain operand, or spec of a quantised one.
        b: As `a`.
        out_dtype: dtype of the result.
        bias: Whether a bias [N] is added.
        accumulate: Whether the product is added to an existing fp32 output.
    """

    op: ClassVar[str] = "gemm_nt"
    functions: ClassVar[tuple[str, ...]] = ("gemm_nt",)

    a: torch.dtype | QuantSpec
    b: torch.dtype | QuantSpec
    out_dtype: torch.dtype
    bias: bool = False
    accumulate: bool = False

    @classmethod
    def of(
        cls,
        a: torch.Tensor | QuantizedTensor,
        b: torch.Tensor | QuantizedTensor,
        out_dtype: torch.dtype,
        *,
        bias: bool = False,
        accumulate: bool = False,
    ) -> GemmRequest:
        kinds = [operand.spec if isinstance(operand, QuantizedTensor) else operand.dtype for operand in (a, b)]
        return cls(device=a.device.type, a=kinds[0], b=kinds[1], out_dtype=out_dtype, bias=bias, accumulate=accumulate)

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        kinds: list[torch.dtype | QuantSpec] = [torch.bfloat16]
        kinds += [QuantSpec(format=name) for name in (Format.MXFP4, Format.MXFP8, Format.FP8)]
        return tuple(cls(device=device, a=kind, b=kind, out_dtype=torch.bfloat16) for kind in kinds)

    @property
    def is_plain(self) -> bool:
        """Neither operand is quantised."""
        return isinstance(self.a, torch.dtype) and isinstance(self.b, torch.dtype)

    def __str__(self) -> str:
        a, b = (_short(kind) if isinstance(kind, torch.dtype) else str(kind) for kind in (self.a, self.b))
        accumulate = " (accumulating)" if self.accumulate else ""
        return f"gemm_nt {a} x {b} -> {_short(self.out_dtype)}{accumulate} on {self.device}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQuantizeRequest(QuantizeRequest):
    """Quantise x `[T, features]`, rows sorted by expert, so that no scale, block or rotation spans two experts.

    Attributes:
        dtype: dtype of x.
        row_spec: Spec of the copy with contraction along features, or None.
        col_spec: Spec of the columnwise copy, contraction along an expert's tokens, or None.
    """

    op: ClassVar[str] = "grouped_quantize"
    functions: ClassVar[tuple[str, ...]] = ("grouped_quantize",)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedGemmRequest(Request):
    """A product for every expert, with fp32 accumulation, in one call.

    Attributes:
        kind: `rows`: y[rows of g] = a[rows of g] @ b[g].T, the fprop and dgrad of experts; `depth`:
            out[g] = a[:, rows of g] @ b[:, rows of g].T, their wgrad.
        a: dtype of a plain operand, or spec of a quantised one (`kernels/grouped_operands.py`).
        b: As `a`.
        out_dtype: dtype of the result.
        accumulate: Whether the product is added to an existing fp32 output; `depth` only.
    """

    op: ClassVar[str] = "grouped_gemm"
    functions: ClassVar[tuple[str, ...]] = ("grouped_gemm_nt", "grouped_gemm_depth")

    kind: Literal["rows", "depth"]
    a: torch.dtype | QuantSpec
    b: torch.dtype | QuantSpec
    out_dtype: torch.dtype
    accumulate: bool = False

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        kinds: list[torch.dtype | QuantSpec] = [torch.bfloat16]
        kinds += [QuantSpec(format=name) for name in (Format.MXFP4, Format.MXFP8)]
        pairs: list[tuple[Literal["rows", "depth"], torch.dtype | QuantSpec]] = [("rows", kind) for kind in kinds]
        pairs += [("rows", QuantSpec(format=Format.FP8, block="rowwise"))]
        pairs += [("depth", kind) for kind in kinds]
        pairs += [("depth", QuantSpec(format=Format.FP8, block="1x128"))]
        return tuple(
            cls(device=device, kind=kind, a=operand, b=operand, out_dtype=torch.bfloat16) for kind, operand in pairs
        )

    @property
    def is_plain(self) -> bool:
        """Neither operand is quantised."""
        return isinstance(self.a, torch.dtype) and isinstance(self.b, torch.dtype)

    def dense(self) -> GemmRequest:
        """One expert's product."""
        return GemmRequest(device=self.device, a=self.a, b=self.b, out_dtype=self.out_dtype, accumulate=self.accumulate)

    def __str__(self) -> str:
        a, b = (_short(kind) if isinstance(kind, torch.dtype) else str(kind) for kind in (self.a, self.b))
        accumulate = " (accumulating)" if self.accumulate else ""
        return f"grouped_gemm of {self.kind} {a} x {b} -> {_short(self.out_dtype)}{accumulate} on {self.device}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
