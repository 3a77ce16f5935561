"""Where tiles are: layouts in registers and LDS, and which tile of which group a work-group computes (gfx1250, Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

try:  # Triton 3.9 renames gfx1250's module
    from triton.experimental.gluon.language.amd import cdna5

    cdna5.tdm  # noqa: B018  (3.8 has an empty module of that name)
except (ImportError, AttributeError):
    from triton.experimental.gluon.language.amd import gfx1250 as cdna5

GROUP = gl.constexpr(8)
"""Rows of tiles walked side by side, for the L2 cache."""


@gluon.constexpr_function
def wmma_depth(P):
    """Contraction of one WMMA: 32 elements of 16 bits, 128 of 8 or 4 bits."""
    return 32 if P.A in ("bf16", "fp16") else 128


@gluon.constexpr_function
def wmma_layouts(P):
    """Register layouts of result, left and right operand: 2 x 2 waves, interleaved at the size of one instruction."""
    warps = [[0, 1], [1, 0]]
    depth = wmma_depth(P)
    rows = 32 if P.A == P.B == "e2m1" else 16  # 32x16x128_f4 has twice the rate of the 16x16x128 form
    result = gl.amd.AMDWMMALayout(version=3, transposed=True, warp_bases=warps, instr_shape=[rows, 16, depth])
    packed = gl.amd.AMDWMMALayout(version=3, transposed=True, warp_bases=warps, instr_shape=[rows, 16, 64])
    width = 8 if depth == 32 else 16
    left = gl.DotOperandLayout(0, packed if P.A == "e2m1" else result, width)
    right = gl.DotOperandLayout(1, packed if P.B == "e2m1" else result, width)
    return result, left, right


@gluon.constexpr_function
def tile_layout(outer, inner, element_bytes):
    """LDS layout of an operand's tile: 16 bytes of padding after a row, so that neighbouring rows start in other banks."""
    return gl.PaddedSharedLayout.with_identity_for([[inner, 16 // element_bytes]], [outer, inner], [1, 0])


@gluon.constexpr_function
def copy_layout(outer, inner, element_bytes):
    """Registers of a pointer copy of a tile: 16 bytes (or a whole shorter row) a lane, rows over lanes and waves."""
    vector = min(16 // element_bytes, inner)
    across = min(inner // vector, 32)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def uniform(value):
    """A value that all lanes share, moved to a scalar register.

    Divisions run on the vector unit; without this every use in the loop would fetch their result from a vector register.
    """
    return gl.inline_asm_elementwise(
        "v_readfirstlane_b32 $0, $1", "=s,v", [value], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _walk(tile, tiles_m, tiles_n):
    """Row and column of a tile: GROUP rows side by side, column by column."""
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.maximum(gl.minimum(tiles_m - first, GROUP), 1)  # past the last tile there is none
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height


@gluon.jit
def dense_place(tile, total, M, N, K, P: gl.constexpr):
    """Tile number to its place; past the last tile a place that holds nothing.

    Returns:
        Group, first row and rows of the group in a, first depth and depth of the group, row of the tile in its group, column.
    """
    i, j = _walk(tile, gl.cdiv(M, P.BM), gl.cdiv(N, P.BN))
    return 0, 0, gl.where(tile < total, M, 0), 0, K, uniform(i * P.BM), uniform(j * P.BN)


@gluon.jit
def rows_place(tile, total, offsets_ptr, tiles_ptr, N, K, P: gl.constexpr):
    """The same where groups (experts) are consecutive rows of a: group g has rows offsets[g] ... offsets[g + 1] - 1.

    `tiles_ptr` is `grouping.row_tiles`: a search here would be a loop, across which the compiler cannot count transfers: it
    would wait for all of them in every stage.
    """
    tiles_m = gl.load(tiles_ptr + P.GROUPS)
    i, j = _walk(tile, tiles_m, gl.cdiv(N, P.BN))
    i = uniform(gl.minimum(i, gl.maximum(tiles_m, 1) - 1))
    group = gl.minimum(gl.load(tiles_ptr + P.GROUPS + 1 + i), P.GROUPS - 1)
    first = gl.load(offsets_ptr + group).to(gl.int32)
    rows = gl.where(tile < total, gl.load(offsets_ptr + group + 1).to(gl.int32) - first, 0)
    return (
        uniform(group),
        uniform(first),
        uniform(rows),
        0,
        K,
        uniform((i - gl.load(tiles_ptr + group)) * P.BM),
        uniform(j * P.BN),
    )


@gluon.jit
def depth_place(tile, total, offsets_ptr, M, N, P: gl.constexpr):
    """The same where groups are consecutive stretches of the contraction (wgrad): every group has all rows and columns."""
    tiles_m = gl.cdiv(M, P.BM)
    per_group = tiles_m * gl.cdiv(N, P.BN)
    group = gl.minimum(tile // per_group, P.GROUPS - 1)
    start = gl.load(offsets_ptr + group).to(gl.int32)
    depth = gl.load(offsets_ptr + group + 1).to(gl.int32) - start
    inside = tile % per_group
    rows = gl.where(tile < total, M, 0)
    m, n = inside % tiles_m * P.BM, inside // tiles_m * P.BN
    return uniform(group), 0, rows, uniform(start), uniform(depth), uniform(m), uniform(n)
