"""c[M, N] = a[M, K] @ b[N, K].T on gfx950: direct-to-LDS copies, transpose loads, MFMA (Gluon kernel).

Math      c = a @ b.T (+ bias) or c += a @ b.T, fp32 accumulation
Layout    a work-group computes a 256 x BN tile with four waves, one a SIMD, each 128 x BN/2 of it in fp32 registers. Two stages in
          LDS hold 128 bytes of the contraction of every row; operands contiguous along the contraction are read by ds_read_b128,
          others transposed by ds_read_b64_tr_*
Pipeline  copies run two tiles ahead (buffer_load ... lds, no registers), operand registers one step ahead: while one step is
          multiplied, the next is read. One barrier a tile: before it, the next tile has landed and the previous one is read; after
          it, its LDS is filled again. The loop is unrolled by two tiles, so every LDS address is an immediate
Order     the compiler would gather all memory instructions in one place and starve the matrix unit. After each piece's MFMAs
          `_order` pins what follows: as a scheduling fence (an empty assembly statement said to change EXEC), or by an empty
          statement that reads the piece's first accumulator
Cost      2 M N K FLOP; 256 x BN tiles read (256 + BN) bytes of each contraction byte from L2
Numerics  fp32 sums, one rounding at the store
Limits    rows start at multiples of 16 bytes (the launcher copies operands that do not), 32-bit offsets inside a tile

Nothing of this has run on hardware yet: docs/amd.md.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from primus_turbo_plugin.kernels.gluon.gemm_gfx950_tiles import (
    PIECE,
    cell_type,
    depth_mask,
    is_half,
    operand_layout,
    place,
    read_piece,
    result_layout,
    row_offsets,
    tile_cells,
    tile_layout,
)


@gluon.constexpr_function
def _first_tile_constraints(P):
    """Operands of `_order`: as many scalar results as accumulators read."""
    count = 4 if P.MX else 16
    return ",".join(["=s"] * count + ["v"] * count)


@gluon.constexpr_function
def snake(r, pieces):
    """Column of the r-th piece: left to right in the upper row of pieces, back in the lower one."""
    return r if r < pieces else 2 * pieces - 1 - r


@gluon.jit
def _order(accumulator, P: gl.constexpr):
    """Keeps memory instructions that follow behind the MFMAs that came before. No instruction comes of it."""
    if P.ORDER == "fence":
        gl.inline_asm_elementwise("", "=s,~{exec}", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        first = gl.amd.slice(accumulator, [64, 64], [0, 0])
        gl.inline_asm_elementwise("", _first_tile_constraints(P), [first], dtype=gl.float32, is_pure=False, pack=16)


@gluon.jit
def _multiply(a, b, accumulator, P: gl.constexpr):
    if is_half(P):
        return cdna4.mfma(a, b, accumulator)
    else:
        return cdna4.mfma_scaled(a, None, P.A, b, None, P.B, accumulator)


@gluon.jit
def _copy(tile, corner, offsets, index: gl.constexpr, left, MASKED: gl.constexpr, P: gl.constexpr):
    """Starts the copy of a piece into LDS; without direct copies, through registers and done on return."""
    mask = None
    if MASKED:
        mask = depth_mask(index, left, P)
    if P.ASYNC_COPY:
        cdna4.async_copy.buffer_load_to_shared(tile, corner, offsets, mask=mask)
    else:
        tile.store(cdna4.buffer_load(corner, offsets, mask=mask, other=0 if MASKED else None))


@gluon.jit
def _copy_tile(a_tiles, b_tiles, stage: gl.constexpr, a, b, a_offsets, b_offsets, left, P: gl.constexpr):
    """A whole tile, at the start."""
    for i in gl.static_range(P.BM // PIECE):
        _copy(a_tiles[i].index(stage), a, a_offsets[i], 0, left, not P.EVEN_K, P)
    for j in gl.static_range(P.BN // P.HN):
        _copy(b_tiles[j].index(stage), b, b_offsets[j], 1, left, not P.EVEN_K, P)
    cdna4.async_copy.commit_group()


@gluon.jit
def _step(
    a_tiles, b_tiles, a, b, a_offsets, b_offsets, left, a_now, b_now, sums,
    t: gl.constexpr, step: gl.constexpr, COPY: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Multiplies one step of tile t (even or odd). After each piece: a part of the copies, one operand of the next step.

    Returns:
        Operands of the next step (none at the end) and the accumulators.
    """
    upper: gl.constexpr = P.BM // PIECE
    pieces: gl.constexpr = P.BN // P.HN
    last: gl.constexpr = step == P.STEPS - 1
    at_end: gl.constexpr = COPY == "none" and t == 1 and last
    copies: gl.constexpr = last and COPY != "none"
    stage: gl.constexpr = (t + 1) % 2 if last else t
    following: gl.constexpr = 0 if last else step + 1
    if last and not at_end:  # the next tile has landed and everybody has read this one
        if P.ASYNC_COPY:
            cdna4.async_copy.wait_group(0)
        gl.barrier()
        if P.ORDER == "fence":
            _order(sums[0], P)
    a_next = ()
    b_next = ()
    added = ()
    for r in gl.static_range(upper * pieces):
        piece = _multiply(a_now[r // pieces], b_now[snake(r, pieces)], sums[r], P)
        added += (piece,)
        _order(piece, P)
        for q in gl.static_range(upper + pieces):
            if q * upper * pieces // (upper + pieces) == r:
                if copies:
                    if q < upper:
                        _copy(a_tiles[q].index(t), a, a_offsets[q], 0, left, COPY == "masked", P)
                    else:
                        _copy(b_tiles[q - upper].index(t), b, b_offsets[q - upper], 1, left, COPY == "masked", P)
                if not at_end:  # in the order in which they will be used: a's first piece, those of b, a's second
                    if q == 0:
                        a_next += (read_piece(0, a_tiles[0].index(stage), following, P),)
                    elif q <= pieces:
                        b_next += (read_piece(1, b_tiles[q - 1].index(stage), following, P),)
                    else:
                        a_next += (read_piece(0, a_tiles[1].index(stage), following, P),)
    if copies:
        cdna4.async_copy.commit_group()
    return a_next, b_next, added


@gluon.jit
def _two_tiles(
    a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums, COPY: gl.constexpr, P: gl.constexpr
):  # fmt: skip
    """Multiplies two tiles and meanwhile copies the two after them (COPY: `all`, `masked` or `none`).

    Args:
        a, b: Corners of the tile two ahead.
        left: Cells of the contraction from there on.
        a_now, b_now: Operands of the first step.
        sums: Accumulators of the pieces.
    """
    for t in gl.static_range(2):
        for step in gl.static_range(P.STEPS):
            a_now, b_now, sums = _step(
                a_tiles, b_tiles, a, b, a_offsets, b_offsets, left, a_now, b_now, sums, t, step, COPY, P
            )
        if COPY != "none":
            a += a_step
            b += b_step
            left -= tile_cells(P)
    return a, b, left, a_now, b_now, sums


@gluon.jit
def _store(c, piece, row0: gl.constexpr, column0: gl.constexpr, rows_left, columns_left, stride_c, bias_ptr, a_scale, b_scale,
           stride_sa, stride_sb, P: gl.constexpr):  # fmt: skip
    """Scales, bias and what is there already, then one rounding and 16-byte stores."""
    output: gl.constexpr = c.dtype.element_ty
    vector: gl.constexpr = 128 // output.primitive_bitwidth
    across: gl.constexpr = min(P.HN // vector, 64)
    layout: gl.constexpr = gl.BlockedLayout([1, vector], [64 // across, across], [4, 1], [1, 0])
    value = gl.convert_layout(piece, layout)
    row = row0 + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    column = column0 + gl.arange(0, P.HN, gl.SliceLayout(0, layout))
    row_inside, column_inside = row < rows_left, column < columns_left
    if P.ROW_SCALE:
        value *= gl.load(a_scale + row * stride_sa, mask=row_inside, other=0.0)[:, None]
        value *= gl.load(b_scale + column * stride_sb, mask=column_inside, other=0.0)[None, :]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + column, mask=column_inside, other=0.0).to(gl.float32)[None, :]
    offset = row[:, None] * stride_c + column[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    if P.ACCUMULATE:
        value += cdna4.buffer_load(c, offset, mask=mask, other=0.0)
    cdna4.buffer_store(value.to(output), c, offset, mask=mask)


@gluon.jit
def gemm_gfx950_kernel(
    a_ptr, a_scale, b_ptr, b_scale, bias_ptr, c_ptr, offsets_ptr, tiles_ptr,
    M, N, K,
    stride_a, stride_sa, stride_b, stride_sb, stride_bg, stride_sbg, stride_c, stride_cg,
    P: gl.constexpr,
):  # fmt: skip
    """One tile of c.

    Args:
        a_ptr: `[M, K]` in cells (elements of 16 bits, or bytes), contiguous along K (`P.A_K`) or M; `stride_a` is the other stride.
        a_scale: fp32 row scales (`P.ROW_SCALE`, `stride_sa` apart), MX scales in the gfx950 layout (rows `stride_sa` apart), or None.
        b_ptr, b_scale: `[N, K]`, likewise; of group g at `g * stride_bg` and `g * stride_sbg`.
        bias_ptr: `[N]`, a group's at `g * N`, or None.
        c_ptr: `[M, N]`, `stride_c` apart; of group g at `g * stride_cg`.
        offsets_ptr: `[groups + 1]` int32 or int64, or None.
        tiles_ptr: `gemm_gfx1250.row_tiles`, for `P.GROUPED == "rows"`.
        M, N, K: Rows, columns, cells of the contraction.
        P: `gemm_gfx950_plan.GemmPlan`.
    """
    pieces: gl.constexpr = P.BN // P.HN
    cells: gl.constexpr = tile_cells(P)
    group, first, rows, start, depth, m, n = place(offsets_ptr, tiles_ptr, M, N, K, P)
    rows_left, columns_left = rows - m, N - n
    if rows_left <= 0:
        return

    # Corners of the first tile, and how far apart tiles are along the contraction.
    if P.A_K:
        a = a_ptr + (first + m).to(gl.int64) * stride_a + start
        a_step = cells
    else:
        a = a_ptr + start * stride_a.to(gl.int64) + m
        a_step = cells * stride_a
    if P.B_K:
        b = b_ptr + group * stride_bg.to(gl.int64) + n.to(gl.int64) * stride_b + start
        b_step = cells
    else:
        b = b_ptr + group * stride_bg.to(gl.int64) + start * stride_b.to(gl.int64) + n
        b_step = cells * stride_b
    a_tiles = ()
    a_offsets = ()
    for i in gl.static_range(P.BM // PIECE):
        a_tiles += (gl.allocate_shared_memory(cell_type(P), [2, PIECE, cells], tile_layout(0, P)),)
        a_offsets += (row_offsets(0, i, rows_left, stride_a, P),)
    b_tiles = ()
    b_offsets = ()
    for j in gl.static_range(pieces):
        b_tiles += (gl.allocate_shared_memory(cell_type(P), [2, cells, P.HN], tile_layout(1, P)),)
        b_offsets += (row_offsets(1, j, columns_left, stride_b, P),)

    # Fill the pipeline.
    sums = ()
    for r in gl.static_range(P.BM // PIECE * pieces):
        sums += (gl.zeros([PIECE, P.HN], gl.float32, result_layout(P)),)
    left = depth
    for t in gl.static_range(2):
        _copy_tile(a_tiles, b_tiles, t, a, b, a_offsets, b_offsets, left, P)
        a += a_step
        b += b_step
        left -= cells
    if P.ASYNC_COPY:
        cdna4.async_copy.wait_group(1)
    gl.barrier()
    a_now = ()
    b_now = ()
    for i in gl.static_range(P.BM // PIECE):
        a_now += (read_piece(0, a_tiles[i].index(0), 0, P),)
    for j in gl.static_range(pieces):
        b_now += (read_piece(1, b_tiles[j].index(0), 0, P),)

    # Multiply: whole pairs of tiles, the pair whose copies reach past the contraction, the last pair.
    for _ in range(depth // (2 * cells) - 1):
        a, b, left, a_now, b_now, sums = _two_tiles(
            a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums, "all", P
        )
    if not P.EVEN_K:
        if depth > 2 * cells and depth % (2 * cells) != 0:
            a, b, left, a_now, b_now, sums = _two_tiles(
                a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums, "masked", P
            )
    a, b, left, a_now, b_now, sums = _two_tiles(
        a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums, "none", P
    )

    # Store.
    c = c_ptr + group * stride_cg.to(gl.int64) + (first + m).to(gl.int64) * stride_c + n
    if bias_ptr is not None:
        bias_ptr += group * N + n
    if P.ROW_SCALE:
        a_scale += (first + m) * stride_sa
        b_scale += group * stride_sbg + n * stride_sb
    for r in gl.static_range(P.BM // PIECE * pieces):
        _store(c, sums[r], (r // pieces) * PIECE, snake(r, pieces) * P.HN, rows_left, columns_left,
               stride_c, bias_ptr, a_scale, b_scale, stride_sa, stride_sb, P)  # fmt: skip
