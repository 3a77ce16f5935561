"""Arguments that are neither arrays nor numbers: host-made descriptors, tables of addresses; and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no kernel can be compiled")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn.faults import EmulationError, OutOfBoundsError, UnknownInstructionError
from primus_turbo_plugin.errors import UnsupportedError

ARCHS = ("gfx942", "gfx950", "gfx1250")


@triton.jit
def turned_copy(x, y, columns, BLOCK: tl.constexpr):
    """y = 2 x.T through descriptors that the host has made."""
    for i in range(tl.cdiv(columns, BLOCK)):
        value = x.load([tl.program_id(0) * BLOCK, i * BLOCK])
        y.store([i * BLOCK, tl.program_id(0) * BLOCK], value.T * 2)


@triton.jit
def batch_add(x, y, PLANES: tl.constexpr):
    at = tl.program_id(0) * PLANES
    y.store([at, 0, 0], x.load([at, 0, 0]) + 1)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "warps"), [(torch.float32, 4), (torch.bfloat16, 1)], ids=str)
def test_host_made_descriptors_with_tails(
    arch: str, dtype: torch.dtype, warps: int, numbers: np.random.Generator
) -> None:
    x = torch.from_numpy(numbers.standard_normal((40, 56), np.float32)).to(dtype)
    y = torch.full((56, 40), float("nan"), dtype=dtype)
    args = {
        "x": TensorDescriptor.from_tensor(x, [16, 16]),
        "y": TensorDescriptor.from_tensor(y, [16, 16]),
        "columns": 56,
    }
    code = amdgcn.compile(turned_copy, arch, args, {"BLOCK": 16}, num_warps=warps)
    assert ("tensor_load_to_lds" in code.asm) == (arch == "gfx1250"), "there the descriptor is the data mover's own"
    amdgcn.launch(code, 3, args)
    assert torch.equal(y, x.T * 2)


@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_host_made_descriptors_of_three_dimensions(arch: str, numbers: np.random.Generator) -> None:
    x = torch.from_numpy(numbers.standard_normal((5, 20, 32), np.float32))
    y = torch.zeros_like(x)
    args = {name: TensorDescriptor.from_tensor(t, [2, 16, 32]) for name, t in (("x", x), ("y", y))}
    code = amdgcn.compile(batch_add, arch, args, {"PLANES": 2})
    amdgcn.launch(code, 3, args)
    assert torch.equal(y[:, :16], x[:, :16] + 1)
    assert not y[:, 16:].any()


@triton.jit
def grouped_by_address(table_ptr, sizes_ptr, groups, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of different sizes; addresses of the matrices lie in memory."""
    tile = tl.program_id(0)
    end = 0
    for g in range(groups):
        M, N, K = tl.load(sizes_ptr + 3 * g), tl.load(sizes_ptr + 3 * g + 1), tl.load(sizes_ptr + 3 * g + 2)
        tiles_n = tl.cdiv(N, BN)
        count = tl.cdiv(M, BM) * tiles_n
        while tile >= end and tile < end + count:
            a = tl.load(table_ptr + 3 * g).to(tl.pointer_type(tl.float16))
            b = tl.load(table_ptr + 3 * g + 1).to(tl.pointer_type(tl.float16))
            c = tl.load(table_ptr + 3 * g + 2).to(tl.pointer_type(tl.float16))
            rows = (tile - end) // tiles_n * BM + tl.arange(0, BM)
            columns = (tile - end) % tiles_n * BN + tl.arange(0, BN)
            depth = tl.arange(0, BK)
            total = tl.zeros([BM, BN], tl.float32)
            for k in range(0, K, BK):
                inside = k + depth < K
                x = tl.load(
                    a + rows[:, None] * K + k + depth[None, :], mask=(rows < M)[:, None] & inside[None, :], other=0.0
                )
                y = tl.load(
                    b + (k + depth)[:, None] * N + columns[None, :],
                    mask=inside[:, None] & (columns < N)[None, :],
                    other=0.0,
                )
                total = tl.dot(x, y, total)
            tl.store(
                c + rows[:, None] * N + columns[None, :],
                total.to(tl.float16),
                mask=(rows < M)[:, None] & (columns < N)[None, :],
            )
            tile += tl.num_programs(0)
        end += count


def matrices(rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    sizes = np.array([(40, 33, 50), (16, 64, 32), (70, 20, 17)], np.int32)
    arrays = []
    for m, n, k in sizes:
        arrays += [rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)]
        arrays += [np.full((m, n), np.nan, np.float16)]
    return arrays, sizes


@pytest.mark.parametrize("arch", ARCHS)
def test_products_whose_addresses_lie_in_memory(arch: str, numbers: np.random.Generator) -> None:
    arrays, sizes = matrices(numbers)
    args = {"table_ptr": amdgcn.AddressTable(arrays), "sizes_ptr": sizes, "groups": 3}
    code = amdgcn.compile(grouped_by_address, arch, args, {"BM": 32, "BN": 32, "BK": 32})
    amdgcn.launch(code, 4, args)
    for a, b, c in zip(arrays[::3], arrays[1::3], arrays[2::3]):
        want = a.astype(np.float64) @ b.astype(np.float64)
        np.testing.assert_allclose(c, want, atol=2.0**-10 * np.abs(want).max(), rtol=0)


def test_an_address_from_a_table_is_checked_like_any_other(numbers: np.random.Generator) -> None:
    arrays, sizes = matrices(numbers)
    sizes[0, 0] += 1  # one row too many
    args = {"table_ptr": amdgcn.AddressTable(arrays), "sizes_ptr": sizes, "groups": 3}
    code = amdgcn.compile(grouped_by_address, "gfx950", args, {"BM": 32, "BN": 32, "BK": 32})
    with pytest.raises(OutOfBoundsError, match=r"test_host_objects\.py:\d+"):
        amdgcn.launch(code, 4, args)


@triton.jit
def prints(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.device_print("x", tl.load(x_ptr + at, mask=at < n, other=0.0))


@triton.jit
def gathers(x_ptr, rows_ptr, y_ptr, rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [rows, BLOCK], [BLOCK, 1], [1, BLOCK])
    value = x.gather(tl.load(rows_ptr + tl.arange(0, ROWS)), 0)
    tl.store(y_ptr + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], value)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_that_prints_is_refused_with_the_remedy(arch: str) -> None:
    args = {"x_ptr": np.zeros(64, np.float32), "n": 60}
    code = amdgcn.compile(prints, arch, args, {"BLOCK": 64})
    with pytest.raises(UnsupportedError, match=r"'prints' calls the host \(device_print.*Remove the call"):
        amdgcn.launch(code, 1, args)


def test_what_a_transfer_cannot_do_yet_names_instruction_and_source_line(numbers: np.random.Generator) -> None:
    """A gather is emulated where it is loads, and refused by name where it is a mode of the tensor data mover."""
    x, rows = numbers.standard_normal((40, 32), np.float32), numbers.integers(0, 40, 16, dtype=np.int32)
    args = {"x_ptr": x, "rows_ptr": rows, "y_ptr": np.zeros((16, 32), np.float32), "rows": 40}
    amdgcn.launch(amdgcn.compile(gathers, "gfx950", args, {"ROWS": 16, "BLOCK": 32}), 1, args)
    np.testing.assert_array_equal(args["y_ptr"], x[rows])
    code = amdgcn.compile(gathers, "gfx1250", args, {"ROWS": 16, "BLOCK": 32})
    with pytest.raises(EmulationError, match=r"tensor_load_to_lds .*test_host_objects\.py:\d+.*gather/scatter"):
        amdgcn.launch(code, 1, args)


def test_unknown_instructions_are_all_named_with_their_source_lines_before_anything_runs() -> None:
    args = {"x_ptr": np.zeros(64, np.float32), "n": 60}
    code = amdgcn.compile(plain_store, "gfx950", args, {"BLOCK": 64})
    text = code.asm.replace("v_pk_add_f32", "v_frobnicate_f32").replace("v_mul_f32_e32", "v_twist_f32")
    broken = code.with_assembly(text)
    with pytest.raises(UnknownInstructionError) as refused:
        amdgcn.launch(broken, 1, args)
    for name in ("v_frobnicate_f32", "v_twist_f32"):
        assert name in str(refused.value)
    assert "test_host_objects.py:" in str(refused.value)
    assert not args["x_ptr"].any()


@triton.jit
def plain_store(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.load(x_ptr + at + 1, mask=at < n - 1, other=2.0)
    tl.store(x_ptr + at, (x + y) * (y + 1.5), mask=at < n)
