"""Quantisation of a GEMM operand (torch reference; the oracle of every other backend).

Math      v = rotate(x);  scale = rule(amax of each block of v);  code = round(v / scale)
Layout    x [rows, cols], any strides;  rowwise copy [rows, cols], columnwise copy [cols, rows], contraction last
Cost      about 25 elementwise passes over tiles that fit the cache; temporaries stay below 256 MiB whatever the size
Numerics  fp32 inside, one rounding (the codes). Division by an E8M0 scale is exact; by an FP8 scale it is one fp32 division.
          NaN or Inf in a block: its scale is NaN and its codes are 0, so the whole block dequantises to NaN
Source    precision.scaling (scales), precision.rotation, precision.rounding (random bits), kernels.reference.element (codes)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.kernels.reference.element import pack_fp4, round_to_codes
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.precision.formats import E8M0_NAN
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import rotate, rotation_signs
from primus_turbo_plugin.precision.rounding import WORDS_PER_COUNTER, RoundingKey, random_words
from primus_turbo_plugin.precision.scale_layout import ScaleLayout
from primus_turbo_plugin.precision.scaling import e8m0_reciprocal, e8m0_scale, fp8_scale

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_TILE_ELEMENTS = {"cpu": 1 << 18}
"""Elements worked on at once. 2^18 fp32 values are 1 MiB: few enough to stay in cache, enough to hide torch's call overhead."""
_TILE_ELEMENTS_DEVICE = 1 << 22
"""On an accelerator, where a launch costs more: 16 MiB a temporary, at most about ten of them (int64 words count twice)."""


@torch.no_grad()
def quantize(
    x: torch.Tensor,
    spec: QuantSpec,
    *,
    columnwise: bool = False,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> QuantizedTensor:
    """Quantise x along its last axis, or along its first for a columnwise copy.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]`, any strides; may be empty.
        spec: A quantised spec.
        columnwise: Quantise x.T `[cols, rows]` instead.
        key: Random bits; required for, and only read by, stochastic rounding.
        signs_seed: Seed of the rotation's signs, read when `spec.random_signs`.
        scale_layout: Where the scales of an MX copy shall lie; FP8 copies keep the plain layout.

    Returns:
        The quantised operand `[rows, cols]`, or `[cols, rows]` for a columnwise copy.

    Raises:
        ShapeError: x is not a 2D tensor of a supported dtype.
        ConfigError: The spec is bf16, or rounds stochastically and there is no key.
    """
    _check(x, spec, key)
    job = _Job.of(x, spec, columnwise, key, signs_seed)
    outer, contraction = job.shape
    per_byte = spec.element_type.codes_per_byte
    data = torch.empty(outer, spec.padded(contraction) // per_byte, dtype=torch.uint8, device=x.device)
    scale_dtype = torch.uint8 if spec.is_mx else torch.float32
    block_scale = torch.empty(spec.scale_shape(outer, contraction), dtype=scale_dtype, device=x.device)
    if 0 in spec.block_shape:  # a block spans the axis: its amax must be known before the first code is rounded
        block_scale.copy_(_whole_axis_scale(job, block_scale.shape))
    for tile in job.tiles():
        _quantize_tile(job, tile, data, block_scale)
    result = QuantizedTensor(data, block_scale, spec, job.shape, signs_seed if spec.random_signs else 0)
    return result.with_scale_layout(scale_layout if spec.is_mx else "plain")


def quantize_both(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
    scale_layout: ScaleLayout = "plain",
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """The rowwise and the columnwise copy of x, the same as two calls of `quantize`.

    Args:
        x: bf16, fp16 or fp32 `[rows, cols]`.
        row_spec: Spec of the rowwise copy; None or bf16 for no such copy.
        col_spec: Spec of the columnwise copy; None or bf16 for no such copy.
        key: As in `quantize`; the two copies get different random bits.
        signs_seed: As in `quantize`.
        scale_layout: As in `quantize`.

    Returns:
        (rowwise `[rows, cols]` or None, columnwise `[cols, rows]` or None).
    """
    row = col = None
    if row_spec and row_spec.is_quantized:
        row = quantize(x, row_spec, key=key, signs_seed=signs_seed, scale_layout=scale_layout)
    if col_spec and col_spec.is_quantized:
        col = quantize(x, col_spec, columnwise=True, key=key, signs_seed=signs_seed, scale_layout=scale_layout)
    return row, col


def supports(request: QuantizeRequest) -> str | None:
    """None, or why the reference cannot do it: it serves every spec, on every device."""
    if request.dtype not in _DTYPES:
        return f"quantises bf16, fp16 and fp32, not {request.dtype}"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """A piece of the padded source: rows and columns of x, which may reach past its end into the padding."""

    rows: range
    cols: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One quantisation, seen from the source: axis `dim` of x is the contraction, the other one the outer axis."""

    x: torch.Tensor
    spec: QuantSpec
    columnwise: bool
    key: RoundingKey | None
    signs: torch.Tensor | None

    @classmethod
    def of(cls, x: torch.Tensor, spec: QuantSpec, columnwise: bool, key: RoundingKey | None, signs_seed: int) -> _Job:
        signs = rotation_signs(spec.hadamard, signs_seed, x.device) if spec.random_signs else None
        return cls(x=x, spec=spec, columnwise=columnwise, key=key, signs=signs)

    @property
    def dim(self) -> int:
        return 0 if self.columnwise else 1

    @property
    def shape(self) -> tuple[int, int]:
        """(outer, contraction)."""
        rows, cols = self.x.shape
        return (cols, rows) if self.columnwise else (rows, cols)

    def oriented(self, outer: int, contraction: int) -> tuple[int, int]:
        """(outer, contraction) in the order of x's axes."""
        return (contraction, outer) if self.columnwise else (outer, contraction)

    def outer_and_contraction(self, tile: _Tile) -> tuple[range, range]:
        return (tile.cols, tile.rows) if self.columnwise else (tile.rows, tile.cols)

    def tiles(self) -> Iterator[_Tile]:
        """Pieces that hold whole blocks, whole rotations and whole groups of random words."""
        outer, contraction = self.shape
        block_outer = self.spec.block_shape[0] or 1
        padded = self.oriented(-(-outer // block_outer) * block_outer, self.spec.padded(contraction))
        unit = self.oriented(block_outer, math.lcm(self.spec.contraction_multiple, WORDS_PER_COUNTER))
        limit = _TILE_ELEMENTS.get(self.x.device.type, _TILE_ELEMENTS_DEVICE)
        if 0 in padded:
            return
        width = min(-(-padded[1] // unit[1]), max(limit // unit[0] // unit[1], 1)) * unit[1]
        height = max(limit // width // unit[0], 1) * unit[0]
        for row in range(0, padded[0], height):
            for col in range(0, padded[1], width):
                yield _Tile(rows=range(row, min(row + height, padded[0])), cols=range(col, min(col + width, padded[1])))

    def load(self, tile: _Tile) -> torch.Tensor:
        """The tile of x in fp32, zero-padded and rotated; a contiguous tensor of its own."""
        piece = self.x[tile.rows.start : tile.rows.stop, tile.cols.start : tile.cols.stop]
        if piece.shape == tile.shape:
            values = torch.empty(tile.shape, dtype=torch.float32, device=self.x.device).copy_(piece)
        else:
            values = torch.zeros(tile.shape, dtype=torch.float32, device=self.x.device)
            values[: piece.shape[0], : piece.shape[1]] = piece
        return rotate(values, self.spec.hadamard, self.signs, self.dim) if self.spec.hadamard else values

    def blocks(self, values: torch.Tensor) -> torch.Tensor:
        """A tile as `[row blocks, rows, column blocks, cols]`; an axis that a block spans counts as one block."""
        block = self.oriented(*self.spec.block_shape)
        height, width = (size or length for size, length in zip(block, values.shape))
        return values.view(values.shape[0] // height, height, values.shape[1] // width, width)

    def scale_slice(self, tile: _Tile) -> tuple[slice, slice]:
        """Where the tile's scales lie in `block_scale`."""
        spans = zip(self.outer_and_contraction(tile), self.spec.block_shape)
        outer, contraction = (
            slice(span.start // size, -(-span.stop // size)) if size else slice(None) for span, size in spans
        )
        return outer, contraction


def _check(x: torch.Tensor, spec: QuantSpec, key: RoundingKey | None) -> None:
    if x.dim() != 2 or x.dtype not in _DTYPES:
        raise ShapeError(
            f"quantize: x must be bf16, fp16 or fp32 [rows, cols], got {x.dtype} {list(x.shape)}. "
            "Flatten the leading axes or convert it."
        )
    if not spec.is_quantized:
        raise ConfigError("quantize: the spec must be quantised, got bf16. Use x itself.")
    if spec.rounding == "stochastic" and key is None:
        raise ConfigError(
            "quantize: rounding: stochastic needs a RoundingKey, got none. Pass key=, or set rounding to nearest."
        )


def _amax_bits(blocks: torch.Tensor) -> torch.Tensor:
    """fp32 bits of the largest magnitude of `[A, a, B, b]` over a and b, int32 `[A, B]`. As integers, NaN > Inf > numbers."""
    bits = blocks.view(torch.int32) & 0x7FFFFFFF
    bits = bits[:, 0] if bits.shape[1] == 1 else bits.amax(1)
    return bits[..., 0] if bits.shape[-1] == 1 else bits.amax(-1)


def _whole_axis_scale(job: _Job, shape: torch.Size) -> torch.Tensor:
    """FP8 scales of blocks that span an axis: a first pass over all tiles."""
    amax = torch.zeros(shape, dtype=torch.int32, device=job.x.device)
    for tile in job.tiles():
        bits = _amax_bits(job.blocks(job.load(tile)))
        part = amax[job.scale_slice(tile)]
        torch.maximum(part, bits.t() if job.columnwise else bits, out=part)
    return fp8_scale(amax.view(torch.float32), job.spec.element_type)


def _quantize_tile(job: _Job, tile: _Tile, data: torch.Tensor, block_scale: torch.Tensor) -> None:
    """Quantise one tile into its places in `data` and `block_scale`."""
    spec = job.spec
    values = job.load(tile)
    blocks = job.blocks(values)
    scales = block_scale[job.scale_slice(tile)]
    scales = scales.t() if job.columnwise else scales  # [row blocks, column blocks], as x lies
    if spec.is_mx:
        assert spec.scale_rule is not None
        byte = e8m0_scale(_amax_bits(blocks).view(torch.float32), spec.scale_rule, spec.element_type)
        scales.copy_(byte)
        blocks *= e8m0_reciprocal(byte)[:, None, :, None]
        is_number = byte != E8M0_NAN
    else:
        if 0 not in spec.block_shape:
            scales.copy_(fp8_scale(_amax_bits(blocks).view(torch.float32), spec.element_type))
        blocks /= scales[:, None, :, None]
        is_number = ~scales.isnan()
    codes = round_to_codes(values, spec.element_type, _words(job, tile))
    job.blocks(codes).mul_(is_number.to(torch.uint8)[:, None, :, None])
    _store(job, tile, codes, data)


def _words(job: _Job, tile: _Tile) -> torch.Tensor | None:
    if job.spec.rounding == "nearest":
        return None
    assert job.key is not None
    outer, contraction = job.outer_and_contraction(tile)
    padded = job.spec.padded(job.shape[1])
    return random_words(job.key, outer, contraction, padded, columnwise=job.columnwise, device=job.x.device)


def _store(job: _Job, tile: _Tile, codes: torch.Tensor, data: torch.Tensor) -> None:
    """Pack the codes, turn a columnwise copy, drop the outer padding."""
    per_byte = job.spec.element_type.codes_per_byte
    if per_byte == 2:
        codes = pack_fp4(codes, job.dim)
    outer, contraction = job.outer_and_contraction(tile)
    place = data[outer.start : outer.stop, contraction.start // per_byte : contraction.stop // per_byte]
    oriented = codes.t() if job.columnwise else codes
    place.copy_(oriented[: place.shape[0]])


BACKEND = Backend(name="reference", request=QuantizeRequest, kernels=sys.modules[__name__], supports=supports)
