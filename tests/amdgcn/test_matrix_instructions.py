"""Matrix instructions on small integers, where every sum is exact, against loops over the documented layouts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.emulator.isa.values import f32_to_bf16
from tests.amdgcn.single import run_lines

Encode = Callable[[np.ndarray], np.ndarray]


def as_bf16(values: np.ndarray) -> np.ndarray:
    return f32_to_bf16(values.astype(np.float32)).astype(np.uint16)


ENCODE: dict[str, tuple[int, Encode]] = {
    "bf16": (16, as_bf16),
    "f16": (16, lambda values: values.astype(np.float16).view(np.uint16)),
    "f32": (32, lambda values: values.astype(np.float32).view(np.uint32)),
    "i8": (8, lambda values: values.astype(np.int8).view(np.uint8)),
}

MFMA = [  # name, type, M, N, K, blocks, K values per lane
    ("v_mfma_f32_32x32x8_bf16", "bf16", 32, 32, 8, 1),
    ("v_mfma_f32_16x16x16_f16", "f16", 16, 16, 16, 1),
    ("v_mfma_f32_32x32x16_bf16", "bf16", 32, 32, 16, 1),
    ("v_mfma_f32_16x16x32_bf16", "bf16", 16, 16, 32, 1),
    ("v_mfma_f32_32x32x2_f32", "f32", 32, 32, 2, 1),
    ("v_mfma_f32_16x16x4_4b_f16", "f16", 16, 16, 4, 4),
    ("v_mfma_f32_32x32x4_2b_bf16", "bf16", 32, 32, 4, 2),
    ("v_mfma_f32_4x4x4_16b_f16", "f16", 4, 4, 4, 16),
    ("v_mfma_i32_32x32x16_i8", "i8", 32, 32, 16, 1),
]


def registers_of(matrix: np.ndarray, kind: str, place: Callable[[int, int], tuple[int, int]], lanes: int) -> np.ndarray:
    """Registers [register, lane] of a matrix [.., row, k]; `place(row_index, k)` gives lane and element."""
    bits, encode = ENCODE[kind]
    coded = encode(matrix)
    rows, depth = coded.shape
    per_lane = rows * depth // lanes
    packed = np.zeros((lanes, per_lane), coded.dtype)
    for row in range(rows):
        for k in range(depth):
            packed[place(row, k)] = coded[row, k]
    assert per_lane * bits % 32 == 0
    return packed.view(np.uint32).T.copy()


@pytest.mark.parametrize(("name", "kind", "m", "n", "k", "blocks"), MFMA, ids=[case[0] for case in MFMA])
def test_mfma_multiplies_blocks(
    name: str, kind: str, m: int, n: int, k: int, blocks: int, numbers: np.random.Generator
) -> None:
    """Lane l holds row l % M of block (l // M) % B and the K run of group l // (M * B)."""
    a = numbers.integers(-4, 5, (blocks, m, k))
    b = numbers.integers(-4, 5, (blocks, n, k))
    per_lane = m * k * blocks // 64

    def place(row: int, depth: int) -> tuple[int, int]:
        block, within = divmod(row, m)
        return within + m * block + m * blocks * (depth // per_lane), depth % per_lane

    left = registers_of(a.reshape(-1, k), kind, place, 64)
    right = registers_of(b.reshape(-1, k), kind, place, 64)
    results = m * n * blocks // 64
    c = numbers.integers(-9, 10, (results, 64))
    out_kind = np.int32 if kind == "i8" else np.float32
    vector = {100 + i: word for i, word in enumerate(left)} | {200 + i: word for i, word in enumerate(right)}
    vector |= {300 + i: c[i].astype(out_kind).view(np.uint32) for i in range(results)}
    text = f"{name} v[0:{results - 1}], v[100:{99 + len(left)}], v[200:{199 + len(right)}], v[300:{299 + results}]"
    waves = run_lines("gfx950", text, vector=vector)
    product = np.einsum("bmk,bnk->bmn", a, b)
    got = waves.vgpr[:results, 0].view(out_kind)
    for register in range(results):
        for lane in range(64):
            if m == 4:
                block, row = lane // 4, register
            else:
                block, within = divmod(register, results // blocks)
                row = 4 * (lane // m) + within if m == 16 else 8 * (within // 4) + 4 * (lane // 32) + within % 4
            assert got[register, lane] == product[block, row, lane % n] + c[register, lane], (register, lane)


def test_mfma_broadcasts_a_block_of_a(numbers: np.random.Generator) -> None:
    """cbsz:2 abid:1 on four blocks: all use block 1 of A."""
    a, b = numbers.integers(-4, 5, (4, 16, 4)), numbers.integers(-4, 5, (4, 16, 4))

    def place(row: int, depth: int) -> tuple[int, int]:
        return row, depth

    vector = {20 + i: word for i, word in enumerate(registers_of(a.reshape(-1, 4), "f16", place, 64))}
    vector |= {30 + i: word for i, word in enumerate(registers_of(b.reshape(-1, 4), "f16", place, 64))}
    waves = run_lines("gfx950", "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[20:21], v[30:31], 0 cbsz:2 abid:1", vector=vector)
    got = waves.vgpr[:16, 0].view(np.float32).reshape(4, 4, 4, 16)  # block, register, row group, column
    want = np.einsum("mk,bnk->bmn", a[1], b).reshape(4, 4, 4, 16).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(got, want)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize(("m", "k"), [(16, 128), (32, 64)])
def test_scaled_mfma_applies_the_scale_of_each_run_of_32(m: int, k: int, numbers: np.random.Generator) -> None:
    """fp4 operands: lane l holds row l % M and the 32 values of run l // M; its scale is one byte of a register."""
    codes = numbers.integers(0, 16, (2, m, k))
    exponents = numbers.integers(120, 134, (2, m, k // 32))
    value = np.where(codes & 8, -1.0, 1.0) * np.take(E2M1, codes & 7)
    scaled = value * np.repeat(2.0 ** (exponents - 127), 32, axis=2)
    words = [np.zeros((4, 64), np.uint64) for _ in range(2)]
    for side in range(2):
        for row in range(m):
            for depth in range(k):
                lane, element = row + m * (depth // 32), depth % 32
                words[side][element // 8, lane] |= int(codes[side, row, depth]) << 4 * (element % 8)
    lane = np.arange(64)
    scales = [exponents[side, lane % m, lane // m].astype(np.uint32) for side in range(2)]
    vector = {100 + i: words[0][i].astype(np.uint32) for i in range(4)}
    vector |= {200 + i: words[1][i].astype(np.uint32) for i in range(4)}
    vector |= {90: scales[0] << 16 | 0x55, 91: scales[1] << 8 | 0x55}  # byte 2 for A, byte 1 for B
    results = m * m // 64
    name = f"v_mfma_scale_f32_{m}x{m}x{k}_f8f6f4"
    text = (
        f"{name} v[0:{results - 1}], v[100:103], v[200:203], 0, v90, v91 op_sel:[0,1,0] op_sel_hi:[1,0,0] cbsz:4 blgp:4"
    )
    waves = run_lines("gfx950", text, vector=vector)
    product = scaled[0] @ scaled[1].T
    got = waves.vgpr[:results, 0].view(np.float32)
    for register in range(results):
        for lane_number in range(64):
            if m == 16:
                row = 4 * (lane_number // 16) + register
            else:
                row = 8 * (register // 4) + 4 * (lane_number // 32) + register % 4
            assert got[register, lane_number] == pytest.approx(product[row, lane_number % m], rel=1e-6)


@pytest.mark.parametrize(("kind", "k", "run"), [("bf16", 32, 8), ("f16", 32, 8), ("f32", 4, 2)])
def test_wmma_interleaves_runs_of_k_between_the_lane_halves(
    kind: str, k: int, run: int, numbers: np.random.Generator
) -> None:
    a, b = numbers.integers(-4, 5, (16, k)), numbers.integers(-4, 5, (16, k))

    def place(row: int, depth: int) -> tuple[int, int]:
        block, within = divmod(depth, 2 * run)
        return row + 16 * (within // run), block * run + within % run

    left, right = registers_of(a, kind, place, 32), registers_of(b, kind, place, 32)
    vector = {100 + i: word for i, word in enumerate(left)} | {200 + i: word for i, word in enumerate(right)}
    text = f"v_wmma_f32_16x16x{k}_{kind} v[0:7], v[100:{99 + len(left)}], v[200:{199 + len(right)}], 1.0"
    waves = run_lines("gfx1250", text, vector=vector)
    product = a @ b.T
    for register in range(8):
        for lane in range(32):
            assert waves.vgpr[register, 0].view(np.float32)[lane] == product[8 * (lane // 16) + register, lane % 16] + 1


def test_matrix_instructions_ignore_the_execution_mask(numbers: np.random.Generator) -> None:
    words = numbers.integers(0, 2**15, (8, 64), dtype=np.uint32)
    vector = {100 + i: words[i] & np.uint32(0x3FFF3FFF) for i in range(8)}
    text = "v_mfma_f32_16x16x16_f16 v[0:3], v[100:101], v[102:103], 0"
    whole = run_lines("gfx950", text, vector=vector).vgpr[:4, 0]
    masked = run_lines("gfx950", f"s_mov_b64 exec, 0\n{text}", vector=vector).vgpr[:4, 0]
    np.testing.assert_array_equal(whole, masked)
