"""A stage of the gfx1250 GEMMs: its transfers into LDS, and its operands from there to registers (Gluon)."""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_tiles import (
    cdna5,
    copy_layout,
    tile_layout,
    wmma_depth,
    wmma_layouts,
)

tdm = cdna5.tdm
SCALE_BLOCK = gl.constexpr(32)


# -- compile-time facts -------------------------------------------------------------------------------------------------
@gluon.constexpr_function
def codes(element):
    """Elements of one stored item."""
    return 2 if element == "e2m1" else 1


@gluon.constexpr_function
def num_pieces(P):
    return len(P.PIECES)


@gluon.constexpr_function
def piece_rows(P, i):
    return P.PIECES[i]


@gluon.constexpr_function
def piece_start(P, i):
    return sum(P.PIECES[:i])


@gluon.constexpr_function
def piece_of(P, row):
    """Piece of a's tile that holds a row."""
    i = 0
    while row >= sum(P.PIECES[: i + 1]):
        i += 1
    return i


@gluon.constexpr_function
def transfers(P):
    """As `gemm_gfx1250_plan.transfers`."""
    return len(P.PIECES) + 1 + (2 if P.MX else 0)


@gluon.constexpr_function
def a_scale_rows(P):
    """As `gemm_gfx1250_plan.scale_rows`."""
    return 1 << (P.BM - 1).bit_length()


@gluon.constexpr_function
def element_bytes(element):
    return 2 if element in ("bf16", "fp16") else 1


@gluon.constexpr_function
def shared_shape(buffers, rows, depth, k_inner):
    return [buffers, rows, depth] if k_inner else [buffers, depth, rows]


@gluon.constexpr_function
def operand_layout(element, rows, depth, k_inner):
    outer, inner = (rows, depth) if k_inner else (depth, rows)
    return tile_layout(outer, inner, element_bytes(element))


@gluon.constexpr_function
def scale_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


# -- memory to LDS ------------------------------------------------------------------------------------------------------
@gluon.jit
def _fetch(ptr, base, outer, depth, stride, row, k, dest, ROWS: gl.constexpr, DEPTH: gl.constexpr, K_INNER: gl.constexpr,
           P: gl.constexpr):  # fmt: skip
    """Start the transfer of one piece: rows row ... and depth k ... of an operand [outer, depth]; zero outside."""
    shape: gl.constexpr = [ROWS, DEPTH] if K_INNER else [DEPTH, ROWS]
    if K_INNER:
        high, low = outer, depth
        i, j = row, k
    else:
        high, low = depth, outer
        i, j = k, row
    if P.TDM:
        descriptor = tdm.make_tensor_descriptor(ptr + base, [high, low], [stride, 1], shape, dest.layout)
        tdm.async_load(descriptor, [i, j], dest)
    else:
        BYTES: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        layout: gl.constexpr = copy_layout(shape[0], shape[1], BYTES)
        WIDE: gl.constexpr = layout.size_per_thread[1]
        stride, low, j, base = (
            stride // WIDE * WIDE,
            low // WIDE * WIDE,
            j // WIDE * WIDE,
            base // WIDE * WIDE,
        )  # tells Triton
        rows = i + gl.arange(0, shape[0], gl.SliceLayout(1, layout))
        columns = j + gl.arange(0, shape[1], gl.SliceLayout(0, layout))
        place = ptr + base + rows.to(gl.int64)[:, None] * stride + columns[None, :]
        if P.EVEN_K:  # rows past the end leave rows of the result wrong that are not stored
            mask = (rows < high)[:, None] if K_INNER else (columns < low)[None, :]
            cdna5.async_copy.global_to_shared(dest, place, mask=mask)
        else:
            mask = (rows < high)[:, None] & (columns < low)[None, :]
            cdna5.async_copy.global_to_shared(dest, place, mask=mask, other=0)


@gluon.jit
def source_of(A, B, place, P: gl.constexpr):
    """Where a tile's operands begin, and how far they reach from there: all that a transfer needs of its place."""
    _, _, stride_a, stride_sa, _, _ = A
    _, _, stride_b, stride_sb, stride_bg, stride_sbg, N, _, _ = B
    group, first, rows, start, depth, m, n = place
    A_CODES: gl.constexpr = codes(P.A)
    B_CODES: gl.constexpr = codes(P.B)
    row, start64, n64 = gl.cast(first + m, gl.int64), gl.cast(start, gl.int64), gl.cast(n, gl.int64)
    a = row * stride_a + start64 // A_CODES if P.A_K else row + start64 * stride_a
    b = group * stride_bg + (n64 * stride_b + start64 // B_CODES if P.B_K else n64 + start64 * stride_b)
    columns = gl.where(rows > 0, N, 0) - n
    if P.MX:
        sa = row * stride_sa + start64 // SCALE_BLOCK
        sb = group * stride_sbg + n64 * stride_sb + start64 // SCALE_BLOCK
        source = (a, b, rows - m, columns, depth, sa, sb)
    else:
        source = (a, b, rows - m, columns, depth)
    return source


@gluon.jit
def fetch_stage(A, B, source, k, slot, P: gl.constexpr):
    """Start all transfers of one stage."""
    a_ptr, a_scale, stride_a, stride_sa, a_tiles, a_scales = A
    b_ptr, b_scale, stride_b, stride_sb, _, _, _, b_tiles, b_scales = B
    PIECES: gl.constexpr = num_pieces(P)
    A_CODES: gl.constexpr = codes(P.A)
    B_CODES: gl.constexpr = codes(P.B)
    rows, columns, depth = source[2], source[3], source[4]
    for i in gl.static_range(PIECES):
        _fetch(a_ptr, source[0], rows, depth // A_CODES, stride_a, piece_start(P, i), k // A_CODES, a_tiles[i].index(slot),
               piece_rows(P, i), P.BK // A_CODES, P.A_K, P)  # fmt: skip
    _fetch(b_ptr, source[1], columns, depth // B_CODES, stride_b, 0, k // B_CODES, b_tiles.index(slot), P.BN,
           P.BK // B_CODES, P.B_K, P)  # fmt: skip
    if P.MX:
        BLOCKS: gl.constexpr = P.BK // SCALE_BLOCK
        _fetch(a_scale, source[5], rows, depth // SCALE_BLOCK, stride_sa, 0, k // SCALE_BLOCK, a_scales.index(slot),
               a_scale_rows(P), BLOCKS, True, P)  # fmt: skip
        _fetch(b_scale, source[6], columns, depth // SCALE_BLOCK, stride_sb, 0, k // SCALE_BLOCK, b_scales.index(slot), P.BN,
               BLOCKS, True, P)  # fmt: skip
    if not P.TDM:
        cdna5.async_copy.commit_group()


@gluon.jit
def wait_stage(NEWER: gl.constexpr, P: gl.constexpr):
    """Wait until all but the NEWER last stages have landed for this wave."""
    if P.TDM:
        tdm.async_wait(NEWER * transfers(P))
    else:
        cdna5.async_copy.wait_group(NEWER)


# -- LDS to registers ---------------------------------------------------------------------------------------------------
@gluon.jit
def _fragment(tile, row: gl.constexpr, k: gl.constexpr, ROWS: gl.constexpr, DEPTH: gl.constexpr, K_INNER: gl.constexpr,
              layout: gl.constexpr, TRANSPOSE_LOAD: gl.constexpr):  # fmt: skip
    """Rows row ... and depth k ... of a tile as a WMMA operand."""
    RIGHT: gl.constexpr = layout.operand_index == 1
    if K_INNER:
        part = tile.slice(row, ROWS, 0).slice(k, DEPTH, 1)
    else:
        part = tile.slice(row, ROWS, 1).slice(k, DEPTH, 0)
    TURNED: gl.constexpr = K_INNER if RIGHT else not K_INNER
    if K_INNER or TRANSPOSE_LOAD:
        if TURNED:
            part = part.permute([1, 0])
        value = _read(part, layout)
    else:
        plain = _read(part, copy_layout(DEPTH, ROWS, 2))
        if TURNED:
            plain = plain.trans(1, 0)
        value = gl.convert_layout(plain, layout)
    return value


@gluon.jit
def _read(part, layout: gl.constexpr):
    """An LDS read that the wait and barrier of its stage already order after the transfer."""
    return part.load(layout)


@gluon.jit
def left_operand(A, slot, i: gl.constexpr, s: gl.constexpr, P: gl.constexpr):
    """Slab i, step s of a's stage: fragment and scales."""
    DEPTH: gl.constexpr = wmma_depth(P) // codes(P.A)
    left: gl.constexpr = wmma_layouts(P)[1]
    piece: gl.constexpr = piece_of(P, i * P.SLAB)
    row: gl.constexpr = i * P.SLAB - piece_start(P, piece)
    x = _fragment(A[4][piece].index(slot), row, s * DEPTH, P.SLAB, DEPTH, P.A_K, left, P.TRANSPOSE_LOAD)
    if P.MX:
        blocks: gl.constexpr = wmma_depth(P) // SCALE_BLOCK
        layout: gl.constexpr = cdna5.get_wmma_scale_layout(left, [P.SLAB, blocks])
        scale = _read(A[5].index(slot).slice(i * P.SLAB, P.SLAB, 0).slice(s * blocks, blocks, 1), layout)
        result = (x, scale)
    else:
        result = (x,)
    return result


@gluon.jit
def right_operand(B, slot, s: gl.constexpr, P: gl.constexpr):
    """Step s of b's stage: fragment and scales."""
    DEPTH: gl.constexpr = wmma_depth(P) // codes(P.B)
    right: gl.constexpr = wmma_layouts(P)[2]
    y = _fragment(B[7].index(slot), 0, s * DEPTH, P.BN, DEPTH, P.B_K, right, P.TRANSPOSE_LOAD)
    if P.MX:
        blocks: gl.constexpr = wmma_depth(P) // SCALE_BLOCK
        layout: gl.constexpr = cdna5.get_wmma_scale_layout(right, [P.BN, blocks])
        scale = _read(B[8].index(slot).slice(s * blocks, blocks, 1), layout)
        result = (y, scale)
    else:
        result = (y,)
    return result
