"""The bars of the numerical tests, each with where it comes from.

u = 2^-24 is half an ulp of fp32 at 1: one fp32 operation is off by at most u relative.
"""

from __future__ import annotations

import torch

FP32_UNIT = 2.0**-24
BF16_UNIT = 2.0**-8
FP16_UNIT = 2.0**-11
"""Largest relative error of one rounding to 24, 8 and 11 significant bits."""

UNIT = {torch.float32: FP32_UNIT, torch.bfloat16: BF16_UNIT, torch.float16: FP16_UNIT}

GAUSSIAN_RELATIVE_ERROR = {"mxfp4": 0.1119, "mxfp8": 0.0265, "fp8": 0.0264}
"""RMS error over RMS value of i.i.d. Gaussian numbers in 1x32 blocks (fp8: tensorwise), default rules: the mean of 40 samples.

Plausible: E2M1 has steps of 1/2 to 1/4 of a value, E4M3 of 1/8 to 1/16; a uniform error of step / sqrt(12) gives 0.11 and 0.026.
"""
GAUSSIAN_RELATIVE_ERROR_SPREAD = 0.025
"""Relative spread allowed for a sample of 2^16 numbers: six times the standard deviation of those 40 samples, 0.4 %."""


def accumulation_bound(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Largest error of a @ b.T when exact products are summed in fp32 in any order, then rounded once to `out_dtype`.

    A sum of K terms in any order is off by at most (K - 1) u sum|terms| to first order (Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2); the final rounding adds one unit of the output dtype. Elementwise: a wrong tile cannot hide.

    Args:
        a: `[M, K]`.
        b: `[N, K]`.
        out_dtype: dtype of the result.

    Returns:
        fp64 `[M, N]`.
    """
    magnitude = a.double().abs() @ b.double().abs().t()
    exact = (a.double() @ b.double().t()).abs()
    smallest = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}[out_dtype]
    return 1.01 * (a.shape[1] * FP32_UNIT * magnitude + UNIT[out_dtype] * exact) + smallest


FP8_ATTENTION_ROUNDINGS = {"out": 4, "dv": 3, "dq": 5, "dk": 5}
"""E4M3 roundings that reach each result of attention with scores of spread 1, each off by `GAUSSIAN_RELATIVE_ERROR["fp8"]` of it.

A score's error is that of q and of k, two, and changes a probability by as much relative to it, since d exp(s) = exp(s) ds.
To these come: out, the rounding of P and of v; dv, that of dout; dq and dk, those of dout, of v, and of k or q. E5M2 for dout
counts four times: its steps are twice as wide.
"""


def fp8_attention_bar(name: str, gradients: str = "e4m3") -> float:
    """Largest RMS error over RMS value of a result of FP8 attention on Gaussian numbers: independent roundings, and a fifth more
    for first rows, whose few keys make scores that weigh more."""
    roundings = FP8_ATTENTION_ROUNDINGS[name]
    if name != "out":
        roundings += {"e4m3": 0, "e5m2": 3, "bf16": -1}[gradients]
    return 1.2 * GAUSSIAN_RELATIVE_ERROR["fp8"] * roundings**0.5
