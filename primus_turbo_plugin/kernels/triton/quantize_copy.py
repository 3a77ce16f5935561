"""One quantised copy to be made: its buffers, and what the kernels need to know about it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from primus_turbo_plugin.kernels.triton.copy_meta import CopyMeta
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotation_signs
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout, shuffled_shape

_NO_WORDS = (0, 0, 0, 0)
_AMAX_ALIGNMENT = 4
"""Two amax buffers in one allocation both start at multiples of 16 bytes, as allocations of their own do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyPlan:
    """One copy of any tensor `[rows, cols]`: everything but its buffers.

    Attributes:
        spec: How it is represented.
        meta: The same for the kernel.
        columnwise: Contraction along rows.
        shape: (outer, contraction).
        padded: Length of the stored contraction axis.
        data_shape: Of the codes, as `QuantizedTensor.data`.
        scale_shape: Of the scales, as `QuantizedTensor.block_scale`.
        scale_dtype: Of the scales.
        scale_layout: Where the scales lie.
        zeroed_scale: Kernels leave a part of the scales alone, which must be 0.
        stochastic: Random bits are wanted.
        amax_size: Numbers that an amax pass of its own finds for the scales, 0 for no such pass.
    """

    spec: QuantSpec
    meta: CopyMeta
    columnwise: bool
    shape: tuple[int, int]
    padded: int
    data_shape: tuple[int, int]
    scale_shape: tuple[int, int]
    scale_dtype: torch.dtype
    scale_layout: ScaleLayout
    zeroed_scale: bool
    stochastic: bool
    amax_size: int

    @classmethod
    def of(
        cls, rows: int, cols: int, spec: QuantSpec | None, columnwise: bool, scale_layout: ScaleLayout = "plain"
    ) -> CopyPlan | None:
        """The plan of a copy; None for no spec, or a bf16 one."""
        if spec is None or not spec.is_quantized:
            return None
        outer, contraction = (cols, rows) if columnwise else (rows, cols)
        meta, padded, scale_shape = CopyMeta.of(spec), spec.padded(contraction), spec.scale_shape(outer, contraction)
        zeroed, layout = False, scale_layout if spec.is_mx else "plain"
        if layout != "plain":
            numbers, scale_shape = outer * scale_shape[1], shuffled_shape(outer, scale_shape[1])
            zeroed = scale_shape[0] * scale_shape[1] != numbers
        amax_size = 0 if not meta.needs_amax else outer if meta.block_outer else 1
        return cls(
            spec=spec,
            meta=meta,
            columnwise=columnwise,
            shape=(outer, contraction),
            padded=padded,
            data_shape=(outer, padded // spec.element_type.codes_per_byte),
            scale_shape=scale_shape,
            scale_dtype=torch.uint8 if spec.is_mx else torch.float32,
            scale_layout=layout,
            zeroed_scale=zeroed,
            stochastic=spec.rounding == "stochastic",
            amax_size=amax_size,
        )

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, not filled; for an empty tensor as they are, with scales of 1."""
        empty = torch.empty
        if 0 in self.shape:
            empty = torch.ones
        data = empty(
            *self.data_shape, dtype=torch.uint8, device=device
        )  # sizes one by one: a tuple takes torch twice as long
        if self.zeroed_scale:
            empty = torch.zeros
        return data, empty(*self.scale_shape, dtype=self.scale_dtype, device=device)

    def words(self, key: RoundingKey | None) -> tuple[int, ...]:
        """The four key words of the copy's random bits, as int32."""
        return _signed(key.words(self.columnwise)) if self.stochastic and key is not None else _NO_WORDS

    def signs(self, seed: int, device: torch.device) -> torch.Tensor | None:
        """Of the rotation."""
        return _signs(self.spec.hadamard, seed, device) if self.meta.random_signs else None

    def result(self, data: torch.Tensor, block_scale: torch.Tensor, signs_seed: int) -> QuantizedTensor:
        """The copy, from buffers of `allocate` that a kernel has filled."""
        seed = signs_seed if self.meta.random_signs else 0
        return QuantizedTensor.trusted(data, block_scale, self.spec, self.shape, seed, self.scale_layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy with its buffers.

    Attributes:
        plan: What it is.
        data: Codes, as `QuantizedTensor.data`.
        block_scale: Scales, as `QuantizedTensor.block_scale`.
        signs: Of the rotation.
        words: The four key words of its random bits, as int32.
        signs_seed: Where the signs come from.
    """

    plan: CopyPlan
    data: torch.Tensor
    block_scale: torch.Tensor
    signs: torch.Tensor | None
    words: tuple[int, ...]
    signs_seed: int

    @classmethod
    def of(
        cls,
        rows: int,
        cols: int,
        device: torch.device,
        spec: QuantSpec | None,
        columnwise: bool,
        key: RoundingKey | None,
        signs_seed: int,
        scale_layout: ScaleLayout = "plain",
    ) -> Copy | None:
        """The copy with its buffers allocated; None for no spec, or a bf16 one."""
        plan = CopyPlan.of(rows, cols, spec, columnwise, scale_layout)
        if plan is None:
            return None
        data, block_scale = plan.allocate(device)
        return cls(
            plan=plan,
            data=data,
            block_scale=block_scale,
            signs=plan.signs(signs_seed, device),
            words=plan.words(key),
            signs_seed=signs_seed if plan.meta.random_signs else 0,
        )

    @property
    def spec(self) -> QuantSpec:
        return self.plan.spec

    @property
    def meta(self) -> CopyMeta:
        return self.plan.meta

    @property
    def shape(self) -> tuple[int, int]:
        return self.plan.shape

    @property
    def scale_layout(self) -> ScaleLayout:
        return self.plan.scale_layout

    @property
    def padded(self) -> int:
        return self.plan.padded

    def amax_buffer(self) -> torch.Tensor | None:
        """Zeroed bits of the amax for a scale that spans an axis, int32 `[outer]` or `[1]`."""
        return amax_buffers(self.plan, None, self.data.device)[0]


def amax_buffers(
    row: CopyPlan | None, col: CopyPlan | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zeroed bits of both copies' amax, each int32 `[amax_size]`, by one memset; None for copies without such a pass."""
    rows, cols = row.amax_size if row else 0, col.amax_size if col else 0
    first = -(-rows // _AMAX_ALIGNMENT) * _AMAX_ALIGNMENT if cols else rows
    if not first + cols:
        return None, None
    zeros = torch.zeros(first + cols, dtype=torch.int32, device=device)
    if not rows or not cols:
        return (zeros, None) if rows else (None, zeros)
    return zeros, zeros[first:]


@functools.lru_cache(maxsize=64)
def _signs(size: int, seed: int, device: torch.device) -> torch.Tensor:
    return rotation_signs(size, seed, device)


def _signed(words: tuple[int, ...]) -> tuple[int, ...]:
    """32-bit words as the int32 of the same bits, so that a kernel argument always has one type."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)
