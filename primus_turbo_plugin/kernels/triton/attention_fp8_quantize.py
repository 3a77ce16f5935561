"""Codes, scales and decoded copies of one of attention's tensors (Triton kernel); numbers: kernels/reference/attention_fp8.py.

Layout    slots: block t of run p (a sequence, or a zig-zag chunk) has slot start(p) // BLOCK_TOKENS + p + t, as the tiles of the
          attention kernels have (attention_tile.py). Codes lie by slots, [batch * heads, slots * BLOCK_TOKENS, columns], zero
          behind the run's end and beyond `DIM`: whatever the packed lengths, every tile is aligned, dense and needs no mask
          codes_t holds them the other way round, [batch * heads, columns, slots * BLOCK_TOKENS]: FP8 products take operands
          whose contraction is dense, and probabilities @ v contracts over tokens
          values are decoded, bf16, [batch, tokens, heads, dim], for kernels that multiply in bf16
Cost      reads x once, writes 1 byte (codes) to 4 (with both values and codes_t) an element: memory-bound
Numerics  exact but for the rounding to the element; kernels/reference has the same bits
"""

from __future__ import annotations

import triton
import triton.language as tl

from primus_turbo_plugin.kernels.triton.attention_tile import find_piece, place_of
from primus_turbo_plugin.kernels.triton.rounding import abs_bits


@triton.jit
def rounded(y, MANTISSA: tl.constexpr, EMIN: tl.constexpr):
    """y to the nearest number with MANTISSA bits behind the first, ties to even, the step constant below the biased exponent
    EMIN. No -0."""
    magnitude = tl.abs(y)
    binade = (tl.maximum(abs_bits(y), EMIN << 23) & 0x7F800000).to(tl.float32, bitcast=True)
    anchor: tl.constexpr = 2.0 ** (23 - MANTISSA)
    shifted = tl.fma(binade, anchor, magnitude)
    nearest = tl.fma(binade, -anchor, shifted)
    return tl.where(y < 0.0, 0.0 - nearest, nearest)


@triton.jit
def _run_of(
    slot, cu, starts, tokens, sequences, slots, cp_rank, cp_size,
    PACKED: tl.constexpr, HALVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(start, length, room, first) of the block in a slot: its run's first token, tokens, tokens with padding, and the block's
    first token in it."""
    if PACKED:
        piece = find_piece(slot, starts, sequences, cp_size, HALVES, BLOCK)
        sequence = piece // HALVES
        is_sequence = sequence < sequences
        this = tl.minimum(sequence, sequences - 1)
        begin = tl.load(starts + this)
        behind = tl.load(starts + this + 1)
        length = tl.load(cu + this + 1) - tl.load(cu + this)
        start = begin
        room = behind - begin
        if HALVES == 2:
            half = piece % 2
            room = room // cp_size // 2
            start = begin // cp_size + half * room
            number = tl.where(half == 0, cp_rank, 2 * cp_size - 1 - cp_rank)
            length = tl.maximum(tl.minimum(room, length - number * room), 0)
        tail = behind // cp_size
        start = tl.where(is_sequence, start, tail)
        length = tl.where(is_sequence, length, 0)
        room = tl.where(is_sequence, room, tokens - tail)
        first = (slot - start // BLOCK - piece) * BLOCK
    else:
        each = slots // HALVES
        room = tokens // HALVES
        start = slot // each * room
        length = room
        first = slot % each * BLOCK
    return start, length, room, first


@triton.jit
def attention_quantize_kernel(
    x, codes, codes_t, scales, values, cu, starts,
    heads, tokens, sequences, slots, cp_rank, cp_size,
    stride_xb, stride_xs, stride_xh, stride_xd, stride_vb, stride_vs, stride_vh, stride_vd,
    DIM: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, COLUMNS_T: tl.constexpr, BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, MIN_EXPONENT: tl.constexpr, HALF: tl.constexpr,
    PACKED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Programs: (slots, heads, batch); a slot without tokens becomes a block of zeros. Each of `codes`, `codes_t` and
    `values` may be None. HALF: codes are stored as numbers of half the value, which in FNUZ have the bits that OCP has for
    the whole."""
    slot = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    start, length, room, first = _run_of(
        slot, cu, starts, tokens, sequences, slots, cp_rank, cp_size, PACKED, HALVES, BLOCK
    )
    rows = tl.arange(0, BLOCK)
    cols = tl.arange(0, D)
    x += place_of(batch, start + first, head, stride_xb, stride_xs, stride_xh)
    places = rows.to(tl.int64)[:, None] * stride_xs + cols.to(tl.int64)[None, :] * stride_xd
    tile = tl.load(x + places, mask=(rows < length - first)[:, None] & (cols < DIM)[None, :], other=0.0)
    tile = tile.to(tl.float32)

    # The largest mantissa of both elements is 1.75: above it the scale's exponent is one more.
    amax = tl.max(tl.max(abs_bits(tile), 1), 0)
    exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - 127 - EMAX, MIN_EXPONENT)
    is_number = amax < 0x7F800000
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    code = rounded(tl.where(is_number, tile * inverse, 0.0), MANTISSA, EMIN)
    line = tl.cast(batch, tl.int64) * heads + head
    tl.store(scales + line * slots + slot, tl.where(is_number, scale, float("nan")))

    if values is not None:
        values += place_of(batch, start + first, head, stride_vb, stride_vs, stride_vh)
        places = rows.to(tl.int64)[:, None] * stride_vs + cols[None, :] * stride_vd
        decoded = tl.where(is_number, code * scale, float("nan"))
        inside = (rows < room - first)[:, None] & (cols < DIM)[None, :]
        tl.store(values + places, decoded.to(values.dtype.element_ty), mask=inside)
    if HALF:
        code = code * 0.5
    if codes is not None:
        codes += (line * slots + slot) * BLOCK * COLUMNS
        stored = code.to(codes.dtype.element_ty)
        tl.store(codes + rows[:, None] * COLUMNS + cols[None, :], stored, mask=(cols < COLUMNS)[None, :])
    if codes_t is not None:
        wide = tl.cast(slots, tl.int64) * BLOCK
        codes_t += line * COLUMNS_T * wide + slot * BLOCK
        stored = code.to(codes_t.dtype.element_ty)
        places = cols.to(tl.int64)[:, None] * wide + rows[None, :]
        tl.store(codes_t + places, tl.trans(stored), mask=(cols < COLUMNS_T)[:, None])
