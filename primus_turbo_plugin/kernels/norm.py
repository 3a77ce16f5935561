"""What a norm kernel is asked for. Formulas, layout and numerics: `kernels/reference/norm.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from primus_turbo_plugin.kernels.requests import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class NormRequest(Request):
    """A norm over the last dimension, forward and backward.

    Attributes:
        kind: Which norm.
        dtype: dtype of the input and output.
        weight_dtype: dtype of the weight.
        hidden: Size of the last dimension.
    """

    op: ClassVar[str] = "norm"
    functions: ClassVar[tuple[str, ...]] = ("rms_norm_fwd", "rms_norm_bwd", "layer_norm_fwd", "layer_norm_bwd")

    kind: Literal["rms_norm", "layer_norm"]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    hidden: int

    @classmethod
    def of(cls, kind: Literal["rms_norm", "layer_norm"], x: Tensor, weight: Tensor) -> NormRequest:
        return cls(device=x.device.type, kind=kind, dtype=x.dtype, weight_dtype=weight.dtype, hidden=x.shape[-1])

    @classmethod
    def examples(cls, device: str) -> tuple[Request, ...]:
        bf16 = torch.bfloat16
        return (
            cls(device=device, kind="rms_norm", dtype=bf16, weight_dtype=bf16, hidden=4096),
            cls(device=device, kind="layer_norm", dtype=bf16, weight_dtype=bf16, hidden=4096),
        )

    def __str__(self) -> str:
        dtypes = " x ".join(str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.weight_dtype))
        return f"{self.kind} {dtypes} hidden {self.hidden} on {self.device}"
