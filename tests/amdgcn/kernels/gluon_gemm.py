"""Gluon GEMMs: direct-to-LDS copies and transpose loads on gfx950, the tensor data mover on gfx1250."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget

try:  # Triton 3.9 renames gfx1250's module
    from triton.experimental.gluon.language.amd import cdna5 as tdm_arch

    tdm_arch.tdm  # noqa: B018  (3.8 has an empty module of that name)
except (ImportError, AttributeError):
    from triton.experimental.gluon.language.amd import gfx1250 as tdm_arch


@gluon.constexpr_function
def copy_layout(shared, num_warps, vector=8):
    """Register, lane and warp bits that follow the shared layout's address bits, as a direct copy writes them."""
    bits = [list(x) for x in shared.offset_bases]
    v, w = vector.bit_length() - 1, num_warps.bit_length() - 1
    return gl.DistributedLinearLayout(
        reg_bases=bits[:v] + bits[v + 6 + w :],
        lane_bases=bits[v : v + 6],
        warp_bases=bits[v + 6 : v + 6 + w],
        block_bases=[],
        shape=list(shared.shape),
    )


@gluon.jit
def gemm_async_copy(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BUFFERS: gl.constexpr,
                    A_K: gl.constexpr, B_K: gl.constexpr, NUM_WARPS: gl.constexpr):  # fmt: skip
    """c = a @ b on gfx950; A_K, B_K: the operand is contiguous along K. Copies run BUFFERS - 1 tiles ahead."""
    mfma: gl.constexpr = gl.amd.AMDMFMALayout(
        version=4, instr_shape=[16, 16, 32], transposed=True, warps_per_cta=[2, NUM_WARPS // 2]
    )
    dot_a: gl.constexpr = gl.DotOperandLayout(0, mfma, 8)
    dot_b: gl.constexpr = gl.DotOperandLayout(1, mfma, 8)
    shared_a: gl.constexpr = cdna4.compute_efficient_padded_shared_layout(dot_a, [BM, BK], gl.bfloat16, A_K)
    shared_b: gl.constexpr = cdna4.compute_efficient_padded_shared_layout(dot_b, [BK, BN], gl.bfloat16, B_K)
    copy_a: gl.constexpr = copy_layout(shared_a, NUM_WARPS)
    copy_b: gl.constexpr = copy_layout(shared_b, NUM_WARPS)
    m, n = gl.program_id(0), gl.program_id(1)
    tile_a = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BM, BK], shared_a)
    tile_b = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BK, BN], shared_b)
    am = gl.arange(0, BM, gl.SliceLayout(1, copy_a))
    ak = gl.arange(0, BK, gl.SliceLayout(0, copy_a))
    bk = gl.arange(0, BK, gl.SliceLayout(1, copy_b))
    bn = gl.arange(0, BN, gl.SliceLayout(0, copy_b))
    if A_K:
        offsets_a = am[:, None] * stride_am + ak[None, :]
        a = a_ptr + m * BM * stride_am
        step_a = BK
    else:
        offsets_a = am[:, None] + ak[None, :] * stride_ak
        a = a_ptr + m * BM
        step_a = BK * stride_ak
    if B_K:
        offsets_b = bk[:, None] + bn[None, :] * stride_bn
        b = b_ptr + n * BN * stride_bn
        step_b = BK
    else:
        offsets_b = bk[:, None] * stride_bk + bn[None, :]
        b = b_ptr + n * BN
        step_b = BK * stride_bk
    for i in gl.static_range(BUFFERS - 1):
        cdna4.async_copy.buffer_load_to_shared(tile_a.index(i), a, offsets_a)
        cdna4.async_copy.buffer_load_to_shared(tile_b.index(i), b, offsets_b)
        cdna4.async_copy.commit_group()
        a += step_a
        b += step_b
    total = gl.zeros([BM, BN], gl.float32, mfma)
    tiles = gl.cdiv(K, BK)
    for k in range(tiles - (BUFFERS - 1)):
        cdna4.async_copy.wait_group(BUFFERS - 2)
        gl.barrier()
        left = cdna4.async_copy.load_shared_relaxed(tile_a.index(k % BUFFERS), dot_a)
        right = cdna4.async_copy.load_shared_relaxed(tile_b.index(k % BUFFERS), dot_b)
        slot = (k + BUFFERS - 1) % BUFFERS
        cdna4.async_copy.buffer_load_to_shared(tile_a.index(slot), a, offsets_a)
        cdna4.async_copy.buffer_load_to_shared(tile_b.index(slot), b, offsets_b)
        cdna4.async_copy.commit_group()
        a += step_a
        b += step_b
        total = cdna4.mfma(left, right, total)
    for i in gl.static_range(BUFFERS - 1):
        cdna4.async_copy.wait_group(BUFFERS - 2 - i)
        gl.barrier()
        k = tiles - (BUFFERS - 1) + i
        left = cdna4.async_copy.load_shared_relaxed(tile_a.index(k % BUFFERS), dot_a)
        right = cdna4.async_copy.load_shared_relaxed(tile_b.index(k % BUFFERS), dot_b)
        total = cdna4.mfma(left, right, total)
    rows = m * BM + gl.arange(0, BM, gl.SliceLayout(1, mfma))
    columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, mfma))
    cdna4.buffer_store(total.to(gl.bfloat16), c_ptr, rows[:, None] * N + columns[None, :])


@gluon.jit
def gemm_tensor_mover(a_ptr, b_ptr, c_ptr, M, N, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
                      BUFFERS: gl.constexpr, BARRIER_OBJECT: gl.constexpr, NUM_WARPS: gl.constexpr):  # fmt: skip
    """c = a @ b.T on gfx1250, tiles through the TDM; BARRIER_OBJECT: transfers signal an LDS barrier per buffer."""
    wmma: gl.constexpr = gl.amd.AMDWMMALayout(
        version=3, transposed=True, warp_bases=[[0, 1], [1, 0]], instr_shape=[16, 16, 32]
    )
    dot_a: gl.constexpr = gl.DotOperandLayout(0, wmma, 8)
    dot_b: gl.constexpr = gl.DotOperandLayout(1, wmma, 8)
    shared_a: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[BK, 8]], [BM, BK], [1, 0])
    shared_b: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[BK, 8]], [BN, BK], [1, 0])
    m, n = gl.program_id(0), gl.program_id(1)
    a = tdm_arch.tdm.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], shared_a)
    b = tdm_arch.tdm.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK], shared_b)
    tile_a = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BM, BK], shared_a)
    tile_b = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BN, BK], shared_b)
    tiles = gl.cdiv(K, BK)
    if BARRIER_OBJECT:
        arrived = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], tdm_arch.mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            tdm_arch.mbarrier.init(arrived.index(i), count=2 * NUM_WARPS)  # every warp moves its part of both tiles
        gl.barrier()
    for i in gl.static_range(BUFFERS - 1):
        if BARRIER_OBJECT:
            tdm_arch.tdm.async_load(a, [m * BM, i * BK], tile_a.index(i), mbarrier=arrived.index(i))
            tdm_arch.tdm.async_load(b, [n * BN, i * BK], tile_b.index(i), mbarrier=arrived.index(i))
        else:
            tdm_arch.tdm.async_load(a, [m * BM, i * BK], tile_a.index(i))
            tdm_arch.tdm.async_load(b, [n * BN, i * BK], tile_b.index(i))
    total = gl.zeros([BM, BN], gl.float32, wmma)
    for k in range(tiles):
        slot = (k + BUFFERS - 1) % BUFFERS
        ahead = (k + BUFFERS - 1) * BK
        more = k + BUFFERS - 1 < tiles
        if BARRIER_OBJECT:
            tdm_arch.mbarrier.wait(arrived.index(k % BUFFERS), (k // BUFFERS) & 1)
            gl.barrier()
            tdm_arch.tdm.async_load(a, [m * BM, ahead], tile_a.index(slot), pred=more, mbarrier=arrived.index(slot))
            tdm_arch.tdm.async_load(b, [n * BN, ahead], tile_b.index(slot), pred=more, mbarrier=arrived.index(slot))
        else:
            tdm_arch.tdm.async_wait((BUFFERS - 2) * 2)
            gl.barrier()
            tdm_arch.tdm.async_load(a, [m * BM, ahead], tile_a.index(slot), pred=more)
            tdm_arch.tdm.async_load(b, [n * BN, ahead], tile_b.index(slot), pred=more)
        left = tile_a.index(k % BUFFERS).load(dot_a)
        right = tile_b.index(k % BUFFERS).permute([1, 0]).load(dot_b)
        total = tdm_arch.wmma(left, right, total)
    rows = m * BM + gl.arange(0, BM, gl.SliceLayout(1, wmma))
    columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, wmma))
    gl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(gl.bfloat16))


@gluon.constexpr_function
def cluster_layouts(BM, BN, BK):
    """A cluster of 2 x 2 work-groups: each half of a goes to two of them, and each half of b."""
    wmma = gl.amd.AMDWMMALayout(version=3, transposed=True, warp_bases=[[0, 1], [1, 0]], instr_shape=[16, 16, 32],
                                cga_layout=[[1, 0], [0, 1]])  # fmt: skip
    shared_a = gl.PaddedSharedLayout.with_identity_for([[BK, 8]], [BM, BK], [1, 0], [[1, 0], [0, 0]])
    shared_b = gl.PaddedSharedLayout.with_identity_for([[BK, 8]], [BN, BK], [1, 0], [[0, 0], [1, 0]])
    return wmma, shared_a, shared_b


@gluon.jit
def gemm_cluster(a_ptr, b_ptr, c_ptr, M, N, K,
                 BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """c = a @ b.T on gfx1250 by clusters of four work-groups, each tile multicast to two of them."""
    layouts: gl.constexpr = cluster_layouts(BM, BN, BK)
    wmma: gl.constexpr = layouts[0]
    dot_a: gl.constexpr = gl.DotOperandLayout(0, wmma, 8)
    dot_b: gl.constexpr = gl.DotOperandLayout(1, wmma, 8)
    m, n = gl.program_id(0), gl.program_id(1)
    a = tdm_arch.tdm.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], layouts[1])
    b = tdm_arch.tdm.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK], layouts[2])
    tile_a = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BM, BK], layouts[1])
    tile_b = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BN, BK], layouts[2])
    tdm_arch.tdm.async_load(a, [m * BM, 0], tile_a.index(0))
    tdm_arch.tdm.async_load(b, [n * BN, 0], tile_b.index(0))
    total = gl.zeros([BM, BN], gl.float32, wmma)
    for k in range(gl.cdiv(K, BK)):
        slot = (k + 1) % BUFFERS
        tdm_arch.tdm.async_wait(0)
        tdm_arch.cluster.arrive()
        tdm_arch.cluster.wait()
        tdm_arch.tdm.async_load(a, [m * BM, (k + 1) * BK], tile_a.index(slot))
        tdm_arch.tdm.async_load(b, [n * BN, (k + 1) * BK], tile_b.index(slot))
        left = tile_a.index(k % BUFFERS).load(dot_a)
        total = tdm_arch.wmma(left, tile_b.index(k % BUFFERS).permute([1, 0]).load(dot_b), total)
    tdm_arch.tdm.async_wait(0)
    rows = m * BM + gl.arange(0, BM, gl.SliceLayout(1, wmma))
    columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, wmma))
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    gl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(gl.bfloat16), mask=inside)


@gluon.constexpr_function
def fp4_layouts(BM, BN, BK):
    """Layouts of the full-rate FP4 instruction (32x16x128)."""
    result = gl.amd.AMDWMMALayout(version=3, transposed=True, warp_bases=[[0, 1], [1, 0]], instr_shape=[32, 16, 128])
    packed = gl.amd.AMDWMMALayout(version=3, transposed=True, warp_bases=[[0, 1], [1, 0]], instr_shape=[32, 16, 64])
    dot_a, dot_b = gl.DotOperandLayout(0, packed, 16), gl.DotOperandLayout(1, packed, 16)
    shared = gl.PaddedSharedLayout.with_identity_for([[BK // 2, 16]], [BM, BK // 2], [1, 0])
    scales = gl.PaddedSharedLayout.with_identity_for([[256, 16]], [BM, BK // 32], [1, 0])
    return result, dot_a, dot_b, shared, scales


@gluon.jit
def gemm_fp4(a_ptr, sa_ptr, b_ptr, sb_ptr, c_ptr, M, N, K, stride, stride_s,
             BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """MXFP4 on gfx1250 with `v_wmma_scale_f32_32x16x128_f4`; tiles and scales through the TDM, one buffer, no overlap."""
    layouts: gl.constexpr = fp4_layouts(BM, BN, BK)
    result: gl.constexpr = layouts[0]
    dot_a: gl.constexpr = layouts[1]
    dot_b: gl.constexpr = layouts[2]
    shared: gl.constexpr = layouts[3]
    shared_scales: gl.constexpr = layouts[4]
    m, n = gl.program_id(0), gl.program_id(1)
    a = tdm_arch.tdm.make_tensor_descriptor(a_ptr, [M, K // 2], [stride, 1], [BM, BK // 2], shared)
    b = tdm_arch.tdm.make_tensor_descriptor(b_ptr, [N, K // 2], [stride, 1], [BN, BK // 2], shared)
    sa = tdm_arch.tdm.make_tensor_descriptor(sa_ptr, [M, K // 32], [stride_s, 1], [BM, BK // 32], shared_scales)
    sb = tdm_arch.tdm.make_tensor_descriptor(sb_ptr, [N, K // 32], [stride_s, 1], [BN, BK // 32], shared_scales)
    tile_a = gl.allocate_shared_memory(gl.uint8, [BM, BK // 2], shared)
    tile_b = gl.allocate_shared_memory(gl.uint8, [BN, BK // 2], shared)
    tile_sa = gl.allocate_shared_memory(gl.uint8, [BM, BK // 32], shared_scales)
    tile_sb = gl.allocate_shared_memory(gl.uint8, [BN, BK // 32], shared_scales)
    scale_a: gl.constexpr = tdm_arch.get_wmma_scale_layout(dot_a, [BM, BK // 32])
    scale_b: gl.constexpr = tdm_arch.get_wmma_scale_layout(dot_b, [BN, BK // 32])
    total = gl.zeros([BM, BN], gl.float32, result)
    for k in range(gl.cdiv(K, BK)):
        gl.barrier()
        tdm_arch.tdm.async_load(a, [m * BM, k * (BK // 2)], tile_a)
        tdm_arch.tdm.async_load(b, [n * BN, k * (BK // 2)], tile_b)
        tdm_arch.tdm.async_load(sa, [m * BM, k * (BK // 32)], tile_sa)
        tdm_arch.tdm.async_load(sb, [n * BN, k * (BK // 32)], tile_sb)
        tdm_arch.tdm.async_wait(0)
        gl.barrier()
        left, right = tile_a.load(dot_a), tile_b.permute([1, 0]).load(dot_b)
        total = tdm_arch.wmma_scaled(left, tile_sa.load(scale_a), "e2m1", right, tile_sb.load(scale_b), "e2m1", total)
    rows = m * BM + gl.arange(0, BM, gl.SliceLayout(1, result))
    columns = n * BN + gl.arange(0, BN, gl.SliceLayout(0, result))
    gl.store(c_ptr + rows[:, None] * N + columns[None, :], total.to(gl.bfloat16))


def bf16_inputs(layout: str, m: int, n: int, k: int, strides: bool) -> Callable[[np.random.Generator], dict[str, Any]]:
    from tests.amdgcn.kernels.gemm import inputs

    return inputs(layout, m, n, k, strides)


def fp4_inputs(rng: np.random.Generator) -> dict[str, Any]:
    m, n, k = 128, 128, 512
    args: dict[str, Any] = {
        "M": m,
        "N": n,
        "K": k,
        "stride": k // 2,
        "stride_s": k // 32,
        "c_ptr": np.zeros((m, n), np.uint16),
    }
    for side, rows in (("a", m), ("b", n)):
        args[f"{side}_ptr"] = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
        args[f"s{side}_ptr"] = rng.integers(120, 134, (rows, k // 32), dtype=np.uint8)
    return args


def cluster_target() -> KernelTarget:
    """Four clusters of four work-groups, with tails in every dimension."""
    from tests.amdgcn.kernels.gemm import BF16_STEP, TYPES, reference

    return KernelTarget(
        name="gluon_cluster",
        kernel=gemm_cluster,
        archs=("gfx1250",),
        inputs=bf16_inputs("NT", 480, 500, 200, strides=False),
        grid=(2, 2),
        constants={"BM": 256, "BN": 256, "BK": 64, "BUFFERS": 2},
        options={"num_warps": 4, "num_ctas": 4},
        types=TYPES,
        expected=reference("NT"),
        tolerance=BF16_STEP,
        gate=IsaGate(required=("tensor_load_to_lds",), forbidden=("global_load.*",)),
    )


def isa_targets() -> list[KernelTarget]:
    from tests.amdgcn.kernels.gemm import BF16_STEP, TYPES, reference
    from tests.amdgcn.kernels.mx_gemm import mx_reference

    targets = [
        KernelTarget(
            name=f"gluon_async_copy_{layout.lower()}",
            kernel=gemm_async_copy,
            archs=("gfx950",),
            inputs=bf16_inputs(layout, 128, 128, 256, strides=True),
            grid=(1, 1),
            constants={"BM": 128, "BN": 128, "BK": 64, "BUFFERS": 2 if layout == "NT" else 3,
                       "A_K": layout[0] == "N", "B_K": layout[1] == "T", "NUM_WARPS": 4},
            types=TYPES,
            expected=reference(layout),
            tolerance=BF16_STEP,
            gate=IsaGate(required=("buffer_load_dwordx4 lds",), forbidden=("ds_write.*", "ds_read_u16.*"), bound_by="lds"),
        )
        for layout in ("NT", "NN", "TN")
    ]  # fmt: skip
    targets += [
        KernelTarget(
            name=f"gluon_tensor_mover_{'barrier' if barrier else f'{buffers}_buffers'}",
            kernel=gemm_tensor_mover,
            archs=("gfx1250",),
            inputs=bf16_inputs("NT", 128, 128, 256, strides=False),
            grid=(1, 1),
            constants={"BM": 128, "BN": 128, "BK": 64, "BUFFERS": buffers, "BARRIER_OBJECT": barrier, "NUM_WARPS": 4},
            types=TYPES,
            expected=reference("NT"),
            tolerance=BF16_STEP,
            gate=IsaGate(required=("tensor_load_to_lds",), forbidden=("global_load.*",)),
        )
        for buffers, barrier in ((2, False), (3, False), (2, True))
    ]
    targets.append(
        KernelTarget(
            name="gluon_fp4",
            kernel=gemm_fp4,
            archs=("gfx1250",),
            inputs=fp4_inputs,
            grid=(1, 1),
            constants={"BM": 128, "BN": 128, "BK": 256},
            types={"c_ptr": "*bf16"},
            expected=mx_reference("e2m1", True),
            tolerance=BF16_STEP,
            gate=IsaGate(required=("v_wmma_scale_f32_32x16x128_f4", "tensor_load_to_lds")),
        )
    )
    return [*targets, cluster_target()]
