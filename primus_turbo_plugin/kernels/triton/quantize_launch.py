"""Which quantisation kernel makes the copies of a tensor, and its launch.

Everything but the tensors is decided once for tensors and specs that are alike, as a `QuantizePlan`; a call then allocates and
launches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from primus_turbo_plugin.kernels.triton.copy_meta import CopyMeta
from primus_turbo_plugin.kernels.triton.launching import Launcher, on_device
from primus_turbo_plugin.kernels.triton.quantize_copy import CopyPlan, amax_buffers
from primus_turbo_plugin.kernels.triton.targets import has_gluon, kernel_target, shared_memory_bytes, warp_size
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies, QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey
from primus_turbo_plugin.precision.scale_layout import ScaleLayout

TILE_COLS = 128
"""Columns of a tile of quantize_shared.py."""
GROUP = 8
"""Token tiles side by side, so that their pieces of a columnwise row meet in the L2 cache."""
_MIN_TILE = 64
_NOTHING = (None, None, None, (0, 0, 0, 0))
"""Codes, scales, signs and random bits of a copy that is not wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizePlan:
    """The copies of one kind of tensor, and the launches that fill them.

    Attributes:
        row: Rowwise copy, or None.
        col: Columnwise copy, or None.
        amax: Finds the amax of scales that span an axis; None where none does.
        amax_sizes: Its integers.
        main: Makes the copies; None where there is nothing to be made, as of an empty tensor.
        sizes: Its integers, in front of the random bits.
        by_words: `main` is quantize_shared.py's, otherwise quantize_tile.py's.
        shuffled: Layout into which plain scales of MX copies are brought afterwards.
        stochastic: Random bits are wanted.
    """

    row: CopyPlan | None
    col: CopyPlan | None
    amax: Launcher | None = None
    amax_sizes: tuple[int, ...] = ()
    main: Launcher | None = None
    sizes: tuple[int, ...] = ()
    by_words: bool = False
    shuffled: ScaleLayout = "plain"
    stochastic: bool = field(init=False)

    def __post_init__(self) -> None:
        stochastic = any(copy is not None and copy.stochastic for copy in (self.row, self.col))
        object.__setattr__(self, "stochastic", stochastic)

    def run(
        self,
        x: torch.Tensor,
        key: RoundingKey | None,
        signs_seed: int,
        *,
        gamma: torch.Tensor | None = None,
        rstd: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
    ) -> Copies:
        """The copies of a tensor of the kind that the plan is for.

        Args:
            x: `[rows, cols]`; `[rows, 2 cols]` in front of SwiGLU.
            key: Random bits.
            signs_seed: Seed of the rotation's signs.
            gamma: Weight of RMS norm `[cols]`.
            rstd: fp32 `[rows]` of RMS norm.
            sums: fp32 `[ceil(rows / tile tokens), cols]` to be filled with sums of a tile's tokens.
        """
        device, row, col = x.device, self.row, self.col
        row_data, row_scale, row_signs, row_words = _made(row, device, key, signs_seed)
        col_data, col_scale, col_signs, col_words = _made(col, device, key, signs_seed)
        if self.main is not None:
            with on_device(device):
                row_amax = col_amax = None
                if self.amax is not None:
                    row_amax, col_amax = amax_buffers(row, col, device)
                    signs = () if self.by_words else (row_signs, col_signs)
                    self.amax(x, row_amax, col_amax, *signs, *self.amax_sizes)
                copies = row_data, row_scale, row_amax, row_signs, col_data, col_scale, col_amax, col_signs
                if self.by_words:
                    self.main(x, gamma, rstd, *copies, sums, *self.sizes, *row_words, *col_words)
                else:
                    self.main(x, *copies, *self.sizes, *row_words, *col_words)
        made_row = None if row is None else row.result(row_data, row_scale, signs_seed)
        made_col = None if col is None else col.result(col_data, col_scale, signs_seed)
        if self.shuffled != "plain":
            return self._in_layout(made_row), self._in_layout(made_col)
        return made_row, made_col

    def _in_layout(self, copy: QuantizedTensor | None) -> QuantizedTensor | None:
        return copy.with_scale_layout(self.shuffled) if copy is not None and copy.spec.is_mx else copy


def _made(copy: CopyPlan | None, device: torch.device, key: RoundingKey | None, signs_seed: int) -> tuple[Any, ...]:
    """Codes, scales, signs and random bits of a copy."""
    if copy is None:
        return _NOTHING
    return *copy.allocate(device), copy.signs(signs_seed, device), copy.words(key)


def quantize_plan(
    x: torch.Tensor, row_spec: QuantSpec | None, col_spec: QuantSpec | None, scale_layout: ScaleLayout
) -> QuantizePlan:
    """The plan for tensors like x `[rows, cols]`. quantize_tile.py writes plain scales only, which are shuffled afterwards."""
    rows, cols = x.shape
    by_words = takes_words(x, row_spec, col_spec)
    layout: ScaleLayout = scale_layout if by_words else "plain"
    row, col = CopyPlan.of(rows, cols, row_spec, False, layout), CopyPlan.of(rows, cols, col_spec, True, layout)
    if (row or col) and x.numel():
        return shared_plan(x, row, col) if by_words else _tile_plan(x, row, col, scale_layout)
    return QuantizePlan(row=row, col=col, shuffled=scale_layout)


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


def shared_plan(
    x: torch.Tensor,
    row: CopyPlan | None,
    col: CopyPlan | None,
    *,
    cols: int | None = None,
    front: Any = None,
    sums: bool = False,
) -> QuantizePlan:
    """The plan of quantize_shared.py on a non-empty x, or on what a front makes of it.

    Args:
        x: bf16 `[rows, cols]`; `[rows, 2 cols]` in front of SwiGLU. See `has_words`.
        row: Rowwise copy.
        col: Columnwise copy.
        cols: Columns of what is quantised; None for x's.
        front: `FrontMeta`, or None.
        sums: Whether tokens are added up as well.
    """
    from primus_turbo_plugin.kernels.triton.quantize_amax import ROWS, TILES, amax_words_kernel
    from primus_turbo_plugin.kernels.triton.quantize_shared import quantize_shared_kernel

    rows, cols = x.shape[0], cols or x.shape[1]
    lanes = warp_size(x.device.index)
    kind = None if front is None else front.kind
    specs = [copy.spec for copy in (row, col) if copy]
    shared_memory = shared_memory_bytes(x.device.index)
    token_blocks = tile_token_blocks(shared_memory, specs, tiles_held=2 if kind == "swiglu" else 1)
    sizes = rows, cols // 8, x.stride(0) // 8
    amax = None
    metas = _amax_metas(row, col)
    if any(metas):
        pieces = -(-cols // (TILE_COLS * TILES)), -(-rows // ROWS)
        constants: dict[str, Any] = {"ROW": metas[0], "COL": metas[1], "ROWS": ROWS, "TILES": TILES}
        amax = Launcher(amax_words_kernel, pieces, constants, {"num_warps": 8}, {0: torch.int32})
    constants = {
        "ROW": row.meta if row else None, "COL": col.meta if col else None, "FRONT": front, "SUMS": sums,
        "SHUFFLED": any(copy.scale_layout != "plain" for copy in (row, col) if copy),
        "REVERSED": kind == "rms_norm" or amax is not None,
        "TB": token_blocks, "GROUP": GROUP, "LANES": lanes,
        "EVEN": rows % (32 * token_blocks) == 0 and cols % TILE_COLS == 0, "TARGET": kernel_target(x.device.index),
    }  # fmt: skip
    options = {"num_warps": num_warps(token_blocks, lanes), **({} if front is None else {"enable_fp_fusion": False})}
    words = dict.fromkeys((0, 3, 7), torch.int32)  # x and the codes
    grid = (-(-rows // (32 * token_blocks)) * -(-cols // TILE_COLS),)
    main = Launcher(quantize_shared_kernel, grid, constants, options, words)
    return QuantizePlan(row=row, col=col, amax=amax, amax_sizes=sizes, main=main, sizes=sizes, by_words=True)


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


def _amax_metas(row: CopyPlan | None, col: CopyPlan | None) -> list[CopyMeta | None]:
    """What the amax pass needs to know of the copies that have one."""
    return [copy.meta if copy is not None and copy.amax_size else None for copy in (row, col)]


def _tile_plan(x: torch.Tensor, row: CopyPlan | None, col: CopyPlan | None, scale_layout: ScaleLayout) -> QuantizePlan:
    from primus_turbo_plugin.kernels.triton.quantize_tile import amax_kernel, quantize_kernel

    rows, cols = x.shape
    row_padded, col_padded = row.padded if row else cols, col.padded if col else rows
    block_m, block_n = tile_shape(row.meta if row else None, col.meta if col else None)
    grid = (-(-max(rows, col_padded) // block_m), -(-max(cols, row_padded) // block_n))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    options = {"num_warps": 8 if block_m * block_n > 4096 else 4}
    amax = None
    metas = _amax_metas(row, col)
    if any(metas):
        amax = Launcher(amax_kernel, grid, {"ROW": metas[0], "COL": metas[1], **blocks}, options)
    constants = {"ROW": row.meta if row else None, "COL": col.meta if col else None, **blocks}
    return QuantizePlan(
        row=row,
        col=col,
        amax=amax,
        amax_sizes=(rows, cols, *x.stride()),
        main=Launcher(quantize_kernel, grid, constants, options),
        sizes=(rows, cols, row_padded, col_padded, *x.stride()),
        shuffled=scale_layout,
    )


def tile_shape(row: CopyMeta | None, col: CopyMeta | None) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) of quantize_tile.py that hold whole blocks and whole rotations of both copies."""
    block_m = max(_MIN_TILE, row.block_outer if row else 0, col.multiple if col else 0)
    block_n = max(_MIN_TILE, col.block_outer if col else 0, row.multiple if row else 0)
    return block_m, block_n
