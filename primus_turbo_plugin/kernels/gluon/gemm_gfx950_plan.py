"""How a gfx950 GEMM is computed: compile-time choices of the kernel, and the tiles to choose from, as data."""

from __future__ import annotations

from typing import NamedTuple

CUS = 256
"""Compute units of an MI355X."""

HALVES = ("bf16", "fp16")
ELEMENT_BITS = {"bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8, "e2m1": 4}


class Tile(NamedTuple):
    """Part of c that a work-group computes, and how.

    Attributes:
        BM, BN: Rows and columns of the tile.
        HM, HN: Rows and columns of the pieces in which it is copied, read and multiplied.
        STEPS: Steps in which the tile's contraction is multiplied; operands of the next step are read meanwhile.
        ORDER: What keeps the compiler from gathering memory instructions: `fence` or `accumulator`, see the kernel.
        share: Of the peak rate, to compare tiles with: what MCA or the static estimate gives the loop, whichever is less.
    """

    BM: int
    BN: int
    HM: int
    HN: int
    STEPS: int
    ORDER: str
    share: float


_PLAIN_TILES = (
    Tile(256, 192, 64, 64, 2, "fence", 0.97),
    Tile(256, 128, 64, 64, 2, "fence", 0.89),  # bound by LDS, as is the next
    Tile(128, 128, 64, 64, 2, "fence", 0.67),
)
_EIGHT_BIT_TILES = (
    Tile(256, 192, 64, 64, 1, "fence", 0.95),
    Tile(256, 128, 64, 64, 1, "fence", 0.89),
    Tile(128, 128, 64, 64, 1, "fence", 0.67),
)
_FP4_TILES = (
    Tile(256, 192, 64, 64, 1, "fence", 0.96),
    Tile(256, 128, 64, 64, 1, "fence", 0.76),
    Tile(128, 128, 64, 64, 1, "fence", 0.59),
)


def tiles_for(element: str) -> tuple[Tile, ...]:
    """Tiles for operands of an element type, largest first.

    256 x 256 is not among them: its accumulators alone fill the 256 vector registers in which Triton 3.8's and 3.9's LLVM keeps
    the results of MFMA, and addresses are then moved or spilled in the loop (docs/amd.md).
    """
    if element in HALVES:
        return _PLAIN_TILES
    return _FP4_TILES if element == "e2m1" else _EIGHT_BIT_TILES


def choose_tile(element: str, rows: int, cols: int, groups: int = 1, cus: int = CUS) -> Tile:
    """The tile with which c `[groups, rows, cols]` takes least time: rounds x area of a tile / share of the peak."""

    def cost(tile: Tile) -> float:
        count = -(-rows // tile.BM) * -(-cols // tile.BN) * groups
        return -(-count // cus) * tile.BM * tile.BN / tile.share

    return min(tiles_for(element), key=cost)


class GemmPlan(NamedTuple):
    """Compile-time arguments of `gemm_gfx950_kernel`.

    Attributes:
        A, B: Elements of the operands, names of `ELEMENT_BITS`, of the same width.
        A_K, B_K: The operand is contiguous along the contraction (else along its rows, read by transpose loads).
        BM, BN, HM, HN, STEPS, ORDER: See `Tile`.
        MX: Scales of 32 elements.
        A_SHUFFLED, B_SHUFFLED: They lie in the gfx950 layout of `precision.scale_layout`, else plain.
        ROW_SCALE: fp32 scales that cover whole rows, applied at the end.
        ACCUMULATE: Add to c instead of replacing it.
        GROUPED: `none`, `rows` (experts are stretches of a's rows) or `depth` (of the contraction).
        GROUPS: Number of experts.
        EVEN_K: The contraction is a whole number of tile pairs, so nothing is masked.
        ASYNC_COPY: Tiles by direct-to-LDS copies; off: through registers.
        TRANSPOSE_LOAD: Row-contiguous operands by transpose loads; off: transposed through LDS.
    """

    A: str = "bf16"
    B: str = "bf16"
    A_K: bool = True
    B_K: bool = True
    BM: int = 256
    BN: int = 192
    HM: int = 64
    HN: int = 64
    STEPS: int = 2
    ORDER: str = "fence"
    MX: bool = False
    A_SHUFFLED: bool = False
    B_SHUFFLED: bool = False
    ROW_SCALE: bool = False
    ACCUMULATE: bool = False
    GROUPED: str = "none"
    GROUPS: int = 1
    EVEN_K: bool = False
    ASYNC_COPY: bool = True
    TRANSPOSE_LOAD: bool = True
