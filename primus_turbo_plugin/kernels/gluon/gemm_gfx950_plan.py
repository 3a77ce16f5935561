"""How a gfx950 GEMM is computed: compile-time choices of the kernel, and the tiles to choose from, as data."""

from __future__ import annotations

from typing import NamedTuple

CUS = 256
"""Compute units of an MI355X."""
LDS_BYTES = 160 * 1024
ROW_BYTES = 128
"""Bytes of the contraction that a tile holds of each row: a cache line."""

ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "e4m3": 1.0, "e5m2": 1.0, "e2m1": 0.5}


class GemmPlan(NamedTuple):
    """Compile-time arguments of `gemm_gfx950_kernel`.

    Attributes:
        A, B: Elements of the operands, names of `ELEMENT_BYTES`.
        A_K, B_K: The operand is contiguous along the contraction (else along its rows, read by transpose loads).
        BM, BN: Rows and columns of a tile; rows come in pieces of 128.
        HN: Columns of a piece of it; BN / HN pieces.
        STEPS: Steps in which the contraction of a tile is multiplied; operands of the next step are read meanwhile.
        ORDER: What keeps the compiler from gathering memory instructions: `fence` or `accumulator`, see the kernel.
        MX: Scales of 32 elements in the gfx950 layout of `precision.scale_layout`.
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
    HN: int = 64
    STEPS: int = 4
    ORDER: str = "fence"
    MX: bool = False
    ROW_SCALE: bool = False
    ACCUMULATE: bool = False
    GROUPED: str = "none"
    GROUPS: int = 1
    EVEN_K: bool = False
    ASYNC_COPY: bool = True
    TRANSPOSE_LOAD: bool = True

    @property
    def depth(self) -> int:
        """Elements of the contraction in a tile."""
        return int(ROW_BYTES / ELEMENT_BYTES[self.A])
