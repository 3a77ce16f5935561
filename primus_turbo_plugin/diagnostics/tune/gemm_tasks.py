"""The products that a model's linears run: what is tuned.

fprop  y[T, N]  = x[T, K] @ w[N, K].T       nt
dgrad  dx[T, K] = dy[T, N] @ w[N, K]        nn    (a quantised weight has a transposed copy: nt)
wgrad  dw[N, K] = dy[T, N].T @ x[T, K]      tn    (likewise)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from primus_turbo_plugin.diagnostics.model_sizes import LinearSizes
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.recipe import LinearPrecision

Kind: TypeAlias = torch.dtype | QuantSpec
Layout = Literal["nt", "nn", "tn", "tt"]
LAYOUTS: tuple[Layout, ...] = ("nt", "nn", "tn", "tt")
GEMMS = ("fprop", "dgrad", "wgrad")
_LAYOUT_OF: dict[str, Layout] = {"fprop": "nt", "dgrad": "nn", "wgrad": "tn"}
_OUT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTask:
    """One product y[rows, cols] = a[rows, contraction] @ b[cols, contraction].T.

    Attributes:
        name: What it is for, `llama3_8b.linear_fc1 fprop`.
        rows, cols, contraction: M, N, K.
        a, b: dtype of a plain operand, spec of a quantised one.
        layout: Which axis of a plain operand is contiguous, as BLAS names it. Quantised ones have the contraction last.
        out_dtype: dtype of the result.
        accumulate: Whether it is added to an fp32 output.
    """

    name: str
    rows: int
    cols: int
    contraction: int
    a: Kind
    b: Kind
    layout: Layout = "nt"
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.cols, self.contraction) < 1:
            raise ConfigError(f"{self.name}: M, N and K must be at least 1, got {self.shape}.")

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.cols}x{self.contraction}"

    @property
    def request(self) -> GemmRequest:
        """As the registry is asked."""
        return GemmRequest(device="cuda", a=self.a, b=self.b, out_dtype=self.out_dtype, accumulate=self.accumulate)

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.cols * self.contraction

    def key(self, arch: str, compute_units: int) -> GemmKey:
        """The key that a kernel would look up; made from the sizes alone, so it needs no GPU."""
        a = self._operand(self.a, self.rows, self.layout[0] == "t")
        b = self._operand(self.b, self.cols, self.layout[1] == "n")
        return GemmKey(
            arch=arch, compute_units=compute_units, rows=self.rows, cols=self.cols, contraction=stored_length(self),
            a=OperandKey.of(a), b=OperandKey.of(b), out=_OUT[self.out_dtype], accumulate=self.accumulate,
            out_aligned=self.cols * self.out_dtype.itemsize % 16 == 0,
        )  # fmt: skip

    def _operand(self, kind: Kind, outer: int, transposed: bool) -> Operand:
        """An operand without memory."""
        if isinstance(kind, QuantSpec):
            width = kind.padded(self.contraction) // kind.element_type.codes_per_byte
            data = torch.empty(outer, width, dtype=torch.uint8, device="meta")
            scale_dtype = torch.uint8 if kind.is_mx else torch.float32
            scale = torch.empty(kind.scale_shape(outer, self.contraction), dtype=scale_dtype, device="meta")
            return QuantizedTensor(data, scale, kind, (outer, self.contraction))
        if transposed:
            return torch.empty(self.contraction, outer, dtype=kind, device="meta").t()
        return torch.empty(outer, self.contraction, dtype=kind, device="meta")


def stored_length(task: GemmTask) -> int:
    """The contraction as both operands store it (`gemm_checks.common_length`)."""
    size = (task.a.hadamard if isinstance(task.a, QuantSpec) else 0) or 1
    return -(-task.contraction // size) * size


def linear_tasks(
    label: str,
    linears: Iterable[LinearSizes],
    precisions: Iterable[tuple[str, LinearPrecision]],
    *,
    tokens: int,
    gemms: Iterable[str] = GEMMS,
    accumulate: bool = True,
) -> Iterator[GemmTask]:
    """The products of linears under recipes.

    Args:
        label: The model's name.
        linears: On this rank.
        precisions: (recipe's name, what it gives a linear).
        tokens: Tokens of a microbatch, all that the GEMM sees.
        gemms: Of `GEMMS`.
        accumulate: Whether wgrad adds to an fp32 main_grad; otherwise it writes bf16.
    """
    for recipe, precision in precisions:
        for linear in linears:
            for gemm in gemms:
                first, second = (spec if spec.is_quantized else torch.bfloat16 for spec in precision.gemm(gemm))
                sizes = {
                    "fprop": (tokens, linear.out_features, linear.in_features),
                    "dgrad": (tokens, linear.in_features, linear.out_features),
                    "wgrad": (linear.out_features, linear.in_features, tokens),
                }[gemm]
                adds = gemm == "wgrad" and accumulate
                yield GemmTask(
                    name=f"{label}.{linear.name} {gemm} {recipe}",
                    rows=sizes[0], cols=sizes[1], contraction=sizes[2], a=first, b=second, layout=_LAYOUT_OF[gemm],
                    out_dtype=torch.float32 if adds else torch.bfloat16, accumulate=adds,
                )  # fmt: skip


def shape_tasks(
    shapes: Iterable[str], formats: Iterable[str], layouts: Iterable[Layout], *, accumulate: bool
) -> Iterator[GemmTask]:
    """Products of shapes `M,N,K` as they are written, with both operands in one format.

    Raises:
        ConfigError: A shape is no three positive numbers.
    """
    for shape in shapes:
        parts = shape.replace("x", ",").split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
            raise ConfigError(f"--shapes: a shape is M,N,K, three positive numbers; got {shape!r}.")
        rows, cols, contraction = (int(part) for part in parts)
        for name in formats:
            kind = kind_of(name)
            for layout in layouts if isinstance(kind, torch.dtype) else ("nt",):
                yield GemmTask(
                    name=f"{layout} {name}", rows=rows, cols=cols, contraction=contraction, a=kind, b=kind,
                    layout=layout, out_dtype=torch.float32 if accumulate else torch.bfloat16, accumulate=accumulate,
                )  # fmt: skip


FORMATS = ("bf16", "fp16", "fp8", "fp8:rowwise", "fp8:1x128", "mxfp8", "mxfp8:32x32", "mxfp4", "mxfp4:32x32")
"""A format, or format:block."""


def kind_of(name: str) -> Kind:
    """An operand's kind by a name of `FORMATS`."""
    if name in ("bf16", "fp16"):
        return torch.bfloat16 if name == "bf16" else torch.float16
    if name not in FORMATS:
        raise ConfigError(f"--formats: unknown format {name!r}. Known: {', '.join(FORMATS)}.")
    format_name, _, block = name.partition(":")
    return QuantSpec(format=Format(format_name), block=block or None)


def distinct(tasks: Iterable[GemmTask], arch: str, compute_units: int) -> list[GemmTask]:
    """Tasks with different keys, each first name kept: layers that share a shape are tuned once."""
    by_key: dict[GemmKey, GemmTask] = {}
    for task in tasks:
        by_key.setdefault(task.key(arch, compute_units), task)
    return list(by_key.values())
