"""Quantise bf16 into a rowwise and a columnwise copy, by one program a tile that passes through shared memory (Gluon).

Math      row: rotate 32 columns or not, scale, round.  column: the same for 32 tokens.  In front of it, if asked for, RMS norm or
          SwiGLU, rounded to bf16 once; beside it, sums of x over 32 tokens for a bias gradient
Layout    x [tokens, cols] bf16, read as words of two columns. A program is TB x 32 tokens by 128 columns:
          1. 16 bytes a thread from device memory (asynchronously where nothing is in front) into shared memory, swizzled;
          2. rows: a thread takes the 16 words of a token's block, a warp a column block of 32;
          3. columns: a thread takes 32 tokens of a word, a warp a token block.
          So a block lies within a thread, and codes cross shared memory once more to be stored 16 bytes a thread
Cost      2 + 1 + 1/16 bytes an element for two MXFP4 copies, 2 + 2 + 1/16 for MXFP8. Instructions an element on sm_90: MXFP4 with
          H16 columns 21, MXFP8 11; docs/performance.md compares that with what the GPU issues
Numerics  quantize_block.py; same bits as kernels/reference/quantize.py
Limits    cols a multiple of 8, unit column stride, rows 16-byte aligned (`quantize_launch.takes_words`); else quantize_tile.py
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from primus_turbo_plugin.kernels.triton.quantize_block import (
    amax_of_words,
    bf16_scale_byte,
    codes_of_values,
    codes_of_words,
    column_values,
    join_last,
    rotated,
    row_values,
    scale_of_block,
    split_last,
    tree_sum,
    upper,
)
from primus_turbo_plugin.kernels.triton.quantize_front import norm_words, swiglu_words
from primus_turbo_plugin.kernels.triton.quantize_scales import fp8_column_scale, fp8_row_scale, store_bytes

WORDS = gl.constexpr(64)
"""Words of two bf16 across a tile: 128 columns."""
ROW_BLOCKS = gl.constexpr(4)
"""Blocks of 32 columns across a tile. The kernel runs with 4 warps, or with the 2 that 64 tokens by 64 lanes occupy."""


@gluon.constexpr_function
def _bases(count: int, axis: int, step: int = 1) -> list[list[int]]:
    """Steps of a power of two `count` of places along an axis, `step` apart."""
    steps = [step << bit for bit in range(count.bit_length() - 1)]
    return [[size, 0] if axis == 0 else [0, size] for size in steps]


@gluon.constexpr_function
def row_layout(lanes: int, num_warps: int) -> gl.DistributedLinearLayout:
    """[lanes tokens, 64 words]: a thread holds the 16 words of a token's block, a warp one or several column blocks."""
    warps, more = _bases(num_warps, 1, 16), _bases(4 // num_warps, 1, 16 * num_warps)
    return gl.DistributedLinearLayout(_bases(16, 1) + more, _bases(lanes, 0), warps, [], [lanes, 64])


@gluon.constexpr_function
def column_layout(lanes: int, token_blocks: int, across: int) -> gl.DistributedLinearLayout:
    """[32 token_blocks tokens, across words]: a thread holds 32 tokens of a word, a warp a token block."""
    warps = _bases(token_blocks, 0, 32) + _bases(across // lanes, 1, lanes)
    return gl.DistributedLinearLayout(_bases(32, 0), _bases(lanes, 1), warps, [], [32 * token_blocks, across])


@gluon.constexpr_function
def store_layout(words: int, lanes: int, num_warps: int) -> gl.BlockedLayout:
    """Rows of `words` words, 16 bytes a thread."""
    return gl.BlockedLayout([1, 4], [lanes // (words // 4), words // 4], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def scale_layout(blocks: int, lanes: int, num_warps: int) -> gl.BlockedLayout:
    """Rows of `blocks` bytes, one row a thread."""
    return gl.BlockedLayout([1, blocks], [lanes, 1], [num_warps, 1], [1, 0])


@gluon.jit
def _over_rows(amax):
    """`[a, b]` with 32 rows at a time replaced by their maximum."""
    t = gl.reshape(amax, (amax.shape[0] // 32, 32, amax.shape[1]))
    t = gl.maximum(t, gl.max(t, axis=1)[:, None, :])
    return gl.convert_layout(gl.reshape(t, amax.shape), amax.type.layout)


@gluon.jit
def _over_words(amax):
    """`[a, b]` with 16 words at a time (32 columns) replaced by their maximum."""
    t = gl.reshape(amax, (amax.shape[0], amax.shape[1] // 16, 16))
    t = gl.maximum(t, gl.max(t, axis=2)[:, :, None])
    return gl.convert_layout(gl.reshape(t, amax.shape), amax.type.layout)


@gluon.jit
def _padded8(eights, META: gl.constexpr):
    """Groups of 8 elements of a stored contraction axis."""
    UNIT: gl.constexpr = max(META.multiple // 8, 1)
    return (eights + (UNIT - 1)) // UNIT * UNIT


@gluon.jit
def _store_words(t, ptr, row0, word0, rows, row_words, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """Store `[a, b]` words of codes at rows row0..., words word0... of a row-major tensor."""
    t = gl.convert_layout(t, LAYOUT)
    row = row0 + gl.arange(0, t.shape[0], gl.SliceLayout(1, LAYOUT))
    word = word0 + gl.arange(0, t.shape[1], gl.SliceLayout(0, LAYOUT))
    place = ptr + row.to(gl.int64)[:, None] * row_words + word[None, :]
    if EVEN:
        gl.store(place, t)
    else:
        gl.store(place, t, mask=(row < rows)[:, None] & (word < row_words)[None, :])


@gluon.jit
def _row_copy(
    smem, tile_amax, signs_ptr, data_ptr, scale_ptr, amax_ptr, k0, k1, c2, c3, token_tile, col_tile, rows, cols8,
    META: gl.constexpr, SHUFFLED: gl.constexpr, LANES: gl.constexpr, EVEN: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Codes and scales of the rowwise copy of the tile, LANES tokens at a time."""
    LOG_WORDS: gl.constexpr = 2 if META.codes_per_byte == 2 else 3
    LAYOUT: gl.constexpr = row_layout(LANES, gl.num_warps())
    SCALES: gl.constexpr = scale_layout(ROW_BLOCKS, LANES, gl.num_warps())
    STORES: gl.constexpr = store_layout(ROW_BLOCKS << LOG_WORDS, LANES, gl.num_warps())
    eights = _padded8(cols8, META)
    if EVEN:  # products of 4, so that Triton knows their divisibility
        blocks = cols8 // 16 * 4
        row_words = cols8 // 16 * (ROW_BLOCKS << LOG_WORDS)
    else:
        blocks = (cols8 + 3) // 4
        row_words = eights * (2 // META.codes_per_byte)
    for i in gl.static_range(smem.shape[0] // LANES):
        row0 = token_tile * smem.shape[0] + i * LANES
        t = smem.slice(i * LANES, LANES, 0).load(LAYOUT)
        words = split_last(gl.reshape(t, (LANES, ROW_BLOCKS, 16)), 4)
        token = row0 + gl.arange(0, LANES, gl.SliceLayout(1, words[0].type.layout))
        block = col_tile * ROW_BLOCKS + gl.arange(0, ROW_BLOCKS, gl.SliceLayout(0, words[0].type.layout))
        draw = (token.to(gl.int64)[:, None] * (eights * 2) + block[None, :] * 8, k0, k1, c2, c3)
        if META.is_mx:
            if META.hadamard:
                values, amax = rotated(row_values(words), signs_ptr, META, TARGET)
                byte = scale_of_block(amax, META)
                codes = codes_of_values(values, byte, draw, META, TARGET)
            else:
                pair = amax_of_words(words, TARGET)
                amax = gl.maximum(pair & 0xFFFF, upper(pair))
                if META.block_outer == 32:
                    amax = _over_rows(amax)
                if META.codes_per_byte == 2 and not META.stochastic:
                    codes, byte = codes_of_words(words, amax, META, TARGET)
                else:
                    byte = bf16_scale_byte(amax, META)
                    codes = codes_of_values(row_values(words), byte, draw, META, TARGET)
            store_bytes(
                byte, scale_ptr, row0, col_tile * ROW_BLOCKS, rows, blocks, META.block_outer, SHUFFLED, SCALES, EVEN
            )
        else:
            scale = fp8_row_scale(
                words, tile_amax, amax_ptr, scale_ptr, token, token_tile, col_tile, i == 0, rows, cols8, META, TARGET
            )
            codes = codes_of_values(row_values(words), scale, draw, META, TARGET)
        codes = gl.reshape(join_last(codes, LOG_WORDS), (LANES, ROW_BLOCKS << LOG_WORDS))
        _store_words(codes, data_ptr, row0, col_tile * (ROW_BLOCKS << LOG_WORDS), rows, row_words, STORES, EVEN)


@gluon.jit
def _column_codes(
    words, tile_amax, signs_ptr, scale_ptr, amax_ptr, k0, k1, c2, c3, col, token_tile, col_tile,
    first: gl.constexpr, rows, cols8, META: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """(words of codes of the lower and of the upper column, their E8M0 bytes if MX) of 32 words down the tokens."""
    TB: gl.constexpr = words[0].shape[0]
    cols = cols8 * 8
    fours = (rows + 7) // 8 * 2 if META.multiple == 1 else _padded8((rows + 7) // 8, META) * 2
    token_block = token_tile * TB + gl.arange(0, TB, gl.SliceLayout(1, words[0].type.layout))
    draw_low = (col.to(gl.int64)[None, :] * fours + token_block[:, None] * 8, k0, k1, c2, c3)
    draw_high = (draw_low[0] + fours, k0, k1, c2, c3)
    low = column_values(words, False)
    high = column_values(words, True)
    scale_low = col
    scale_high = col
    if META.hadamard:
        low, amax = rotated(low, signs_ptr, META, TARGET)
        scale_low = scale_of_block(amax, META)
        low = codes_of_values(low, scale_low, draw_low, META, TARGET)
        high, amax = rotated(high, signs_ptr, META, TARGET)
        scale_high = scale_of_block(amax, META)
        high = codes_of_values(high, scale_high, draw_high, META, TARGET)
    else:
        pair = amax_of_words(words, TARGET)
        if META.is_mx:
            if META.block_outer == 32:
                shared = _over_words(gl.maximum(pair & 0xFFFF, upper(pair)))
                pair = shared | (shared << 16)
            scale_low = bf16_scale_byte(pair & 0xFFFF, META)
            scale_high = bf16_scale_byte(upper(pair), META)
        else:
            scale_low = fp8_column_scale(
                pair, tile_amax, amax_ptr, scale_ptr, col, token_tile, col_tile, first, cols, rows, False, META
            )
            scale_high = fp8_column_scale(
                pair, tile_amax, amax_ptr, scale_ptr, col + 1, token_tile, col_tile, False, cols, rows, True, META
            )
        low = codes_of_values(low, scale_low, draw_low, META, TARGET)
        high = codes_of_values(high, scale_high, draw_high, META, TARGET)
    return low, high, scale_low, scale_high


@gluon.jit
def _column_copy(
    words, tile_amax, signs_ptr, data_ptr, scale_ptr, amax_ptr, k0, k1, c2, c3, col0, token_tile, col_tile,
    first: gl.constexpr, rows, cols8,
    META: gl.constexpr, SHUFFLED: gl.constexpr, LANES: gl.constexpr, EVEN: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Codes and scales of the columnwise copy of some words, `[token blocks, words]`, columns from `col0`."""
    TB: gl.constexpr = words[0].shape[0]
    ACROSS: gl.constexpr = words[0].shape[1]
    LOG_WORDS: gl.constexpr = 2 if META.codes_per_byte == 2 else 3
    STORES: gl.constexpr = store_layout(TB << LOG_WORDS, LANES, gl.num_warps())
    SCALES: gl.constexpr = scale_layout(TB, LANES, gl.num_warps())
    if EVEN:  # products, so that Triton knows their divisibility
        blocks = rows // (TB * 32) * TB
        col_words = rows // (TB * 32) * (TB << LOG_WORDS)
    else:
        blocks = (rows + 31) // 32
        col_words = _padded8((rows + 7) // 8, META) * (2 // META.codes_per_byte)
    col = col0 + 2 * gl.arange(0, ACROSS, gl.SliceLayout(0, words[0].type.layout))
    low, high, scale_low, scale_high = _column_codes(
        words, tile_amax, signs_ptr, scale_ptr, amax_ptr, k0, k1, c2, c3, col, token_tile, col_tile,
        first, rows, cols8, META, TARGET,
    )  # fmt: skip
    # [token blocks, words, words of codes] of two columns -> [columns, token blocks x words of codes]
    codes = gl.permute(gl.join(join_last(low, LOG_WORDS), join_last(high, LOG_WORDS)), (1, 3, 0, 2))
    codes = gl.reshape(codes, (ACROSS * 2, TB << LOG_WORDS))
    _store_words(codes, data_ptr, col0, token_tile * (TB << LOG_WORDS), cols8 * 8, col_words, STORES, EVEN)
    if META.is_mx:
        byte = gl.reshape(gl.permute(gl.join(scale_low, scale_high), (1, 2, 0)), (ACROSS * 2, TB))
        store_bytes(byte, scale_ptr, col0, token_tile * TB, cols8 * 8, blocks, META.block_outer, SHUFFLED, SCALES, EVEN)


@gluon.jit
def _store_sums(words, sums_ptr, token_tile, col0, cols8, LANES: gl.constexpr):
    """Sums of the tile's tokens, fp32 `[token tiles, cols]`: the tree of `precision.tree_sum` up to this height."""
    TB: gl.constexpr = words[0].shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([TB, 1], [1, LANES], [1, gl.num_warps()], [0, 1])
    sums = gl.join(tree_sum(column_values(words, False)), tree_sum(column_values(words, True)))
    sums = gl.convert_layout(gl.reshape(sums, (TB, sums.shape[1] * 2)), LAYOUT)
    height: gl.constexpr = TB // 2
    sums = gl.sum(gl.reshape(sums, (height, 2, sums.shape[1])), axis=1)
    if height == 2:
        sums = gl.sum(sums, axis=0)
    else:
        sums = gl.reshape(sums, (sums.shape[1],))
    col = col0 + gl.arange(0, sums.shape[0], sums.type.layout)
    gl.store(sums_ptr + token_tile.to(gl.int64) * (cols8 * 8) + col, sums, mask=col < cols8 * 8)


@gluon.jit
def _load_tile(smem, x_ptr, token, word, rows, cols8, row_stride16, EVEN: gl.constexpr, TARGET: gl.constexpr):
    """The tile of x into shared memory: asynchronously on sm_90 where it has no tail."""
    place = x_ptr + token.to(gl.int64)[:, None] * (row_stride16 * 4) + word[None, :]
    if EVEN and TARGET == "sm90":
        async_copy.async_copy_global_to_shared(smem, place)
        async_copy.commit_group()
    elif EVEN:
        smem.store(gl.load(place))
    else:
        smem.store(gl.load(place, mask=(token < rows)[:, None] & (word < cols8 * 4)[None, :], other=0))


@gluon.jit
def _norm_in_place(
    smem,
    gamma_ptr,
    rstd_ptr,
    token_tile,
    word,
    rows,
    cols8,
    FRONT: gl.constexpr,
    LOADS: gl.constexpr,
    EVEN: gl.constexpr,
    TARGET: gl.constexpr,
):
    """RMS norm of a tile, 32 tokens at a time: few enough to stay in registers."""
    inside = word < cols8 * 4
    even = gl.load(gamma_ptr + word * 2, mask=inside, other=0.0).to(gl.float32)[None, :]
    odd = gl.load(gamma_ptr + word * 2 + 1, mask=inside, other=0.0).to(gl.float32)[None, :]
    for i in gl.static_range(smem.shape[0] // 32):
        part = smem.slice(i * 32, 32, 0)
        token = token_tile * smem.shape[0] + i * 32 + gl.arange(0, 32, gl.SliceLayout(1, LOADS))
        rstd = gl.load(rstd_ptr + token, mask=token < rows, other=0.0)[:, None]
        y = norm_words(part.load(LOADS), rstd, even, odd, FRONT, TARGET)
        if not EVEN:  # 0 * gamma may be -0, which padding is not
            y = gl.where((token < rows)[:, None] & inside[None, :], y, 0)
        part.store(y)


@gluon.jit
def _swiglu_in_place(gate, up, LOADS: gl.constexpr, TARGET: gl.constexpr):
    """silu(gate) * up of two tiles into the first, 32 tokens at a time."""
    for i in gl.static_range(gate.shape[0] // 32):
        part = gate.slice(i * 32, 32, 0)
        part.store(swiglu_words(part.load(LOADS), up.slice(i * 32, 32, 0).load(LOADS), TARGET))


@gluon.jit
def _tile_of_program(token_tiles, col_tiles, GROUP: gl.constexpr, REVERSED: gl.constexpr):
    """(token tile, column tile): GROUP token tiles side by side, whose pieces of a columnwise row meet in the L2 cache."""
    pid = gl.program_id(0)
    if REVERSED:  # x was read from its first row to its last just before: the last ones are still in the L2 cache
        pid = token_tiles * col_tiles - 1 - pid
    first = pid // (GROUP * col_tiles) * GROUP
    size = gl.minimum(token_tiles - first, GROUP)
    within = pid % (GROUP * col_tiles)
    return first + within % size, within // size


_KEY_WORDS = ("row_k0", "row_k1", "row_c2", "row_c3", "col_k0", "col_k1", "col_c2", "col_c3")


@gluon.jit(do_not_specialize=_KEY_WORDS)
def quantize_shared_kernel(
    x_ptr, gamma_ptr, rstd_ptr,
    row_data, row_scale, row_amax, row_signs,
    col_data, col_scale, col_amax, col_signs,
    sums_ptr,
    rows, cols8, row_stride16,
    row_k0, row_k1, row_c2, row_c3, col_k0, col_k1, col_c2, col_c3,
    ROW: gl.constexpr, COL: gl.constexpr, FRONT: gl.constexpr, SUMS: gl.constexpr, SHUFFLED: gl.constexpr,
    REVERSED: gl.constexpr,
    TB: gl.constexpr, GROUP: gl.constexpr, LANES: gl.constexpr, EVEN: gl.constexpr, TARGET: gl.constexpr,
):  # fmt: skip
    """Both copies of 32 TB tokens by 128 columns.

    `x_ptr`, `row_data` and `col_data` are int32: two bf16, eight FP4 or four FP8 codes. `cols8` counts groups of 8 columns of
    what is quantised, `row_stride16` is x's row stride in 16-byte units.
    """
    TOKENS: gl.constexpr = TB * 32
    LOADS: gl.constexpr = gl.BlockedLayout([1, 4], [LANES // 16, 16], [gl.num_warps(), 1], [1, 0])
    token_tile, col_tile = _tile_of_program((rows + (TOKENS - 1)) // TOKENS, (cols8 + 15) // 16, GROUP, REVERSED)
    smem = gl.allocate_shared_memory(gl.int32, [TOKENS, WORDS], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    token = token_tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, LOADS))
    word = col_tile * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, LOADS))
    _load_tile(smem, x_ptr, token, word, rows, cols8, row_stride16, EVEN, TARGET)
    if FRONT is not None and FRONT.kind == "swiglu":
        up = gl.allocate_shared_memory(gl.int32, [TOKENS, WORDS], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
        _load_tile(up, x_ptr + cols8 * 4, token, word, rows, cols8, row_stride16, EVEN, TARGET)
    if EVEN and TARGET == "sm90":
        async_copy.wait_group(0)
    if FRONT is not None:
        if FRONT.kind == "rms_norm":
            _norm_in_place(smem, gamma_ptr, rstd_ptr, token_tile, word, rows, cols8, FRONT, LOADS, EVEN, TARGET)
        else:
            _swiglu_in_place(smem, up, LOADS, TARGET)
    tile_amax = 0
    if _needs_tile_amax(ROW, COL):
        bits = smem.load(LOADS) & 0x7FFF7FFF
        tile_amax = gl.max(gl.max(gl.maximum(bits & 0xFFFF, bits >> 16), axis=1), axis=0) << 16
    if ROW is not None:
        _row_copy(
            smem, tile_amax, row_signs, row_data, row_scale, row_amax, row_k0, row_k1, row_c2, row_c3,
            token_tile, col_tile, rows, cols8, ROW, SHUFFLED, LANES, EVEN, TARGET,
        )  # fmt: skip
    if COL is not None or SUMS:
        ACROSS: gl.constexpr = LANES * gl.num_warps() // TB
        LAYOUT: gl.constexpr = column_layout(LANES, TB, ACROSS)
        for h in gl.static_range(WORDS // ACROSS):
            tile = smem.slice(h * ACROSS, ACROSS, 1).load(LAYOUT)
            words = split_last(gl.permute(gl.reshape(tile, (TB, 32, ACROSS)), (0, 2, 1)), 5)
            col0 = (col_tile * WORDS + h * ACROSS) * 2
            if SUMS:
                _store_sums(words, sums_ptr, token_tile, col0, cols8, LANES)
            if COL is not None:
                _column_copy(
                    words, tile_amax, col_signs, col_data, col_scale, col_amax, col_k0, col_k1, col_c2, col_c3,
                    col0, token_tile, col_tile, h == 0, rows, cols8, COL, SHUFFLED, LANES, EVEN, TARGET,
                )  # fmt: skip


@gluon.constexpr_function
def _needs_tile_amax(row, col) -> bool:
    return any(meta is not None and meta.block_outer == 128 for meta in (row, col))
