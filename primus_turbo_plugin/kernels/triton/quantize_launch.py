"""Which quantisation kernel makes the copies of a tensor, and its launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from primus_turbo_plugin.kernels.triton.copy_meta import CopyMeta
from primus_turbo_plugin.kernels.triton.quantize_copy import Copy
from primus_turbo_plugin.kernels.triton.targets import has_gluon, kernel_target, shared_memory_bytes, warp_size
from primus_turbo_plugin.precision.quant_spec import QuantSpec

TILE_COLS = 128
"""Columns of a tile of quantize_shared.py."""
GROUP = 8
"""Token tiles side by side, so that their pieces of a columnwise row meet in the L2 cache."""
_MIN_TILE = 64


def launch(x: torch.Tensor, row: Copy | None, col: Copy | None) -> None:
    """Make the copies of a non-empty x `[rows, cols]`. Shuffled scales only where `takes_words`."""
    with torch.cuda.device(x.device):
        if takes_words(x, row.spec if row else None, col.spec if col else None):
            launch_shared(x, row, col)
        else:
            _launch_tile(x, row, col)


def takes_words(x: torch.Tensor, row: QuantSpec | None, col: QuantSpec | None) -> bool:
    """Whether quantize_shared.py makes these copies of x `[rows, cols]`."""
    return has_words(x) and serves(row, x.shape[1]) and serves(col, x.shape[0]) and has_gluon()


def serves(spec: QuantSpec | None, contraction: int) -> bool:
    """Whether quantize_shared.py makes a copy of this spec from aligned bf16."""
    if spec is None or not spec.is_quantized:
        return True
    if spec.hadamard and (not spec.is_mx or spec.block_shape[0] == 32 or spec.hadamard > 32):
        return False
    return spec.contraction_multiple > 2 or contraction % 8 == 0


def has_words(x: torch.Tensor) -> bool:
    """Whether x can be read 16 bytes at a time as bf16 along its rows."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype is torch.bfloat16 and aligned


def launch_shared(
    x: torch.Tensor,
    row: Copy | None,
    col: Copy | None,
    *,
    cols: int | None = None,
    front: Any = None,
    gamma: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> None:
    """quantize_shared.py on x, or on what a front makes of it.

    Args:
        x: bf16 `[rows, cols]`; `[rows, 2 cols]` in front of SwiGLU. See `has_words`.
        row: Rowwise copy.
        col: Columnwise copy.
        cols: Columns of what is quantised; None for x's.
        front: `FrontMeta`, or None.
        gamma: Weight of RMS norm `[cols]`.
        rstd: fp32 `[rows]` of RMS norm.
        sums: fp32 `[ceil(rows / tile_tokens), cols]` to be filled with sums of a tile's tokens.
    """
    from primus_turbo_plugin.kernels.triton.quantize_shared import quantize_shared_kernel

    rows, cols = x.shape[0], cols or x.shape[1]
    index = x.device.index
    target = kernel_target(index)
    specs = [copy.spec for copy in (row, col) if copy]
    tiles_held = 2 if front is not None and front.kind == "swiglu" else 1
    token_blocks = tile_token_blocks(shared_memory_bytes(index), specs, tiles_held=tiles_held)
    grid = (-(-rows // (32 * token_blocks)) * -(-cols // TILE_COLS),)
    words = x.view(torch.int32)
    amax = _whole_axis_amax(words, row, col, rows, cols)
    shuffled = any(copy.scale_layout != "plain" for copy in (row, col) if copy)
    options = {"enable_fp_fusion": False} if front is not None else {}
    quantize_shared_kernel[grid](
        words, gamma, rstd,
        *(row.buffers(torch.int32) if row else (None, None)), amax[0], row.signs if row else None,
        *(col.buffers(torch.int32) if col else (None, None)), amax[1], col.signs if col else None,
        sums,
        rows, cols // 8, x.stride(0) // 8,
        *(row.words if row else (0, 0, 0, 0)),
        *(col.words if col else (0, 0, 0, 0)),
        ROW=row.meta if row else None,
        COL=col.meta if col else None,
        FRONT=front,
        SUMS=sums is not None,
        SHUFFLED=shuffled,
        REVERSED=rstd is not None or any(buffer is not None for buffer in amax),
        TB=token_blocks,
        GROUP=GROUP,
        LANES=warp_size(index),
        EVEN=rows % (32 * token_blocks) == 0 and cols % TILE_COLS == 0,
        TARGET=target,
        num_warps=num_warps(token_blocks, warp_size(index)),
        **options,
    )  # fmt: skip


def tile_token_blocks(shared_memory: int, specs: Iterable[QuantSpec | None], *, tiles_held: int = 1) -> int:
    """Blocks of 32 tokens in a tile.

    4 take 37 to 41 KB of shared memory, so that a GPU with 64 KB, or a program that holds two tiles (SwiGLU), takes 2. FP8 blocks
    of 128 tokens need 4 everywhere.
    """
    fp8_blocks = any(spec is not None and spec.is_quantized and 128 in spec.block_shape for spec in specs)
    return 4 if fp8_blocks or shared_memory > 96 * 1024 * tiles_held**2 else 2


def tile_tokens(x: torch.Tensor, specs: Iterable[QuantSpec | None]) -> int:
    """Tokens of a tile of quantize_shared.py on x's GPU."""
    return 32 * tile_token_blocks(shared_memory_bytes(x.device.index), specs)


def num_warps(token_blocks: int, lanes: int) -> int:
    """Warps that a tile of quantize_shared.py occupies when a thread takes 32 tokens of a word, at most 4."""
    return min(token_blocks * 64 // lanes, 4)


def _whole_axis_amax(
    words: torch.Tensor, row: Copy | None, col: Copy | None, rows: int, cols: int
) -> list[torch.Tensor | None]:
    """Amax bits of the copies whose scale spans an axis, by a read of their own."""
    amax = [copy.amax_buffer() if copy else None for copy in (row, col)]
    if any(buffer is not None for buffer in amax):
        from primus_turbo_plugin.kernels.triton.quantize_amax import ROWS, TILES, amax_words_kernel

        metas = [copy.meta if copy and copy.meta.needs_amax else None for copy in (row, col)]
        grid = (-(-cols // (TILE_COLS * TILES)), -(-rows // ROWS))
        amax_words_kernel[grid](
            words, *amax, rows, cols // 8, words.stride(0) // 4,
            ROW=metas[0], COL=metas[1], ROWS=ROWS, TILES=TILES, num_warps=8,
        )  # fmt: skip
    return amax


def _launch_tile(x: torch.Tensor, row: Copy | None, col: Copy | None) -> None:
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
        *(row.buffers() if row else (None, None)), amax[0], signs[0],
        *(col.buffers() if col else (None, None)), amax[1], signs[1],
        rows, cols, row_padded, col_padded,
        *x.stride(),
        *(row.words if row else (0, 0, 0, 0)),
        *(col.words if col else (0, 0, 0, 0)),
        ROW=row.meta if row else None,
        COL=col.meta if col else None,
        **tile,
    )  # fmt: skip


def tile_shape(row: CopyMeta | None, col: CopyMeta | None) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) of quantize_tile.py that hold whole blocks and whole rotations of both copies."""
    block_m = max(_MIN_TILE, row.block_outer if row else 0, col.multiple if col else 0)
    block_n = max(_MIN_TILE, col.block_outer if col else 0, row.multiple if row else 0)
    return block_m, block_n
