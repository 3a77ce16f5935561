"""The named recipes, as data: for each GEMM and operand, the fields of its `QuantSpec` that differ from the format's defaults.

    fprop  y[T, N]  = x[T, K] @ w[N, K].T    contraction K, operands x and w
    dgrad  dx[T, K] = dy[T, N] @ w[N, K]     contraction N, operands dy and w (transposed)
    wgrad  dw[N, K] = dy[T, N].T @ x[T, K]   contraction T, operands dy and x (both transposed)

Source: the three MXFP4 presets are the variants of public MXFP4 pretraining stacks, compared in docs/recipes.md; `fp8_block128`
follows DeepSeek-V3's technical report, section 3.3.2 (activations and gradients 1x128, weights 128x128).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The operands of each GEMM, activation-like one first.
GEMM_OPERANDS: Mapping[str, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}

#: The six places where a recipe chooses a representation: (gemm, operand).
SLOTS: tuple[tuple[str, str], ...] = tuple((gemm, operand) for gemm, pair in GEMM_OPERANDS.items() for operand in pair)

#: Fields of `QuantSpec`, by slot.
SlotFields = Mapping[tuple[str, str], Mapping[str, Any]]


def _everywhere(**fields: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {slot: dict(fields) for slot in SLOTS}


def _with(base: SlotFields, changes: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """`base` with `changes`, whose keys are a GEMM or an operand name."""
    return {
        (gemm, operand): {**base[gemm, operand], **changes.get(gemm, {}), **changes.get(operand, {})}
        for gemm, operand in SLOTS
    }


_MXFP4 = _everywhere(format="mxfp4", block="1x32")
_MXFP8 = _everywhere(format="mxfp8", block="1x32")

#: Preset name -> slot -> fields. `bf16` multiplies what it is given, in the tensors' own dtype.
PRESETS: Mapping[str, SlotFields] = {
    "bf16": _everywhere(format="bf16"),
    "mxfp8": _MXFP8,
    "mxfp8_hybrid": _with(_MXFP8, {"dy": {"element": "e5m2"}}),
    "fp8_tensorwise": _everywhere(format="fp8", block="tensorwise"),
    "fp8_rowwise": _everywhere(format="fp8", block="rowwise"),
    "fp8_block128": _with(_everywhere(format="fp8", block="1x128"), {"w": {"block": "128x128"}}),
    "mxfp4_wgrad": _with(_MXFP4, {"w": {"block": "32x32"}, "wgrad": {"hadamard": 16}}),
    "mxfp4_all": _everywhere(format="mxfp4", block="1x32", hadamard=16),
    "mxfp4_none": _MXFP4,
}

#: Other names a preset answers to.
ALIASES: Mapping[str, str] = {"mxfp4": "mxfp4_wgrad"}

#: One line about each preset, for `--help`, the doctor and the documentation.
SUMMARIES: Mapping[str, str] = {
    "bf16": "no quantisation: every GEMM in the tensors' own dtype",
    "mxfp8": "MXFP8, E4M3 everywhere, 1x32 blocks, RCEIL scales",
    "mxfp8_hybrid": "as mxfp8, gradients (dy) in E5M2",
    "fp8_tensorwise": "FP8 E4M3, one fp32 scale a tensor, from the current amax",
    "fp8_rowwise": "FP8 E4M3, one fp32 scale a row along the contraction",
    "fp8_block128": "FP8 E4M3, activations and gradients 1x128, weights 128x128",
    "mxfp4_wgrad": "MXFP4, H16 on both operands of wgrad, weights in 32x32 blocks, nearest rounding (the default mxfp4)",
    "mxfp4_all": "MXFP4, H16 on both operands of all three GEMMs, 1x32 blocks",
    "mxfp4_none": "MXFP4, no rotation, 1x32 blocks",
}
