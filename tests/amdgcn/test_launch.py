"""Launching: arguments in and out, bounds, waits, barriers, races and the other ways a kernel can go wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from primus_turbo_plugin.amdgcn.emulator.launch import launch
from primus_turbo_plugin.amdgcn.faults import (
    DeadlockError,
    MissingWaitError,
    OutOfBoundsError,
    RaceError,
    TrapError,
    UnknownInstructionError,
)
from primus_turbo_plugin.errors import ShapeError
from tests.amdgcn.single import kernel

# y[i] = x[i] + 1 for one wave of dwords.
INCREMENT = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_waitcnt lgkmcnt(0)
    global_load_dword v2, v1, s[4:5]
    s_waitcnt vmcnt(0)
    v_add_u32 v2, 1, v2
    global_store_dword v1, v2, s[6:7]
"""


def test_results_are_written_into_numpy_arrays_and_tensors(numbers: np.random.Generator) -> None:
    x = numbers.integers(0, 1000, 64).astype(np.int32)
    compiled = kernel("gfx950", INCREMENT, pointers=2)
    y = np.zeros(64, np.int32)
    launch(compiled, 1, [x, y])
    np.testing.assert_array_equal(y, x + 1)
    tensor, result = torch.from_numpy(x), torch.zeros(64, dtype=torch.int32)
    launch(compiled, 1, [tensor, result])
    assert torch.equal(result, tensor + 1)


@pytest.mark.parametrize(("source", "target"), [(0, 16), (16, 0)])
def test_overlapping_views_share_memory(source: int, target: int, numbers: np.random.Generator) -> None:
    base = numbers.integers(0, 1000, 96).astype(np.int32)
    want = base.copy()
    want[target : target + 64] = base[source : source + 64] + 1
    arrays = [base[source : source + 64], base[target : target + 64]]
    launch(kernel("gfx950", INCREMENT, pointers=2), 1, arrays)
    np.testing.assert_array_equal(base, want)


@pytest.mark.parametrize("size", [63, 1])
def test_a_load_past_the_end_names_instruction_buffer_and_byte(size: int) -> None:
    compiled = kernel("gfx950", INCREMENT, pointers=2)
    with pytest.raises(
        OutOfBoundsError, match=rf"global_load_dword.*at byte {4 * size} of buffer 'arg0'.*{64 - size} lane"
    ):
        launch(compiled, 1, [np.zeros(size, np.int32), np.zeros(64, np.int32)])


def test_one_byte_past_the_end_is_too_many() -> None:
    with pytest.raises(OutOfBoundsError, match=r"at byte 252 of buffer 'arg0', which has 255 bytes; 1 lane"):
        launch(kernel("gfx950", INCREMENT, pointers=2), 1, [np.zeros(255, np.uint8), np.zeros(64, np.int32)])


def test_a_store_past_the_end_is_an_error() -> None:
    with pytest.raises(OutOfBoundsError, match=r"global_store_dword.*write of 4 bytes.*buffer 'arg1'"):
        launch(kernel("gfx950", INCREMENT, pointers=2), 1, [np.zeros(64, np.int32), np.zeros(63, np.int32)])


def test_an_empty_array_can_be_passed_but_not_read() -> None:
    with pytest.raises(OutOfBoundsError):
        launch(kernel("gfx950", INCREMENT, pointers=2), 1, [np.zeros(0, np.int32), np.zeros(64, np.int32)])


def test_buffer_loads_outside_num_records_give_zero() -> None:
    body = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_mov_b32 s10, 0x80
        s_mov_b32 s11, 0x27000
        s_waitcnt lgkmcnt(0)
        s_mov_b32 s8, s4
        s_mov_b32 s9, s5
        buffer_load_dword v2, v1, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        global_store_dword v1, v2, s[6:7]
    """
    x, y = np.arange(1, 65, dtype=np.int32), np.full(64, -1, np.int32)
    launch(kernel("gfx950", body, pointers=2), 1, [x, y])
    np.testing.assert_array_equal(y, np.where(np.arange(64) < 32, x, 0))


def test_the_grid_numbers_work_groups_in_all_three_dimensions() -> None:
    for arch, body in (
        ("gfx950", """
            s_load_dwordx2 s[6:7], s[0:1], 0x0
            s_mul_i32 s3, s3, 3
            s_add_i32 s3, s3, s2
            s_lshl_b32 s5, s3, 2
            v_mov_b32 v1, s5
            v_mov_b32 v2, s3
            s_waitcnt lgkmcnt(0)
            global_store_dword v1, v2, s[6:7]
        """),
        ("gfx1250", """
            s_load_b64 s[6:7], s[0:1], 0x0
            s_and_b32 s3, ttmp7, 0xffff
            s_mul_i32 s3, s3, 3
            s_add_co_i32 s3, s3, ttmp9
            s_lshl_b32 s5, s3, 2
            v_mov_b32 v1, s5
            v_mov_b32 v2, s3
            s_wait_kmcnt 0x0
            global_store_b32 v1, v2, s[6:7]
        """),
    ):  # fmt: skip
        compiled = kernel(arch, body)
        compiled = compiled.with_assembly(
            compiled.asm.replace("workgroup_id_x 1", "workgroup_id_x 1\n\t\t.amdhsa_system_sgpr_workgroup_id_y 1")
        )
        out = np.full(6, -1, np.int32)
        launch(compiled, (3, 2), [out], batch=4)
        assert out.tolist() == [0, 1, 2, 3, 4, 5]


def test_using_a_register_before_its_wait_is_an_error_that_names_both_instructions() -> None:
    text = INCREMENT.replace("    s_waitcnt vmcnt(0)\n", "")
    compiled = kernel("gfx950", text, pointers=2)
    arrays = [np.zeros(64, np.int32), np.zeros(64, np.int32)]
    with pytest.raises(MissingWaitError, match=r"v_add_u32 v2.*v2 is still being loaded.*vmcnt.*global_load_dword v2"):
        launch(compiled, 1, arrays)
    launch(compiled, 1, arrays, defer=False)


def test_scalar_loads_need_a_wait_for_zero() -> None:
    text = INCREMENT.replace("lgkmcnt(0)", "lgkmcnt(1)").replace(
        "0x0\n", "0x0\n    s_load_dwordx4 s[8:11], s[0:1], 0x0\n"
    )
    with pytest.raises(MissingWaitError, match=r"s4 is still being loaded.*lgkmcnt"):
        launch(kernel("gfx950", text, pointers=2), 1, [np.zeros(64, np.int32), np.zeros(64, np.int32)])


def test_a_wait_that_allows_younger_loads_is_enough() -> None:
    text = """
        s_load_dwordx4 s[4:7], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_load_dword v2, v1, s[4:5]
        global_load_dword v3, v1, s[4:5]
        s_waitcnt vmcnt(1)
        v_add_u32 v2, 1, v2
        s_waitcnt vmcnt(0)
        global_store_dword v1, v2, s[6:7]
    """
    launch(kernel("gfx950", text, pointers=2), 1, [np.zeros(64, np.int32), np.zeros(64, np.int32)])


# Two waves: each stores its own half of LDS and reads the other's.
EXCHANGE = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_xor_b32 v2, 0x100, v1
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v3, v2
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v3, s[4:5]
"""


def test_a_barrier_orders_the_waves_of_a_group() -> None:
    out = np.zeros(128, np.int32)
    launch(kernel("gfx950", EXCHANGE, waves=2, lds=512), 1, [out])
    assert out.tolist() == [i ^ 64 for i in range(128)]


def test_a_wave_waits_at_the_barrier_for_one_that_comes_later_by_another_path() -> None:
    body = """
        s_load_dwordx2 s[4:5], s[0:1], 0x0
        v_mov_b32 v1, 0
        v_readfirstlane_b32 s6, v0
        s_waitcnt lgkmcnt(0)
        s_cmp_eq_u32 s6, 0
        s_cbranch_scc1 writer
        s_barrier
        ds_read_b32 v2, v1
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v2, s[4:5]
        s_endpgm
        writer:
        v_mov_b32 v3, 42
        ds_write_b32 v1, v3
        s_waitcnt lgkmcnt(0)
        s_barrier
    """
    out = np.zeros(1, np.int32)
    launch(kernel("gfx950", body, waves=2, lds=64), 1, [out])
    assert out.tolist() == [42]


def test_a_missing_barrier_is_reported_with_both_accesses() -> None:
    compiled = kernel("gfx950", EXCHANGE.replace("    s_barrier\n", ""), waves=2, lds=512)
    with pytest.raises(RaceError, match=r"RAW race on 128 LDS granule.*ds_read_b32 v3, v2 after.*ds_write_b32 v1, v0"):
        launch(compiled, 1, [np.zeros(128, np.int32)])
    report = launch(compiled, 1, [np.zeros(128, np.int32)], on_race="report")
    assert [race.kind for race in report.races] == ["RAW"]
    assert not launch(compiled, 1, [np.zeros(128, np.int32)], race=False).races


def test_writing_over_what_another_wave_still_reads_is_reported() -> None:
    text = EXCHANGE.replace("    global_store", "    ds_write_b32 v1, v3\n    global_store")
    with pytest.raises(RaceError, match="WAR race"):
        launch(kernel("gfx950", text, waves=2, lds=512), 1, [np.zeros(128, np.int32)])


def test_a_wave_may_not_write_what_it_and_another_wave_read() -> None:
    """Both waves read everything; the last to read is not the only one."""
    body = """
        v_mov_b32 v1, 0
        v_lshrrev_b32 v2, 6, v0
        v_readfirstlane_b32 s6, v2
        ds_read_b32 v3, v1
        s_waitcnt lgkmcnt(0)
        s_cmp_eq_u32 s6, 0
        s_cbranch_scc1 done
        ds_write_b32 v1, v0
        done:
        s_nop 0
    """
    with pytest.raises(RaceError, match="WAR race"):
        launch(kernel("gfx950", body, waves=2, lds=64), 1, [np.zeros(1, np.int32)])


def test_two_waves_may_write_the_same_bytes_but_not_different_ones() -> None:
    out = np.zeros(128, np.int32)
    shared = "v_and_b32 v4, 0xff, v1\n    ds_write_b32 v4, {}"
    same = kernel("gfx950", EXCHANGE.replace("ds_write_b32 v1, v0", shared.format("v4")), waves=2, lds=512)
    assert not launch(same, 1, [out]).races
    different = kernel("gfx950", EXCHANGE.replace("ds_write_b32 v1, v0", shared.format("v0")), waves=2, lds=512)
    assert {race.kind for race in launch(different, 1, [out], on_race="report").races} == {"WAW"}


def test_split_barriers_order_what_came_before_the_signal_only() -> None:
    before = """
        s_load_b64 s[4:5], s[0:1], 0x0
        v_lshlrev_b32 v1, 2, v0
        v_xor_b32 v2, 0x80, v1
        ds_store_b32 v1, v0
        s_wait_dscnt 0x0
        s_barrier_signal -1
        s_nop 0
        s_barrier_wait -1
        ds_load_b32 v3, v2
        s_wait_dscnt 0x0
        s_wait_kmcnt 0x0
        global_store_b32 v1, v3, s[4:5]
    """
    out = np.zeros(64, np.int32)
    launch(kernel("gfx1250", before, waves=2, lds=256), 1, [out])
    assert out.tolist() == [i ^ 32 for i in range(64)]
    between = before.replace("        ds_store_b32 v1, v0\n        s_wait_dscnt 0x0\n", "", 1)
    between = between.replace("s_nop 0", "ds_store_b32 v1, v0\n        s_wait_dscnt 0x0")
    with pytest.raises(RaceError, match="RAW race"):
        launch(kernel("gfx1250", between, waves=2, lds=256), 1, [out])


@pytest.mark.parametrize(("loads", "fails"), [(63, True), (64, False)])
def test_a_counter_that_is_full_waits_for_its_oldest_operation(loads: int, fails: bool) -> None:
    """vmcnt counts to 63: the 64th load is not issued before the first has returned, and compilers leave that wait out."""
    lines = ["s_load_dwordx2 s[4:5], s[0:1], 0x0", "v_lshlrev_b32 v1, 2, v0", "s_waitcnt lgkmcnt(0)"]
    lines += [f"global_load_dword v{10 + i}, v1, s[4:5]" for i in range(loads)]
    lines += ["v_add_u32 v2, v10, v10", "s_waitcnt vmcnt(0)", "global_store_dword v1, v2, s[4:5]"]
    x = np.arange(64, dtype=np.int32)
    if fails:
        with pytest.raises(MissingWaitError, match=r"v10 is still being loaded.*vmcnt"):
            launch(kernel("gfx950", "\n".join(lines)), 1, [x])
    else:
        launch(kernel("gfx950", "\n".join(lines)), 1, [x])
        assert x.tolist() == (2 * np.arange(64)).tolist()


ASYNC_LOAD = """
    s_load_b128 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    v_cmp_gt_u32 vcc_lo, 16, v0
    v_cndmask_b32 v4, 0x7fffffff, v1, vcc_lo
    v_cndmask_b32 v5, 0x70000000, v1, vcc_lo
    s_wait_kmcnt 0x0
    global_load_async_to_lds_b32 v4, v5, s[4:5]
    s_wait_asynccnt 0x0
    ds_load_b32 v2, v1
    s_wait_dscnt 0x0
    global_store_b32 v1, v2, s[6:7]
"""


def test_an_asynchronous_load_to_an_address_far_outside_lds_does_nothing() -> None:
    """That is how Triton masks it: neither memory (here: outside every buffer) nor LDS is touched."""
    x, y = np.arange(1, 17, dtype=np.int32), np.zeros(32, np.int32)
    launch(kernel("gfx1250", ASYNC_LOAD, pointers=2, lds=128), 1, [x, y])
    assert y.tolist() == [*range(1, 17), *[-1] * 16]
    near = ASYNC_LOAD.replace("0x7fffffff", "0x80").replace("0x70000000", "0")
    with pytest.raises(OutOfBoundsError, match="LDS transfer of 4 bytes at address 128"):
        launch(kernel("gfx1250", near, pointers=2, lds=128), 1, [x, y])


ASYNC_STORE = """
    s_load_b64 s[4:5], s[0:1], 0x0
    v_and_b32 v0, 0x3ff, v0
    v_lshlrev_b32 v1, 2, v0
    ds_store_b32 v1, v0
    s_wait_dscnt 0x0
    s_wait_kmcnt 0x0
    global_store_async_from_lds_b32 v1, v1, s[4:5]
    s_wait_asynccnt 0x0
    v_add_nc_u32 v2, 1, v0
    ds_store_b32 v1, v2
"""


def test_lds_that_an_asynchronous_store_still_reads_must_be_left_alone() -> None:
    out = np.zeros(64, np.int32)
    report = launch(kernel("gfx1250", ASYNC_STORE, waves=2, lds=256), 1, [out])
    assert out.tolist() == list(range(64))
    assert report.unlanded == 0
    early = ASYNC_STORE.replace("    s_wait_asynccnt 0x0\n", "")
    with pytest.raises(RaceError, match=r"WAR, in flight,.*ds_store_b32 v1, v2.*global_store_async_from_lds_b32"):
        launch(kernel("gfx1250", early, waves=2, lds=256), 1, [out])


DIRECT = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32 v1, 2, v0
    s_mov_b32 m0, 0
    s_waitcnt lgkmcnt(0)
    global_load_lds_dword v1, s[4:5]
    s_waitcnt vmcnt(0)
    ds_read_b32 v2, v1
    s_waitcnt lgkmcnt(0)
    global_store_dword v1, v2, s[6:7]
"""


def test_direct_transfers_land_at_the_wait_and_not_before(numbers: np.random.Generator) -> None:
    x, y = numbers.integers(0, 1000, 64).astype(np.int32), np.zeros(64, np.int32)
    launch(kernel("gfx950", DIRECT, pointers=2, lds=256), 1, [x, y])
    np.testing.assert_array_equal(y, x)
    unwaited = kernel("gfx950", DIRECT.replace("    s_waitcnt vmcnt(0)\n", ""), pointers=2, lds=256)
    report = launch(unwaited, 1, [x, y])
    assert (y == -1).all(), "LDS still holds what it was filled with"
    assert report.unlanded == 1


def test_an_infinite_loop_is_a_deadlock_error_with_the_place() -> None:
    text = "loop:\n    s_nop 0\n    s_branch loop"
    with pytest.raises(DeadlockError, match=r"more than 500 instructions.*(s_nop 0|s_branch loop)"):
        launch(kernel("gfx950", text), 1, [np.zeros(1, np.int32)], max_steps=500)


def test_waves_that_wait_for_one_that_ended_are_let_go() -> None:
    text = """
        v_readfirstlane_b32 s6, v0
        s_cmp_eq_u32 s6, 0
        s_cbranch_scc1 done
        s_barrier
        done:
        s_nop 0
    """
    launch(kernel("gfx950", text, waves=2, lds=64), 1, [np.zeros(1, np.int32)])


def test_a_spinning_wave_does_not_starve_the_wave_it_waits_for() -> None:
    """Wave 1 polls LDS at a lower address than the code of wave 0 that sets the flag."""
    text = """
        v_mov_b32 v1, 0
        v_readfirstlane_b32 s6, v0
        ds_write_b32 v1, v1
        s_waitcnt lgkmcnt(0)
        s_barrier
        s_cmp_eq_u32 s6, 0
        s_cbranch_scc1 setter
        poll:
        ds_read_b32 v2, v1
        s_waitcnt lgkmcnt(0)
        v_readfirstlane_b32 s7, v2
        s_cmp_eq_u32 s7, 0
        s_cbranch_scc1 poll
        s_branch done
        setter:
        v_mov_b32 v3, 1
        ds_write_b32 v1, v3
        done:
        s_nop 0
    """
    launch(kernel("gfx950", text, waves=2, lds=64), 1, [np.zeros(1, np.int32)], race=False, max_steps=10000)


def test_a_failed_device_assertion_stops_the_launch() -> None:
    with pytest.raises(TrapError, match="s_trap 2"):
        launch(kernel("gfx950", "s_trap 2"), 1, [np.zeros(1, np.int32)])


def test_all_unknown_instructions_are_listed_before_anything_runs() -> None:
    text = "v_frobnicate_b32 v0, v1\ns_nop 0\ns_quux s0, s1\nv_frobnicate_b32 v2, v3\nv_add_f32 v0, v0, v1 wobble:3"
    with pytest.raises(UnknownInstructionError) as caught:
        launch(kernel("gfx950", text), 1, [np.zeros(1, np.int32)])
    message = str(caught.value)
    assert "3 instruction(s) not emulated on gfx950" in message
    assert "v_frobnicate_b32 is not known: 2 use(s)" in message
    assert "s_quux is not known" in message
    assert "v_add_f32 with modifier wobble is not known" in message


def test_an_instruction_of_another_target_is_unknown() -> None:
    with pytest.raises(UnknownInstructionError, match=r"ds_read_b64_tr_b16 is not known"):
        launch(kernel("gfx942", "ds_read_b64_tr_b16 v[0:1], v2"), 1, [np.zeros(1, np.int32)])


def test_trailing_pointers_may_be_missing_and_are_null() -> None:
    launch(kernel("gfx950", "s_nop 0", pointers=2), 1, [np.zeros(1)])


def test_arrays_the_device_could_not_address_are_refused() -> None:
    with pytest.raises(ShapeError, match="negative strides"):
        launch(kernel("gfx950", "s_nop 0"), 1, [np.zeros((4, 4))[::-1]])
    with pytest.raises(ShapeError, match="must be a CPU tensor, got device meta"):
        launch(kernel("gfx950", "s_nop 0"), 1, [torch.zeros(4, device="meta")])


def test_the_report_counts_instructions_in_waves() -> None:
    report = launch(kernel("gfx950", INCREMENT, pointers=2, waves=2), 3, [np.zeros(128, np.int32)] * 2, batch=2)
    assert report.executed["global_load_dword"] == 6
    assert report.executed["s_endpgm"] == 6
