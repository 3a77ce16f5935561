"""Launches of the Hopper attention kernels (Gluon): when they apply, and with what."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor

from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem, can_use_descriptors

_LOG2E = 1.4426950408889634
_ROWS = 128  # queries of a program
KEYS = 128  # of a program of dkdv
_WIDEST = 128
_WIDEST_WITH_TAIL = 192


def applies(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, tail: bool = True) -> bool:
    """Whether the kernels can do this problem on a Hopper GPU; the portable ones do everything else.

    Args:
        problem: The problem.
        q: Its queries.
        k: Its keys.
        v: Its values.
        others: Further tensors that descriptors must read.
        tail: Whether the kernel in question takes columns of q and k beyond the first 128.
    """
    plain = problem.cu_q is None and problem.cp_size == 1 and problem.masked is None
    plain = plain and problem.softcap == 0.0 and problem.seed is None and problem.scale > 0.0
    return (
        plain
        and q.shape[3] <= (_WIDEST_WITH_TAIL if tail else _WIDEST)
        and v.shape[3] <= _WIDEST
        and q.shape[3] % 8 == v.shape[3] % 8 == 0
        and min(q.numel(), k.numel(), v.numel()) > 0
        and can_use_descriptors(q, k, v, *others)
    )


def forward_launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem) -> Launch:
    """The forward kernel, writing out (dense in its last dimension) and lse."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_fwd import attention_hopper_fwd_kernel

    batch, q_len, heads, _ = q.shape
    width, block_n = _width(q, v), 128
    tiles = math.ceil(q_len / _ROWS)
    args = {
        **_both_parts("q", q, _ROWS // 2, width), **_both_parts("k", k, block_n, width),
        "v_desc": descriptor(v, block_n, width), "out": out, "lse": lse, "sinks": problem.sinks,
        **_sizes(q, k, problem), "tiles": tiles, "v_dim": v.shape[3],
        "stride_ob": out.stride(0), "stride_os": out.stride(1), "stride_oh": out.stride(2),
    }  # fmt: skip
    constants = {**_reaches(problem), "SINKS": problem.sinks is not None, "BLOCK_N": block_n, "SLOTS": 2}
    constants |= {"D": width, "TAIL": _tail(q, width)}
    return Launch(attention_hopper_fwd_kernel, (tiles * batch * heads,), args, constants, {"num_warps": 4})


def dkdv_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, lse2: Tensor, delta: Tensor, problem: Problem
) -> Launch:
    """dk and dv `[splits, batch, tokens, groups, dim]`, dense in their last dimension."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_dkdv import attention_hopper_dkdv_kernel

    width, block_m = _width(q, v), 64
    tiles, splits = math.ceil(k.shape[1] / KEYS), dk.shape[0]
    args = {
        "q_desc": descriptor(q, block_m, width), "k_desc": descriptor(k, KEYS, width),
        "v_desc": descriptor(v, KEYS, width), "g_desc": descriptor(dout, block_m, width),
        "lse_desc": _row_descriptor(lse2, block_m), "delta_desc": _row_descriptor(delta, block_m), "dk": dk, "dv": dv,
        **_sizes(q, k, problem), "tiles": tiles, "splits": splits, "grad_scale": problem.scale,
        "dim": q.shape[3], "v_dim": v.shape[3],
        **{f"stride_{name}{axis}": x.stride(i) for name, x in (("dk", dk), ("dv", dv)) for i, axis in enumerate("pbsh")},
    }  # fmt: skip
    constants = {**_reaches(problem), "BLOCK_M": block_m, "D": width, "SLOTS": 2}
    grid = tiles * splits * k.shape[0] * k.shape[2]
    return Launch(attention_hopper_dkdv_kernel, (grid,), args, constants, {"num_warps": 4})


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dq: Tensor, lse2: Tensor, delta: Tensor, problem: Problem
) -> Launch:
    """dq, dense in its last dimension."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_dq import attention_hopper_dq_kernel

    width = _width(q, v)
    block_n, slots = (64, 3) if _tail(q, width) else (128, 2)  # what fits shared memory
    tiles = math.ceil(q.shape[1] / _ROWS)
    args = {
        **_both_parts("q", q, _ROWS // 2, width), "g_desc": descriptor(dout, _ROWS // 2, width),
        **_both_parts("k", k, block_n, width), "v_desc": descriptor(v, block_n, width),
        "dq": dq, "lse2": lse2, "delta": delta, **_sizes(q, k, problem), "tiles": tiles,
        "grad_scale": problem.scale, "dim": q.shape[3],
        "stride_dqb": dq.stride(0), "stride_dqs": dq.stride(1), "stride_dqh": dq.stride(2),
    }  # fmt: skip
    constants = {**_reaches(problem), "BLOCK_N": block_n, "SLOTS": slots}
    constants |= {"D": width, "TAIL": _tail(q, width)}
    grid = tiles * q.shape[0] * q.shape[2]
    return Launch(attention_hopper_dq_kernel, (grid,), args, constants, {"num_warps": 4})


def descriptor(x: Tensor, rows: int, width: int) -> Any:
    """x `[batch, tokens, heads, dim]` in tiles of `rows` tokens of one head; columns past dim read as zero."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape)] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, rows, 1, width], _layout(128, 16, 4))


@functools.cache
def _layout(swizzle: int, bits: int, rank: int) -> Any:
    """Made once: making it takes longer than making the descriptor."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _both_parts(name: str, x: Tensor, rows: int, width: int) -> dict[str, Any]:
    """Descriptors of x's first columns and of those beyond; without any, the same again, since the kernels take no None."""
    first, tail = descriptor(x, rows, width), _tail(x, width)
    return {f"{name}_desc": first, f"{name}_tail_desc": descriptor(x, rows, tail) if tail else first}


def _tail(x: Tensor, width: int) -> int:
    return 64 if x.shape[3] > width else 0


def _row_descriptor(x: Tensor, rows: int) -> Any:
    """x fp32 `[batch, heads, queries]`, contiguous, in runs of `rows` queries of one head."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    batch, heads, queries = x.shape
    return TensorDescriptor(x, [batch * heads, queries], [queries, 1], [1, rows], _layout(0, 32, 2))


def _sizes(q: Tensor, k: Tensor, problem: Problem) -> dict[str, Any]:
    return {
        "heads": q.shape[2], "groups": k.shape[2], "q_len": q.shape[1], "k_len": k.shape[1],
        "left": problem.left or 0, "right": problem.right or 0, "scale": problem.scale * _LOG2E,
    }  # fmt: skip


def _width(q: Tensor, v: Tensor) -> int:
    return 64 if max(q.shape[3], v.shape[3]) <= 64 else 128


def _reaches(problem: Problem) -> dict[str, bool]:
    return {"LEFT": problem.left is not None, "RIGHT": problem.right is not None}
