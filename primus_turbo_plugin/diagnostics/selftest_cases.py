"""The cases of the self-test: what each op is given on the device, and the independent result it must equal.

quantize   codes and scales equal the reference's on the CPU, bit for bit
fused_quantize  the same for an op fused with a quantisation
grouped_quantize, grouped_gemm  the same as these two for experts
gemm_nt    inputs on the format's grid, whose sums are exact in fp32: equal to float64, bit for bit (selftest_gemm.py)
norm       float64 formula; bf16 results within one rounding, 2^-8 relative, of fp32-accurate ones
attention  float64 softmax and its autograd gradients; bf16 tensors, so SNR of at least 40 dB; FP8: those at the decoded numbers
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from primus_turbo_plugin.diagnostics.selftest_fused import fused_cases
from primus_turbo_plugin.diagnostics.selftest_gemm import Case, gemm_cases, show_difference
from primus_turbo_plugin.diagnostics.selftest_grouped import grouped_gemm_cases, grouped_quantize_cases
from primus_turbo_plugin.kernels.attention import AttentionMask, AttentionOptions, AttentionRequest, Dropout, Packing
from primus_turbo_plugin.kernels.attention_dropout import keep_mask
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.reference import quantize as reference_quantize
from primus_turbo_plugin.kernels.reference.attention_fp8 import decoded
from primus_turbo_plugin.kernels.requests import (
    FusedQuantizeRequest,
    GemmRequest,
    GroupedGemmRequest,
    GroupedQuantizeRequest,
    QuantizeRequest,
)
from primus_turbo_plugin.precision.attention import AttentionPrecision
from primus_turbo_plugin.precision.formats import Format, ScaleRule
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rounding import RoundingKey

_SEED = 20260801
_MIN_ATTENTION_SNR_DB = 40.0
_MIN_FP8_SNR_DB = {"out": 28.0}  # of attention at the decoded numbers: probabilities are off by 2.6 %
_MIN_FP8_GRADIENT_SNR_DB = 32.0  # 2.5 %: their errors take part in delta, most in the first rows
_NORM_RTOL = 2.0**-8

Copies: TypeAlias = "tuple[QuantizedTensor | None, QuantizedTensor | None]"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _specs() -> tuple[QuantSpec, ...]:
    """Every format, block shape, a rotation, and stochastic rounding, at least once each."""
    return (
        QuantSpec(format=Format.MXFP4),
        QuantSpec(format=Format.MXFP4, hadamard=16),
        QuantSpec(format=Format.MXFP4, hadamard=32, random_signs=True, rounding="stochastic"),
        QuantSpec(format=Format.MXFP4, block="32x32"),
        QuantSpec(format=Format.MXFP8),
        QuantSpec(format=Format.MXFP8, element="e5m2", scale_rule=ScaleRule.FLOOR),
        QuantSpec(format=Format.FP8, block="tensorwise"),
        QuantSpec(format=Format.FP8, block="rowwise"),
        QuantSpec(format=Format.FP8, block="1x128"),
        QuantSpec(format=Format.FP8, block="128x128"),
    )


def quantize_cases(torch_device: str) -> Iterator[Case]:
    """Every spec on magnitudes over 12 decades, with and without NaN and Inf (a tensorwise scale would be NaN with them)."""
    finite = torch.randn(96, 160, generator=_generator()) * torch.logspace(-6, 6, 96).unsqueeze(1)
    finite[5, :40] = 0.0
    for row, peak in enumerate(
        (6.0, 448.0, 57344.0), start=10
    ):  # amax = max_element * 2^k, where scale rules turn over
        finite[row] = finite[row].clamp(-peak / 8, peak / 8)
        finite[row, ::32] = peak * 2.0 ** torch.arange(5.0)
    finite = finite.to(torch.bfloat16)
    special = finite.clone()
    special[7, 3], special[9, 64] = torch.nan, torch.inf
    key = RoundingKey(seed=_SEED, draw=1, tensor=2, rank=0)
    for spec in _specs():

        def check(kernels: Any, device: torch.device, spec: QuantSpec = spec) -> str | None:
            for x in (finite, special):
                wanted = reference_quantize.quantize_both(x, spec, spec, key=key, signs_seed=3)
                got = kernels.quantize_both(x.to(device), spec, spec, key=key, signs_seed=3)
                wrong = _differing_copies(wanted, got)
                if wrong is not None:
                    return wrong
            return None

        yield QuantizeRequest(device=torch_device, dtype=finite.dtype, row_spec=spec, col_spec=spec), check


def _differing_copies(wanted: Copies, got: Copies) -> str | None:
    """The first part of the first copy that differs in a bit."""
    for name, expected, actual in zip(("rowwise", "columnwise"), wanted, got):
        for part in ("block_scale", "data"):
            left, right = _bits(getattr(expected, part)), _bits(getattr(actual, part).cpu())
            if not torch.equal(left, right):
                return show_difference(f"{name} {part}", left, right)
    return None


def _bits(tensor: Tensor) -> Tensor:
    """Floats as integers, so that -0 differs from 0; every NaN as the same one, since devices write different NaNs."""
    if tensor.dtype != torch.float32:
        return tensor
    return tensor.view(torch.int32).masked_fill(tensor.isnan(), -1)


def norm_cases(torch_device: str) -> Iterator[Case]:
    generator = _generator()
    x = torch.randn(33, 320, generator=generator, dtype=torch.float64).to(torch.bfloat16)
    weight, dy = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(torch.bfloat16) for size in ((320,), (33, 320))
    )
    request = NormRequest(device=torch_device, kind="rms_norm", dtype=x.dtype, weight_dtype=x.dtype, hidden=320)

    def check(kernels: Any, device: torch.device) -> str | None:
        x64 = x.double().requires_grad_()
        w64 = weight.double().requires_grad_()
        y64 = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5) * w64
        y64.backward(dy.double())
        on_device = [tensor.to(device) for tensor in (dy, x, weight)]
        y, rstd = kernels.rms_norm_fwd(*on_device[1:], 1e-5)
        dx, dweight = kernels.rms_norm_bwd(*on_device, rstd)
        pairs = {"y": (y64, y), "dx": (x64.grad, dx), "dweight": (w64.grad, dweight)}
        for name, (wanted, got) in pairs.items():
            assert wanted is not None
            error = (got.cpu().double() - wanted).abs()
            if not bool((error <= _NORM_RTOL * wanted.abs() + 1e-4).all()):
                return f"{name}: off by {error.max().item():.3g}"
        return None

    yield request, check


def attention_cases(torch_device: str) -> Iterator[Case]:
    """Causal; a window with sinks on wide heads; packed sequences with a softcap; dropout; FP8."""
    packed = torch.tensor([0, 50, 128], dtype=torch.int32)
    window = AttentionMask(causal=True, window=(40, 0))
    packing = Packing(cu_seqlens_q=packed, cu_seqlens_k=packed)
    yield _attention_case(torch_device, tokens=48, dim=32, mask=AttentionMask(causal=True))
    yield _attention_case(torch_device, tokens=200, dim=128, mask=window, sinks=True)
    yield _attention_case(
        torch_device, tokens=128, dim=64, mask=AttentionMask(causal=True, packing=packing), softcap=3.0, batch=1
    )
    yield _attention_case(torch_device, tokens=96, dim=64, mask=AttentionMask(), probability=0.2)
    yield _attention_case(torch_device, tokens=200, dim=128, mask=AttentionMask(causal=True), fp8=True)


def _attention_case(
    torch_device: str,
    *,
    tokens: int,
    dim: int,
    mask: AttentionMask,
    batch: int = 2,
    sinks: bool = False,
    softcap: float = 0.0,
    probability: float = 0.0,
    fp8: bool = False,
) -> Case:
    generator = _generator()
    q, dout = (torch.randn(batch, tokens, 4, dim, generator=generator).to(torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, tokens, 2, dim, generator=generator).to(torch.bfloat16) for _ in range(2))
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


#: Op -> its cases on a device.
CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    QuantizeRequest.op: quantize_cases,
    FusedQuantizeRequest.op: fused_cases,
    GemmRequest.op: gemm_cases,
    GroupedQuantizeRequest.op: grouped_quantize_cases,
    GroupedGemmRequest.op: grouped_gemm_cases,
    NormRequest.op: norm_cases,
    AttentionRequest.op: attention_cases,
}
