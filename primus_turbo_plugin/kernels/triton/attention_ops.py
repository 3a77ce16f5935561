"""Flash attention as two operators that torch.compile and CUDA graphs can take (torch.library custom ops).

`primus_turbo_plugin::attention_fwd` writes out and returns lse; `primus_turbo_plugin::attention_bwd` returns dq, dk, dv and the
rows' delta. No value is read back from the device: launches follow from shapes, strides and plain numbers alone, and packed
lengths and the dropout seed are read by the kernels.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.triton.attention_tiles import Tiles, architecture, tiles_for

_PROBLEM = (
    "Tensor? sinks, Tensor? masked, Tensor? seed, Tensor? q_places, Tensor? k_places, "
    "Tensor? cu_q, Tensor? starts_q, Tensor? cu_k, Tensor? starts_k, "
    "float scale, int left, int right, float softcap, float probability, int first_head, int cp_rank, int cp_size"
)
"""`attention_launch.Problem`, field by field; a reach of -1 is no limit."""
_FIELDS = tuple(part.split()[-1] for part in _PROBLEM.split(","))


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
    from primus_turbo_plugin.kernels.triton import attention_launch as launch

    lse, described = _new_lse(q), _problem(*problem)
    if _is_answered(out, lse, described):
        return lse
    tiles = _tiles(q, v)
    with _device(q):
        if _arch(q) == "sm90" and out.stride(3) == 1 and hopper.applies("forward", described, q, k, v):
            hopper.forward_launch(q, k, v, out, lse, described).run()
        else:
            tma = _use_descriptors(q, k, v)
            launch.forward_launch(q, k, v, out, lse, described, tiles.forward, tma=tma).run()
    return lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None,
    q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None, *problem: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
    from primus_turbo_plugin.kernels.triton import attention_launch as launch

    described = _problem(*problem)
    tiles = _tiles(q, v)
    dq, dk, dv, row_delta = _new_gradients(q, k, v, lse, q_dtype, kv_dtype)
    if delta is not None:
        row_delta.copy_(delta)
    if q.numel() == 0 or k.numel() == 0 or _has_no_sequence(described.cu_q):
        return dq.zero_(), dk.zero_(), dv.zero_(), row_delta.zero_()
    with _device(q):
        tma = _use_descriptors(q, k, v, dout)
        both_ways = torch.version.hip is not None
        lse2 = torch.empty_like(lse)
        launch.delta_launch(out, dout, lse, row_delta if delta is None else None, lse2).run()
        is_hopper = _arch(q) == "sm90"
        dkdv_on_hopper = is_hopper and hopper.applies("dkdv", described, q, k, v, dout)
        splits = _splits(q, k, hopper.dkdv_keys(q, v) if dkdv_on_hopper else tiles.dkdv.block_n)
        parts_k, parts_v = _parts(dk, splits), _parts(dv, splits)
        shared = (lse2, row_delta, described)
        ways: dict[str, Any] = {"tma": tma, "both_ways": both_ways}
        if dkdv_on_hopper:
            hopper.dkdv_launch(q, k, v, dout, parts_k, parts_v, *shared).run()
        else:
            launch.dkdv_launch(q, k, v, dout, parts_k, parts_v, *shared, tile=tiles.dkdv, **ways).run()
        if is_hopper and hopper.applies("dq", described, q, k, v, dout):
            hopper.dq_launch(q, k, v, dout, dq, *shared).run()
        else:
            launch.dq_launch(q, k, v, dout, dq, *shared, tile=tiles.dq, **ways).run()
    if splits > 1:
        dk.copy_(parts_k.sum(0))
        dv.copy_(parts_v.sum(0))
    return dq, dk, dv, row_delta


def _has_no_sequence(cu: Tensor | None) -> bool:
    return cu is not None and cu.shape[0] == 1


def _is_answered(out: Tensor, lse: Tensor, problem: Any) -> bool:
    """Whether there is nothing to attend to; out and lse then hold the answer."""
    if out.numel() == 0 and lse.numel() == 0:
        return True
    if _has_no_sequence(problem.cu_q):
        out.zero_()
        lse.fill_(-torch.inf)
        return True
    return False


def _new_lse(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv = (torch.empty_like(x, dtype=kv_dtype or x.dtype) for x in (k, v))
    return torch.empty_like(q, dtype=q_dtype or q.dtype), dk, dv, torch.empty_like(lse)


def _problem(*fields: Any) -> Any:
    from primus_turbo_plugin.kernels.triton.attention_launch import Problem

    values = dict(zip(_FIELDS, fields))
    for reach in ("left", "right"):
        values[reach] = None if values[reach] < 0 else values[reach]
    return Problem(**values)


def _parts(gradient: Tensor, splits: int) -> Tensor:
    """[splits, *shape]: the gradient itself, or fp32 parts to be summed."""
    if splits == 1:
        return gradient.unsqueeze(0)
    return gradient.new_empty(splits, *gradient.shape, dtype=torch.float32)


def _splits(q: Tensor, k: Tensor, block_n: int) -> int:
    """Programs that share a group's heads: one, unless that leaves compute units without work."""
    ratio = q.shape[2] // k.shape[2]
    programs = -(-k.shape[1] // block_n) * k.shape[0] * k.shape[2]
    wanted = [n for n in range(1, ratio + 1) if ratio % n == 0 and programs * n >= _compute_units(q)]
    return wanted[0] if wanted else ratio


def _arch(q: Tensor) -> str:
    return architecture(q.device.index) if q.device.type == "cuda" else "generic"


def _tiles(q: Tensor, v: Tensor) -> Tiles:
    return tiles_for(_arch(q), max(q.shape[3], v.shape[3]))


def _use_descriptors(*tensors: Tensor) -> bool:
    from primus_turbo_plugin.kernels.triton.attention_launch import can_use_descriptors

    return _arch(tensors[0]) == "sm90" and can_use_descriptors(*tensors)


def _device(q: Tensor) -> Any:
    return torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext()


@functools.cache
def _units(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _compute_units(q: Tensor) -> int:
    return _units(q.device.index) if q.device.type == "cuda" else 1


attention_fwd = torch.library.custom_op(
    "primus_turbo_plugin::attention_fwd",
    _forward,
    mutates_args=("out",),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_PROBLEM}) -> Tensor",
)
attention_bwd = torch.library.custom_op(
    "primus_turbo_plugin::attention_bwd",
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? delta, ScalarType? q_dtype, "
        f"ScalarType? kv_dtype, {_PROBLEM}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@attention_fwd.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    return _new_lse(q)


@attention_bwd.register_fake
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None,
    q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None, *problem: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_gradients(q, k, v, lse, q_dtype, kv_dtype)
