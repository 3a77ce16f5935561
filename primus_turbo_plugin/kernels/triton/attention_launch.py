"""From tensors and options to launches of the attention kernels (Triton).

Everything that a launch needs follows from shapes, strides and options: no value is read back from the device, so that a call can
be captured into a CUDA graph, packed lengths and dropout seed included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention_dropout import drop_threshold
from primus_turbo_plugin.kernels.triton.attention_bwd import attention_delta_kernel
from primus_turbo_plugin.kernels.triton.attention_dkdv import attention_dkdv_kernel
from primus_turbo_plugin.kernels.triton.attention_dq import attention_dq_kernel
from primus_turbo_plugin.kernels.triton.attention_fwd import attention_fwd_kernel
from primus_turbo_plugin.kernels.triton.attention_tile import AttentionMeta
from primus_turbo_plugin.kernels.triton.attention_tiles import Tile

_LOG2E = 1.4426950408889634
_DELTA_ROWS = 64
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What both passes are asked for, beside the tensors q, k and v `[batch, tokens, heads | groups, dim]`.

    Attributes:
        scale: On q @ k.T.
        left: Keys a query sees before its position; None for all.
        right: Keys it sees behind; None for all.
        softcap: 0 for none.
        probability: Of dropping.
        seed: int64 `[1]`, of the dropout; None for none.
        first_head: What a head's number counts from, for the dropout.
        q_places: int32 `[queries]`, where each stands among all tokens, for the dropout; None: counted.
        k_places: The same for the keys.
        sinks: `[heads]` or None.
        masked: bool (or its bytes) `[batch | 1, heads | 1, queries | 1, keys | 1]`, True where not seen, or None.
        cu_q: int32 `[sequences + 1]`, or None for a dense batch.
        starts_q: Likewise, padding counted in.
        cu_k: Of the keys.
        starts_k: Of the keys.
        cp_rank: Context-parallel rank.
        cp_size: Context-parallel size; 1: the queries are whole sequences.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    probability: float = 0.0
    seed: Tensor | None = None
    first_head: int = 0
    q_places: Tensor | None = None
    k_places: Tensor | None = None
    sinks: Tensor | None = None
    masked: Tensor | None = None
    cu_q: Tensor | None = None
    starts_q: Tensor | None = None
    cu_k: Tensor | None = None
    starts_k: Tensor | None = None
    cp_rank: int = 0
    cp_size: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: `run`, or hand the parts to a compiler or emulator."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]

    def run(self) -> Any:
        """The compiled kernel that ran, where Triton tells."""
        return self.kernel[self.grid](**self.args, **self.constants, **self.options)


def split_dim(dim: int) -> tuple[int, int]:
    """(d0, d1): powers of two of at least 16 that cover `dim` columns with the fewest, d1 being 0 where one does it."""
    one = max(16, 1 << (dim - 1).bit_length())
    first = one // 2
    rest = max(16, 1 << max(0, dim - first - 1).bit_length())
    return (first, rest) if first >= 16 and first + rest < one else (one, 0)


def padded(dim: int) -> int:
    """Columns of v's tile."""
    return max(16, 1 << (dim - 1).bit_length())


def meta_of(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, tile: Tile, *, tma: bool, both_ways: bool
) -> AttentionMeta:
    """The compile-time part of a problem."""
    d0, d1 = split_dim(q.shape[3])
    strides = [stride for x in (q, k, v) for stride in x.stride()[1:]]
    return AttentionMeta(
        dim=q.shape[3],
        v_dim=v.shape[3],
        d0=d0,
        d1=d1,
        dv=padded(v.shape[3]),
        has_left=problem.left is not None,
        has_right=problem.right is not None,
        packed=problem.cu_q is not None,
        zigzag=problem.cp_size > 1,
        masked=problem.masked is not None,
        sinks=problem.sinks is not None,
        softcap=problem.softcap != 0.0,
        dropout=problem.seed is not None,
        fold_scale=problem.softcap == 0.0 and problem.scale > 0.0,
        tma=tma,
        both_ways=both_ways,
        wide=max(strides) * max(tile.block_m, tile.block_n, d0 + d1) > _INT32_MAX,
    )


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, problem: Problem, tile: Tile, *, tma: bool
) -> Launch:
    """The forward kernel, writing out and lse."""
    meta = meta_of(q, k, v, problem, tile, tma=tma, both_ways=False)
    slots = query_slots(q, problem, tile.block_m)
    args = {
        "q": q, "k": k, "v": v, **_key_descriptors(k, v, meta, tile), "out": out, "lse": lse, "sinks": problem.sinks,
        **shared_args(q, k, problem), "slots": slots,
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **_strides("o", out), **_mask_strides(problem),
    }  # fmt: skip
    del args["grad_scale"]
    return _launch(attention_fwd_kernel, slots * q.shape[0] * q.shape[2], args, meta, tile)


def delta_launch(out: Tensor, dout: Tensor, lse: Tensor, delta: Tensor | None, lse2: Tensor) -> Launch:
    """The rows' base-2 lse, and their delta unless it is None."""
    batch, tokens, heads, v_dim = out.shape
    args = {
        "out": out, "dout": dout, "lse": lse, "delta": delta, "lse2": lse2, "heads": heads, "tokens": tokens,
        **_strides("o", out), **_strides("g", dout),
    }  # fmt: skip
    constants = {"V_DIM": v_dim, "DV": padded(v_dim), "BLOCK_M": _DELTA_ROWS}
    grid = (-(-tokens // _DELTA_ROWS), batch * heads)
    return Launch(attention_delta_kernel, grid, args, constants, {"num_warps": 4})


def dkdv_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dk: Tensor, dv: Tensor, lse2: Tensor, delta: Tensor,
    problem: Problem, tile: Tile, *, tma: bool, both_ways: bool = False,
) -> Launch:  # fmt: skip
    """dk and dv `[splits, batch, tokens, groups, dim]`."""
    meta = meta_of(q, k, v, problem, tile, tma=tma, both_ways=both_ways)
    slots = key_slots(k, problem, tile.block_n)
    splits = dk.shape[0]
    q_desc, q_desc1 = _descriptors(q, meta.d0, meta.d1, tile.block_m, meta.tma)
    dout_desc, _ = _descriptors(dout, meta.dv, 0, tile.block_m, meta.tma)
    args = {
        "q": q, "k": k, "v": v, "q_desc": q_desc, "q_desc1": q_desc1, "dout": dout, "dout_desc": dout_desc,
        "dk": dk, "dv": dv, "lse2": lse2, "delta": delta, **shared_args(q, k, problem), "slots": slots, "splits": splits,
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **_strides("g", dout),
        "stride_dkp": dk.stride(0), **_strides("dk", dk[0]), "stride_dvp": dv.stride(0), **_strides("dv", dv[0]),
        **_mask_strides(problem),
    }  # fmt: skip
    grid = slots * splits * k.shape[0] * k.shape[2]
    return _launch(attention_dkdv_kernel, grid, args, meta, tile)


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dq: Tensor, lse2: Tensor, delta: Tensor,
    problem: Problem, tile: Tile, *, tma: bool, both_ways: bool = False,
) -> Launch:  # fmt: skip
    """dq in its own dtype."""
    meta = meta_of(q, k, v, problem, tile, tma=tma, both_ways=both_ways)
    slots = query_slots(q, problem, tile.block_m)
    args = {
        "q": q, "k": k, "v": v, **_key_descriptors(k, v, meta, tile), "dout": dout, "dq": dq, "lse2": lse2, "delta": delta,
        **shared_args(q, k, problem), "slots": slots,
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **_strides("g", dout), **_strides("dq", dq),
        **_mask_strides(problem),
    }  # fmt: skip
    return _launch(attention_dq_kernel, slots * q.shape[0] * q.shape[2], args, meta, tile)


def can_use_descriptors(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can read them in place: last dimension dense, all others in steps of 16 bytes, none of 0."""
    return all(
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * x.element_size() % 16 == 0
            for stride, size in zip(x.stride()[:-1], x.shape)
            if size > 1
        )
        for x in tensors
    )


def _launch(kernel: Any, grid: int, args: dict[str, Any], meta: AttentionMeta, tile: Tile, **constants: Any) -> Launch:
    constants |= {"META": meta, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "HEADS_FIRST": tile.heads_first}
    # With a mask tensor more than one stage makes ptxas 13.0, which comes with Triton 3.6, crash on some shapes.
    constants["MASKED_STAGES"] = 1 if meta.masked else tile.masked_stages or tile.num_stages
    return Launch(kernel, (grid,), args, constants, {"num_warps": tile.num_warps, "num_stages": tile.num_stages})


def shared_args(q: Tensor, k: Tensor, problem: Problem) -> dict[str, Any]:
    """What every kernel takes beside tensors and strides."""
    capped = problem.softcap != 0.0
    keep = 1.0 - problem.probability
    return {
        "masked": None if problem.masked is None else as_bytes(problem.masked),
        "seed": problem.seed, "first_head": problem.first_head, "q_places": problem.q_places, "k_places": problem.k_places,
        "cu_q": problem.cu_q, "starts_q": problem.starts_q,
        "cu_k": problem.cu_k, "starts_k": problem.starts_k,
        "heads": q.shape[2], "groups": k.shape[2], "q_tokens": q.shape[1], "k_tokens": k.shape[1],
        "sequences": 0 if problem.cu_q is None else problem.cu_q.shape[0] - 1,
        "cp_rank": problem.cp_rank, "cp_size": problem.cp_size,
        "left": problem.left or 0, "right": problem.right or 0,
        "scale": problem.scale / problem.softcap if capped else problem.scale * _LOG2E,
        "grad_scale": problem.scale, "softcap": problem.softcap * _LOG2E,
        "threshold": min(drop_threshold(problem.probability), 2**32 - 1) - 2**31,  # fits int32 whatever it is
        "keep_scale": 1.0 / keep if keep > 0 else 0.0,
    }  # fmt: skip


def as_bytes(masked: Tensor) -> Tensor:
    """A bool mask as kernels read it; the very same object where it is that already."""
    return masked if masked.dtype == torch.uint8 else masked.view(torch.uint8)


def _strides(name: str, x: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": stride for axis, stride in zip("bshd", x.stride())}


def _mask_strides(problem: Problem) -> dict[str, int]:
    masked = problem.masked
    if masked is None:
        return {f"stride_m{axis}": 0 for axis in "bhqk"}
    return {
        f"stride_m{axis}": stride if size > 1 else 0
        for axis, stride, size in zip("bhqk", masked.stride(), masked.shape)
    }


def query_slots(q: Tensor, problem: Problem, block: int) -> int:
    """Programs that a head needs for all tiles of `block` queries."""
    return _slots(q.shape[1], problem.starts_q, 2 if problem.cp_size > 1 else 1, block)


def key_slots(k: Tensor, problem: Problem, block: int) -> int:
    """Programs that a group needs for all tiles of `block` keys."""
    return _slots(k.shape[1], problem.starts_k, 1, block)


def _slots(tokens: int, starts: Tensor | None, halves: int, block: int) -> int:
    """Programs a head needs for all tiles of all pieces; packed, an upper bound (see attention_tile.py)."""
    if starts is None:
        return halves * math.ceil(tokens // halves / block)
    return tokens // block + (starts.shape[0] - 1) * halves + 1


def _key_descriptors(k: Tensor, v: Tensor, meta: AttentionMeta, tile: Tile) -> dict[str, Any]:
    k_desc, k_desc1 = _descriptors(k, meta.d0, meta.d1, tile.block_n, meta.tma)
    v_desc, _ = _descriptors(v, meta.dv, 0, tile.block_n, meta.tma)
    return {"k_desc": k_desc, "k_desc1": k_desc1, "v_desc": v_desc}


def _descriptors(x: Tensor, d0: int, d1: int, rows: int, wanted: bool) -> tuple[Any, Any]:
    """Tensor descriptors of x `[batch, tokens, heads, dim]` for tiles of d0 and of d1 columns."""
    if not wanted:
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape)] + [1]
    both = [TensorDescriptor(x, list(x.shape), strides, [1, rows, 1, d]) if d else None for d in (d0, d1)]
    return both[0], both[1]
