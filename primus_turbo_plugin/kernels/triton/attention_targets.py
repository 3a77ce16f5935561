"""The attention kernels as targets of `primus-turbo isa` and `primus-turbo emulate`: the shipped tiles, causal, head dim 128."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primus_turbo_plugin.amdgcn.report.gate import IsaGate
from primus_turbo_plugin.amdgcn.targets import KernelTarget
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions
from primus_turbo_plugin.kernels.reference import attention as reference
from primus_turbo_plugin.kernels.triton import attention_launch as launch
from primus_turbo_plugin.kernels.triton.attention_tiles import tiles_for

_TOKENS, _HEADS, _GROUPS, _DIM = 150, 2, 1, 128
"""Small, and still several tiles with a tail."""
_SCALE = _DIM**-0.5
_OPTIONS = AttentionOptions(scale=_SCALE, mask=AttentionMask(causal=True))
_PROBLEM = launch.Problem(scale=_SCALE, right=0)
_LOG2E = 1.4426950408889634
_TRANSPOSING_LOADS = {"gfx950": ("ds_read_b64_tr_b16",), "gfx1250": ("ds_load_tr16_b128",), "gfx942": ()}
_TOLERANCE = 2.0**-6
"""P and dS are rounded to bf16, 2^-9 relative, before they are summed; relative to the largest result."""


def _tensors(rng: np.random.Generator) -> list[Tensor]:
    """q, k, v, dout."""
    heads = (_HEADS, _GROUPS, _GROUPS, _HEADS)
    return [torch.from_numpy(rng.standard_normal((1, _TOKENS, n, _DIM), dtype="f4")).bfloat16() for n in heads]


def _forward(rng: np.random.Generator, arch: str) -> launch.Launch:
    q, k, v, _ = _tensors(rng)
    out, lse = torch.full_like(q, torch.nan), torch.full((1, _HEADS, _TOKENS), torch.nan)
    return launch.forward_launch(q, k, v, out, lse, _PROBLEM, tiles_for(arch, _DIM).forward, tma=False)


def _backward(rng: np.random.Generator, arch: str, kind: str) -> launch.Launch:
    q, k, v, dout = _tensors(rng)
    out, lse = reference.attention_fwd(q, k, v, _OPTIONS)
    delta = (out.float() * dout.float()).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    shared, tiles = (lse * _LOG2E, delta, _PROBLEM), tiles_for(arch, _DIM)
    ways: dict[str, Any] = {"tma": False, "both_ways": True}
    if kind == "dkdv":
        return launch.dkdv_launch(q, k, v, dout, dk[None], dv[None], *shared, tile=tiles.dkdv, **ways)
    return launch.dq_launch(q, k, v, dout, dq, *shared, tile=tiles.dq, **ways)


def _expected(args: dict[str, Any]) -> dict[str, Any]:
    q, k, v = (args[name].double() for name in "qkv")
    out, lse = reference.attention_fwd(q, k, v, _OPTIONS)
    if "out" in args:
        return {"out": out, "lse": lse}
    dq, dk, dv, _, _ = reference.attention_bwd(args["dout"].double(), q, k, v, out, lse, _OPTIONS)
    return {"dq": dq} if "dq" in args else {"dk": dk[None], "dv": dv[None]}


def _target(arch: str, kind: str, make: Callable[[np.random.Generator], launch.Launch]) -> KernelTarget:
    step = make(np.random.default_rng(0))
    return KernelTarget(
        name=f"{arch}_attention_{kind}",
        kernel=step.kernel,
        archs=(arch,),
        inputs=lambda rng: make(rng).args,
        grid=step.grid[0],
        constants=step.constants,
        options=step.options,
        expected=_expected,
        tolerance=_TOLERANCE,
        # Triton 3.9 moves two vector registers to accumulation registers on gfx942; nothing may go to memory.
        gate=IsaGate(max_spills=2, required=_TRANSPOSING_LOADS[arch], forbidden_anywhere=("scratch_.*",)),
    )


def isa_targets() -> list[KernelTarget]:
    found = []
    for arch in _TRANSPOSING_LOADS:
        found.append(_target(arch, "fwd", partial(_forward, arch=arch)))
        found += [_target(arch, kind, partial(_backward, arch=arch, kind=kind)) for kind in ("dkdv", "dq")]
    return found
