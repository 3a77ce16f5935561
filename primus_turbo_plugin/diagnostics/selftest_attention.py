"""Self-test of attention: out and gradients against float64, spelled out, by signal-to-noise ratio."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.diagnostics.selftest_gemm import Case
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest, Dropout, Packing
from primus_turbo_plugin.kernels.attention_dropout import keep_mask
from primus_turbo_plugin.kernels.reference.attention_fp8 import decoded
from primus_turbo_plugin.precision.attention import AttentionPrecision

_SEED = 20260801
_MIN_ATTENTION_SNR_DB = 40.0
_MIN_FP8_SNR_DB = {"out": 28.0}  # of attention at the decoded numbers: probabilities are off by 2.6 %
_MIN_FP8_GRADIENT_SNR_DB = 32.0  # 2.5 %: their errors take part in delta, most in the first rows


def attention_cases(torch_device: str) -> Iterator[Case]:
    """Causal; a window with sinks on wide heads; packed sequences with a softcap; dropout; keys wider than values (MLA); FP8.

    On GPUs also the sizes that other tiles serve: long sequences, heads of 256, MLA's own 192 and 128, and fp16.
    """
    packed = torch.tensor([0, 50, 128], dtype=torch.int32)
    window = AttentionMask(causal=True, window=(40, 0))
    packing = Packing(cu_seqlens_q=packed, cu_seqlens_k=packed)
    yield _attention_case(torch_device, tokens=48, dim=32, mask=AttentionMask(causal=True))
    yield _attention_case(torch_device, tokens=200, dim=128, mask=window, sinks=True)
    yield _attention_case(
        torch_device, tokens=128, dim=64, mask=AttentionMask(causal=True, packing=packing), softcap=3.0, batch=1
    )
    yield _attention_case(torch_device, tokens=96, dim=64, mask=AttentionMask(), probability=0.2)
    causal = AttentionMask(causal=True)
    yield _attention_case(torch_device, tokens=60, dim=48, value_dim=32, mask=causal)
    yield _attention_case(torch_device, tokens=200, dim=128, mask=causal, fp8=True)
    if torch_device != "cpu":
        yield _attention_case(torch_device, tokens=700, dim=128, mask=causal, batch=1)
        yield _attention_case(torch_device, tokens=300, dim=64, mask=AttentionMask(), dtype=torch.float16)
        yield _attention_case(torch_device, tokens=200, dim=256, mask=causal)
        yield _attention_case(torch_device, tokens=300, dim=192, value_dim=128, mask=causal)


def _attention_case(
    torch_device: str,
    *,
    tokens: int,
    dim: int,
    mask: AttentionMask,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 2,
    sinks: bool = False,
    softcap: float = 0.0,
    probability: float = 0.0,
    fp8: bool = False,
) -> Case:
    generator = torch.Generator().manual_seed(_SEED)
    wide = dim if value_dim is None else value_dim
    q, dout = (torch.randn(batch, tokens, 4, d, generator=generator).to(dtype) for d in (dim, wide))
    k, v = (torch.randn(batch, tokens, 2, d, generator=generator).to(dtype) for d in (dim, wide))
    sink = torch.randn(4, generator=generator) if sinks else None
    dropout = Dropout(probability=probability, seed=torch.tensor([_SEED])) if probability else None
    precision = AttentionPrecision(format="fp8" if fp8 else "bf16")
    options = AttentionOptions(scale=dim**-0.5, mask=mask, softcap=softcap, dropout=dropout, precision=precision)

    def check(kernels: Any, device: torch.device) -> str | None:
        multiplied = [decoded(tensor, [(0, tokens)]) if fp8 else tensor for tensor in (q, k, v, dout)]
        inputs = [tensor.double().requires_grad_() for tensor in multiplied[:3]]
        expected = _attention64(inputs[0], inputs[1], inputs[2], options, sink)
        expected.backward(multiplied[3].double())
        q_d, k_d, v_d, dout_d = (tensor.to(device) for tensor in (q, k, v, dout))
        there = _on_device(options, device)
        sink_d = None if sink is None else sink.to(device)
        out, lse = kernels.attention_fwd(q_d, k_d, v_d, there, sinks=sink_d)
        grads = kernels.attention_bwd(dout_d, q_d, k_d, v_d, out, lse, there, sinks=sink_d)[:3]
        wanted = [expected, *(tensor.grad for tensor in inputs)]
        for name, reference, got in zip(("out", "dq", "dk", "dv"), wanted, (out, *grads)):
            assert reference is not None
            error = (got.cpu().double() - reference).square().sum()
            snr = 10 * torch.log10(reference.square().sum() / error).item()
            least = _MIN_FP8_SNR_DB.get(name, _MIN_FP8_GRADIENT_SNR_DB) if fp8 else _MIN_ATTENTION_SNR_DB
            if not snr >= least:  # NaN fails too
                return f"{name}: SNR {snr:.1f} dB, at least {least:.0f} is required"
        return None

    request = AttentionRequest.of(q, k, v, options, bias=None, sinks=sink)
    return dataclasses.replace(request, device=torch_device), check


def _on_device(options: AttentionOptions, device: torch.device) -> AttentionOptions:
    packing, dropout = options.mask.packing, options.dropout
    if packing is not None:
        lengths = packing.cu_seqlens_q.to(device)
        packing = Packing(cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    if dropout is not None:
        dropout = dataclasses.replace(dropout, seed=dropout.seed.to(device))
    return dataclasses.replace(options, mask=dataclasses.replace(options.mask, packing=packing), dropout=dropout)


def _attention64(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, sinks: Tensor | None) -> Tensor:
    """Attention with grouped heads, spelled out: q [batch, seq, heads, dim], k and v [batch, seq, groups, dim]."""
    batch, tokens, heads, _ = q.shape
    k, v = (tensor.repeat_interleave(heads // k.shape[2], dim=2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    places = torch.arange(tokens)
    behind = places[:, None] - places
    hidden = torch.zeros(tokens, tokens, dtype=torch.bool)
    if options.mask.causal:
        hidden |= behind < 0
    if options.mask.window[0] >= 0:
        hidden |= behind > options.mask.window[0]
    if options.mask.packing is not None:
        sequence = torch.bucketize(places, options.mask.packing.cu_seqlens_q[1:], right=True)
        hidden |= sequence[:, None] != sequence
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand(batch, heads, tokens, 1)
        probabilities = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    dropout = options.dropout
    if dropout is not None:
        ranges: dict[str, Any] = {"batch": range(batch), "heads": range(heads), "queries": places, "keys": places}
        kept = keep_mask(dropout.probability, int(dropout.seed), **ranges)
        probabilities = probabilities * kept * dropout.scale
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)
