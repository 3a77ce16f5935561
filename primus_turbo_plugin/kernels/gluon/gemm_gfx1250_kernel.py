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

from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_stage import (
    SCALE_BLOCK,
    a_scale_rows,
    codes,
    fetch_stage,
    left_operand,
    num_pieces,
    operand_layout,
    piece_rows,
    right_operand,
    scale_layout,
    shared_shape,
    source_of,
    tdm,
    transfers,
    wait_stage,
)
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250_tiles import (
    cdna5,
    dense_place,
    depth_place,
    rows_place,
    wmma_depth,
    wmma_layouts,
)


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
    source = source_of(A, B, place, P)
    for i in gl.static_range(P.STAGES):
        fetch_stage(A, B, source, i * P.BK, i, P)
    wait_stage(P.STAGES - 1, P)
    gl.barrier()
    slot = 0
    x = left_operand(A, slot, 0, 0, P)
    y = right_operand(B, slot, 0, P)
    for tile in range(first_tile, total, step):
        place_after = _place(tile + step, total, offsets_ptr, tiles_ptr, M, N, K, P)
        source_after = source_of(A, B, place_after, P)
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
                        x_next = left_operand(A, slot, i + 1, s, P)
                    elif s < STEPS - 1:
                        x_next = left_operand(A, slot, 0, s + 1, P)
                        y_next = right_operand(B, slot, s + 1, P)
                    else:
                        # Every wave has read this stage, and the next one has landed.
                        wait_stage(P.STAGES - 2, P)
                        gl.barrier()
                        ahead = k + P.STAGES
                        crossing = ahead >= stages
                        target = _either(crossing, source_after, source)
                        fetch_stage(A, B, target, gl.where(crossing, ahead - stages, ahead) * P.BK, slot, P)
                        x_next = left_operand(A, next_slot, 0, 0, P)
                        y_next = right_operand(B, next_slot, 0, P)
                    acc = _replaced(acc, i, _multiply(x, y, acc[i], P))
                    _pin(acc[i], P)
                    x = x_next
                    y = y_next
            slot = next_slot
        _store_tile(acc, C, place, N, a_scale, b_scale, bias_ptr, stride_sa, stride_sb, P)
        place = place_after
        source = source_after
    wait_stage(0, P)
    tdm.async_wait(0)
