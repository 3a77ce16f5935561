"""Layouts of the gfx950 GEMMs in registers and LDS, copies into LDS, and which tile a work-group computes (Gluon)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

NUM_WARPS = 4
XCDS = gl.constexpr(8)
"""Dies of an MI355X, each with an L2 cache of its own; work-groups are dealt to them in turn."""
GROUP = gl.constexpr(4)
"""Rows of tiles walked side by side, for the L2 cache."""


@gluon.constexpr_function
def is_half(P):
    """Elements of 16 bits, multiplied by the bf16 and fp16 units; others by the f8f6f4 units."""
    return P.A in ("bf16", "fp16")


@gluon.constexpr_function
def cell_type(P):
    """What an LDS cell holds: an element of 16 bits, or a byte with one or two codes."""
    return {"bf16": gl.bfloat16, "fp16": gl.float16}.get(P.A, gl.uint8)


@gluon.constexpr_function
def tile_cells(P):
    """Cells of the contraction in a tile: 128 bytes of each row."""
    return 64 if is_half(P) else 128


@gluon.constexpr_function
def tile_blocks(P):
    """MX blocks of 32 elements of the contraction in a tile."""
    return 8 if P.A == "e2m1" else 4


@gluon.constexpr_function
def vector_cells(P):
    """Cells of a 16-byte transfer."""
    return 8 if is_half(P) else 16


@gluon.constexpr_function
def result_layout(P):
    """Four waves, 2 x 2, interleaved at the size of one instruction.

    32x32, not 16x16: at the same rate half the instructions, and twice the time of each to issue others.
    """
    depth = 16 if is_half(P) else 64
    return gl.amd.AMDMFMALayout(version=4, instr_shape=[32, 32, depth], transposed=True, warps_per_cta=[2, 2])


@gluon.constexpr_function
def operand_layout(index, P):
    return gl.DotOperandLayout(index, result_layout(P), 8 if is_half(P) else 16)


@gluon.constexpr_function
def tile_layout(index, P):
    """LDS layout of a piece: `[HM, cells]` of a, `[cells, HN]` of b, without bank conflicts.

    Triton interleaves the rows that one transfer of a wave writes, so that what an operand load reads at once lies in different
    banks, and pads between transfers.
    """
    shape = [P.HM, tile_cells(P)] if index == 0 else [tile_cells(P), P.HN]
    k_inner = P.A_K if index == 0 else P.B_K
    return cdna4.compute_efficient_padded_shared_layout(operand_layout(index, P), shape, cell_type(P), k_inner)


@gluon.constexpr_function
def copy_layout(index, P):
    """Registers of a copy. A direct copy writes 64 x 16 contiguous bytes a wave, so its bits follow the LDS address bits."""
    shared = tile_layout(index, P)
    bits = [list(x) for x in shared.offset_bases]
    vector = vector_cells(P).bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=bits[:vector] + bits[vector + 8 :],
        lane_bases=bits[vector : vector + 6],
        warp_bases=bits[vector + 6 : vector + 8],
        block_bases=[],
        shape=list(shared.shape),
    )


@gluon.constexpr_function
def turned_layout(index, P):
    """Registers in which a row-contiguous tile is read where it is not transposed by the load: 16 bytes of a row a lane."""
    vector = vector_cells(P)
    order = [0, 1] if index == 0 else [1, 0]
    size, threads = ([vector, 1], [16, 4]) if index == 0 else ([1, vector], [4, 16])
    return gl.BlockedLayout(size, threads, [1, 4] if index == 0 else [4, 1], order)


@gluon.jit
def row_offsets(index: gl.constexpr, piece: gl.constexpr, left, stride, P: gl.constexpr):
    """Offsets (32 bits) of a piece's cells from the tile's corner. Rows past `left` repeat the last: they are not stored."""
    layout: gl.constexpr = copy_layout(index, P)
    vector: gl.constexpr = vector_cells(P)
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    k_inner: gl.constexpr = P.A_K if index == 0 else P.B_K
    row = piece * rows + gl.arange(0, rows, gl.SliceLayout(1 - index, layout))
    k = gl.arange(0, tile_cells(P), gl.SliceLayout(index, layout))
    if k_inner:
        row = gl.minimum(row, left - 1)
        offset = gl.expand_dims(row, 1 - index) * stride + gl.expand_dims(k, index)
    else:  # whole vectors of rows: they are stored whole, with zeros past `left`
        start = gl.minimum(row // vector, gl.cdiv(left, vector) - 1) * vector
        offset = gl.expand_dims(k, index) * stride + gl.expand_dims(start + row % vector, 1 - index)
    contiguous: gl.constexpr = index if not k_inner else 1 - index
    run: gl.constexpr = [vector, 1] if contiguous == 0 else [1, vector]
    return gl.max_contiguous(gl.multiple_of(offset, run), run)


@gluon.jit
def depth_mask(index: gl.constexpr, left, P: gl.constexpr):
    """Which cells of a tile lie within the `left` cells of the contraction that remain."""
    layout: gl.constexpr = copy_layout(index, P)
    vector: gl.constexpr = vector_cells(P)
    k_inner: gl.constexpr = P.A_K if index == 0 else P.B_K
    rows: gl.constexpr = P.HM if index == 0 else P.HN
    k = gl.arange(0, tile_cells(P), gl.SliceLayout(index, layout))
    if k_inner:  # by vectors, so that the compiler sees that a transfer is whole
        inside = k // vector < gl.cdiv(left, vector)
    else:
        inside = k < left
    row = gl.arange(0, rows, gl.SliceLayout(1 - index, layout))
    return gl.expand_dims(inside, index) & gl.expand_dims(row >= 0, 1 - index)


@gluon.jit
def read_piece(index: gl.constexpr, tile, step: gl.constexpr, P: gl.constexpr):
    """One step's contraction of a piece, from LDS into operand registers."""
    layout: gl.constexpr = operand_layout(index, P)
    cells: gl.constexpr = tile_cells(P) // P.STEPS
    k_inner: gl.constexpr = P.A_K if index == 0 else P.B_K
    part = tile.slice(step * cells, cells, dim=1 - index)
    if not (k_inner or P.TRANSPOSE_LOAD):
        value = gl.convert_layout(part.load(turned_layout(index, P)), layout)
    elif P.ASYNC_COPY:  # ordered by the wait and the barrier before; the compiler need not order it again
        value = cdna4.async_copy.load_shared_relaxed(part, layout)
    else:
        value = part.load(layout)
    return value


@gluon.jit
def walk(tile, tiles_m, tiles_n):
    """Row and column of a tile: neighbours on one die, GROUP rows side by side, column by column."""
    total = tiles_m * tiles_n
    share, rest = total // XCDS, total % XCDS
    die, turn = tile % XCDS, tile // XCDS
    tile = die * share + gl.minimum(die, rest) + turn
    first = tile // (GROUP * tiles_n) * GROUP
    height = gl.maximum(gl.minimum(tiles_m - first, GROUP), 1)
    inside = tile % (GROUP * tiles_n)
    return first + inside % height, inside // height


@gluon.jit
def place(offsets_ptr, tiles_ptr, M, N, K, P: gl.constexpr):
    """Where this work-group's tile is.

    Returns:
        Group, first row of a's group and its rows, first element of the contraction and their number, row and column of the tile
        in the group. A tile past the last has no rows.
    """
    pid = gl.program_id(0)
    tiles_n = gl.cdiv(N, P.BN)
    group, first, rows, start, depth = 0, 0, M, 0, K
    if P.GROUPED == "rows":
        tiles_m = gl.load(tiles_ptr + P.GROUPS)
        beyond = pid >= tiles_m * tiles_n
        i, j = walk(gl.where(beyond, 0, pid), gl.maximum(tiles_m, 1), tiles_n)
        group = gl.minimum(gl.load(tiles_ptr + P.GROUPS + 1 + i), P.GROUPS - 1)
        first = gl.load(offsets_ptr + group).to(gl.int32)
        rows = gl.where(beyond, 0, gl.load(offsets_ptr + group + 1).to(gl.int32) - first)
        i -= gl.load(tiles_ptr + group)
    elif P.GROUPED == "depth":
        per_group = gl.cdiv(M, P.BM) * tiles_n
        group = pid // per_group
        i, j = walk(pid % per_group, gl.cdiv(M, P.BM), tiles_n)
        start = gl.load(offsets_ptr + group).to(gl.int32)
        depth = gl.load(offsets_ptr + group + 1).to(gl.int32) - start
    else:
        i, j = walk(pid, gl.cdiv(M, P.BM), tiles_n)
    return group, first, rows, start, depth, i * P.BM, j * P.BN
