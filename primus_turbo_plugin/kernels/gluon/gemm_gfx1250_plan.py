"""What a gfx1250 GEMM kernel is compiled for: elements, orientation, epilogue, tile; and which tile is taken when."""

from __future__ import annotations

import functools
from typing import NamedTuple

LDS_BYTES = 320 * 1024
"""LDS of one work-group, all of a compute unit's."""
SCRATCH_BYTES = 1536
"""Kept, where there is a bias or scales of rows, for what the compiler puts into LDS itself: these vectors change layout."""
_PAD_BYTES = 16


class GemmPlan(NamedTuple):
    """Compile-time choices of one kernel.

    Attributes:
        A, B: Element of each operand: `bf16`, `fp16`, `e4m3`, `e5m2` or `e2m1` (two codes a byte).
        A_K, B_K: The operand is contiguous along the contraction; otherwise along its rows (16-bit elements only).
        MX: Every 32 elements along the contraction share an E8M0 scale, applied by the WMMA.
        ROW_SCALE: fp32 scales of whole rows (or of the whole operand), applied at the end.
        ACCUMULATE: The product is added to the fp32 output.
        GROUPED: `none`; `rows`: groups are stretches of a's rows, each with its own b; `depth`: stretches of the contraction,
            each with its own output.
        GROUPS: Number of groups.
        BM, BN, BK: Tile; BN and BK are powers of two, BM a sum of two or fewer.
        PIECES: `pieces(BM)`: rows of a that one transfer each moves.
        SLAB: Rows of one accumulator, a power of two that divides every piece.
        STAGES: Tiles of the contraction in LDS.
        STAGING: Slabs of the output in LDS.
        TDM: Tiles by the tensor data mover; off (ablation), by pointer copies.
        EVEN_K: For pointer copies: the contraction is a whole number of stages, at least STAGES.
        TRANSPOSE_LOAD: Row-contiguous operands by transpose loads; off (ablation), transposed through LDS.
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
    BM: int = 256
    BN: int = 256
    BK: int = 64
    PIECES: tuple[int, ...] = (256,)
    SLAB: int = 64
    STAGES: int = 3
    STAGING: int = 2
    TDM: bool = True
    EVEN_K: bool = False
    TRANSPOSE_LOAD: bool = True


class Tile(NamedTuple):
    """The tile of a plan, and how much of the time its loop needs is spent multiplying (static estimate, see docs/amd.md)."""

    BM: int
    BN: int
    BK: int
    SLAB: int
    STAGES: int
    share: float


def pieces(rows: int) -> tuple[int, ...]:
    """Rows as powers of two, largest first: what one transfer each moves."""
    return tuple(1 << bit for bit in reversed(range(rows.bit_length())) if rows >> bit & 1)


def scale_rows(rows: int) -> int:
    """Rows of scales a transfer moves: all of a tile's, and some of the next one's where that is no power of two."""
    return 1 << (rows - 1).bit_length()


def transfers(plan: GemmPlan) -> int:
    """Transfers of a stage, as each wave counts them.

    Few, because Triton 3.9 holds the next one back while ten are outstanding.
    """
    return len(plan.PIECES) + 1 + (2 if plan.MX else 0)


_SIXTEEN_BITS = (Tile(256, 256, 64, 64, 3, 1.0), Tile(128, 128, 64, 64, 4, 1.0))
_EIGHT_BITS = (Tile(256, 256, 128, 32, 3, 0.95), Tile(128, 128, 128, 64, 4, 0.49))
"""With slabs of 64 rows or 256 elements, Triton 3.9 spills 40 and 24 registers."""
_EIGHT_BITS_MX = (Tile(256, 256, 256, 32, 2, 0.95), Tile(128, 128, 128, 64, 4, 0.49))
"""256 elements a stage: the loop then multiplies from two sets of registers in turn, where it copied one to the other. Two stages
of them are asked for as long before their use as three of 128."""
_FOUR_BITS = (
    Tile(384, 256, 256, 32, 3, 1.0),
    Tile(256, 256, 256, 64, 3, 0.91),
    Tile(128, 128, 256, 64, 4, 0.46),
)
_MIXED_BITS = (Tile(256, 256, 128, 64, 3, 1.0), Tile(128, 128, 128, 64, 4, 0.62))


def tiles_for(a: str, b: str, *, mx: bool = False) -> tuple[Tile, ...]:
    """Candidate tiles for a pair of elements (with MX scales), largest first."""
    bits = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}
    if bits[a] != bits[b]:
        return _MIXED_BITS
    return {16: _SIXTEEN_BITS, 8: _EIGHT_BITS_MX if mx else _EIGHT_BITS, 4: _FOUR_BITS}[bits[a]]


def choose_tile(a: str, b: str, rows: int, cols: int, groups: int, programs: int, *, mx: bool = False) -> Tile:
    """The tile that keeps the compute units busy best: rounds of tiles, each costing its area over the loop's share.

    Args:
        rows, cols: Of the output, or of an average group's.
        groups: Outputs computed together.
        programs: Compute units.
        mx: The operands have MX scales.
    """

    def cost(tile: Tile) -> float:
        count = -(-rows // tile.BM) * -(-cols // tile.BN) * groups
        return -(-count // programs) * tile.BM * tile.BN / tile.share

    return min(tiles_for(a, b, mx=mx), key=cost)


def lds_bytes(plan: GemmPlan, out_bytes: int) -> int:
    """LDS a plan allocates: stages of both operands (16 bytes of padding a row), their scales, slabs of the output."""
    total = plan.STAGING * plan.SLAB * plan.BN * out_bytes
    for element, rows, k_inner in ((plan.A, plan.BM, plan.A_K), (plan.B, plan.BN, plan.B_K)):
        item = 2 if element in ("bf16", "fp16") else 1
        depth = plan.BK // (2 if element == "e2m1" else 1)
        for piece in pieces(rows):
            outer, inner = (piece, depth) if k_inner else (depth, piece)
            total += plan.STAGES * outer * (inner * item + _PAD_BYTES)
        total += plan.STAGES * scale_rows(rows) * plan.BK // 32 if plan.MX else 0
    return total


def fitted(plan: GemmPlan, out_bytes: int, *, vectors: bool) -> GemmPlan:
    """The plan with as much staging as LDS holds, in smaller slabs if need be; stages are given up last.

    Args:
        vectors: There is a bias, or there are scales of rows.
    """
    slab, room = plan.SLAB, LDS_BYTES - (SCRATCH_BYTES if vectors else 0)
    for stages in range(plan.STAGES, 1, -1):
        for rows, staging in ((slab, 2), (slab, 1), (max(slab // 2, 32), 2), (max(slab // 2, 32), 1)):
            trial = plan._replace(SLAB=rows, STAGING=staging, STAGES=stages)
            if lds_bytes(trial, out_bytes) <= room:
                return trial
    raise AssertionError(f"no two stages of {plan} fit LDS")


@functools.lru_cache(maxsize=1024)
def complete(
    wanted: GemmPlan,
    tile: Tile | None,
    rows: int,
    cols: int,
    programs: int,
    length: int | None,
    out_bytes: int,
    bias: bool,
) -> GemmPlan:
    """The plan with its tile, and what follows from that.

    Args:
        wanted: Elements, orientation, epilogue and features.
        tile: None: the one that suits.
        rows, cols: Of the output, or of an average group's.
        programs: Compute units.
        length: Elements of the contraction, None where groups have their own.
        out_bytes: Of an element of the output.
        bias: There is one.
    """
    tile = tile or choose_tile(wanted.A, wanted.B, rows, cols, wanted.GROUPS, programs, mx=wanted.MX)
    sizes = {name: value for name, value in tile._asdict().items() if name != "share"}
    plan = wanted._replace(PIECES=pieces(tile.BM), **sizes)
    plan = fitted(plan, out_bytes, vectors=bias or plan.ROW_SCALE)
    even = length is not None and length % plan.BK == 0 and length >= plan.STAGES * plan.BK
    return plan._replace(EVEN_K=even and not plan.TDM)
