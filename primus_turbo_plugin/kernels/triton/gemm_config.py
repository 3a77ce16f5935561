"""`GemmConfig`: how one product is computed, and the reasons for which a configuration cannot serve a product.

The choice is data; `gemm_defaults.py` makes it. An explicit configuration that cannot serve a product is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, OperandKey


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmConfig:
    """How one product is computed; every field changes code or order, none changes what is computed beyond fp32 rounding.

    Attributes:
        block_m: Rows of a program's tile.
        block_n: Columns of a program's tile.
        block_k: Contraction of one step.
        group_m: Tiles of M side by side before the next tile of N, for the L2 cache.
        num_warps: Warps (waves) of a program.
        num_stages: Steps in flight.
        split_k: Programs that share a tile's contraction; their partial sums are added in a fixed order by a second kernel.
        persistent: One program a compute unit, which walks over tiles; otherwise one program a tile.
        loads: `pointers`, or `descriptors`: tiles copied by the tensor copy engine.
        units: What multiplies: `half` (bf16 or fp16), `fp8`, or `mx` (scaled matrix units).
        decode: Where operands become what `units` read: in every program that reads a `tile`, or once, into a `scratch` copy that
            lives as long as the call (bf16, 2 bytes an element; FP8 on gfx942: its FNUZ encoding, 1 byte).
        epilogue_parts: Pieces in which a tile is stored, so that less shared memory waits for it.
        num_xcds: Chiplets among which the hardware deals out programs; neighbouring tiles are put on one. 1: no reordering.
        matrix_instr_nonkdim: AMD: M and N of the matrix instruction, 0 for Triton's choice.
        waves_per_eu: AMD: waves a SIMD should hold, 0 for the compiler's choice.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    split_k: int = 1
    persistent: bool = False
    loads: Literal["pointers", "descriptors"] = "pointers"
    units: Literal["half", "fp8", "mx"] = "half"
    decode: Literal["tile", "scratch"] = "tile"
    epilogue_parts: int = 1
    num_xcds: int = 1
    matrix_instr_nonkdim: int = 0
    waves_per_eu: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps", "epilogue_parts"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ConfigError(f"gemm config: {name} must be a power of two, got {value}.")
        for name in ("group_m", "num_stages", "split_k", "num_xcds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"gemm config: {name} must be at least 1, got {getattr(self, name)}.")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"gemm config: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )

    def tiles(self, key: GemmKey) -> int:
        """Output tiles of a product."""
        return -(-key.rows // self.block_m) * -(-key.cols // self.block_n)

    def scratch_bytes(self, key: GemmKey) -> int:
        """Device memory a call needs beside its operands and result: decoded operands, partial sums."""
        decoded = 0
        if self.decode == "scratch":
            outer, size = ((key.a, key.rows), (key.b, key.cols)), 2 if self.units == "half" else 1
            decoded = sum(size * rows * key.contraction for kind, rows in outer if not kind.is_plain)
        return decoded + (4 * self.split_k * key.rows * key.cols if self.split_k > 1 else 0)


_CHOICES = {"loads": ("pointers", "descriptors"), "units": ("half", "fp8", "mx"), "decode": ("tile", "scratch")}

_BARRIER_BYTES = 1 << 10
"""Shared memory that NVIDIA's pipelines need beside their buffers, and what a program may not use."""
_ACCUMULATORS = {"nvidia": 128, "amd": 256}
"""fp32 accumulators a thread with which nothing spills: of 255 registers on NVIDIA, of 512 on CDNA."""
_ACCUMULATORS_GFX1250 = 512
"""Of 1024 registers."""


def refusal(key: GemmKey, config: GemmConfig) -> str | None:
    """Why a configuration cannot serve a product, or None."""
    return _units_refusal(key, config) or _loads_refusal(key, config) or _size_refusal(key, config)


def _units_refusal(key: GemmKey, config: GemmConfig) -> str | None:
    kinds = (key.a, key.b)
    if config.units == "fp8":
        if not all(kind.is_fp8 for kind in kinds):
            return "units fp8 multiply two FP8 operands"
        encoding = key.capabilities.fp8_encoding
        if encoding is None:
            return key.capabilities.emulation("fp8")
        if encoding == "fnuz" and config.decode != "scratch":
            return f"{key.capabilities.emulation('fp8')}; decode: scratch converts exactly"
        if encoding == "ocp" and config.decode == "scratch":
            return "nothing is to be decoded"
    if config.units == "mx":
        if not all(kind.is_mx for kind in kinds):
            return "units mx multiply two MX operands"
        if key.arch not in ("gfx950", "gfx1250"):
            return f"{key.arch} has no scaled matrix units that Triton's dot_scaled reaches with plain scales"
    if config.decode == "scratch" and (config.units == "mx" or all(kind.is_plain for kind in kinds)):
        return "nothing is to be decoded"
    return None


def _loads_refusal(key: GemmKey, config: GemmConfig) -> str | None:
    if config.loads != "descriptors":
        return None
    if key.capabilities.tensor_dma != "TMA":
        return f"{key.arch} has no TMA"
    if config.split_k > 1:
        return "split_k is for loads: pointers"
    if not key.out_aligned:
        return "the result's address or row distance is not a multiple of 16 bytes"
    for name, kind in (("a", key.a), ("b", key.b)):
        if config.decode == "scratch" and not kind.is_plain:
            continue  # the copy is aligned
        if not kind.aligned:
            return f"{name}: address or row distance is not a multiple of 16 bytes"
        if not kind.is_plain and config.units == "half":
            return f"{name}: codes are decoded behind loads: pointers, or into a scratch copy"
    return None


def _size_refusal(key: GemmKey, config: GemmConfig) -> str | None:
    blocked = any(kind.block in ("1x128", "128x128") for kind in (key.a, key.b))
    if blocked and not (config.decode == "scratch" and config.units == "half") and config.block_k != 128:
        return f"FP8 blocks of 128 need block_k 128, got {config.block_k}"
    if blocked and config.decode == "scratch" and config.units == "half":
        return "the fp32 scales of FP8 blocks belong to partial sums, not into a bf16 copy"
    if any(kind.is_mx for kind in (key.a, key.b)) and config.block_k < 32:
        return f"MX blocks of 32 need block_k of at least 32, got {config.block_k}"
    if config.units != "half" and config.block_k < 64:
        return f"8-bit and 4-bit units need block_k of at least 64, got {config.block_k}"
    per_thread = config.block_m * config.block_n // (config.num_warps * (key.capabilities.wave_size or 1))
    most = _ACCUMULATORS_GFX1250 if key.arch == "gfx1250" else _ACCUMULATORS.get(key.capabilities.vendor, 128)
    if config.units == "fp8" and key.capabilities.vendor == "nvidia":
        most //= 2  # sums of the FP8 units beside the accumulators
    if per_thread > most:
        return f"{per_thread} accumulators a thread, at most {most} leave registers for the rest"
    steps = -(-key.contraction // config.block_k)
    if config.split_k > max(steps, 1):
        return f"{config.split_k} shares of {steps} steps"
    limit, needed = key.capabilities.lds_bytes, shared_memory_bytes(key, config)
    if limit and needed > limit:
        return f"{needed // 1024} KiB of shared memory, {key.arch} has {limit // 1024}"
    return None


def shared_memory_bytes(key: GemmKey, config: GemmConfig) -> int:
    """Estimate of a program's shared memory: the steps in flight, and where descriptors store it, the tile's part."""

    def row_bytes(kind: OperandKey) -> int:
        bits = kind.bits if config.units != "half" or (config.decode == "tile" and not kind.is_plain) else 16
        return config.block_k * bits // 8

    step = config.block_m * row_bytes(key.a) + config.block_n * row_bytes(key.b)
    if key.arch == "gfx942":  # copies pass through registers, which hold the last step
        return step * max(config.num_stages - 1, 1)
    if key.capabilities.vendor == "amd":
        return step * config.num_stages
    part = 0
    if config.loads == "descriptors":  # one to store, and one to add to
        size = 4 if key.out == "fp32" else 2
        part = config.block_m * config.block_n * size // config.epilogue_parts * (2 if key.accumulate else 1)
    return step * config.num_stages + part + 2 * _BARRIER_BYTES
