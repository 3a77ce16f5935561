"""Which kinds of operands the Gluon GEMMs of every architecture multiply."""

from __future__ import annotations

import torch

from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.precision.quant_spec import QuantSpec

PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Dtypes of plain operands, and the kernels' names for them."""


def refusal(request: GemmRequest) -> str | None:
    """None, or why no Gluon GEMM multiplies such a pair."""
    kinds = (request.a, request.b)
    if all(isinstance(kind, torch.dtype) for kind in kinds):
        if kinds[0] != kinds[1] or kinds[0] not in PLAIN:
            names = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
            return f"plain operands must both be bf16 or both fp16, got {names}"
        return None
    for kind in kinds:
        if not isinstance(kind, QuantSpec):
            return "multiplies two quantised operands or two plain ones, not one of each"
        if not kind.is_mx and kind.block_shape[1] != 0:
            return f"FP8 scales must cover whole rows or the whole operand, got blocks of {kind.block}"
    if len({isinstance(kind, QuantSpec) and kind.is_mx for kind in kinds}) > 1:
        return "both operands must have MX scales, or both FP8 scales"
    return None
