"""Flash attention as two operators that torch.compile and CUDA graphs can take (torch.library).

`primus_turbo_plugin::attention_fwd` writes out and returns lse; `primus_turbo_plugin::attention_bwd` returns dq, dk, dv and the
rows' delta. No value is read back from the device: launches follow from shapes, strides and plain numbers alone, and packed
lengths and the dropout seed are read by the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.triton.attention_plan import Plans
from primus_turbo_plugin.kernels.triton.attention_tiles import Tiles, architecture, tiles_for
from primus_turbo_plugin.kernels.triton.launching import facts, on_device, untraced
from primus_turbo_plugin.kernels.triton.zeros import fresh_zero

_PROBLEM = (
    "Tensor? sinks, Tensor? masked, Tensor? seed, Tensor? q_places, Tensor? k_places, "
    "Tensor? cu_q, Tensor? starts_q, Tensor? cu_k, Tensor? starts_k, "
    "float scale, int left, int right, float softcap, float probability, int first_head, int cp_rank, int cp_size"
)
"""`attention_launch.Problem`, field by field, tensors first; a reach of -1 is no limit."""
_FIELDS = tuple(part.split()[-1] for part in _PROBLEM.split(","))
_TENSORS = _PROBLEM.count("Tensor")
_COUNTER = "Tensor(z!)? counter=None"
"""int32 zero by which programs share out their work; None: the operator makes one if it needs one."""

_PLANS = Plans()
"""Launches by all that they follow from. Who changes a table of theirs while they run, of tiles or of what Hopper's kernels are
offered, clears it."""


@untraced
def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    lse = _new_lse(q)
    optional, numbers, counter = _parted(problem)
    arch = _arch(q)
    key = ("forward", arch, numbers, *map(facts, (q, k, v, out, *optional)))
    plan = _PLANS.get(key)
    if plan is None and _is_answered(out, lse, _problem(*optional, *numbers)):
        return lse
    if counter is None and arch == "sm90":
        counter = _zero(q)
    tensors = (q, k, v, out, lse, counter, *optional)
    with _device(q):
        if plan is None:
            _PLANS.run_and_keep(key, tensors, lambda tensors: _forward_launches(arch, numbers, *tensors))
        else:
            plan.repeat(tensors)
    return lse


def _forward_launches(
    arch: str, numbers: tuple[Any, ...], q: Any, k: Any, v: Any, out: Any, lse: Any, counter: Any, *optional: Any
) -> Iterator[Any]:
    from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
    from primus_turbo_plugin.kernels.triton import attention_launch as launch

    described = _problem(*optional, *numbers)
    if arch == "sm90" and out.stride(3) == 1 and hopper.applies("forward", described, q, k, v):
        yield hopper.forward_launch(q, k, v, out, lse, described, counter)
    else:
        tma = _use_descriptors(q, k, v)
        yield launch.forward_launch(q, k, v, out, lse, described, _tiles(q, v).forward, tma=tma)


@untraced
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None,
    q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None, *problem: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    optional, numbers, counter = _parted(problem)
    dq, dk, dv, row_delta = _new_gradients(q, k, v, lse, q_dtype, kv_dtype)
    if delta is not None:
        row_delta.copy_(delta)
    arch = _arch(q)
    key = (
        "backward", arch, numbers, q_dtype, kv_dtype, delta is None, *map(facts, (dout, q, k, v, out, lse, *optional))
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None and (q.numel() == 0 or k.numel() == 0 or _has_no_sequence(optional[_FIELDS.index("cu_q")])):
        return dq.zero_(), dk.zero_(), dv.zero_(), row_delta.zero_()
    if counter is None and arch == "sm90":
        counter = _zero(q)
    ways = None if plan is not None else _ways(arch, numbers, dout, q, k, v, *optional)
    splits = plan.splits if ways is None else ways.splits  # type: ignore[union-attr]
    parts_k, parts_v = _parts(dk, splits), _parts(dv, splits)
    tensors = (dout, q, k, v, out, lse, row_delta, torch.empty_like(lse), dq, parts_k, parts_v, counter, *optional)
    with _device(q):
        if plan is not None:
            plan.repeat(tensors)
        else:
            _PLANS.run_and_keep(
                key, tensors, lambda tensors: _backward_launches(ways, numbers, delta is None, *tensors), splits
            )
    if splits > 1:
        dk.copy_(parts_k.sum(0))
        dv.copy_(parts_v.sum(0))
    return dq, dk, dv, row_delta


class _Ways(NamedTuple):
    """How gradients are computed: which of them by Hopper's kernels, and in how many parts those of keys and values."""

    dkdv_on_hopper: bool
    dq_on_hopper: bool
    splits: int


def _ways(arch: str, numbers: tuple[Any, ...], dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *optional: Any) -> _Ways:
    from primus_turbo_plugin.kernels.triton import attention_hopper as hopper

    described = _problem(*optional, *numbers)
    dkdv, dq = (arch == "sm90" and hopper.applies(kernel, described, q, k, v, dout) for kernel in ("dkdv", "dq"))
    return _Ways(dkdv, dq, _splits(q, k, hopper.dkdv_keys(q, v) if dkdv else _tiles(q, v).dkdv.block_n))


def _backward_launches(
    ways: Any, numbers: tuple[Any, ...], with_delta: bool,
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, delta: Any, lse2: Any, dq: Any, dk: Any, dv: Any, counter: Any,
    *optional: Any,
) -> Iterator[Any]:  # fmt: skip
    from primus_turbo_plugin.kernels.triton import attention_hopper as hopper
    from primus_turbo_plugin.kernels.triton import attention_launch as launch

    tiles = _tiles(q, v)
    shared = (lse2, delta, _problem(*optional, *numbers))
    how: dict[str, Any] = {"tma": _use_descriptors(q, k, v, dout), "both_ways": torch.version.hip is not None}
    yield launch.delta_launch(out, dout, lse, delta if with_delta else None, lse2)
    if ways.dkdv_on_hopper:
        yield hopper.dkdv_launch(q, k, v, dout, dk, dv, *shared)
    else:
        yield launch.dkdv_launch(q, k, v, dout, dk, dv, *shared, tile=tiles.dkdv, **how)
    if ways.dq_on_hopper:
        yield hopper.dq_launch(q, k, v, dout, dq, *shared, counter)
    else:
        yield launch.dq_launch(q, k, v, dout, dq, *shared, tile=tiles.dq, **how)


def _parted(problem: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], Tensor | None]:
    """(tensors, numbers, counter) of an operator's last arguments; a mask as bytes, since kernels read no bool."""
    optional, numbers = problem[:_TENSORS], problem[_TENSORS : len(_FIELDS)]
    if optional[1] is not None:
        optional = (optional[0], optional[1].view(torch.uint8), *optional[2:])
    return optional, numbers, problem[-1] if len(problem) > len(_FIELDS) else None


def _zero(q: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=q.device)


def counter_for(q: Tensor) -> Tensor | None:
    """A zero that was made beforehand, for the kernels that count; None where there is none, or nothing to count."""
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.device.type != "cuda" or _arch(q) != "sm90":
        return None
    return fresh_zero(q.device)


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
    return on_device(q.device) if q.device.type == "cuda" else nullcontext()


@functools.cache
def _units(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _compute_units(q: Tensor) -> int:
    return _units(q.device.index) if q.device.type == "cuda" else 1


def _operator(name: str, arguments: str, returns: str, function: Callable[..., Any]) -> Any:
    """The operator of that schema. `torch.library.custom_op` does the same with three times the host time a call."""
    qualified = f"primus_turbo_plugin::{name}"
    torch.library.define(qualified, f"({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_kernel(qualified, None, function)
    return getattr(torch.ops.primus_turbo_plugin, name).default


attention_fwd = _operator(
    "attention_fwd", f"Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_PROBLEM}, {_COUNTER}", "Tensor", _forward
)
attention_bwd = _operator(
    "attention_bwd",
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? delta, ScalarType? q_dtype, "
    f"ScalarType? kv_dtype, {_PROBLEM}, {_COUNTER}",
    "(Tensor, Tensor, Tensor, Tensor)",
    _backward,
)


@torch.library.register_fake("primus_turbo_plugin::attention_fwd")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    return _new_lse(q)


@torch.library.register_fake("primus_turbo_plugin::attention_bwd")
def _backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor | None,
    q_dtype: torch.dtype | None, kv_dtype: torch.dtype | None, *problem: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _new_gradients(q, k, v, lse, q_dtype, kv_dtype)
