"""Zeros made beforehand, for kernels that need a counter at zero: filling one for every launch is a launch of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

_AT_ONCE = 256
_APART = 4  # int32: 16 bytes, so that each is aligned as an allocation is
_MOST_STREAMS = 64
_ready: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Zeros not yet given away, by device and stream: what was filled on a stream may be used on it without waiting."""


def fresh_zero(device: torch.device) -> Tensor | None:
    """An int32 zero on a GPU that nobody else has or gets, for the current stream; or None where zeros must not be kept.

    That is in a CUDA graph, whose replays must each start at zero, and where calls are recorded instead of run once.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _get_current_dispatch_mode() is not None:
        return None
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    place = (device, torch.cuda.current_stream(device).cuda_stream)
    try:
        return _ready[place].pop()
    except (KeyError, IndexError):  # all used up, perhaps by another thread at this moment
        return _fill(place, device)


def _fill(place: tuple[torch.device, int], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        zeros = list(torch.zeros(_AT_ONCE, _APART, dtype=torch.int32, device=device).unbind(0))
    zero = zeros.pop()
    if len(_ready) >= _MOST_STREAMS:
        _ready.clear()
    _ready[place] = zeros
    return zero
