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
    return gl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [value], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def dense_place(tile, total, M, N, K, P: gl.constexpr):
    """Tile number to its place; past the last tile a place that holds nothing.

    Returns:
        Group, first row and rows of the group in a, first depth and depth of the group, row of the tile in its group, column.
    """
    tiles_n = gl.cdiv(N, P.BN)
    first = tile // (GROUP * tiles_n) * GROUP
    size = gl.minimum(gl.cdiv(M, P.BM) - first, GROUP)
    size = gl.maximum(size, 1)
    inside = tile % (GROUP * tiles_n)
    rows = gl.where(tile < total, M, 0)
    m, n = (first + inside % size) * P.BM, inside // size * P.BN
    return 0, 0, rows, 0, K, uniform(m), uniform(n)


@gluon.jit
def rows_place(tile, offsets_ptr, N, K, P: gl.constexpr):
    """The same where groups (experts) are consecutive rows of a: group g has rows offsets[g] ... offsets[g + 1] - 1."""
    group, first, rows, before, total = _find(tile, offsets_ptr, gl.cdiv(N, P.BN), P)
    inside = tile - before
    tiles_m = gl.maximum(gl.cdiv(rows, P.BM), 1)
    m, n = inside % tiles_m * P.BM, inside // tiles_m * P.BN
    return uniform(group), uniform(first), uniform(rows), 0, K, uniform(m), uniform(n)


@gluon.jit
def rows_tiles(offsets_ptr, N, P: gl.constexpr):
    """Number of tiles of all groups."""
    _, _, _, _, total = _find(0, offsets_ptr, gl.cdiv(N, P.BN), P)
    return uniform(total)


@gluon.jit
def _find(tile, offsets_ptr, tiles_n, P: gl.constexpr):
    """Group of a tile, its first row and number of rows, tiles before it, and tiles in all."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    g = gl.arange(0, P.GROUPS_POW2, layout)
    inside = g < P.GROUPS
    start = gl.load(offsets_ptr + g, mask=inside, other=0)
    end = gl.load(offsets_ptr + g + 1, mask=inside, other=0)
    tiles = (end - start + P.BM - 1) // P.BM * tiles_n
    upto = gl.associative_scan(tiles, 0, _add)
    passed = (upto <= tile) & inside
    group = gl.sum(passed.to(gl.int32), 0)
    here = g == group
    return group, _only(start, here), _only(end - start, here), gl.sum(gl.where(passed, tiles, 0), 0), gl.sum(tiles, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _only(values, here):
    return gl.sum(gl.where(here, values, 0), 0)


@gluon.jit
def depth_place(tile, total, offsets_ptr, M, N, P: gl.constexpr):
    """The same where groups are consecutive stretches of the contraction (wgrad): every group has all rows and columns."""
    tiles_m = gl.cdiv(M, P.BM)
    per_group = tiles_m * gl.cdiv(N, P.BN)
    group = gl.minimum(tile // per_group, P.GROUPS - 1)
    start = gl.load(offsets_ptr + group)
    depth = gl.load(offsets_ptr + group + 1) - start
    inside = tile % per_group
    rows = gl.where(tile < total, M, 0)
    m, n = inside % tiles_m * P.BM, inside // tiles_m * P.BN
    return uniform(group), 0, rows, uniform(start), uniform(depth), uniform(m), uniform(n)
