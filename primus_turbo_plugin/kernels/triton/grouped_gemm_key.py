"""`GroupedGemmKey`: everything about one grouped product that changes which code is compiled, or which configuration is best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from primus_turbo_plugin.devices.capabilities import Capabilities
from primus_turbo_plugin.kernels.gemm_checks import common_length
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_config import refusal as dense_refusal
from primus_turbo_plugin.kernels.triton.gemm_defaults import default_config as dense_default
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey, gpu_of
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_OUT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ONE_SCALE = {"1x128": "rowwise"}
"""Block of a depth copy -> what it is to the kernels where an expert has one scale a row."""
_DESCRIPTOR_STEP = 128
"""Largest BLOCK_K of the kernels on tensor descriptors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedGemmKey:
    """A grouped product on one kind of GPU.

    Attributes:
        arch: `sm90`, `gfx950`...
        compute_units: Streaming multiprocessors or compute units of the GPU.
        kind: `rows` or `depth`, as `GroupedGemmRequest.kind`.
        groups: Experts.
        tokens: Tokens of an average expert, rounded up to a power of two: their number differs in every step.
        outer: N of `rows`; M of `depth`.
        inner: K of `rows`; N of `depth`.
        a: The left operand.
        b: The right operand, of one expert.
        out: `bf16`, `fp16` or `fp32`.
        accumulate: Whether the product is added to what `out` holds.
    """

    arch: str
    compute_units: int
    kind: Literal["rows", "depth"]
    groups: int
    tokens: int
    outer: int
    inner: int
    a: OperandKey
    b: OperandKey
    out: str
    accumulate: bool = False

    @property
    def dense(self) -> GemmKey:
        """An average expert's product, on its share of the GPU."""
        rows, cols, contraction = (
            (self.tokens, self.outer, self.inner) if self.kind == "rows" else (self.outer, self.inner, self.tokens)
        )
        return GemmKey(
            arch=self.arch, compute_units=-(-self.compute_units // self.groups), rows=rows, cols=cols,
            contraction=contraction, a=self.a, b=self.b, out=self.out, accumulate=self.accumulate,
        )  # fmt: skip

    @property
    def capabilities(self) -> Capabilities:
        """The architecture's row of the table of devices."""
        return self.dense.capabilities

    def __str__(self) -> str:
        return f"grouped {self.kind} of {self.groups} experts, each {self.dense}"


def rows_key(a: Operand, b: Operand, cols: int, groups: Groups, out_dtype: torch.dtype) -> GroupedGemmKey:
    """The key of y[rows of g] = a[rows of g] @ b[g].T."""
    length = a.shape[1] if isinstance(b, torch.Tensor) else common_length(a, b)
    left, right = OperandKey.of(a), _weight_key(b)
    if left.contiguous != "contraction":
        left = replace(left, aligned=False)
    return _key("rows", a, groups, cols, length, left, right, out_dtype, False)


def depth_key(
    a: Operand, b: Operand, groups: Groups, out: torch.Tensor, *, accumulate: bool, scales_by_expert: bool = False
) -> GroupedGemmKey:
    """The key of out[g] (+)= a[:, rows of g] @ b[:, rows of g].T."""
    common_length(a, b)  # refuses operands that are rotated differently
    left, right = OperandKey.of(a), OperandKey.of(b)
    if scales_by_expert:
        left, right = (replace(kind, block=_ONE_SCALE.get(kind.block, kind.block)) for kind in (left, right))
    return _key("depth", a, groups, a.shape[0], b.shape[0], left, right, out.dtype, accumulate)


def _key(
    kind: Literal["rows", "depth"], a: Operand, groups: Groups, outer: int, inner: int, left: OperandKey, right: OperandKey,
    out_dtype: torch.dtype, accumulate: bool,
) -> GroupedGemmKey:  # fmt: skip
    arch, units = gpu_of(a.device.index)
    return GroupedGemmKey(
        arch=arch, compute_units=units, kind=kind, groups=groups.count, tokens=average_tokens(groups),
        outer=outer, inner=inner, a=left, b=right, out=_OUT_NAMES.get(out_dtype, str(out_dtype)), accumulate=accumulate,
    )  # fmt: skip


def average_tokens(groups: Groups) -> int:
    """Tokens of an average expert, rounded up to a power of two."""
    return 1 << max(-(-groups.total // groups.count) - 1, 0).bit_length()


def _weight_key(b: Operand) -> OperandKey:
    """The key of one expert's weight; aligned only where all experts' are one matrix to a tensor copy engine."""
    if isinstance(b, QuantizedTensor):
        return OperandKey.of(b)
    key = OperandKey.of(b[0])
    along = 1 if key.contiguous == "contraction" else 2
    one_matrix = b.stride(0) == b.shape[along] * b.stride(along)
    if key.contiguous == "outer":
        one_matrix = one_matrix and b.shape[2] % _DESCRIPTOR_STEP == 0  # no step may reach into the next expert
    return key if one_matrix else replace(key, aligned=False)


def refusal(key: GroupedGemmKey, config: GemmConfig) -> str | None:
    """Why a configuration cannot serve a grouped product, or None."""
    if config.split_k > 1:
        return "split_k is for one product: experts share the GPU already"
    return dense_refusal(key.dense, config)


def default_config(key: GroupedGemmKey) -> GemmConfig:
    """The shipped configuration: an average expert's, its contraction not shared."""
    config = dense_default(key.dense)
    whole = dense_default(replace(key.dense, compute_units=key.compute_units))
    if key.arch == "gfx950" and config.epilogue_parts == 2:
        config = replace(
            config, epilogue_parts=4
        )  # the search for a tile's expert takes registers that halves would need
    return replace(config, split_k=1, num_xcds=whole.num_xcds, persistent=True)
