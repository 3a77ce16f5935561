"""LDS loads, stores, transposes and atomics."""

from __future__ import annotations

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.faults import EmulationError, OutOfBoundsError
from tests.amdgcn.single import run_lines


def image(numbers: np.random.Generator, size: int = 4096) -> np.ndarray:
    return numbers.integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize(
    ("opcode", "width", "dtype"),
    [("ds_read_u8", 1, "u1"), ("ds_read_i8", 1, "i1"), ("ds_read_u16", 2, "u2"), ("ds_read_i16", 2, "i2")],
)
def test_narrow_loads_extend(opcode: str, width: int, dtype: str, numbers: np.random.Generator) -> None:
    lds = image(numbers)
    address = numbers.permutation(64).astype(np.uint32) * width
    waves = run_lines("gfx950", f"{opcode} v0, v1 offset:16", vector={1: address}, lds=lds)
    want = lds[16:].view(dtype)[address // width].astype(np.int64) & 0xFFFFFFFF
    assert waves.vgpr[0, 0].tolist() == want.tolist()


@pytest.mark.parametrize(("bits", "registers"), [(32, 1), (64, 2), (96, 3), (128, 4)])
def test_wide_loads_and_stores_move_consecutive_dwords(bits: int, registers: int, numbers: np.random.Generator) -> None:
    lds = image(numbers)
    source, target = (numbers.permutation(64).astype(np.uint32) * 16 for _ in range(2))
    last = registers - 1
    lines = f"ds_read_b{bits} v[4:{4 + last}], v1\nds_write_b{bits} v2, v[4:{4 + last}] offset:2048\n"
    lines += f"ds_read_b{bits} v[10:{10 + last}], v2 offset:2048"
    waves = run_lines(
        "gfx950", lines.replace("[4:4]", "4").replace("[10:10]", "10"), vector={1: source, 2: target}, lds=lds
    )
    want = lds.view(np.uint32)[(source // 4)[:, None] + np.arange(registers)]
    np.testing.assert_array_equal(waves.vgpr[10 : 10 + registers, 0].T, want)


def test_two_address_forms_scale_their_offsets(numbers: np.random.Generator) -> None:
    lds = image(numbers)
    address = np.arange(64, dtype=np.uint32) * 4
    for opcode, unit in (("ds_read2_b32", 4), ("ds_read2st64_b32", 256)):
        waves = run_lines("gfx950", f"{opcode} v[0:1], v2 offset0:1 offset1:5", vector={2: address}, lds=lds)
        for register, offset in ((0, 1), (1, 5)):
            want = lds.view(np.uint32)[(address + offset * unit) // 4]
            np.testing.assert_array_equal(waves.vgpr[register, 0], want)


def test_half_register_stores_and_loads_keep_the_other_half(numbers: np.random.Generator) -> None:
    lds, address = image(numbers), np.arange(64, dtype=np.uint32) * 4
    data = numbers.integers(0, 2**32, 64, dtype=np.uint64).astype(np.uint32)
    lines = "ds_write_b16_d16_hi v1, v2\nds_read_u16_d16_hi v3, v1\nds_read_u16_d16 v4, v1"
    vector = {1: address, 2: data, 3: np.full(64, 0x1111, np.uint32), 4: np.full(64, 0x22220000, np.uint32)}
    waves = run_lines("gfx950", lines, vector=vector, lds=lds)
    assert waves.vgpr[3, 0].tolist() == ((data & 0xFFFF0000) | 0x1111).tolist()
    assert waves.vgpr[4, 0].tolist() == ((data >> 16) | 0x22220000).tolist()


@pytest.mark.parametrize(("bits", "count"), [(16, 4), (8, 8), (4, 16)])
def test_transpose_loads_give_each_lane_of_16_a_column(bits: int, count: int, numbers: np.random.Generator) -> None:
    """gfx950: the 16 lanes of a group read a matrix [count, 16] in lane order; lane i receives column i."""
    lds = image(numbers)
    address = np.arange(64, dtype=np.uint32) * 8
    waves = run_lines("gfx950", f"ds_read_b64_tr_b{bits} v[0:1], v2", vector={2: address}, lds=lds)
    stream = sum(int(byte) << 8 * i for i, byte in enumerate(lds[:512]))
    element = [stream >> bits * i & ((1 << bits) - 1) for i in range(512 * 8 // bits)]
    for lane in range(64):
        group, column = divmod(lane, 16)
        want = sum(element[group * 16 * count + 16 * row + column] << bits * row for row in range(count))
        assert int(waves.vgpr[0, 0, lane]) | int(waves.vgpr[1, 0, lane]) << 32 == want


def test_gfx1250_transposes_16_bit_elements_in_blocks_of_8_lanes(numbers: np.random.Generator) -> None:
    lds = image(numbers)
    waves = run_lines(
        "gfx1250", "ds_load_tr16_b128 v[0:3], v4", vector={4: np.arange(32, dtype=np.uint32) * 16}, lds=lds
    )
    matrix = lds[:512].view(np.uint16).reshape(4, 8, 8)
    want = matrix.transpose(0, 2, 1).reshape(32, 8)
    np.testing.assert_array_equal(waves.vgpr[0:4, 0].T.copy().view(np.uint16), want)


def test_a_misaligned_transpose_load_is_an_error() -> None:
    address = np.arange(32, dtype=np.uint32) * 16 + 8
    with pytest.raises(EmulationError, match="aligned to 16 bytes"):
        run_lines("gfx1250", "ds_load_tr16_b128 v[0:3], v4", vector={4: address})


def test_an_access_past_the_allocation_is_an_error_that_names_the_instruction() -> None:
    address = np.arange(64, dtype=np.uint32) * 16
    with pytest.raises(OutOfBoundsError, match=r"ds_read_b128 v\[0:3\], v4.*outside the 1008 bytes"):
        run_lines("gfx950", "ds_read_b128 v[0:3], v4", vector={4: address}, lds=np.zeros(1008, np.uint8))


def test_atomics_on_one_address_add_up_and_return_what_they_found() -> None:
    lds = np.zeros(64, np.uint8)
    lanes = np.arange(64, dtype=np.uint32)
    vector = {1: np.zeros(64, np.uint32), 2: lanes}
    waves = run_lines("gfx950", "ds_add_rtn_u32 v0, v1, v2\nds_read_b32 v3, v1", vector=vector, lds=lds)
    assert waves.vgpr[0, 0].tolist() == (np.cumsum(lanes) - lanes).tolist()
    assert set(waves.vgpr[3, 0].tolist()) == {2016}


@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_a_store_far_outside_is_dropped_and_one_just_outside_is_an_error(arch: str) -> None:
    """Triton switches lanes off by giving them the address 0x7fffffff."""
    store, lanes = ("ds_write_b64", 64) if arch == "gfx950" else ("ds_store_b64", 32)
    data = np.arange(1, lanes + 1, dtype=np.uint32)
    address = np.where(np.arange(lanes) % 2, 0x7FFFFFFF, np.arange(lanes) * 8).astype(np.uint32)
    lines = f"{store} v0, v[1:2] offset:16\n" + (
        "ds_read_b64 v[4:5], v3" if arch == "gfx950" else "ds_load_b64 v[4:5], v3"
    )
    back = (np.arange(lanes) * 8 + 16).astype(np.uint32)
    lds = np.full(lanes * 8 + 16, 0xAA, np.uint8)
    waves = run_lines(arch, lines, vector={0: address, 1: data, 2: data * 3, 3: back}, lds=lds)
    off = np.arange(lanes) % 2 == 1
    assert waves.vgpr[4, 0].tolist() == np.where(off, 0xAAAAAAAA, data).tolist()
    assert waves.vgpr[5, 0].tolist() == np.where(off, 0xAAAAAAAA, data * 3).tolist()
    near = np.full(lanes, lds.size - 16, np.uint32)
    with pytest.raises(OutOfBoundsError, match=store):
        run_lines(arch, lines, vector={0: near, 1: data, 2: data, 3: back}, lds=lds)
