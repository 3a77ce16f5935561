"""Attention problems for the Triton kernels, each with its answer in float64, by any device's launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, Dropout, Packing, ZigZag
from primus_turbo_plugin.kernels.reference import attention as reference


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """What is asked; `mask` makes the mask on a device, `bar` is the largest relative RMS error."""

    queries: int = 129
    keys: int | None = None
    batch: int = 1
    heads: int = 4
    groups: int = 2
    dim: int = 64
    v_dim: int | None = None
    mask: Callable[[str], AttentionMask] = lambda device: AttentionMask(causal=True)
    softcap: float = 0.0
    sinks: bool = False
    dropout: float = 0.0
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    strided: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class Problem:
    """Inputs on a device, and out, lse, dq, dk, dv (and dsinks) in float64."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, dout
    options: AttentionOptions
    sinks: Tensor | None
    expected: dict[str, Tensor]


def packing(
    device: str,
    q: list[int],
    k: list[int] | None = None,
    room: list[int] | None = None,
    k_room: list[int] | None = None,
) -> Packing:
    """Packed sequences of these lengths, in these rooms."""

    def cumulative(lengths: list[int] | None) -> Tensor | None:
        if lengths is None:
            return None
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    cu_q, cu_k = cumulative(q), cumulative(k or q)
    assert cu_q is not None
    assert cu_k is not None
    return Packing(
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        cu_seqlens_q_padded=cumulative(room),
        cu_seqlens_k_padded=cumulative(k_room or room),
    )


def make(case: AttentionCase, rng: torch.Generator, device: str = "cpu") -> Problem:
    """Fresh inputs and their answer. Padding of packed sequences is NaN, so that whoever reads it is found out."""
    keys, v_dim = case.keys or case.queries, case.v_dim or case.dim
    shapes = [(case.queries, case.heads, case.dim), (keys, case.groups, case.dim), (keys, case.groups, v_dim)]
    shapes.append((case.queries, case.heads, v_dim))
    tensors = [_tensor(rng, case, shape).to(device) for shape in shapes]
    if case.strided:
        tensors = [_strided(x) for x in tensors]
    sinks = torch.randn(case.heads, generator=rng).to(device) if case.sinks else None
    seed = torch.randint(2**62, (1,), generator=rng).to(device)
    mask = case.mask(device)
    options = AttentionOptions(
        scale=case.scale or case.dim**-0.5,
        mask=mask,
        softcap=case.softcap,
        dropout=Dropout(probability=case.dropout, seed=seed) if case.dropout else None,
        deterministic=case.deterministic,
    )
    q, k, v, dout = (x.double() for x in tensors)
    out, lse = reference.attention_fwd(q, k, v, options, sinks=sinks)
    grads = reference.attention_bwd(dout, q, k, v, out, lse, options, sinks=sinks)
    names = ("dq", "dk", "dv", "dbias", "dsinks")
    expected = {"out": out, "lse": lse} | {name: x for name, x in zip(names, grads) if x is not None}
    if mask.packing is not None:
        _poison(tensors, mask.packing, 1 if mask.zigzag is None else mask.zigzag.size)
    return Problem(tuple(tensors), options, sinks, expected)  # type: ignore[arg-type]


_FLOOR = 1e-4
"""Where a gradient cancels to nothing (one key: P = 1, dP = delta), fp32 leaves some 1e-7 of it."""


def wrong(problem: Problem, got: dict[str, Tensor], bar: float) -> list[str]:
    """What is off by more than `bar`, relative to the expected RMS; lse by its largest difference."""
    problems = []
    for name, want in problem.expected.items():
        mine = got[name].to(want.device).double()
        if name == "lse":
            same = torch.equal(mine.isinf(), want.isinf())
            error = torch.where(want.isinf(), 0.0, mine - want).abs().max().item() if same else float("inf")
            limit = 2e-5 * max(1.0, want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0)
        else:
            error = ((mine - want).square().mean().sqrt() / want.square().mean().sqrt().clamp_min(_FLOOR)).item()
            limit = bar
        if not error <= limit:  # NaN fails too
            problems.append(f"{name}: off by {error:.3g}, at most {limit:.3g} is allowed")
    return problems


def _tensor(rng: torch.Generator, case: AttentionCase, shape: tuple[int, int, int]) -> Tensor:
    return torch.randn(case.batch, *shape, generator=rng).to(case.dtype)


def _strided(x: Tensor) -> Tensor:
    """The same values inside a wider tensor, sequence first: neither tokens nor heads are dense."""
    wide = torch.full(
        (x.shape[1], x.shape[0], x.shape[2] + 1, x.shape[3] + 24), float("nan"), dtype=x.dtype, device=x.device
    )
    view = wide[:, :, 1:, 8 : 8 + x.shape[3]].transpose(0, 1)
    view.copy_(x)
    return view


def _poison(tensors: list[Tensor], packed: Packing, size: int) -> None:
    for x, lengths, starts, split in (
        (tensors[0], packed.cu_seqlens_q, packed.starts_q, size),
        (tensors[3], packed.cu_seqlens_q, packed.starts_q, size),
        (tensors[1], packed.cu_seqlens_k, packed.starts_k, 1),
        (tensors[2], packed.cu_seqlens_k, packed.starts_k, 1),
    ):
        if split > 1:
            continue  # a rank's share of the padding is spread over its chunks
        first = starts.tolist()
        for start, length in zip(first, lengths.diff().tolist()):
            stop = first[first.index(start) + 1] if start != first[-1] else x.shape[1]
            x[:, start + length : max(stop, start + length)] = float("nan")
        x[:, first[-1] :] = float("nan")


def causal(**fields: Any) -> Callable[[str], AttentionMask]:
    return lambda device: AttentionMask(causal=True, **fields)


def full(**fields: Any) -> Callable[[str], AttentionMask]:
    return lambda device: AttentionMask(**fields)


ODD_ROOMS = ([50, 200, 0, 230], [50, 180, 3, 200], [80, 240, 3, 260], [80, 200, 8, 230])
SMALL_ROOMS = ([5, 20, 0, 23], [5, 18, 3, 20], [8, 24, 3, 26], [8, 20, 8, 23])


def packed(rooms: tuple[list[int], ...], **fields: Any) -> Callable[[str], AttentionMask]:
    return lambda device: AttentionMask(packing=packing(device, *rooms), **fields)


CASES: dict[str, AttentionCase] = {
    "one query": AttentionCase(queries=1, batch=2),
    "17": AttentionCase(queries=17, mask=full(), groups=1),
    "129": AttentionCase(queries=129, batch=2, groups=4),
    "more keys": AttentionCase(queries=65, keys=300, dim=128),
    "more queries": AttentionCase(queries=300, keys=65),
    "strided": AttentionCase(queries=200, strided=True, dim=128, v_dim=64),
    "dim 96": AttentionCase(queries=150, dim=96, sinks=True),
    "mla": AttentionCase(queries=150, dim=192, v_dim=128, groups=4),
    "dim 256": AttentionCase(queries=150, dim=256, mask=full()),
    "odd dims": AttentionCase(queries=70, dim=40, v_dim=24, sinks=True),
    "fp16": AttentionCase(queries=150, dtype=torch.float16, softcap=3.0),
    "window": AttentionCase(queries=500, mask=causal(window=(70, 0)), sinks=True),
    "window ahead": AttentionCase(queries=290, keys=400, mask=full(window=(150, 67)), dropout=0.1),
    "no limit behind": AttentionCase(queries=270, mask=full(window=(-1, 50)), softcap=3.0),
    "no limit ahead": AttentionCase(queries=270, mask=full(window=(150, -1)), dim=128),
    "sinks, dropout and softcap": AttentionCase(queries=200, sinks=True, dropout=0.3, softcap=2.0, batch=2),
    "negative scale": AttentionCase(queries=100, scale=-0.2),
    "mask tensor": AttentionCase(
        queries=100, batch=2, mask=lambda d: AttentionMask(masked=(torch.rand(2, 1, 100, 100) < 0.4).to(d))
    ),
    "mask of keys": AttentionCase(
        queries=100, batch=2, mask=lambda d: AttentionMask(causal=True, masked=(torch.rand(2, 1, 1, 100) < 0.4).to(d))
    ),
    "row without keys": AttentionCase(
        queries=100, mask=lambda d: AttentionMask(masked=(torch.arange(100) == 7).view(1, 1, 100, 1).to(d))
    ),
    "packed": AttentionCase(
        queries=600, mask=lambda d: AttentionMask(causal=True, packing=packing(d, [50, 200, 0, 330, 1])), dim=128
    ),
    "packed with padding": AttentionCase(queries=600, keys=540, mask=packed(ODD_ROOMS, causal=True), sinks=True),
    "packed with a window": AttentionCase(queries=600, keys=540, mask=packed(ODD_ROOMS, window=(60, 30)), dropout=0.2),
    "zig-zag": AttentionCase(
        queries=120, keys=240, dropout=0.3, mask=lambda d: AttentionMask(causal=True, zigzag=ZigZag(rank=1, size=2))
    ),
    "zig-zag, packed": AttentionCase(
        queries=180,
        keys=360,
        mask=lambda d: AttentionMask(
            causal=True,
            packing=packing(d, [100, 60, 150], None, [120, 80, 160]),
            zigzag=ZigZag(rank=0, size=2),
        ),
    ),
    "one group": AttentionCase(queries=150, heads=8, groups=1, dropout=0.2, mask=causal(window=(40, 0))),
}
