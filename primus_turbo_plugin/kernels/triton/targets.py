"""Which code path a GPU gets, and why a machine has none."""

from __future__ import annotations

import functools
import importlib.util

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def kernel_target(device_index: int) -> str:
    """The `TARGET` of a GPU: `sm90` (PTX for packed bf16), `gfx950` (hardware FP4 conversion) or `generic` (plain Triton)."""
    properties = torch.cuda.get_device_properties(device_index)
    if torch.version.hip is not None:
        return "gfx950" if properties.gcnArchName.split(":")[0] == "gfx950" else "generic"
    return "sm90" if properties.major >= 9 else "generic"


@functools.cache
def warp_size(device_index: int) -> int:
    """Lanes of a warp or wave: 32, or 64 on gfx9."""
    return int(torch.cuda.get_device_properties(device_index).warp_size)


@functools.cache
def shared_memory_bytes(device_index: int) -> int:
    """Shared memory (LDS) of a multiprocessor or compute unit: 64 KiB on gfx942, 160 KiB on gfx950, 228 KiB on sm_90."""
    return int(torch.cuda.get_device_properties(device_index).shared_memory_per_multiprocessor)


SCALED_MATRIX_UNITS = {"gfx950": ("mxfp8", "mxfp4"), "gfx1250": ("mxfp8", "mxfp4")}
"""Architecture -> MX formats for which `dot_scaled` becomes scaled matrix instructions, both operands being MX."""


@functools.cache
def has_scaled_matrix_units(device_index: int) -> bool:
    """Whether Triton's `dot_scaled` uses MX matrix instructions on this GPU."""
    properties = torch.cuda.get_device_properties(device_index)
    return torch.version.hip is not None and properties.gcnArchName.split(":")[0] in SCALED_MATRIX_UNITS


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the Gluon that quantize_shared.py is written in: 3.6 and later."""
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.ampere.async_copy") is not None
    except ModuleNotFoundError:  # of a package on the way
        return False


def refusal(device: str) -> str | None:
    """Why Triton kernels cannot run on tensors of this device type, or None."""
    if device != "cuda":
        return f"runs on GPUs, the tensors are on {device}"
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package, which is not installed; it comes with torch's GPU builds"
    return None


def dtype_refusal(dtype: torch.dtype) -> str | None:
    """Why a kernel cannot read this dtype, or None."""
    return None if dtype in _DTYPES else f"reads bf16, fp16 and fp32, not {str(dtype).removeprefix('torch.')}"
