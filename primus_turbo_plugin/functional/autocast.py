"""Autocast, decided once at an op's door: operands are cast to its dtype there, and nothing inside is cast again."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype an op on x computes in: autocast's where it is on, else x's."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast leaves alone what runs on x's device. Nothing, and free, where autocast is off."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING
