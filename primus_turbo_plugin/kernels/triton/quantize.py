"""Quantisation of a GEMM operand (Triton): one kernel, one read, for the rowwise and the columnwise copy together.

Math      as kernels/reference/quantize.py, bit for bit
Layout    x [rows, cols] by its strides, without a hidden copy;  copies as `QuantizedTensor` describes
Cost      reads x once (FP8 scales that span an axis: twice); docs/performance.md has measurements
Limits    GPU only. Round-to-nearest MXFP4 of bf16 takes quantize_mxfp4_bf16.py on sm_90 and gfx950, all else quantize_tile.py
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.kernels.triton.copy_meta import CopyMeta
from primus_turbo_plugin.kernels.triton.targets import dtype_refusal, kernel_target, refusal
from primus_turbo_plugin.precision.formats import Format
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotation_signs
from primus_turbo_plugin.precision.rounding import RoundingKey

_TOKEN_BLOCKS, _COL_GROUPS, _FAST_WARPS = 4, 32, 4
"""Tile of the fast kernel: 128 tokens x 128 columns, a warp a token block. Measured on one H200: docs/performance.md."""
_FAST_TARGETS = ("sm90", "gfx950")
"""Elsewhere the portable rounding in registers takes LLVM many minutes to compile (gfx942 and gfx1250, Triton 3.8)."""
_GROUP = 8
"""Token tiles side by side."""
_MIN_TILE = 64


def quantize(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    columnwise: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> QuantizedTensor:
    """Quantise x along its last axis, or along its first for a columnwise copy.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]` on a GPU, any strides; may be empty.
        spec: A quantised spec.
        columnwise: Quantise x.T `[cols, rows]` instead.
        key: Random bits; required for, and only read by, stochastic rounding.
        signs_seed: Seed of the rotation's signs, read when `spec.random_signs`.

    Returns:
        The quantised operand `[rows, cols]`, or `[cols, rows]` for a columnwise copy.

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: The spec is bf16, or rounds stochastically and there is no key.
    """
    if not spec.is_quantized:
        raise ConfigError("quantize: the spec must be quantised, got bf16. Use x itself.")
    specs = (None, spec) if columnwise else (spec, None)
    row, col = quantize_both(x, *specs, key=key, signs_seed=signs_seed)
    copy = col if columnwise else row
    assert copy is not None
    return copy


@torch.no_grad()
def quantize_both(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The rowwise and the columnwise copy of x from one read.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]` on a GPU.
        row_spec: Spec of the rowwise copy; None or bf16 for no such copy.
        col_spec: Spec of the columnwise copy; None or bf16 for no such copy.
        key: As in `quantize`; the two copies get different random bits.
        signs_seed: As in `quantize`.

    Returns:
        (rowwise `[rows, cols]` or None, columnwise `[cols, rows]` or None).

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: A spec rounds stochastically and there is no key.
    """
    row = _Copy.of(x, row_spec, False, key, signs_seed)
    col = _Copy.of(x, col_spec, True, key, signs_seed)
    copies = [copy for copy in (row, col) if copy is not None]
    _check(x, [copy.spec for copy in copies], key)
    if copies and x.numel():
        with torch.cuda.device(x.device):
            if kernel_target(x.device.index) in _FAST_TARGETS and all(_is_fast(x, copy) for copy in copies):
                _launch_fast(x, row, col)
            else:
                _launch_tile(x, row, col)
    return row.result(signs_seed) if row else None, col.result(signs_seed) if col else None


def supports(request: QuantizeRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every spec, on GPUs."""
    return refusal(request.device) or dtype_refusal(request.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copy:
    """One copy to be made: its buffers and what the kernels need to know."""

    spec: QuantSpec
    meta: CopyMeta
    columnwise: bool
    shape: tuple[int, int]
    data: torch.Tensor
    block_scale: torch.Tensor
    signs: torch.Tensor | None
    words: tuple[int, ...]

    @classmethod
    def of(
        cls, x: torch.Tensor, spec: QuantSpec | None, columnwise: bool, key: RoundingKey | None, signs_seed: int
    ) -> _Copy | None:
        if spec is None or not spec.is_quantized or x.dim() != 2:
            return None
        outer, contraction = (x.shape[1], x.shape[0]) if columnwise else (x.shape[0], x.shape[1])
        per_byte = spec.element_type.codes_per_byte
        scale_dtype = torch.uint8 if spec.is_mx else torch.float32
        empty = functools.partial(torch.empty if x.numel() else torch.ones, device=x.device)
        return cls(
            spec=spec,
            meta=CopyMeta.of(spec),
            columnwise=columnwise,
            shape=(outer, contraction),
            data=empty((outer, spec.padded(contraction) // per_byte), dtype=torch.uint8),
            block_scale=empty(spec.scale_shape(outer, contraction), dtype=scale_dtype),
            signs=_signs(spec.hadamard, signs_seed, x.device) if spec.random_signs else None,
            words=_signed(key.words(columnwise)) if key is not None and spec.rounding == "stochastic" else (0, 0, 0, 0),
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

    def result(self, signs_seed: int) -> QuantizedTensor:
        seed = signs_seed if self.spec.random_signs else 0
        return QuantizedTensor(self.data, self.block_scale, self.spec, self.shape, seed)


def _check(x: torch.Tensor, specs: list[QuantSpec], key: RoundingKey | None) -> None:
    if x.dim() != 2 or dtype_refusal(x.dtype) or x.device.type != "cuda":
        raise ShapeError(
            f"quantize (triton): x must be bf16, fp16 or fp32 [rows, cols] on a GPU, got {x.dtype} {list(x.shape)} on "
            f"{x.device}. Flatten the leading axes, convert it, or use the reference backend."
        )
    if key is None and any(spec.rounding == "stochastic" for spec in specs):
        raise ConfigError(
            "quantize: rounding: stochastic needs a RoundingKey, got none. Pass key=, or set rounding to nearest."
        )


@functools.lru_cache(maxsize=64)
def _signs(size: int, seed: int, device: torch.device) -> torch.Tensor:
    return rotation_signs(size, seed, device)


def _signed(words: tuple[int, ...]) -> tuple[int, ...]:
    """32-bit words as the int32 of the same bits, so that a kernel argument always has one type."""
    return tuple(word - (1 << 32) if word >> 31 else word for word in words)


def _is_fast(x: torch.Tensor, copy: _Copy) -> bool:
    """Whether quantize_mxfp4_bf16.py can make this copy."""
    spec = copy.spec
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
    if not aligned or x.dtype is not torch.bfloat16 or spec.format is not Format.MXFP4:
        return False
    if spec.rounding == "stochastic" or (spec.hadamard and copy.meta.block_outer == 32):
        return False
    return spec.hadamard in (0, 16, 32) if copy.columnwise else spec.hadamard == 0


def _launch_fast(x: torch.Tensor, row: _Copy | None, col: _Copy | None) -> None:
    from primus_turbo_plugin.kernels.triton.quantize_mxfp4_bf16 import quantize_mxfp4_bf16_kernel

    rows, cols = x.shape
    row_scales, col_blocks = -(-cols // 32), -(-rows // 32)
    grid = (-(-row_scales * 8 // _COL_GROUPS) * -(-col_blocks // _TOKEN_BLOCKS),)
    quantize_mxfp4_bf16_kernel[grid](
        x.view(torch.int32),
        *(_buffers(row, torch.int32)),
        *(_buffers(col, torch.int32)),
        col.signs if col else None,
        rows, cols // 8, row_scales, col_blocks,
        x.stride(0) // 8, row_scales * 4,
        ROW=row.meta if row else None,
        COL=col.meta if col else None,
        TOKEN_BLOCKS=_TOKEN_BLOCKS,
        COL_GROUPS=_COL_GROUPS,
        GROUP=_GROUP,
        EVEN=rows % (_TOKEN_BLOCKS * 32) == 0 and cols % (_COL_GROUPS * 4) == 0,
        TARGET=kernel_target(x.device.index),
        num_warps=_FAST_WARPS,
    )  # fmt: skip


def _buffers(copy: _Copy | None, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (copy.data.view(dtype), copy.block_scale) if copy else (None, None)


def _launch_tile(x: torch.Tensor, row: _Copy | None, col: _Copy | None) -> None:
    from primus_turbo_plugin.kernels.triton.quantize_tile import amax_kernel, quantize_kernel

    rows, cols = x.shape
    row_padded, col_padded = row.padded if row else cols, col.padded if col else rows
    block_m, block_n = tile_shape(row.meta if row else None, col.meta if col else None)
    grid = (-(-max(rows, col_padded) // block_m), -(-max(cols, row_padded) // block_n))
    tile: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8 if block_m * block_n > 4096 else 4}
    amax = [copy.amax_buffer() if copy else None for copy in (row, col)]
    signs = [copy.signs if copy else None for copy in (row, col)]
    if any(buffer is not None for buffer in amax):
        metas = [copy.meta if copy and copy.meta.needs_amax else None for copy in (row, col)]
        amax_kernel[grid](x, *amax, *signs, rows, cols, *x.stride(), ROW=metas[0], COL=metas[1], **tile)
    quantize_kernel[grid](
        x,
        *_buffers(row), amax[0], signs[0],
        *_buffers(col), amax[1], signs[1],
        rows, cols, row_padded, col_padded,
        *x.stride(),
        *(row.words if row else (0, 0, 0, 0)),
        *(col.words if col else (0, 0, 0, 0)),
        ROW=row.meta if row else None,
        COL=col.meta if col else None,
        **tile,
    )  # fmt: skip


def tile_shape(row: CopyMeta | None, col: CopyMeta | None) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) that hold whole blocks and whole rotations of both copies."""
    block_m = max(_MIN_TILE, row.block_outer if row else 0, col.multiple if col else 0)
    block_n = max(_MIN_TILE, col.block_outer if col else 0, row.multiple if row else 0)
    return block_m, block_n


BACKEND = Backend(name="triton", request=QuantizeRequest, kernels=sys.modules[__name__], supports=supports)
