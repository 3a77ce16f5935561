"""`GemmKey`: everything about one product that changes which code is compiled, or which configuration is best."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Union

import torch

from primus_turbo_plugin.devices.capabilities import Capabilities, capabilities_of
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

Operand = Union[torch.Tensor, QuantizedTensor]  # noqa: UP007  (evaluated at run time; Python 3.10's torch.Tensor has no |)

_ALIGNMENT_BYTES = 16
"""What a tensor copy engine (TMA) asks of a tensor's address and of its rows' distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandKey:
    """One operand `[outer, contraction]`.

    Attributes:
        element: `bf16`, `fp16`, `e2m1`, `e4m3` or `e5m2`.
        block: Elements that share a scale, as `QuantSpec.block` names them; `none` for a plain operand.
        contiguous: The axis whose neighbours are neighbours in memory. Two `contraction` operands are an NT product, `outer` on
            the right is NN (dgrad), on both sides TN (wgrad).
        aligned: Address and row distance are multiples of 16 bytes.
    """

    element: str
    block: str = "none"
    contiguous: Literal["contraction", "outer", "neither"] = "contraction"
    aligned: bool = True

    @classmethod
    def of(cls, operand: Operand) -> OperandKey:
        """The key of a tensor."""
        if isinstance(operand, QuantizedTensor):
            data, spec = operand.data, operand.spec
            return cls(element=spec.element_type.name, block=str(spec.block), aligned=_aligned(data, 0))
        element = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(operand.dtype, str(operand.dtype))
        if operand.stride(1) == 1 or operand.shape[1] == 1:
            return cls(element=element, aligned=_aligned(operand, 0))
        if operand.stride(0) == 1 or operand.shape[0] == 1:
            return cls(element=element, contiguous="outer", aligned=_aligned(operand, 1))
        return cls(element=element, contiguous="neither", aligned=False)

    @property
    def is_plain(self) -> bool:
        return self.block == "none"

    @property
    def is_mx(self) -> bool:
        """E8M0 scales for blocks of 32."""
        return self.block.endswith("x32")

    @property
    def is_fp8(self) -> bool:
        """8-bit codes with fp32 scales."""
        return not self.is_plain and not self.is_mx

    @property
    def bits(self) -> int:
        """Bits of a stored element."""
        return {"e2m1": 4, "e4m3": 8, "e5m2": 8}.get(self.element, 16)


def _aligned(tensor: torch.Tensor, strided_dim: int) -> bool:
    """Whether a tensor copy engine can read it: neither at odd addresses nor the same row again and again, as of an expansion."""
    step = tensor.stride(strided_dim) * tensor.element_size()
    repeats = step == 0 and tensor.shape[strided_dim] > 1
    return tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and step % _ALIGNMENT_BYTES == 0 and not repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmKey:
    """y[M, N] = a[M, K] @ b[N, K].T on one kind of GPU.

    Attributes:
        arch: `sm90`, `gfx950`...
        compute_units: Streaming multiprocessors or compute units of the GPU.
        rows: M.
        cols: N.
        contraction: K, as both operands store it.
        a: The left operand.
        b: The right operand.
        out: `bf16`, `fp16` or `fp32`.
        bias: Whether a bias `[N]` is added.
        accumulate: Whether the product is added to what `out` holds.
        out_aligned: The result's neighbours along N are neighbours in memory, its address and row distance multiples of 16 bytes.
    """

    arch: str
    compute_units: int
    rows: int
    cols: int
    contraction: int
    a: OperandKey
    b: OperandKey
    out: str
    bias: bool = False
    accumulate: bool = False
    out_aligned: bool = True

    @property
    def capabilities(self) -> Capabilities:
        """The architecture's row of the table of devices."""
        return capabilities_of(self.arch)

    @property
    def layout(self) -> str:
        """`nt`, `nn`, `tn` or `tt`, as BLAS names it; `strided` when an operand is contiguous along neither axis."""
        if "neither" in (self.a.contiguous, self.b.contiguous):
            return "strided"
        left = "n" if self.a.contiguous == "contraction" else "t"
        return left + ("t" if self.b.contiguous == "contraction" else "n")

    def __str__(self) -> str:
        kinds = [kind.element if kind.is_plain else f"{kind.element}({kind.block})" for kind in (self.a, self.b)]
        extras = " + bias" * self.bias + " accumulating" * self.accumulate
        shape = f"{self.rows}x{self.cols}x{self.contraction}"
        return f"gemm {self.layout} {shape} {kinds[0]} x {kinds[1]} -> {self.out}{extras} on {self.arch}"


_OUT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def key_of(a: Operand, b: Operand, y: torch.Tensor, length: int, *, bias: bool, accumulate: bool) -> GemmKey:
    """The key of a product on the GPU its tensors are on.

    Args:
        a: `[M, K]`.
        b: `[N, K]`.
        y: `[M, N]`, the result.
        length: K as both operands store it (`gemm_checks.common_length`).
        bias: Whether a bias is added.
        accumulate: Whether y is added to.
    """
    arch, units = gpu_of(y.device.index)
    return GemmKey(
        arch=arch, compute_units=units, rows=y.shape[0], cols=y.shape[1], contraction=length,
        a=OperandKey.of(a), b=OperandKey.of(b), out=_OUT_NAMES.get(y.dtype, str(y.dtype)), bias=bias, accumulate=accumulate,
        out_aligned=y.stride(1) == 1 and _aligned(y, 0),
    )  # fmt: skip


@functools.cache
def gpu_of(device_index: int) -> tuple[str, int]:
    """(architecture, number of multiprocessors or compute units) of a GPU."""
    properties = torch.cuda.get_device_properties(device_index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.split(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return arch, properties.multi_processor_count
