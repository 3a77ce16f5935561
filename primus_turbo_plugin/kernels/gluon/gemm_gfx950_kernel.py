"""c[M, N] = a[M, K] @ b[N, K].T on gfx950: direct-to-LDS copies, transpose loads, MFMA (Gluon kernel).

Math      c = a @ b.T (+ bias) or c += a @ b.T, fp32 accumulation
Layout    a work-group computes a 256 x BN tile with four waves, one a SIMD, each 128 x BN/2 of it in fp32 registers. Two
          stages in LDS hold 128 bytes of the contraction of every row; operands contiguous along the contraction are read by
          ds_read_b128, others transposed by ds_read_b64_tr_*. MX scales go from memory to registers, a tile ahead, four a load
Pipeline  copies run two tiles ahead (buffer_load ... lds, no registers), operand registers one step ahead: while one step is
          multiplied, the next is read. One barrier a tile: before it, the next tile has landed and this one has been read; after
          it this one's LDS is filled again. The loop is unrolled by two tiles, so every LDS address is an immediate
Order     the compiler would gather all memory instructions in one place and starve the matrix unit. After each piece's MFMAs
          `_order` pins what follows: as a scheduling fence (an empty assembly statement said to change EXEC), or by an empty
          statement that reads the piece's first accumulator
Cost      2 M N K FLOP; 256 x BN tiles read (256 + BN) bytes of each contraction byte from L2
Numerics  fp32 sums, one rounding at the store
Limits    rows start at multiples of 16 bytes (the launcher copies operands that do not), 32-bit offsets inside a tile

Nothing of this has run on hardware yet: docs/amd.md.
"""

# mypy: disable-error-code="assignment"
# (tuples grow in kernels, and branches of compile-time conditions define names again)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from primus_turbo_plugin.kernels.gluon.gemm_gfx950_scales import arrange_scale, load_scale, step_scale
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_schedule import copy_region, read_region, scale_region, snake
from primus_turbo_plugin.kernels.gluon.gemm_gfx950_tiles import (
    cell_type,
    depth_mask,
    is_half,
    place,
    read_piece,
    result_layout,
    row_offsets,
    tile_blocks,
    tile_cells,
    tile_layout,
)

_READ_SIXTEEN = gl.constexpr(",".join(["=s"] * 16 + ["v"] * 16))
"""Operands of `_order`: a lane's accumulators of one 64 x 64 part, and as many scalar results that nobody uses."""


@gluon.jit
def _order(accumulator, P: gl.constexpr):
    """Keeps memory instructions that follow behind MFMAs that came before. No instruction comes of it."""
    if P.ORDER == "fence":
        gl.inline_asm_elementwise("", "=s,~{exec}", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        part = gl.amd.slice(accumulator, [64, 64], [0, 0])
        gl.inline_asm_elementwise("", _READ_SIXTEEN, [part], dtype=gl.float32, is_pure=False, pack=16)


@gluon.jit
def _multiply(a, a_scale, b, b_scale, accumulator, P: gl.constexpr):
    if is_half(P):
        total = cdna4.mfma(a, b, accumulator)
    else:
        total = cdna4.mfma_scaled(a, a_scale if P.MX else None, P.A, b, b_scale if P.MX else None, P.B, accumulator)
    return total


@gluon.jit
def _scale_of(scales, which: gl.constexpr, index: gl.constexpr, block, blocks, t: gl.constexpr, step: gl.constexpr,
              MASKED: gl.constexpr, P: gl.constexpr):  # fmt: skip
    """A piece's MX scales in this step, or 0; `block` is that of the next tile."""
    value = 0
    if P.MX:
        arranged = arrange_scale(scales[which], index, block - tile_blocks(P), blocks, MASKED, P)
        value = step_scale(arranged, index, t, step, P)
    return value


@gluon.jit
def _load_scale(
    which: gl.constexpr, a_scale, b_scale, m, n, rows_left, columns_left, stride_sa, stride_sb, block, blocks,
    MASKED: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Starts loading the scales of one piece of a tile: of a's pieces, then of b's."""
    upper: gl.constexpr = P.BM // P.HM
    if which < upper:
        value = load_scale(0, which, a_scale, m, rows_left, stride_sa, block, blocks, MASKED, P)
    else:
        value = load_scale(1, which - upper, b_scale, n, columns_left, stride_sb, block, blocks, MASKED, P)
    return value


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
    for i in gl.static_range(P.BM // P.HM):
        _copy(a_tiles[i].index(stage), a, a_offsets[i], 0, left, not P.EVEN_K, P)
    for j in gl.static_range(P.BN // P.HN):
        _copy(b_tiles[j].index(stage), b, b_offsets[j], 1, left, not P.EVEN_K, P)
    cdna4.async_copy.commit_group()


@gluon.jit
def _step(
    a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
    a_scale, b_scale, m, n, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
    t: gl.constexpr, step: gl.constexpr, COPY: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Multiplies one step of tile t (even or odd). After each piece: a part of the copies, one operand of the next step.

    Returns:
        Corners, cells and block of the tile to copy next; operands of the next step (none at the end); the accumulators; in the
        last step, scales of the next tile.
    """
    upper: gl.constexpr = P.BM // P.HM
    pieces: gl.constexpr = P.BN // P.HN
    last: gl.constexpr = step == P.STEPS - 1
    at_end: gl.constexpr = COPY == "none" and t == 1 and last
    masked: gl.constexpr = COPY != "all" and not P.EVEN_K
    copies: gl.constexpr = last and COPY != "none"
    stage: gl.constexpr = (t + 1) % 2 if last else t
    following: gl.constexpr = 0 if last else step + 1
    if last and not at_end:  # the next tile has landed and everybody has read this one
        if P.ASYNC_COPY:
            cdna4.async_copy.wait_group(0)
        gl.barrier()
        if P.ORDER == "fence":
            _order(sums[0], P)
    here = block
    a_next = ()
    b_next = ()
    added = ()
    ahead = ()
    for r in gl.static_range(upper * pieces):
        piece = _multiply(
            a_now[r // pieces],
            _scale_of(scales, r // pieces, 0, here, blocks, t, step, masked, P),
            b_now[snake(r, pieces)],
            _scale_of(scales, upper + snake(r, pieces), 1, here, blocks, t, step, masked, P),
            sums[r],
            P,
        )
        added += (piece,)
        _order(piece, P)
        for q in gl.static_range(upper + pieces):
            if copies and copy_region(q, upper, pieces) == r:
                if q < upper:
                    _copy(a_tiles[q].index(t), a, a_offsets[q], 0, left, COPY == "masked", P)
                else:
                    _copy(b_tiles[q - upper].index(t), b, b_offsets[q - upper], 1, left, COPY == "masked", P)
            if P.MX and last and not at_end and scale_region(q, upper, pieces) == r:
                ahead += (
                    _load_scale(
                        q,
                        a_scale,
                        b_scale,
                        m,
                        n,
                        rows_left,
                        columns_left,
                        stride_sa,
                        stride_sb,
                        block,
                        blocks,
                        masked,
                        P,
                    ),
                )
            if not at_end and read_region(q, upper, pieces, last, P) == r:
                # in the order in which they will be used: a's first piece, those of b, a's others
                if q == 0:
                    a_next += (read_piece(0, a_tiles[0].index(stage), following, P),)
                elif q <= pieces:
                    b_next += (read_piece(1, b_tiles[q - 1].index(stage), following, P),)
                else:
                    a_next += (read_piece(0, a_tiles[q - pieces].index(stage), following, P),)
        if last and r == upper * pieces - 2:  # here, and not at the end, for the matrix unit to be busy meanwhile
            a += a_step
            b += b_step
            left -= tile_cells(P)
            block += tile_blocks(P)
    if copies:
        cdna4.async_copy.commit_group()
    return a, b, left, block, a_next, b_next, added, ahead


@gluon.jit
def _two_tiles(
    a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
    a_scale, b_scale, m, n, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
    COPY: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Multiplies two tiles and meanwhile copies the two after them (COPY: `all`, `masked` or `none`).

    Args:
        a, b: Corners of the tile two ahead.
        left: Cells of the contraction from there on.
        a_now, b_now: Operands of the first step.
        sums: Accumulators of the pieces.
        block: First MX block of the next tile.
        scales: Of the first of the two tiles.
    """
    for t in gl.static_range(2):
        for step in gl.static_range(P.STEPS):
            a, b, left, block, a_now, b_now, sums, ahead = _step(
                a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
                a_scale, b_scale, m, n, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
                t, step, COPY, P,
            )  # fmt: skip
        scales = ahead
    return a, b, left, a_now, b_now, sums, block, scales


@gluon.jit
def _store(c, piece, row0: gl.constexpr, column0: gl.constexpr, rows_left, columns_left, stride_c, bias_ptr, a_scale, b_scale,
           stride_sa, stride_sb, P: gl.constexpr):  # fmt: skip
    """Scales, bias and what is there already, then one rounding and 16-byte stores."""
    output: gl.constexpr = c.dtype.element_ty
    vector: gl.constexpr = 128 // output.primitive_bitwidth
    across: gl.constexpr = min(P.HN // vector, 64)
    layout: gl.constexpr = gl.BlockedLayout([1, vector], [64 // across, across], [4, 1], [1, 0])
    value = gl.convert_layout(piece, layout)
    row = row0 + gl.arange(0, P.HM, gl.SliceLayout(1, layout))
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
        a_ptr: `[M, K]` in cells (elements of 16 bits, or bytes), contiguous along K (`P.A_K`) or M; `stride_a`: the other stride.
        a_scale: fp32 row scales (`P.ROW_SCALE`), `stride_sa` apart; MX scales, rows `stride_sa` apart, in the gfx950 layout
            (`P.A_SHUFFLED`) or plain; or None.
        b_ptr, b_scale: `[N, K]`, likewise; of group g at `g * stride_bg` and `g * stride_sbg`.
        bias_ptr: `[N]`, a group's at `g * N`, or None.
        c_ptr: `[M, N]`, `stride_c` apart; of group g at `g * stride_cg`.
        offsets_ptr: `[groups + 1]` int32 or int64, or None.
        tiles_ptr: `grouping.row_tiles`, for `P.GROUPED == "rows"`.
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
    start64 = gl.to_tensor(start).to(gl.int64)
    weight = gl.to_tensor(group).to(gl.int64) * stride_bg
    if P.A_K:
        a = a_ptr + ((first + m).to(gl.int64) * stride_a + start)
        a_step = cells
    else:
        a = a_ptr + (start64 * stride_a + m)
        a_step = cells * stride_a
    if P.B_K:
        b = b_ptr + (weight + n.to(gl.int64) * stride_b + start)
        b_step = cells
    else:
        b = b_ptr + (weight + start64 * stride_b + n)
        b_step = cells * stride_b
    a, b = gl.multiple_of(a, 16), gl.multiple_of(b, 16)  # bytes: the launcher sees to it
    a_tiles = ()
    a_offsets = ()
    for i in gl.static_range(P.BM // P.HM):
        a_tiles += (gl.allocate_shared_memory(cell_type(P), [2, P.HM, cells], tile_layout(0, P)),)
        a_offsets += (row_offsets(0, i, rows_left, stride_a, P),)
    b_tiles = ()
    b_offsets = ()
    for j in gl.static_range(pieces):
        b_tiles += (gl.allocate_shared_memory(cell_type(P), [2, cells, P.HN], tile_layout(1, P)),)
        b_offsets += (row_offsets(1, j, columns_left, stride_b, P),)

    # Fill the pipeline.
    m_scale, n_scale = first + m, n
    if P.MX:
        b_scale += gl.to_tensor(group).to(gl.int64) * stride_sbg
    block = start // (cells // tile_blocks(P))
    blocks = (start + depth) // (cells // tile_blocks(P))
    scales = ()
    if P.MX:
        for which in gl.static_range(P.BM // P.HM + pieces):
            scales += (
                _load_scale(
                    which,
                    a_scale,
                    b_scale,
                    m_scale,
                    n_scale,
                    rows_left,
                    columns_left,
                    stride_sa,
                    stride_sb,
                    block,
                    blocks,
                    not P.EVEN_K,
                    P,
                ),
            )
    block += tile_blocks(P)
    sums = ()
    for _ in gl.static_range(P.BM // P.HM * pieces):
        sums += (gl.zeros([P.HM, P.HN], gl.float32, result_layout(P)),)
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
    for i in gl.static_range(P.BM // P.HM):
        a_now += (read_piece(0, a_tiles[i].index(0), 0, P),)
    for j in gl.static_range(pieces):
        b_now += (read_piece(1, b_tiles[j].index(0), 0, P),)

    # Multiply: whole pairs of tiles, the pair whose copies reach past the contraction, the last pair.
    for _ in range(depth // (2 * cells) - 1):
        a, b, left, a_now, b_now, sums, block, scales = _two_tiles(
            a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
            a_scale, b_scale, m_scale, n_scale, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
            "all", P,
        )  # fmt: skip
    if not P.EVEN_K:
        if depth > 2 * cells and depth % (2 * cells) != 0:
            a, b, left, a_now, b_now, sums, block, scales = _two_tiles(
                a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
                a_scale, b_scale, m_scale, n_scale, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
                "masked", P,
            )  # fmt: skip
    a, b, left, a_now, b_now, sums, block, scales = _two_tiles(
        a_tiles, b_tiles, a, b, a_offsets, b_offsets, a_step, b_step, left, a_now, b_now, sums,
        a_scale, b_scale, m_scale, n_scale, rows_left, columns_left, stride_sa, stride_sb, block, blocks, scales,
        "none", P,
    )  # fmt: skip

    # Store.
    c = c_ptr + gl.to_tensor(group).to(gl.int64) * stride_cg + (first + m).to(gl.int64) * stride_c + n
    if bias_ptr is not None:
        bias_ptr += group * N + n
    if P.ROW_SCALE:
        a_scale += (first + m) * stride_sa
        b_scale += group * stride_sbg + n * stride_sb
    for r in gl.static_range(P.BM // P.HM * pieces):
        _store(c, sums[r], (r // pieces) * P.HM, snake(r, pieces) * P.HN, rows_left, columns_left,
               stride_c, bias_ptr, a_scale, b_scale, stride_sa, stride_sb, P)  # fmt: skip
