"""Scalar instructions against arithmetic on Python's integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.assembly.operands import EXEC, SCC
from tests.amdgcn.single import run_lines

MASK = 0xFFFFFFFF


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


Reference = Callable[[int, int], tuple[int, bool | None]]
REFERENCES: dict[str, Reference] = {
    "s_add_u32": lambda a, b: ((a + b) & MASK, a + b > MASK),
    "s_add_i32": lambda a, b: ((a + b) & MASK, not -(2**31) <= signed(a) + signed(b) < 2**31),
    "s_sub_u32": lambda a, b: ((a - b) & MASK, b > a),
    "s_sub_i32": lambda a, b: ((a - b) & MASK, not -(2**31) <= signed(a) - signed(b) < 2**31),
    "s_mul_i32": lambda a, b: (a * b & MASK, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32 & MASK, None),
    "s_and_b32": lambda a, b: (a & b, a & b != 0),
    "s_xor_b32": lambda a, b: (a ^ b, a ^ b != 0),
    "s_nor_b32": lambda a, b: (~(a | b) & MASK, ~(a | b) & MASK != 0),
    "s_andn2_b32": lambda a, b: (a & ~b & MASK, a & ~b & MASK != 0),
    "s_lshl_b32": lambda a, b: (a << (b & 31) & MASK, a << (b & 31) & MASK != 0),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), a >> (b & 31) != 0),
    "s_ashr_i32": lambda a, b: (signed(a) >> (b & 31) & MASK, signed(a) >> (b & 31) != 0),
    "s_lshl2_add_u32": lambda a, b: (((a << 2) + b) & MASK, (a << 2) + b > MASK),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & MASK, signed(a) < signed(b)),
    "s_max_u32": lambda a, b: (max(a, b), a >= b),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | (b & 0xFFFF) << 16, None),
}
ONLY_CDNA = {"s_andn2_b32"}


@pytest.mark.parametrize("opcode", REFERENCES)
def test_two_operand_instructions(opcode: str, numbers: np.random.Generator) -> None:
    special = [0, 1, 31, 0x7FFFFFFF, 0x80000000, MASK]
    values = [(int(a), int(b)) for a, b in numbers.integers(0, 2**32, (20, 2))] + [
        (a, b) for a in special for b in special
    ]
    for a, b in values:
        waves = run_lines("gfx950", f"{opcode} s4, s5, s6", scalar={5: a, 6: b})
        result, flag = REFERENCES[opcode](a, b)
        assert int(waves.sgpr[4, 0]) == result, (opcode, a, b)
        if flag is not None:
            assert bool(waves.scc[0]) == flag, (opcode, a, b)


def test_add_with_carry_makes_64_bit_sums(numbers: np.random.Generator) -> None:
    for a, b in numbers.integers(0, 2**63, (20, 2)):
        scalar = {0: int(a) & MASK, 1: int(a) >> 32, 2: int(b) & MASK, 3: int(b) >> 32}
        waves = run_lines("gfx950", "s_add_u32 s4, s0, s2\ns_addc_u32 s5, s1, s3", scalar=scalar)
        assert int(waves.sgpr[4, 0]) | int(waves.sgpr[5, 0]) << 32 == int(a) + int(b)


@pytest.mark.parametrize(("text", "value"), [("0xff80", -128), ("0x7f", 127), ("-3", -3), ("0x8000", -32768)])
def test_short_immediates_are_sign_extended(text: str, value: int) -> None:
    assert int(run_lines("gfx950", f"s_movk_i32 s0, {text}").sgpr[0, 0]) == value & MASK
    assert int(run_lines("gfx950", f"s_addk_i32 s0, {text}", scalar={0: 1000}).sgpr[0, 0]) == (1000 + value) & MASK
    assert int(run_lines("gfx950", f"s_mulk_i32 s0, {text}", scalar={0: 7}).sgpr[0, 0]) == 7 * value & MASK
    assert bool(run_lines("gfx950", f"s_cmpk_eq_i32 s0, {text}", scalar={0: value & MASK}).scc[0])


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int, numbers: np.random.Generator) -> None:
    for _ in range(30):
        value = int(numbers.integers(0, 2**32)) | int(numbers.integers(0, 2**32)) << 32
        value &= (1 << bits) - 1
        offset, width = int(numbers.integers(0, bits)), int(numbers.integers(1, bits))
        source, target = ("s4", "s0") if bits == 32 else ("s[4:5]", "s[0:1]")
        scalar = {4: value & MASK, 5: value >> 32, 6: offset | width << 16}
        field = value >> offset & ((1 << width) - 1)
        for kind, want in (("u", field), ("i", signed(field, width) & ((1 << bits) - 1))):
            waves = run_lines("gfx950", f"s_bfe_{kind}{bits} {target}, {source}, s6", scalar=scalar)
            got = int(waves.sgpr[0, 0]) | (int(waves.sgpr[1, 0]) << 32 if bits == 64 else 0)
            assert got == want, (value, offset, width, kind)


@pytest.mark.parametrize("value", [0, 1, 0x80000000, 0x00F00000, MASK])
def test_bit_scans(value: int) -> None:
    text = f"{value:032b}"
    trailing = len(text) - len(text.rstrip("0")) if value else MASK
    leading = len(text) - len(text.lstrip("0")) if value else MASK
    waves = run_lines("gfx950", "s_ff1_i32_b32 s0, s9\ns_flbit_i32_b32 s1, s9\ns_bcnt1_i32_b32 s2, s9\ns_brev_b32 s3, s9",
                      scalar={9: value})  # fmt: skip
    assert [int(waves.sgpr[i, 0]) for i in range(4)] == [trailing, leading, text.count("1"), int(text[::-1], 2)]


def test_saveexec_narrows_the_execution_mask_even_onto_its_source() -> None:
    for arch, pair in (("gfx950", "s[4:5]"), ("gfx1250", "s4")):
        bits = "64" if arch == "gfx950" else "32"
        waves = run_lines(arch, f"s_and_saveexec_b{bits} {pair}, {pair}", scalar={4: 0xF0, 5: 0})
        assert int(waves.sgpr[4, 0]) == MASK, "the old mask is saved"
        assert int(waves.sgpr[EXEC, 0]) == 0xF0
        assert waves.active[0, :12].tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_scc_reads_as_an_operand() -> None:
    waves = run_lines("gfx1250", "s_cmp_eq_u32 s0, s0\ns_mov_b32 s1, src_scc", scalar={0: 5})
    assert int(waves.sgpr[1, 0]) == 1
    assert SCC >= 128


@pytest.mark.parametrize(("arch", "opcode"), [("gfx950", "s_ff1_i32_b64"), ("gfx1250", "s_ctz_i32_b64")])
def test_the_lowest_set_bit_of_64(arch: str, opcode: str, numbers: np.random.Generator) -> None:
    for shift in (0, 1, 31, 32, 33, 63):
        value = (int(numbers.integers(0, 2**63)) << 1 | 1) << shift & (1 << 64) - 1
        waves = run_lines(arch, f"{opcode} s4, s[6:7]", scalar={6: value & MASK, 7: value >> 32})
        assert int(waves.sgpr[4, 0]) == shift
    waves = run_lines(arch, f"{opcode} s4, s[6:7]", scalar={6: 0, 7: 0})
    assert int(waves.sgpr[4, 0]) == MASK
