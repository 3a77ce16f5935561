"""Quantisation of experts' tokens on GPUs: the Triton quantisation wherever blocks belong to one expert.

Bytes as of kernels/reference/grouped_quantize.py. Rows are moved apart by one copy of x; FP8 scales that span an expert's tokens
are made by torch's operators. Nothing is read on the host.
"""

from __future__ import annotations

import sys

import torch

from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.reference.grouped_quantize import Copies, quantize_groups
from primus_turbo_plugin.kernels.registry import Backend
from primus_turbo_plugin.kernels.requests import GroupedQuantizeRequest
from primus_turbo_plugin.kernels.triton import quantize as dense
from primus_turbo_plugin.kernels.triton.targets import dtype_refusal, refusal
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rounding import RoundingKey


@torch.no_grad()
def grouped_quantize(
    x: torch.Tensor,
    row_spec: QuantSpec | None,
    col_spec: QuantSpec | None,
    groups: Groups,
    padded: Groups,
    *,
    key: RoundingKey | None = None,
    signs_seed: int = 0,
) -> Copies:
    """Both copies of x; arguments and results as in kernels/reference/grouped_quantize.py."""
    return quantize_groups(dense, x, row_spec, col_spec, groups, padded, key=key, signs_seed=signs_seed)


def supports(request: GroupedQuantizeRequest) -> str | None:
    """None, or why these kernels cannot do it: they serve every spec, on GPUs."""
    return refusal(request.device) or dtype_refusal(request.dtype)


BACKEND = Backend(name="triton", request=GroupedQuantizeRequest, kernels=sys.modules[__name__], supports=supports)
