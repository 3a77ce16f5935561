"""What a gfx1250 GEMM kernel is compiled for: elements, orientation, epilogue, tile; and which tile is taken when."""

from __future__ import annotations

from typing import NamedTuple


class GemmPlan(NamedTuple):
    """Compile-time choices of one kernel.

    Attributes:
        A, B: Element of each operand: `bf16`, `fp16`, `e4m3`, `e5m2` or `e2m1` (two codes a byte).
        A_K, B_K: The operand is contiguous along the contraction; otherwise along its rows (16-bit elements only).
        MX: Every 32 elements along the contraction share an E8M0 scale, applied by the WMMA.
        ROW_SCALE: fp32 scales of whole rows (or of the whole operand), applied at the end.
        ACCUMULATE: The product is added to the fp32 output.
        GROUPED: `none`; `rows`: groups are stretches of a's rows, each with its own b; `depth`: stretches of the contraction, each
            with its own output.
        GROUPS: Number of groups.
        GROUPS_POW2: The next power of two.
        BM, BN, BK: Tile; BM may be a sum of pieces.
        PIECE: Rows of a one transfer moves, a power of two that divides BM.
        SLAB: Rows of one accumulator, a power of two that divides PIECE.
        STAGES: Tiles of the contraction in LDS.
        STAGING: Slabs of the output in LDS.
        TDM: Tiles by the tensor data mover; off (ablation), by pointer copies.
        TRANSPOSE_LOAD: Row-contiguous operands by transpose loads; off (ablation), transposed through LDS by plain loads and stores.
    """

    A: str = "bf16"
    B: str = "bf16"
    A_K: bool = True
    B_K: bool = True
    MX: bool = False
    ROW_SCALE: bool = False
    ACCUMULATE: bool = False
    GROUPED: str = "none"
    GROUPS: int = 1
    GROUPS_POW2: int = 1
    BM: int = 256
    BN: int = 256
    BK: int = 64
    PIECE: int = 256
    SLAB: int = 64
    STAGES: int = 3
    STAGING: int = 2
    TDM: bool = True
    TRANSPOSE_LOAD: bool = True
