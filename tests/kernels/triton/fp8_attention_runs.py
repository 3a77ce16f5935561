"""Runs FP8 attention's Triton kernels by any device's launcher and compares with the torch reference, which defines every bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionOptions
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.reference.attention_fp8 import decoded, decoded_inputs, runs_of
from primus_turbo_plugin.kernels.triton import attention_fp8_launch as launch
from primus_turbo_plugin.kernels.triton.attention import _fields
from primus_turbo_plugin.kernels.triton.attention_launch import Launch
from primus_turbo_plugin.kernels.triton.attention_ops import _problem
from primus_turbo_plugin.kernels.triton.attention_tiles import Tile
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.formats import E5M2
from tests.kernels.triton.attention_cases import Problem

RESULT_BAR = 2.0**-8
"""RMS error over RMS value against the reference: out is rounded to 16 bits, and a probability next to a rounding boundary, whose
score's last bits differ, may round the other way: one in some 10^4, by 2^-4 of it."""


def fp8_options(problem: Problem, gradients: str = "e4m3") -> AttentionOptions:
    return dataclasses.replace(problem.options, precision=AttentionPrecision(format="fp8", gradients=gradients))


def without_padding(problem: Problem) -> list[Tensor]:
    """q, k, v, dout with zeros where padding holds NaN."""
    return [x.nan_to_num() for x in problem.tensors]


def forward(problem: Problem, units: launch.Units, tile: Tile, execute: Callable[[Launch], None]) -> dict[str, Any]:
    """out and lse, and q, k and v as decoded by the quantising kernel."""
    q, k, v, _ = problem.tensors
    described = _problem(*_fields(fp8_options(problem), problem.sinks))
    slots = launch.query_slots(q.shape[1], described), *[launch.key_slots(k.shape[1], described)] * 2
    codes = tuple(
        launch.new_codes(x, count, units, rows=x is not v, columns=x is v) for x, count in zip((q, k, v), slots)
    )
    values = [torch.full_like(x, float("nan"), dtype=torch.bfloat16) for x in (q, k, v)]
    for x, room, value in zip((q, k, v), codes, values):
        execute(launch.quantize_launch(x, room, described, units, keys=x is not q, values=value))
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device=q.device)
    step = launch.forward_launch(q, k, v, codes, out, lse, described, tile, units=units, tma=False)  # type: ignore[arg-type]
    execute(step)
    return {"out": out, "lse": lse, **dict(zip("qkv", values))}


def decoded_gradient(problem: Problem, execute: Callable[[Launch], None]) -> tuple[Tensor, Tensor]:
    """dout as E5M2 decoded by the kernel, and by the reference."""
    dout = problem.tensors[3]
    described = _problem(*_fields(fp8_options(problem), problem.sinks))
    value = torch.full_like(dout, float("nan"), dtype=torch.bfloat16)
    room = launch.new_codes(dout, launch.query_slots(dout.shape[1], described), None)
    execute(launch.quantize_launch(dout, room, described, None, keys=False, element=E5M2, values=value))
    runs, _ = runs_of(problem.options.mask, dout.shape[1], problem.tensors[1].shape[1])
    return value, decoded(without_padding(problem)[3], runs, E5M2)


def differences(problem: Problem, got: dict[str, Any]) -> list[str]:
    """What is not as the reference has it."""
    options = fp8_options(problem)
    clean = without_padding(problem)
    found = [
        f"decoded {name} differs"
        for name, want in zip("qkv", decoded_inputs(*clean[:3], options))
        if not torch.equal(got[name].float(), want)
    ]
    out, lse = reference.attention_fwd(*clean[:3], options, sinks=problem.sinks)
    error = (got["out"].double() - out.double()).square().mean().sqrt() / out.double().square().mean().sqrt()
    if not error <= RESULT_BAR:
        found.append(f"out: off by {error:.3g}")
    same = torch.equal(got["lse"].isinf(), lse.isinf())
    if not same or not torch.allclose(got["lse"].nan_to_num(0, 0, 0), lse.nan_to_num(0, 0, 0), rtol=2e-5, atol=2e-5):
        found.append("lse differs")
    return found
