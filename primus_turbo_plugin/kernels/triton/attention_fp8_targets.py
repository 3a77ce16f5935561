"""FP8 attention as targets of `primus-turbo isa` and `primus-turbo emulate`: the shipped tiles, causal, head dim 128."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.reference.attention_fp8 import decoded, quantize_blocks
from primus_turbo_plugin.kernels.triton import attention_fp8_launch as launch
from primus_turbo_plugin.kernels.triton.attention_fp8_tiles import fp8_tile_for
from primus_turbo_plugin.kernels.triton.attention_launch import Launch, Problem
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS, AttentionPrecision

_TOKENS, _HEADS, _GROUPS, _DIM = 150, 2, 1, 128
"""Small, and still two blocks with a tail."""
_SCALE = _DIM**-0.5
_PROBLEM = Problem(scale=_SCALE, right=0)
_OPTIONS = AttentionOptions(scale=_SCALE, mask=AttentionMask(causal=True), precision=AttentionPrecision(format="fp8"))
_UNITS: dict[str, launch.Units] = {"gfx942": "fnuz", "gfx950": "ocp", "gfx1250": "ocp"}
_PRODUCTS = {"gfx942": "v_mfma_f32_.*_fp8_fp8", "gfx950": "v_mfma_f32_.*_f8f6f4", "gfx1250": "v_wmma_f32_.*_fp8_fp8"}
_TOLERANCE = 2.0**-7
"""out is rounded to bf16, and a probability on a rounding boundary may round the other way; relative to the largest result."""


def _tensors(rng: np.random.Generator) -> list[Tensor]:
    """q, k, v."""
    heads = (_HEADS, _GROUPS, _GROUPS)
    return [torch.from_numpy(rng.standard_normal((1, _TOKENS, n, _DIM), dtype="f4")).bfloat16() for n in heads]


def _quantize(rng: np.random.Generator, arch: str) -> Launch:
    q = _tensors(rng)[0]
    codes = launch.new_codes(q, launch.query_slots(_TOKENS, _PROBLEM), _UNITS[arch], rows=True, columns=True)
    values = torch.full_like(q, torch.nan)
    return launch.quantize_launch(q, codes, _PROBLEM, _UNITS[arch], keys=False, values=values)


def _quantized(args: dict[str, Any]) -> dict[str, Any]:
    return {"values": decoded(args["x"], [(0, _TOKENS)])}


def _codes(x: Tensor, units: launch.Units, *, columns: bool) -> launch.Codes:
    """As the quantising kernel writes them."""
    codes, scales = quantize_blocks(x, [(0, _TOKENS)])
    slots = launch.query_slots(_TOKENS, _PROBLEM)
    room = launch.new_codes(x, slots, units, rows=not columns, columns=columns)
    numbers = torch.zeros(x.shape[2], slots * BLOCK_TOKENS, _DIM)
    numbers[:, :_TOKENS] = codes[0].float().transpose(0, 1) * (0.5 if units == "fnuz" else 1.0)
    room.scales.copy_(scales[0, ::BLOCK_TOKENS].t())
    for made, values in ((room.rows, numbers), (room.columns, numbers.transpose(1, 2))):
        if made is not None:
            made.copy_(values.to(made.dtype))
    return room


def _forward(rng: np.random.Generator, arch: str) -> Launch:
    q, k, v = _tensors(rng)
    units = _UNITS[arch]
    codes = _codes(q, units, columns=False), _codes(k, units, columns=False), _codes(v, units, columns=True)
    out, lse = torch.full_like(q, torch.nan), torch.full((1, _HEADS, _TOKENS), torch.nan)
    return launch.forward_launch(q, k, v, codes, out, lse, _PROBLEM, fp8_tile_for(arch, _DIM), units=units, tma=False)


def _attended(args: dict[str, Any], arch: str) -> dict[str, Any]:
    """The reference on the decoded codes, which quantise to themselves."""
    whole = 2.0 if _UNITS[arch] == "fnuz" else 1.0
    found = []
    for name in ("q", "k", "v"):
        codes = args["v_t"].float().transpose(1, 2) if name == "v" else args[name].float()
        scales = args[f"{name}_scales"].repeat_interleave(BLOCK_TOKENS, 1)
        found.append((codes * whole * scales[..., None])[:, :_TOKENS].transpose(0, 1)[None])
    out, lse = reference.attention_fwd(found[0], found[1], found[2], _OPTIONS)
    return {"out": out, "lse": lse}


def isa_targets() -> list[KernelTarget]:
    targets = []
    for arch in _UNITS:
        gates = {
            "quantize": IsaGate(max_spills=0, forbidden_anywhere=("scratch_.*",)),
            "fwd": IsaGate(max_spills=0, required=(_PRODUCTS[arch],), forbidden_anywhere=("scratch_.*", ".*mma.*bf16")),
        }
        for kind, make, expected, tolerance in (
            ("quantize", _quantize, _quantized, 0.0),
            ("fwd", _forward, partial(_attended, arch=arch), _TOLERANCE),
        ):
            step = make(np.random.default_rng(0), arch)
            targets.append(
                KernelTarget(
                    name=f"{arch}_attention_fp8_{kind}",
                    kernel=step.kernel,
                    archs=(arch,),
                    inputs=partial(_arguments, make=make, arch=arch),
                    grid=step.grid,
                    constants=step.constants,
                    options=step.options,
                    expected=expected,
                    tolerance=tolerance,
                    gate=gates[kind],
                )
            )
    return targets


def _arguments(rng: np.random.Generator, make: Any, arch: str) -> dict[str, Any]:
    args: dict[str, Any] = make(rng, arch).args
    return args
