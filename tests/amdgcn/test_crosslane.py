"""Cross-lane moves against the lane patterns written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from primus_turbo_plugin.amdgcn.assembly.operands import EXEC
from tests.amdgcn.single import run_lines

LANES = np.arange(64, dtype=np.uint32)
OLD = LANES + 1000

# For each DPP control, the lane every lane reads; None where there is no such lane.
PATTERNS = {
    "quad_perm:[1,0,3,2]": lambda i: i ^ 1,
    "row_shl:1": lambda i: i + 1 if i % 16 < 15 else None,
    "row_shr:4": lambda i: i - 4 if i % 16 >= 4 else None,
    "row_ror:3": lambda i: i // 16 * 16 + (i % 16 - 3) % 16,
    "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
    "row_newbcast:5": lambda i: i // 16 * 16 + 5,
    "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "wave_shr:1": lambda i: i - 1 if i else None,
}


@pytest.mark.parametrize("control", PATTERNS)
@pytest.mark.parametrize("bound", ["", " bound_ctrl:1"])
def test_dpp_reads_the_lane_the_control_names(control: str, bound: str) -> None:
    text = f"v_mov_b32_dpp v0, v1 {control} row_mask:0xf bank_mask:0xf{bound}"
    waves = run_lines("gfx950", text, vector={0: OLD, 1: LANES})
    sources = [PATTERNS[control](i) for i in range(64)]
    missing = [0 if bound else int(OLD[i]) for i in range(64)]
    assert waves.vgpr[0, 0].tolist() == [missing[i] if s is None else s for i, s in enumerate(sources)]


def test_dpp_masks_leave_rows_and_banks_alone() -> None:
    text = "v_mov_b32_dpp v0, v1 quad_perm:[0,1,2,3] row_mask:0x5 bank_mask:0x6"
    waves = run_lines("gfx950", text, vector={0: OLD, 1: LANES})
    want = [i if i // 16 in (0, 2) and i % 16 // 4 in (1, 2) else int(OLD[i]) for i in range(64)]
    assert waves.vgpr[0, 0].tolist() == want


def test_dpp_does_not_read_inactive_lanes() -> None:
    text = "v_mov_b32_dpp v0, v1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
    waves = run_lines("gfx950", text, vector={0: OLD, 1: LANES}, scalar={EXEC: 0x55555557, EXEC + 1: 0})
    assert waves.vgpr[0, 0, :4].tolist() == [1, 0, int(OLD[2]), int(OLD[3])]


def test_dpp_on_arithmetic_permutes_only_the_first_source() -> None:
    text = "v_add_u32_dpp v0, v1, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    waves = run_lines("gfx950", text, vector={0: OLD, 1: LANES, 2: LANES * 100})
    want = [(i - 1 if i % 16 else 0) + 100 * i for i in range(64)]
    assert waves.vgpr[0, 0].tolist() == want


@pytest.mark.parametrize("group", [16, 32])
def test_permlane_swap_exchanges_odd_rows_of_one_with_even_rows_of_the_other(group: int) -> None:
    waves = run_lines("gfx950", f"v_permlane{group}_swap_b32 v0, v1", vector={0: LANES, 1: LANES + 100})
    first, second = LANES.copy(), LANES + 100
    for start in range(0, 64, 2 * group):
        odd, even = slice(start + group, start + 2 * group), slice(start, start + group)
        first[odd], second[even] = (LANES + 100)[even], LANES[odd]
    assert waves.vgpr[0, 0].tolist() == first.tolist()
    assert waves.vgpr[1, 0].tolist() == second.tolist()


def test_row_permutes_take_selectors_from_scalar_registers() -> None:
    selectors = [(7 * i + 3) % 16 for i in range(16)]
    low = sum(s << 4 * i for i, s in enumerate(selectors[:8]))
    high = sum(s << 4 * i for i, s in enumerate(selectors[8:]))
    lanes = np.arange(32, dtype=np.uint32)
    for name, row in (("v_permlane16_b32", 0), ("v_permlanex16_b32", 1)):
        waves = run_lines("gfx1250", f"{name} v0, v1, s4, s5", vector={1: lanes}, scalar={4: low, 5: high})
        assert waves.vgpr[0, 0].tolist() == [(i // 16 ^ row) * 16 + selectors[i % 16] for i in range(32)]


def test_backward_and_forward_permutes_through_lds_hardware() -> None:
    address = ((LANES * 5) % 64 * 4).astype(np.uint32)
    waves = run_lines("gfx950", "ds_bpermute_b32 v0, v2, v1\nds_permute_b32 v3, v2, v1", vector={1: LANES, 2: address})
    assert waves.vgpr[0, 0].tolist() == [i * 5 % 64 for i in range(64)]
    pushed = np.zeros(64, np.uint32)
    pushed[LANES * 5 % 64] = LANES
    assert waves.vgpr[3, 0].tolist() == pushed.tolist()


def test_swizzles_by_mask_and_by_quad() -> None:
    waves = run_lines(
        "gfx950", "ds_swizzle_b32 v0, v1 offset:0x401f\nds_swizzle_b32 v2, v1 offset:0x80b1", vector={1: LANES}
    )
    assert waves.vgpr[0, 0].tolist() == [i ^ 16 for i in range(64)]
    assert waves.vgpr[2, 0].tolist() == [i ^ 1 for i in range(64)]


def test_lane_reads_and_writes() -> None:
    lines = "v_readlane_b32 s4, v1, 37\nv_readfirstlane_b32 s5, v1\nv_writelane_b32 v0, s6, 9"
    scalar = {6: 77, EXEC: 0xFFFFFFF0, EXEC + 1: 0xFFFFFFFF}
    waves = run_lines("gfx950", lines, vector={0: OLD, 1: LANES}, scalar=scalar)
    assert (int(waves.sgpr[4, 0]), int(waves.sgpr[5, 0])) == (37, 4)
    assert waves.vgpr[0, 0].tolist() == [77 if i == 9 else int(OLD[i]) for i in range(64)]


def test_lane_counting_numbers_the_active_lanes() -> None:
    lines = "v_mbcnt_lo_u32_b32 v0, s4, 0\nv_mbcnt_hi_u32_b32 v0, s5, v0"
    waves = run_lines("gfx950", lines, scalar={4: 0xF0F0F0F0, 5: 0x0000FFFF})
    mask = 0xF0F0F0F0 | 0x0000FFFF << 32
    assert waves.vgpr[0, 0].tolist() == [(mask & ((1 << i) - 1)).bit_count() for i in range(64)]
