"""Attention problems drawn at random over all features and their combinations, and what flash attention's roundings cost on each.

torch's flash kernel can do few of the features, so its numerics are modelled: 16-bit P, unnormalised, before the product with v;
16-bit P and dS in the backward; delta from the rounded output; fp32 sums; one rounding of every result. On what it can do, a test
with a GPU compares with the kernel itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.attention import AttentionMask, ZigZag
from primus_turbo_plugin.kernels.attention_dropout import keep_mask
from primus_turbo_plugin.kernels.attention_spans import spans
from tests.kernels.triton.attention_cases import AttentionCase, Problem, packing

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 24))


def draw(rng: torch.Generator) -> AttentionCase:
    """A case with any combination of features that a call can have."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    def chance(one_in: int) -> bool:
        return number(0, one_in) == 0

    dim, v_dim = DIMS[number(0, len(DIMS))]
    groups = (1, 2, 4)[number(0, 3)]
    fields: dict[str, Any] = {
        "dim": dim,
        "v_dim": v_dim,
        "groups": groups,
        "heads": groups * (1, 2, 4)[number(0, 3)],
        "sinks": chance(2),
        "softcap": 3.0 if chance(3) else 0.0,
        "dropout": 0.2 if chance(3) else 0.0,
        "scale": (None, None, None, 0.05, -0.1)[number(0, 5)],
        "dtype": torch.float16 if chance(4) else torch.bfloat16,
        "strided": chance(3),
    }
    window = ((-1, -1), (-1, -1), (number(0, 200), 0), (number(0, 200), number(0, 60)), (-1, number(0, 60)))[
        number(0, 5)
    ]
    causal = window[1] <= 0 and not chance(3)
    kind = ("dense", "dense", "packed", "zigzag", "masked")[number(0, 5)]
    if kind == "dense":
        queries = number(1, 400)
        fields |= {"queries": queries, "keys": queries if chance(2) else number(1, 500), "batch": number(1, 3)}
        fields["mask"] = lambda device: AttentionMask(causal=causal, window=window)
    elif kind == "masked":
        queries, keys = number(1, 200), number(1, 200)
        hidden = torch.rand(1, 1, queries, keys, generator=rng) < 0.4
        fields |= {"queries": queries, "keys": keys}
        fields["mask"] = lambda device: AttentionMask(causal=causal, window=window, masked=hidden.to(device))
    elif kind == "zigzag":
        size, chunk = number(2, 4), number(1, 90)
        rank = number(0, size)
        fields |= {"queries": 2 * chunk, "keys": 2 * chunk * size}
        fields["mask"] = lambda device: AttentionMask(causal=causal, window=window, zigzag=ZigZag(rank=rank, size=size))
    else:
        lengths = [number(0, 180) for _ in range(number(1, 5))]
        rooms = [length + (number(0, 30) if chance(2) else 0) for length in lengths]
        fields |= {"queries": sum(rooms) + number(0, 40), "strided": False}
        fields["queries"] = max(1, fields["queries"])
        fields["mask"] = lambda device: AttentionMask(
            causal=causal, window=window, packing=packing(device, lengths, None, rooms)
        )
    return AttentionCase(**fields)


def described(case: AttentionCase) -> str:
    """For messages."""
    mask = case.mask("cpu")
    kind = "packed" if mask.packing else "zig-zag" if mask.zigzag else "masked" if mask.masked is not None else "dense"
    shape = f"b{case.batch} {case.queries}x{case.keys} h{case.heads}/{case.groups} d{case.dim}/{case.v_dim}"
    rest = f"sinks={case.sinks} softcap={case.softcap} dropout={case.dropout} scale={case.scale} {case.dtype}"
    return f"{kind} {shape} causal={mask.causal} window={mask.window} {rest}"


def visible(mask: AttentionMask, queries: int, keys: int, device: str) -> tuple[Tensor, Tensor]:
    """bool [queries, keys], which query sees which key but for a mask tensor; and int64 [queries], each query's place."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    places = torch.zeros(queries, dtype=torch.int64)
    left, right = mask.limits
    for span in spans(mask, queries, keys):
        rows, columns = torch.arange(span.q_len), torch.arange(span.k_len)
        ahead = columns - (rows[:, None] + span.position)
        ok = torch.ones_like(ahead, dtype=torch.bool)
        ok &= ahead <= (right if right is not None else 10 * (keys + queries))
        ok &= ahead >= (-left if left is not None else -10 * (keys + queries))
        seen[span.q_start : span.q_start + span.q_len, span.k_start : span.k_start + span.k_len] = ok
        places[span.q_start : span.q_start + span.q_len] = span.place + rows
    return seen.to(device), places.to(device)


def flash_model(problem: Problem) -> dict[str, Tensor]:
    """out, dq, dk, dv of a problem with flash attention's roundings, on the problem's device."""
    dtype = problem.tensors[0].dtype
    q, k, v, dout = (x.nan_to_num().float().transpose(1, 2) for x in problem.tensors)
    options, mask = problem.options, problem.options.mask
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    k_all, v_all = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    seen, places = visible(mask, queries, keys, str(q.device))
    if mask.masked is not None:
        seen = seen & ~mask.masked
    raw = q @ k_all.transpose(-1, -2) * options.scale
    slope = torch.ones_like(raw)
    if options.softcap:
        capped = torch.tanh(raw / options.softcap)
        raw, slope = capped * options.softcap, 1 - capped.square()
    scores = raw.masked_fill(~seen, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    sink = None
    if problem.sinks is not None:
        sink = problem.sinks.float().view(1, -1, 1, 1)
        peak = torch.maximum(peak, sink)
    peak = torch.where(peak.isinf(), 0.0, peak)
    p = torch.exp(scores - peak)
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    total = torch.where(total == 0, 1.0, total)
    keep: Tensor | float = 1.0
    if options.dropout is not None:
        kept = keep_mask(
            options.dropout.probability, int(options.dropout.seed), batch=range(batch), heads=range(heads),
            queries=places, keys=torch.arange(keys, device=q.device),
        )  # fmt: skip
        keep = kept.float() * options.dropout.scale
    out = ((p * keep).to(dtype).float() @ v_all / total).to(dtype)
    inside = torch.isfinite(scores).any(-1, keepdim=True) if sink is None else torch.ones_like(total, dtype=torch.bool)
    out = torch.where(inside, out, 0)
    p = p / total
    dp = dout @ v_all.transpose(-1, -2) * keep
    ds = p * (dp - (out.float() * dout).sum(-1, keepdim=True)) * slope
    ds, weights = ds.to(dtype).float(), (p * keep).to(dtype).float()

    def shared(x: Tensor) -> Tensor:
        return x.unflatten(1, (groups, heads // groups)).sum(2)

    grads = {
        "dq": ds @ k_all * options.scale,
        "dk": shared(ds.transpose(-1, -2) @ q) * options.scale,
        "dv": shared(weights.transpose(-1, -2) @ dout),
    }
    return {"out": out.transpose(1, 2)} | {name: x.to(dtype).transpose(1, 2) for name, x in grads.items()}


def worse(problem: Problem, got: dict[str, Tensor], factor: float, floor: float) -> list[str]:
    """Where an RMS error exceeds `factor` times the model's and `floor` times the expected RMS value."""
    model, found = flash_model(problem), []
    for name, theirs in model.items():
        want = problem.expected[name].to(theirs.device)
        mine, other = ((x.to(want.device).double() - want).square().mean().sqrt().item() for x in (got[name], theirs))
        limit = max(factor * other, floor * want.square().mean().sqrt().item(), 1e-9)
        if not mine <= limit:
            found.append(f"{name}: error {mine:.3g}, flash attention's {other:.3g}")
    return found
