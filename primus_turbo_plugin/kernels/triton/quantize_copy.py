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


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One copy of a tensor `[rows, cols]`.

    Attributes:
        spec: How it is represented.
        meta: The same for the kernel.
        columnwise: Contraction along rows.
        shape: (outer, contraction).
        data: Codes, as `QuantizedTensor.data`.
        block_scale: Scales, as `QuantizedTensor.block_scale`.
        scale_layout: Where the scales lie.
        signs: Of the rotation.
        words: The four key words of its random bits, as int32.
        signs_seed: Where the signs come from.
    """

    spec: QuantSpec
    meta: CopyMeta
    columnwise: bool
    shape: tuple[int, int]
    data: torch.Tensor
    block_scale: torch.Tensor
    scale_layout: ScaleLayout
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
        if spec is None or not spec.is_quantized:
            return None
        outer, contraction = (cols, rows) if columnwise else (rows, cols)
        per_byte = spec.element_type.codes_per_byte
        empty = functools.partial(torch.empty if rows * cols else torch.ones, device=device)
        empty_scale, scale_shape = empty, spec.scale_shape(outer, contraction)
        if scale_layout != "plain" and spec.is_mx:
            blocks, scale_shape = scale_shape[1], shuffled_shape(outer, scale_shape[1])
            if scale_shape[0] * scale_shape[1] != outer * blocks:  # kernels leave the padding alone
                empty_scale = functools.partial(torch.zeros, device=device)
        return cls(
            spec=spec,
            meta=CopyMeta.of(spec),
            columnwise=columnwise,
            shape=(outer, contraction),
            data=empty((outer, spec.padded(contraction) // per_byte), dtype=torch.uint8),
            block_scale=empty_scale(scale_shape, dtype=torch.uint8 if spec.is_mx else torch.float32),
            scale_layout=scale_layout if spec.is_mx else "plain",
            signs=_signs(spec.hadamard, signs_seed, device) if spec.random_signs else None,
            words=_signed(key.words(columnwise)) if key is not None and spec.rounding == "stochastic" else (0, 0, 0, 0),
            signs_seed=signs_seed if spec.random_signs else 0,
        )

    @property
    def padded(self) -> int:
        return self.spec.padded(self.shape[1])

    def amax_buffer(self) -> torch.Tensor | None:
        """Zeroed bits of the amax for a scale that spans an axis, int32 `[outer]` or `[1]`."""
        if not self.meta.needs_amax:
            return None
        size = self.shape[0] if self.meta.block_outer else 1
        return torch.zeros(size, dtype=torch.int32, device=self.data.device)

    def buffers(self, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, viewed as `dtype`, and scales."""
        return self.data.view(dtype), self.block_scale

    def result(self) -> QuantizedTensor:
        return QuantizedTensor(
            self.data, self.block_scale, self.spec, self.shape, self.signs_seed, scale_layout=self.scale_layout
        )


@functools.lru_cache(maxsize=64)
def _signs(size: int, seed: int, device: torch.device) -> torch.Tensor:
    return rotation_signs(size, seed, device)


def _signed(words: tuple[int, ...]) -> tuple[int, ...]:
    """32-bit words as the int32 of the same bits, so that a kernel argument always has one type."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)
