"""Device functions: 1 / RMS of rows in the launch that normalises and quantises them, so that x comes from memory once (Gluon).

Layout    A launch has two kinds of programs: some compute 1 / RMS of a few whole rows, the others quantise tiles
          (quantize_shared.py). Among the tiles of one group of token tiles stand the statistics of the next group, so that a tile
          finds its rows' statistics ready, and its part of x in the L2 cache, read from memory shortly before
Order     Programs start in the order of their numbers, and statistics wait for nothing, so a tile that waits is waiting for
          programs that run. 1 / RMS says itself whether it is there: memory holds zero bits before, and never after (+0 is
          written as -0)
Numerics  as row_sums.rstd_kernel: the order of `precision.tree_sum`, correctly rounded quotient and root
"""

# Triton's compiler grows tuples by concatenation only:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from primus_turbo_plugin.kernels.triton.fp4_codes import high_half, low_half

LOG_CHUNK = gl.constexpr(12)
"""Columns that a warp holds of a row at a time: 64 words a thread of four warps and four rows."""
WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _words_layout(log_words: int) -> gl.DistributedLinearLayout:
    """[2^(13 - log_words) rows, 2^log_words words] of four warps of 32: a row in one warp, 16 bytes a load, 64 side by side.

    Lanes take low bits of a word's number, then registers, then lanes again: sums within a thread come early in the tree.
    """
    more = log_words - 7
    registers = [[0, 1], [0, 2], *([0, 16 << bit] for bit in range(more)), *([4 << bit, 0] for bit in range(4 - more))]
    lanes = [[0, 4], [0, 8], *([0, 16 << more + bit] for bit in range(3))]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0], [2, 0]], [], [1 << 13 - log_words, 1 << log_words])


@gluon.jit
def _tree(t, LOG: gl.constexpr):
    """`[rows, 2^LOG]` to `[rows, 1]` by pairs of neighbours."""
    for i in gl.static_range(LOG):
        t = gl.sum(gl.reshape(t, (t.shape[0], 1 << (LOG - i - 1), 2)), axis=2)
    return t


@gluon.jit
def row_statistics(x_ptr, rstd_ptr, number, rows, cols8, row_stride16, eps, FRONT: gl.constexpr):
    """1 / RMS of `FRONT.stats_rows` rows of words, from row number * stats_rows on."""
    LOG_WORDS: gl.constexpr = min(FRONT.log_hidden, LOG_CHUNK) - 1
    LAYOUT: gl.constexpr = _words_layout(LOG_WORDS)
    AT_ONCE: gl.constexpr = 1 << (13 - LOG_WORDS)
    LOG_CHUNKS: gl.constexpr = max(FRONT.log_hidden - LOG_CHUNK, 0)
    for step in range(FRONT.stats_rows // AT_ONCE):
        row = number * FRONT.stats_rows + step * AT_ONCE + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
        sums = ()
        for chunk in gl.static_range(1 << LOG_CHUNKS):
            word = (chunk << LOG_WORDS) + gl.arange(0, 1 << LOG_WORDS, gl.SliceLayout(0, LAYOUT))
            place = x_ptr + row.to(gl.int64)[:, None] * (row_stride16 * 4) + word[None, :]
            words = gl.load(place, mask=(row < rows)[:, None] & (word < cols8 * 4)[None, :], other=0)
            low = low_half(words)
            high = high_half(words)
            sums = sums + (_tree(low * low + high * high, LOG_WORDS),)
        for level in gl.static_range(LOG_CHUNKS):
            pairs = ()
            for i in gl.static_range(1 << (LOG_CHUNKS - level - 1)):
                pairs = pairs + (sums[2 * i] + sums[2 * i + 1],)
            sums = pairs
        mean = gl.div_rn(gl.reshape(sums[0], (AT_ONCE,)), (cols8 * 8).to(gl.float32))
        bits = gl.div_rn(1.0, gl.sqrt_rn(mean + eps)).to(gl.int32, bitcast=True)
        rstd = gl.where(bits == 0, -2147483648, bits).to(gl.float32, bitcast=True)
        first = number * FRONT.stats_rows + step * AT_ONCE
        row = first + gl.arange(0, AT_ONCE, rstd.type.layout)
        gl.store(rstd_ptr + row, rstd, mask=row < rows)


@gluon.jit
def await_rstd(rstd_ptr, token0, rows, TOKENS: gl.constexpr):
    """Waits until 1 / RMS of TOKENS rows from token0 on is there."""
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [TOKENS // WARPS], [WARPS], [0])
    token = token0 + gl.arange(0, TOKENS, ONE_EACH)
    missing = 1
    while missing > 0:
        bits = gl.load(rstd_ptr + token, mask=token < rows, other=1.0, volatile=True).to(gl.int32, bitcast=True)
        missing = gl.max((bits == 0).to(gl.int32), axis=0)


@gluon.jit
def role(pid, token_tiles, col_tiles, GROUP: gl.constexpr, TOKENS: gl.constexpr, FRONT: gl.constexpr):
    """(number, whether it is one of statistics) of a program; numbers beyond the last row or tile have nothing to do."""
    STATISTICS: gl.constexpr = GROUP * TOKENS // FRONT.stats_rows
    later = pid - STATISTICS
    both = STATISTICS + GROUP * col_tiles
    group = later // both
    within = later % both
    before = within * STATISTICS // both  # spread evenly among the tiles
    is_statistics = (within + 1) * STATISTICS // both > before
    number = gl.where(is_statistics, (group + 1) * STATISTICS + before, group * GROUP * col_tiles + within - before)
    first = later < 0
    return gl.where(first, pid, number), first | is_statistics


@gluon.constexpr_function
def programs(token_tiles: int, col_tiles: int, group: int, tokens: int, stats_rows: int) -> int:
    """How many programs a launch has."""
    statistics = group * tokens // stats_rows
    return statistics + -(-token_tiles // group) * (statistics + group * col_tiles)
