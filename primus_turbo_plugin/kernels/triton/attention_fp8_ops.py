"""FP8 attention as operators that torch.compile and CUDA graphs can take, in the manner of attention_ops.py.

`primus_turbo_plugin::attention_fp8_fwd` quantises q, k and v and attends; `primus_turbo_plugin::attention_decoded` gives one
tensor's decoded numbers in bf16, on which the gradient kernels of attention_ops.py compute: they are exact, so that no precision
is lost to the format of those kernels' operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.devices import capabilities_of
from primus_turbo_plugin.kernels.attention import AttentionOptions
from primus_turbo_plugin.kernels.triton.attention_fp8_tiles import fp8_tile_for
from primus_turbo_plugin.kernels.triton.attention_ops import (
    _PROBLEM,
    _arch,
    _device,
    _has_no_sequence,
    _is_answered,
    _new_lse,
    _problem,
)
from primus_turbo_plugin.kernels.triton.gemm_key import gpu_of
from primus_turbo_plugin.precision.formats import ELEMENT_TYPES


def _forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    from primus_turbo_plugin.kernels.triton import attention_fp8_launch as launch

    lse, described = _new_lse(q), _problem(*problem)
    if _is_answered(out, lse, described):
        return lse
    units = fp8_units(q.device)
    arch = _arch(q)
    tile = fp8_tile_for(arch, max(sum(launch.split_columns(q.shape[3])), v.shape[3]))
    q_slots, k_slots = launch.query_slots(q.shape[1], described), launch.key_slots(k.shape[1], described)
    codes = (
        launch.new_codes(q, q_slots, units, rows=True),
        launch.new_codes(k, k_slots, units, rows=True),
        launch.new_codes(v, k_slots, units, columns=True),
    )
    with _device(q):
        for x, room, keys in zip((q, k, v), codes, (False, True, True)):
            launch.quantize_launch(x, room, described, units, keys=keys).run()
        tma = arch == "sm90" and k.numel() > 0
        launch.forward_launch(q, k, v, codes, out, lse, described, tile, units=units, tma=tma).run()
    return lse


def _decoded(
    x: Tensor, keys: bool, element: str, cu: Tensor | None, starts: Tensor | None, cp_rank: int, cp_size: int
) -> Tensor:
    from primus_turbo_plugin.kernels.triton import attention_fp8_launch as launch

    values = _new_decoded(x)
    if x.numel() == 0 or _has_no_sequence(cu):
        return values.zero_()
    problem = launch.Problem(
        scale=1.0, cu_q=cu, starts_q=starts, cu_k=cu, starts_k=starts, cp_rank=cp_rank, cp_size=cp_size
    )
    slots = launch.key_slots(x.shape[1], problem) if keys else launch.query_slots(x.shape[1], problem)
    room = launch.new_codes(x, slots, None)
    with _device(x):
        step = launch.quantize_launch(x, room, problem, None, keys=keys, element=ELEMENT_TYPES[element], values=values)
        step.run()
    return values


def _new_decoded(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16)


def fp8_units(device: torch.device) -> Any:
    """What the FP8 matrix units of a GPU read: `ocp`, `fnuz`, or None where codes are multiplied as bf16 numbers."""
    return capabilities_of(gpu_of(device.index)[0]).fp8_encoding if device.type == "cuda" else None


attention_fp8_fwd = torch.library.custom_op(
    "primus_turbo_plugin::attention_fp8_fwd",
    _forward,
    mutates_args=("out",),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_PROBLEM}) -> Tensor",
)
attention_decoded = torch.library.custom_op(
    "primus_turbo_plugin::attention_decoded",
    _decoded,
    mutates_args=(),
    schema=("(Tensor x, bool keys, str element, Tensor? cu, Tensor? starts, int cp_rank, int cp_size) -> Tensor"),
)


@attention_fp8_fwd.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, out: Tensor, *problem: Any) -> Tensor:
    return _new_lse(q)


@attention_decoded.register_fake
def _decoded_fake(x: Tensor, *_: Any) -> Tensor:
    return _new_decoded(x)


def decoded_queries(x: Tensor, options: AttentionOptions, element: str) -> Tensor:
    """x, which lies as queries do, as FP8 attention multiplies it, in bf16."""
    packing, zigzag = options.mask.packing, options.mask.zigzag
    lengths: tuple[Any, ...] = (None, None) if packing is None else (packing.cu_seqlens_q, packing.starts_q)
    place = (0, 1) if zigzag is None else (zigzag.rank, zigzag.size)
    found: Tensor = attention_decoded(x, False, element, *lengths, *place)
    return found


def decoded_for_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dout, q, k and v as FP8 attention multiplies them, in bf16."""
    packing, gradients = options.mask.packing, options.precision.gradients
    lengths: tuple[Any, ...] = (None, None) if packing is None else (packing.cu_seqlens_k, packing.starts_k)
    return (
        dout.to(torch.bfloat16) if gradients == "bf16" else decoded_queries(dout, options, gradients),
        decoded_queries(q, options, "e4m3"),
        attention_decoded(k, True, "e4m3", *lengths, 0, 1),
        attention_decoded(v, True, "e4m3", *lengths, 0, 1),
    )
