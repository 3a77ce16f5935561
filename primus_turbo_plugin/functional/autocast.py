"""Autocast, decided once at an op's door: operands are cast to its dtype there, and nothing inside is cast again."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype an op on x computes in: autocast's where it is on, else x's."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves alone what runs on x's device."""
    return torch.autocast(x.device.type, enabled=False)
