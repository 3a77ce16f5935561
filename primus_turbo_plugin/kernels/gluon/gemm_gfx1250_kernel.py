"""c = a @ b.T on gfx1250 (Gluon kernel): tiles through the tensor data mover, operands one WMMA step ahead of the matrix unit.

Math      c[M, N] (+)= sum_k a[m, k] * b[n, k] (* scales), fp32 accumulation, one rounding at the store
Layout    4 waves compute BM x BN of c; a is cut into slabs of SLAB rows, each with its own accumulator; BK of the contraction is
          a stage, of which STAGES lie in LDS. An operand contiguous along its rows is a [BK, rows] tile in LDS, which
          `ds_load_tr16_b128` transposes on the way to registers
Pipeline  stage s + STAGES is asked of the TDM as soon as every wave has read stage s. It may be the next tile's: work-groups are
          persistent and the pipeline does not drain between tiles. The operands of the next slab are read from LDS before the
          WMMAs of the current one, across stages and tiles
Tails     the TDM fills what lies outside an operand with zeros and stores nothing outside c, in all three dimensions. Past the
          last tile everything is outside, so that waits may count transfers without exception
Limits    coordinates are 32 bits, addresses 64
"""

# ruff: noqa: RUF005  (Triton's language does not unpack into a tuple)
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_tiles import (
    cdna5,
    copy_layout,
    dense_place,
    depth_place,
    rows_place,
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
def _source(A, B, place, P: gl.constexpr):
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
def _fetch_stage(A, B, source, k, slot, P: gl.constexpr):
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
def _wait_stage(NEWER: gl.constexpr, P: gl.constexpr):
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
def _left(A, slot, i: gl.constexpr, s: gl.constexpr, P: gl.constexpr):
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
def _right(B, slot, s: gl.constexpr, P: gl.constexpr):
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


@gluon.jit
def _typed(codes, element: gl.constexpr):
    if element == "e4m3":
        codes = codes.to(gl.float8e4nv, bitcast=True)
    elif element == "e5m2":
        codes = codes.to(gl.float8e5, bitcast=True)
    return codes


@gluon.jit
def _multiply(x, y, acc, P: gl.constexpr):
    if P.MX:
        acc = cdna5.wmma_scaled(x[0], x[1], P.A, y[0], y[1], P.B, acc)
    else:
        acc = cdna5.wmma(_typed(x[0], P.A), _typed(y[0], P.B), acc)
    return acc


@gluon.jit
def _pin(acc, P: gl.constexpr):
    """Keep LDS reads and barriers on their side of the WMMAs: an empty statement that needs the last of them.

    Without it LLVM gathers the reads of a whole stage in front of the barrier, where the matrix unit then waits for them.
    """
    ROWS: gl.constexpr = 32  # two waves of 16; the result is transposed, so that a 32 x 16 instruction spans 32 columns
    COLUMNS: gl.constexpr = 2 * wmma_layouts(P)[0].instr_shape[0]
    last = gl.amd.slice(acc, [ROWS, COLUMNS], [P.SLAB - ROWS, P.BN - COLUMNS])
    gl.inline_asm_elementwise("", "=v,v", [last], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _replaced(items, i: gl.constexpr, value):
    result = ()
    for j in gl.static_range(len(items)):
        if j == i:
            result = result + (value,)
        else:
            result = result + (items[j],)
    return result


@gluon.jit
def _either(condition, one, two):
    """Elementwise choice between two tuples of scalars."""
    result = ()
    for j in gl.static_range(len(one)):
        result = result + (gl.where(condition, one[j], two[j]),)
    return result


# -- the kernel ---------------------------------------------------------------------------------------------------------
@gluon.jit
def _stages(depth, P: gl.constexpr):
    """Stages of a tile, at least as many as the pipeline holds (zeros, if need be)."""
    return gl.maximum(gl.cdiv(depth, P.BK), P.STAGES)


@gluon.jit
def _place(tile, total, offsets_ptr, tiles_ptr, M, N, K, P: gl.constexpr):
    if P.GROUPED == "rows":
        place = rows_place(tile, total, offsets_ptr, tiles_ptr, N, K, P)
    elif P.GROUPED == "depth":
        place = depth_place(tile, total, offsets_ptr, M, N, P)
    else:
        place = dense_place(tile, total, M, N, K, P)
    return place


@gluon.jit
def _vector(ptr, start, before, size, stride, LENGTH: gl.constexpr, layout: gl.constexpr):
    """Elements before + start ... of a vector as fp32, zero from before + size on; each is loaded once and spread through LDS."""
    i = start + gl.arange(0, LENGTH, gl.BlockedLayout([1], [32], [4], [0]))
    values = gl.load(ptr + (before + i) * stride, mask=i < size, other=0.0).to(gl.float32)
    return gl.convert_layout(values, layout)


@gluon.jit
def _store_tile(acc, C, place, N, a_scale, b_scale, bias_ptr, stride_sa, stride_sb, P: gl.constexpr):
    """Epilogue: scales, bias, accumulation, rounding; slab by slab through LDS to memory."""
    c_ptr, stride_c, stride_cg, staging = C
    group, first, rows, _, _, m, n = place
    result: gl.constexpr = wmma_layouts(P)[0]
    base = gl.cast(first, gl.int64) * stride_c
    if P.GROUPED == "depth":
        base += group * stride_cg
    out = tdm.make_tensor_descriptor(c_ptr + base, [rows, N], [stride_c, 1], [P.SLAB, P.BN], staging.layout)
    if P.ROW_SCALE:
        before = 0 if P.GROUPED == "depth" else group * N  # there all groups have the same rows of b
        column_scale = _vector(b_scale, n, before, N, stride_sb, P.BN, gl.SliceLayout(0, result))
    if bias_ptr is not None:
        bias = _vector(bias_ptr, n, group * N, N, 1, P.BN, gl.SliceLayout(0, result))
    for i in gl.static_range(len(acc)):
        value = acc[i]
        if P.ROW_SCALE:
            row_scale = _vector(a_scale, m + i * P.SLAB, first, rows, stride_sa, P.SLAB, gl.SliceLayout(1, result))
            value = value * row_scale[:, None] * column_scale[None, :]
        if bias_ptr is not None:
            value += bias[None, :]
        buffer = staging.index(i % P.STAGING)
        if P.ACCUMULATE:
            tdm.async_wait(0)  # the slab that was here has been stored
            gl.barrier()
            tdm.async_load(out, [m + i * P.SLAB, n], buffer)
            tdm.async_wait(0)
            gl.barrier()
            value += buffer.load(result)
        elif P.TDM:
            # The slab that was here: of the previous tile, with a pipeline of transfers behind it, or of this one.
            tdm.async_wait(P.STAGES * transfers(P) if i < P.STAGING else P.STAGING - 1)
            gl.barrier()
        else:
            tdm.async_wait(P.STAGING - 1)
            gl.barrier()
        buffer.store(value.to(c_ptr.dtype.element_ty))
        gl.barrier()
        tdm.async_store(out, [m + i * P.SLAB, n], buffer)


@gluon.jit
def _piece_in_lds(a_ptr, i: gl.constexpr, P: gl.constexpr):
    """LDS of all stages of one piece of a."""
    ROWS: gl.constexpr = piece_rows(P, i)
    DEPTH: gl.constexpr = P.BK // codes(P.A)
    layout: gl.constexpr = operand_layout(P.A, ROWS, DEPTH, P.A_K)
    return gl.allocate_shared_memory(a_ptr.dtype.element_ty, shared_shape(P.STAGES, ROWS, DEPTH, P.A_K), layout)


@gluon.jit
def gemm_gfx1250_kernel(
    a_ptr, a_scale, b_ptr, b_scale, bias_ptr, c_ptr, offsets_ptr, tiles_ptr, M, N, K,
    stride_a, stride_sa, stride_b, stride_sb, stride_bg, stride_sbg, stride_c, stride_cg,
    P: gl.constexpr,
):  # fmt: skip
    """All tiles of c that fall to this work-group; `P` is a `GemmPlan`.

    Args:
        a_ptr, b_ptr: Operands; codes are uint8.
        a_scale, b_scale: E8M0 bytes [rows, K / 32] (MX), fp32 [rows] or [1] (`ROW_SCALE`), or None.
        bias_ptr: [N] (or [groups, N]), or None.
        offsets_ptr: int32 or int64 [groups + 1], or None.
        tiles_ptr: int32 `grouping.row_tiles`, or None.
        M, N, K: Sizes; K counts elements. M is unused with `rows`, K with `depth`.
        stride_a, stride_b, stride_sa, stride_sb: Elements between neighbours of the outer dimension; of fp32 scales 1 or 0.
        stride_bg, stride_sbg, stride_cg: Elements between groups of b, its scales and c.
    """
    SLABS: gl.constexpr = P.BM // P.SLAB
    STEPS: gl.constexpr = P.BK // wmma_depth(P)
    B_DEPTH: gl.constexpr = P.BK // codes(P.B)
    b_layout: gl.constexpr = operand_layout(P.B, P.BN, B_DEPTH, P.B_K)
    c_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    b_shape: gl.constexpr = shared_shape(P.STAGES, P.BN, B_DEPTH, P.B_K)
    a_tiles = ()
    for i in gl.static_range(num_pieces(P)):
        a_tiles = a_tiles + (_piece_in_lds(a_ptr, i, P),)
    b_tiles = gl.allocate_shared_memory(b_ptr.dtype.element_ty, b_shape, b_layout)
    a_scales = b_tiles
    b_scales = b_tiles
    if P.MX:
        a_scales = gl.allocate_shared_memory(gl.uint8, [P.STAGES, a_scale_rows(P), P.BK // SCALE_BLOCK], scale_layout())
        b_scales = gl.allocate_shared_memory(gl.uint8, [P.STAGES, P.BN, P.BK // SCALE_BLOCK], scale_layout())
    staging = gl.allocate_shared_memory(c_ptr.dtype.element_ty, [P.STAGING, P.SLAB, P.BN], c_layout)
    A = (a_ptr, a_scale, stride_a, stride_sa, a_tiles, a_scales)
    B = (b_ptr, b_scale, stride_b, stride_sb, stride_bg, stride_sbg, N, b_tiles, b_scales)
    C = (c_ptr, stride_c, stride_cg, staging)

    if P.GROUPED == "rows":
        total = gl.load(tiles_ptr + P.GROUPS) * gl.cdiv(N, P.BN)
    else:
        total = gl.cdiv(M, P.BM) * gl.cdiv(N, P.BN) * P.GROUPS
    step = gl.num_programs(0)
    first_tile = gl.program_id(0)
    place = _place(first_tile, total, offsets_ptr, tiles_ptr, M, N, K, P)
    source = _source(A, B, place, P)
    for i in gl.static_range(P.STAGES):
        _fetch_stage(A, B, source, i * P.BK, i, P)
    _wait_stage(P.STAGES - 1, P)
    gl.barrier()
    slot = 0
    x = _left(A, slot, 0, 0, P)
    y = _right(B, slot, 0, P)
    for tile in range(first_tile, total, step):
        place_after = _place(tile + step, total, offsets_ptr, tiles_ptr, M, N, K, P)
        source_after = _source(A, B, place_after, P)
        stages = _stages(place[4], P)
        acc = ()
        for _ in gl.static_range(SLABS):
            acc = acc + (gl.zeros([P.SLAB, P.BN], gl.float32, wmma_layouts(P)[0]),)
        for k in range(stages):
            next_slot = gl.where(slot == P.STAGES - 1, 0, slot + 1)
            for s in gl.static_range(STEPS):
                for i in gl.static_range(SLABS):
                    y_next = y
                    if i < SLABS - 1:
                        x_next = _left(A, slot, i + 1, s, P)
                    elif s < STEPS - 1:
                        x_next = _left(A, slot, 0, s + 1, P)
                        y_next = _right(B, slot, s + 1, P)
                    else:
                        # Every wave has read this stage, and the next one has landed.
                        _wait_stage(P.STAGES - 2, P)
                        gl.barrier()
                        ahead = k + P.STAGES
                        crossing = ahead >= stages
                        target = _either(crossing, source_after, source)
                        _fetch_stage(A, B, target, gl.where(crossing, ahead - stages, ahead) * P.BK, slot, P)
                        x_next = _left(A, next_slot, 0, 0, P)
                        y_next = _right(B, next_slot, 0, P)
                    acc = _replaced(acc, i, _multiply(x, y, acc[i], P))
                    _pin(acc[i], P)
                    x = x_next
                    y = y_next
            slot = next_slot
        _store_tile(acc, C, place, N, a_scale, b_scale, bias_ptr, stride_sa, stride_sb, P)
        place = place_after
        source = source_after
    _wait_stage(0, P)
    tdm.async_wait(0)
