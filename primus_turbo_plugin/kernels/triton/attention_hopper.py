"""Launches of the Hopper attention kernels (Gluon): when they apply, and with what."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.triton.attention_launch import (
    Launch,
    Problem,
    can_use_descriptors,
    key_slots,
    query_slots,
    shared_args,
)
from primus_turbo_plugin.kernels.triton.attention_plan import Moved

_ROWS = 128  # queries of a program
_KEYS = 128
_KEYS_WIDE = 64
_WIDEST = 256
_SHORT = 4096  # keys up to which dq gains by persistent programs
_CACHED_BYTES = 16 << 20  # of 50 MB of L2 cache

Kernel = Literal["forward", "dq", "dkdv"]
Order = Literal["dense", "packed", "zig-zag", "packed zig-zag"]
# TODO(#6): the kernels are written for all four orders. What an H200 showed of the others (2026-12):
# forward  right for two packed sequences that fill the tensor, for 8 and 20 in 16,384 tokens and for zig-zag order, plain and
#          packed; illegal memory access where tokens follow the last sequence (600 tokens, lengths 50, 200, 0, 330, 1)
# dq       right for 8 and 20 packed sequences in 16,384 tokens; not run otherwise
# dkdv     right in 24 packed and 19 zig-zag problems of up to 4,503 tokens, with `load_run`
# all three together, 8 packed sequences in 16,384 tokens: illegal memory access, of which kernel is not known
SEEN_RIGHT: dict[Kernel, frozenset[Order]] = {
    "forward": frozenset({"dense"}),
    "dq": frozenset({"dense"}),
    "dkdv": frozenset({"dense"}),
}
"""What a Hopper GPU (H200, 2026-12) has computed right, by kernel; `applies` offers no more."""


def applies(kernel: Kernel, problem: Problem, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> bool:
    """Whether a kernel can do this problem on a Hopper GPU; the portable one of the same pass does everything else.

    Args:
        kernel: Which; all of them write and read what the portable ones do, so that passes mix.
        problem: The problem.
        q: Its queries.
        k: Its keys.
        v: Its values.
        others: Further tensors that descriptors must read.
    """
    plain = problem.masked is None and problem.softcap == 0.0 and problem.seed is None and problem.scale > 0.0
    order = order_of(problem)
    return (
        plain
        and order in SEEN_RIGHT[kernel]
        and (kernel != "dkdv" or order != "dense" or q.shape[1] % 4 == 0)  # descriptors read lse and delta
        and max(q.shape[3], v.shape[3]) <= _WIDEST
        and q.shape[3] % 8 == v.shape[3] % 8 == 0
        and min(q.numel(), k.numel(), v.numel()) > 0
        and can_use_descriptors(q, k, v, *others)
    )


def order_of(problem: Problem) -> Order:
    """How its tokens lie."""
    if problem.cp_size > 1:
        return "zig-zag" if problem.cu_q is None else "packed zig-zag"
    return "dense" if problem.cu_q is None else "packed"


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, counter: Tensor | None = None
) -> Launch:
    """The forward kernel, writing out (dense in its last dimension) and lse; `counter` is an int32 zero, None for a new one."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_fwd import attention_hopper_fwd_kernel

    width = _width(q, v)
    block_n = 128 if width <= 128 else 64
    args = {
        **_both_parts("q", q, _ROWS // 2, width, problem), **_both_parts("k", k, block_n, width, problem),
        "v_desc": descriptor(v, block_n, width, problem), "out": out, "lse": lse, "sinks": problem.sinks,
        **_query_sizes(q, k, v, problem), "v_dim": v.shape[3],
        "stride_ob": out.stride(0), "stride_os": out.stride(1), "stride_oh": out.stride(2),
    }  # fmt: skip
    del args["grad_scale"]
    constants = {**_reaches(problem), "SINKS": problem.sinks is not None, "BLOCK_N": block_n, "SLOTS": 2}
    constants |= {"D": width, "TAIL": _tail(q, width), "META": _pieces(problem)}
    return _shared_out(attention_hopper_fwd_kernel, args, constants, q, counter, persistent=True)


def dkdv_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, lse2: Tensor, delta: Tensor, problem: Problem
) -> Launch:
    """dk and dv `[splits, batch, tokens, groups, dim]`, dense in their last dimension."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_dkdv import attention_hopper_dkdv_kernel
    from primus_turbo_plugin.kernels.triton.attention_hopper_dkdv_wide import attention_hopper_dkdv_wide_kernel

    keys, width, block_m = dkdv_keys(q, v), _width(q, v), 64
    v_width = width
    constants = {**_reaches(problem), "META": _pieces(problem), "BLOCK_M": block_m, "D": width, "SLOTS": 2}
    if keys == _KEYS:
        kernel = attention_hopper_dkdv_kernel
        descriptors = {
            "q_desc": descriptor(q, block_m, width, problem), "k_desc": descriptor(k, keys, width, problem)
        }  # fmt: skip
    else:
        kernel = attention_hopper_dkdv_wide_kernel
        v_width = 64 if v.shape[3] <= 64 else 128 if v.shape[3] <= 128 else 256
        descriptors = {
            **_both_parts("q", q, block_m, width, problem), **_both_parts("k", k, keys, width, problem)
        }  # fmt: skip
        constants |= {"TAIL": _tail(q, width), "DV": v_width, "P_SLOTS": 1 if width + v_width == 512 else 2}
    slots, splits = key_slots(k, problem, keys), dk.shape[0]
    lanes = splits * k.shape[0] * k.shape[2]
    chunk = max(1, _multiprocessors(q) // slots)  # measured: as many groups take turns as fill the GPU once
    args = {
        **descriptors, "v_desc": descriptor(v, keys, v_width, problem), "g_desc": descriptor(dout, block_m, v_width, problem),
        "lse2": _runs(lse2, block_m, problem), "delta": _runs(delta, block_m, problem), "dk": dk, "dv": dv,
        **_numbers(q, k, problem), "slots": slots, "chunk": min(chunk, lanes), "lanes": lanes, "splits": splits,
        "dim": q.shape[3], "v_dim": v.shape[3],
        **{f"stride_{name}{axis}": x.stride(i) for name, x in (("dk", dk), ("dv", dv)) for i, axis in enumerate("pbsh")},
    }  # fmt: skip
    return Launch(kernel, (slots * lanes,), args, constants, {"num_warps": 4})


def dkdv_keys(q: Tensor, v: Tensor) -> int:
    """Keys of a program of dkdv: two warpgroups share them, or where the heads are wide, the products."""
    return _KEYS if max(q.shape[3], v.shape[3]) <= 128 else _KEYS_WIDE


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dq: Tensor, lse2: Tensor, delta: Tensor, problem: Problem,
    counter: Tensor | None = None,
) -> Launch:  # fmt: skip
    """dq, dense in its last dimension; `counter` as for `forward_launch`."""
    from primus_turbo_plugin.kernels.triton.attention_hopper_dq import attention_hopper_dq_kernel

    width = _width(q, v)
    block_n, slots, v_slots = 128, 2, 2  # what fits shared memory
    if _tail(q, width):
        block_n, slots, v_slots = 64, 3, 3
    elif width > 128:
        block_n, slots, v_slots = 64, 2, 1
    args = {
        **_both_parts("q", q, _ROWS // 2, width, problem), "g_desc": descriptor(dout, _ROWS // 2, width, problem),
        **_both_parts("k", k, block_n, width, problem), "v_desc": descriptor(v, block_n, width, problem),
        "dq": dq, "lse2": lse2, "delta": delta, **_query_sizes(q, k, v, problem), "dim": q.shape[3],
        "stride_dqb": dq.stride(0), "stride_dqs": dq.stride(1), "stride_dqh": dq.stride(2),
    }  # fmt: skip
    constants = {**_reaches(problem), "META": _pieces(problem), "BLOCK_N": block_n, "SLOTS": slots, "V_SLOTS": v_slots}
    constants |= {"D": width, "TAIL": _tail(q, width)}
    return _shared_out(attention_hopper_dq_kernel, args, constants, q, counter, persistent=k.shape[1] <= _SHORT)


def _shared_out(
    kernel: Any, args: dict[str, Any], constants: dict[str, Any], q: Tensor, counter: Tensor | None, *, persistent: bool
) -> Launch:
    """A program for every item, or as many as run at once, which then count by `counter` what is done."""
    if not persistent:
        counter = None
    elif counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    grid = min(args["items"], _multiprocessors(q)) if persistent else args["items"]
    return Launch(
        kernel, (grid,), args | {"counter": counter}, constants | {"PERSISTENT": persistent}, {"num_warps": 4}
    )


def descriptor(x: Tensor, rows: int, width: int, problem: Problem | None = None) -> Any:
    """x `[batch, tokens, heads, dim]` in tiles of `rows` tokens of one head; columns past dim read as zero.

    With a packed problem, rows past a sequence's end do, too: see
    `attention_hopper_tile.copy_rows`.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape)] + [1]
    block, layout = [1, rows, 1, width], _layout(128, 16, 4)
    if problem is None or problem.cu_q is None:
        return TensorDescriptor(x, list(x.shape), strides, block, layout)
    tokens, step = x.shape[1], strides[1]
    base = Moved(x, -tokens * step)
    return TensorDescriptor(base, [tokens + 1, *x.shape[1:]], [step, *strides[1:]], block, layout)


@functools.cache
def _layout(swizzle: int, bits: int, rank: int) -> Any:
    """Made once: making it takes longer than making the descriptor."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _both_parts(name: str, x: Tensor, rows: int, width: int, problem: Problem | None = None) -> dict[str, Any]:
    """Descriptors of x's first columns and of those beyond; without any, the same again, since the kernels take no None."""
    first, tail = descriptor(x, rows, width, problem), _tail(x, width)
    return {f"{name}_desc": first, f"{name}_tail_desc": descriptor(x, rows, tail, problem) if tail else first}


def _tail(x: Tensor, width: int) -> int:
    """Columns of q and k in a second tile."""
    return 64 if x.shape[3] > width else 0


def _runs(x: Tensor, rows: int, problem: Problem) -> Any:
    """x fp32 `[batch, heads, queries]`, contiguous, in runs of `rows` queries of one head; x itself where they start anywhere."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    if order_of(problem) != "dense":
        return x
    batch, heads, queries = x.shape
    return TensorDescriptor(x, [batch * heads, queries], [queries, 1], [1, rows], _layout(0, 32, 2))


def _numbers(q: Tensor, k: Tensor, problem: Problem) -> dict[str, Any]:
    """The arguments that all kernels share."""
    args = shared_args(q, k, problem)
    for name in ("masked", "seed", "first_head", "q_places", "k_places", "softcap", "threshold", "keep_scale"):
        del args[name]
    return args


def _query_sizes(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> dict[str, Any]:
    """What `attention_hopper_pieces.query_tile` needs, and the rest of the numbers of a kernel that goes through queries."""
    slots, lanes = query_slots(q, problem, _ROWS), q.shape[0] * q.shape[2]
    # The heads of a group share its keys and values.
    chunk = _chunk(k.shape[1] * (k.shape[3] + v.shape[3])) * (q.shape[2] // k.shape[2])
    sizes = {"slots": slots, "items": slots * lanes, "chunk": min(chunk, lanes), "lanes": lanes}
    return _numbers(q, k, problem) | sizes


def _chunk(elements: int) -> int:
    """How many lanes take turns, each of which goes through as many 16-bit elements: as many as the cache holds."""
    return max(1, _CACHED_BYTES // (2 * elements))


def _pieces(problem: Problem) -> Any:
    from primus_turbo_plugin.kernels.triton.attention_hopper_pieces import Pieces

    order = order_of(problem)
    return Pieces(packed="packed" in order, zigzag="zig-zag" in order, odd_starts=order != "dense")


def _multiprocessors(q: Tensor) -> int:
    return _count(q.device.index) if q.device.type == "cuda" else 132


@functools.cache
def _count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _width(q: Tensor, v: Tensor) -> int:
    """Columns of q, k and v in a tile; q and k have a tail where 128 and 64 cover them and v has no more than 128."""
    if q.shape[3] > 192 or v.shape[3] > 128:
        return 256
    return 64 if max(q.shape[3], v.shape[3]) <= 64 else 128


def _reaches(problem: Problem) -> dict[str, bool]:
    return {"LEFT": problem.left is not None, "RIGHT": problem.right is not None}
