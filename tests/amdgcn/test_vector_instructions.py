"""Vector instructions against references written on Python integers and IEEE arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.assembly.operands import EXEC, VCC
from tests.amdgcn.single import run_lines

MASK = 0xFFFFFFFF


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def words(numbers: np.random.Generator, lanes: int) -> np.ndarray:
    """Random words with the awkward ones among them."""
    result = numbers.integers(0, 2**32, lanes, dtype=np.uint64).astype(np.uint32)
    result[:6] = [0, 1, 0x7FFFFFFF, 0x80000000, MASK, 33]
    return numbers.permutation(result)


def byte_of(a: int, b: int, code: int) -> int:
    """One byte of v_perm_b32, for selectors the compiler uses."""
    if code >= 13:
        return 0xFF
    if code == 12:
        return 0
    if code >= 8:
        return 0xFF if ((a << 32 | b) >> (16 * (code - 8) + 15)) & 1 else 0
    return (a << 32 | b) >> (8 * code) & 0xFF


INTEGER: dict[str, Callable[[int, int, int], int]] = {
    "v_add_u32 v0, v1, v2": lambda a, b, c: a + b,
    "v_subrev_u32 v0, v1, v2": lambda a, b, c: b - a,
    "v_add3_u32 v0, v1, v2, v3": lambda a, b, c: a + b + c,
    "v_mul_lo_u32 v0, v1, v2": lambda a, b, c: a * b,
    "v_mul_hi_u32 v0, v1, v2": lambda a, b, c: a * b >> 32,
    "v_mul_hi_i32 v0, v1, v2": lambda a, b, c: signed(a) * signed(b) >> 32,
    "v_mul_i32_i24 v0, v1, v2": lambda a, b, c: signed(a & 0xFFFFFF, 24) * signed(b & 0xFFFFFF, 24),
    "v_mad_u32_u24 v0, v1, v2, v3": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_lshl_add_u32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31)) + c,
    "v_lshl_or_b32 v0, v1, v2, v3": lambda a, b, c: (a << (b & 31) & MASK) | c,
    "v_and_or_b32 v0, v1, v2, v3": lambda a, b, c: a & b | c,
    "v_xad_u32 v0, v1, v2, v3": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32 v0, v1, v2, v3": lambda a, b, c: a & b | ~a & c,
    "v_bfe_u32 v0, v1, v2, v3": lambda a, b, c: a >> (b & 31) & ((1 << (c & 31)) - 1),
    "v_lshlrev_b32 v0, v1, v2": lambda a, b, c: b << (a & 31),
    "v_ashrrev_i32 v0, v1, v2": lambda a, b, c: signed(b) >> (a & 31),
    "v_alignbit_b32 v0, v1, v2, v3": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_max3_i32 v0, v1, v2, v3": lambda a, b, c: max(signed(a), signed(b), signed(c)),
    "v_med3_i32 v0, v1, v2, v3": lambda a, b, c: sorted((signed(a), signed(b), signed(c)))[1],
    "v_min_u32 v0, v1, v2": lambda a, b, c: min(a, b),
    "v_min3_i16 v0, v1, v2, v3": lambda a, b, c: min(signed(x & 0xFFFF, 16) for x in (a, b, c)) & 0xFFFF,
    "v_med3_u16 v0, v1, v2, v3": lambda a, b, c: sorted(x & 0xFFFF for x in (a, b, c))[1],
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0x96": lambda a, b, c: a ^ b ^ c,
    "v_bitop3_b32 v0, v1, v2, v3 bitop3:0xca": lambda a, b, c: a & b | ~a & c,
    "v_sub_u32 v0, v1, v2 clamp": lambda a, b, c: max(a - b, 0),
    "v_add_u32 v0, v1, v2 clamp": lambda a, b, c: min(a + b, MASK),
    "v_prng_b32 v0, v1": lambda a, b, c: a << 1 ^ (197 if a >> 31 else 0),
    "v_add_u16 v0, v1, v2": lambda a, b, c: (a + b) & 0xFFFF,
    "v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_2": (
        lambda a, b, c: a >> 16 & (b >> 16 & 0xFF)
    ),
    "v_add_u32_sdwa v0, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_0": (
        lambda a, b, c: (((a >> 16 & 0xFF) ^ 0x80) - 0x80) + (b & 0xFFFF)
    ),
    "v_mul_i32_i24_sdwa v0, v1, sext(v2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_1": (
        lambda a, b, c: (a & 0xFF) * ((b >> 16 ^ 0x8000) - 0x8000)
    ),
    "v_lshlrev_b32_sdwa v0, v1, sext(v2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3": (
        lambda a, b, c: ((b >> 24 ^ 0x80) - 0x80) << (a & 31)
    ),
    "v_or_b32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 src1_sel:BYTE_3": (
        lambda a, b, c: 0xDEAD00EF | ((a & 0xFF) | (b >> 24)) << 8
    ),
}


@pytest.mark.parametrize("text", INTEGER)
def test_integer_instructions(text: str, numbers: np.random.Generator) -> None:
    sources = [words(numbers, 64) for _ in range(3)]
    old = np.full(64, 0xDEADBEEF, np.uint32)
    waves = run_lines("gfx950", text, vector={0: old, 1: sources[0], 2: sources[1], 3: sources[2]})
    want = [INTEGER[text](int(a), int(b), int(c)) & MASK for a, b, c in zip(*sources)]
    assert waves.vgpr[0, 0].tolist() == want


def test_byte_permutation_including_sign_and_constant_selectors(numbers: np.random.Generator) -> None:
    a, b = words(numbers, 64), words(numbers, 64)
    selector = numbers.integers(0, 16, (64, 4)).astype(np.uint32)
    code = (selector << np.array([0, 8, 16, 24], np.uint32)).sum(axis=1, dtype=np.uint32)
    waves = run_lines("gfx950", "v_perm_b32 v0, v1, v2, v3", vector={1: a, 2: b, 3: code})
    want = [
        sum(byte_of(int(x), int(y), int(s)) << 8 * i for i, s in enumerate(row)) for x, y, row in zip(a, b, selector)
    ]
    assert waves.vgpr[0, 0].tolist() == want


def test_carries_chain_to_64_bit_sums_and_set_the_mask(numbers: np.random.Generator) -> None:
    low, high, other = (words(numbers, 64) for _ in range(3))
    lines = "v_add_co_u32 v0, vcc, v1, v3\nv_addc_co_u32 v4, vcc, 0, v2, vcc"
    waves = run_lines("gfx950", lines, vector={1: low, 2: high, 3: other})
    total = low.astype(np.uint64) + (high.astype(np.uint64) << np.uint64(32)) + other
    assert (
        waves.vgpr[0, 0].astype(np.uint64) | waves.vgpr[4, 0].astype(np.uint64) << np.uint64(32)
    ).tolist() == total.tolist()
    overflowed = (low.astype(np.uint64) + other > MASK) & (high == MASK)
    mask = int(waves.sgpr[VCC, 0]) | int(waves.sgpr[VCC + 1, 0]) << 32
    assert [bool(mask >> i & 1) for i in range(64)] == overflowed.tolist()


FLOAT: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "v_add_f32 v0, v1, -v2": lambda a, b, c: a - b,
    "v_mul_f32 v0, |v1|, v2": lambda a, b, c: np.abs(a) * b,
    "v_max3_f32 v0, v1, v2, v3": lambda a, b, c: np.fmax(np.fmax(a, b), c),
    "v_med3_f32 v0, v1, v2, v3": lambda a, b, c: np.sort(np.stack([a, b, c]), axis=0)[1],
    "v_rndne_f32 v0, v1": lambda a, b, c: np.rint(a),
    "v_mul_f32 v0, v1, v2 mul:2": lambda a, b, c: a * b * np.float32(2),
    "v_add_f32 v0, v1, v2 clamp": lambda a, b, c: np.clip(a + b, 0, 1),
    "v_ldexp_f32 v0, v1, 5": lambda a, b, c: a * np.float32(32),
}


@pytest.mark.parametrize("text", FLOAT)
def test_float_instructions_match_ieee_arithmetic(text: str, numbers: np.random.Generator) -> None:
    sources = [numbers.standard_normal(64).astype(np.float32) * 3 for _ in range(3)]
    waves = run_lines("gfx950", text, vector={i + 1: value.view(np.uint32) for i, value in enumerate(sources)})
    np.testing.assert_array_equal(waves.vgpr[0, 0].view(np.float32), FLOAT[text](*sources))


def test_fused_multiply_add_rounds_once(numbers: np.random.Generator) -> None:
    a = np.full(64, 1 + 2.0**-12, np.float32)
    c = np.full(64, -1 - 2.0**-11, np.float32)
    vector = {1: a.view(np.uint32), 2: a.view(np.uint32), 3: c.view(np.uint32)}
    fused = run_lines("gfx950", "v_fma_f32 v0, v1, v2, v3", vector=vector).vgpr[0, 0].view(np.float32)
    apart = run_lines("gfx950", "v_mul_f32 v0, v1, v2\nv_add_f32 v0, v0, v3", vector=vector).vgpr[0, 0].view(np.float32)
    assert fused.tolist() == [2.0**-24] * 64
    assert apart.tolist() == [0.0] * 64


def test_minimum_and_maximum_prefer_numbers_over_nan() -> None:
    nan = np.full(64, np.nan, np.float32).view(np.uint32)
    one = np.ones(64, np.float32).view(np.uint32)
    waves = run_lines("gfx950", "v_max_f32 v0, v1, v2\nv_min_f32 v3, v2, v1", vector={1: nan, 2: one})
    assert waves.vgpr[0, 0].tolist() == waves.vgpr[3, 0].tolist() == one.tolist()


def test_the_division_sequence_is_correctly_rounded_for_hard_cases(numbers: np.random.Generator) -> None:
    """The sequence the compiler emits for a / b, with tiny, huge, zero and infinite operands."""
    magnitudes = np.float32([1e-45, 1e-38, 1e-30, 1.0, 1e30, 3e38, np.inf, 0.0])
    a, b = (column.ravel() for column in np.meshgrid(magnitudes, magnitudes))
    sign = numbers.choice([-1.0, 1.0], 64).astype(np.float32)
    a = a * sign * (1 + numbers.random(64).astype(np.float32) * (np.abs(a) < 1e38) * (np.abs(a) > 1e-37))
    lines = """
        v_div_scale_f32 v3, s[0:1], v2, v2, v1
        v_rcp_f32 v4, v3
        v_div_scale_f32 v5, vcc, v1, v2, v1
        v_fma_f32 v6, -v3, v4, 1.0
        v_fma_f32 v4, v6, v4, v4
        v_mul_f32 v6, v5, v4
        v_fma_f32 v7, -v3, v6, v5
        v_fma_f32 v6, v7, v4, v6
        v_fma_f32 v3, -v3, v6, v5
        v_div_fmas_f32 v3, v3, v4, v6
        v_div_fixup_f32 v0, v3, v2, v1
    """
    waves = run_lines("gfx950", lines, vector={1: a.view(np.uint32), 2: b.view(np.uint32)})
    with np.errstate(all="ignore"):
        want = a / b
    np.testing.assert_array_equal(waves.vgpr[0, 0].view(np.float32), want)


@pytest.mark.parametrize(
    ("text", "test"),
    [
        ("v_cmp_gt_i32 s[4:5], v1, v2", lambda a, b: a.view(np.int32) > b.view(np.int32)),
        ("v_cmp_le_u32 s[4:5], v1, v2", lambda a, b: a <= b),
        ("v_cmp_nlt_f32 s[4:5], v1, v2", lambda a, b: ~(a.view(np.float32) < b.view(np.float32))),
        ("v_cmp_u_f32 s[4:5], v1, v2", lambda a, b: np.isnan(a.view(np.float32)) | np.isnan(b.view(np.float32))),
    ],
)
def test_comparisons_give_masks_with_inactive_lanes_off(
    text: str, test: Callable[[np.ndarray, np.ndarray], np.ndarray], numbers: np.random.Generator
) -> None:
    a, b = words(numbers, 64), words(numbers, 64)
    a[7] = 0x7FC00000
    scalar = {EXEC: 0x0F0FFFFF, EXEC + 1: 0xFFFF0000}
    waves = run_lines("gfx950", text, vector={1: a, 2: b}, scalar=scalar)
    mask = int(waves.sgpr[4, 0]) | int(waves.sgpr[5, 0]) << 32
    active = scalar[EXEC] | scalar[EXEC + 1] << 32
    want = sum(int(flag) << i for i, flag in enumerate(test(a, b))) & active
    assert mask == want


def test_only_active_lanes_are_written(numbers: np.random.Generator) -> None:
    old, new = words(numbers, 64), words(numbers, 64)
    waves = run_lines("gfx950", "v_mov_b32 v0, v1", vector={0: old, 1: new}, scalar={EXEC: 0xAAAAAAAA, EXEC + 1: 0})
    want = np.where((0xAAAAAAAA >> np.arange(64).astype(np.uint64)) & np.uint64(1) == 1, new, old)
    assert waves.vgpr[0, 0].tolist() == want.tolist()


def test_sixteen_bit_results_clear_the_other_half_on_cdna_and_keep_it_on_gfx1250() -> None:
    for arch, text, want in (
        ("gfx950", "v_add_u16 v0, v1, v2", 0x0000_0005),
        ("gfx950", "v_mad_u16 v0, v1, v2, v1 op_sel:[0,0,1,1]", 0x0007_1234),
        ("gfx1250", "v_add_nc_u16 v0.l, v1.l, v2.l", 0xABCD_0005),
        ("gfx1250", "v_add_nc_u16 v0.h, v1.l, v2.h", 0x0009_1234),
    ):
        lanes = 64 if arch == "gfx950" else 32
        vector = {0: np.full(lanes, 0xABCD1234), 1: np.full(lanes, 0x00010002), 2: np.full(lanes, 0x00070003)}
        waves = run_lines(arch, text, vector={i: value.astype(np.uint32) for i, value in vector.items()})
        assert set(waves.vgpr[0, 0].tolist()) == {want}, text


def test_halves_are_widened_with_and_without_sign() -> None:
    source = np.full(32, 0x8001_7FFE, np.uint32)
    lines = "v_cvt_u32_u16 v0, v1.l\nv_cvt_u32_u16 v2, v1.h\nv_cvt_i32_i16 v3, v1.l\nv_cvt_i32_i16 v4, v1.h"
    waves = run_lines("gfx1250", lines, vector={1: source})
    assert [int(waves.vgpr[i, 0, 0]) for i in (0, 2, 3, 4)] == [0x7FFE, 0x8001, 0x7FFE, 0xFFFF8001]


def test_dual_issue_reads_before_it_writes() -> None:
    one, two = np.full(32, 1, np.uint32), np.full(32, 2, np.uint32)
    waves = run_lines("gfx1250", "v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0", vector={0: one, 1: two})
    assert (set(waves.vgpr[0, 0].tolist()), set(waves.vgpr[1, 0].tolist())) == ({2}, {1})


def test_packed_halves_follow_op_sel_and_signs(numbers: np.random.Generator) -> None:
    a, b = (numbers.standard_normal((64, 2)).astype(np.float16) for _ in range(2))
    vector = {1: a.view(np.uint32)[:, 0], 2: b.view(np.uint32)[:, 0]}
    waves = run_lines("gfx950", "v_pk_mul_f16 v0, v1, v2 op_sel:[0,1] op_sel_hi:[1,0] neg_hi:[0,1]", vector=vector)
    got = waves.vgpr[0, 0].copy().view(np.float16).reshape(64, 2)
    np.testing.assert_array_equal(got, np.stack([a[:, 0] * b[:, 1], a[:, 1] * -b[:, 0]], axis=1))


def test_inline_constants_have_the_type_of_the_operation() -> None:
    half = int(np.float16(0.5).view(np.uint16))
    waves = run_lines("gfx950", "v_mul_f16 v0, 0.5, v1\nv_mul_f32 v2, 0.5, v3\nv_add_f64 v[4:5], v[6:7], 0.5", vector={
        1: np.full(64, int(np.float16(1).view(np.uint16)), np.uint32), 3: np.ones(64, np.float32).view(np.uint32),
        6: np.zeros(64, np.uint32), 7: np.zeros(64, np.uint32)})  # fmt: skip
    assert waves.vgpr[0, 0, 0] == half
    assert waves.vgpr[2, 0].view(np.float32)[0] == 0.5
    assert struct.unpack("<d", struct.pack("<II", int(waves.vgpr[4, 0, 0]), int(waves.vgpr[5, 0, 0])))[0] == 0.5


def test_a_literal_of_a_double_is_its_high_half_or_all_64_bits(numbers: np.random.Generator) -> None:
    """gfx9 has literals of 32 bits, the high half of a double; gfx1250 also whole ones."""
    x, y = (numbers.standard_normal(32) for _ in range(2))
    vector = {2 + 2 * i + j: v.view(np.uint32)[j::2] for i, v in enumerate((x, y)) for j in (0, 1)}
    lines = (
        "v_fmaak_f64 v[6:7], v[2:3], v[4:5], 0x3e928af3fca7ab0c\nv_fmamk_f64 v[8:9], v[2:3], 0xbfe62e42fefa39ef, v[4:5]"
    )
    waves = run_lines("gfx1250", lines, vector=vector)
    added, factor = (np.uint64(bits).view(np.float64) for bits in (0x3E928AF3FCA7AB0C, 0xBFE62E42FEFA39EF))
    for register, want in ((6, x * y + added), (8, x * factor + y)):
        got = waves.vgpr[register : register + 2, 0].T.copy().view(np.float64)[:, 0]
        np.testing.assert_allclose(got, want, rtol=1e-15, atol=1e-15)
    wide = {i: np.repeat(words, 2) for i, words in vector.items()}
    got = (
        run_lines("gfx950", "v_add_f64 v[6:7], v[2:3], 0x3fe62e42", vector=wide).vgpr[6:8, 0].T.copy().view(np.float64)
    )
    np.testing.assert_array_equal(got[::2, 0], x + np.uint64(0x3FE62E42 << 32).view(np.float64))


def test_floats_become_saturated_shorts() -> None:
    values = np.array([1.9, -1.9, 40000.0, -40000.0, 70000.0, np.nan, np.inf, -np.inf] * 4, np.float32)
    vector = {1: values.view(np.uint32), 2: np.zeros(32, np.uint32)}
    waves = run_lines("gfx1250", "v_cvt_pk_i16_f32 v0, v1, v2\nv_cvt_pk_u16_f32 v3, v2, v1", vector=vector)
    assert waves.vgpr[0, 0, :8].astype(np.uint16).view(np.int16).tolist() == [
        1,
        -1,
        32767,
        -32768,
        32767,
        0,
        32767,
        -32768,
    ]
    assert (waves.vgpr[3, 0, :8] >> np.uint32(16)).tolist() == [1, 0, 40000, 0, 65535, 0, 65535, 0]
