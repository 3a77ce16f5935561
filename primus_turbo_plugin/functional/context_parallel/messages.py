"""Keys and values (or their gradients) of some runs of tokens, as one contiguous message.

[rows, batch, groups, dim] of k, then [rows, batch, groups, v_dim] of v, flat
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from primus_turbo_plugin.functional.context_parallel.sequences import CPU

Runs = tuple[tuple[int, int], ...]

_FEW = 4  # runs: so many are copied slice by slice, more by one gather


def empty_message(k: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Room for `rows` tokens of tensors like k and v, `[batch, tokens, groups, dim]`."""
    return k.new_empty(rows * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]), dtype=dtype)


def parts_of(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`[batch, rows, groups, dim]` views of a message's two parts; k and v give the sizes."""
    batch, _, groups, dim = k.shape
    rows = message.numel() // (batch * groups * (dim + v.shape[3]))
    split = rows * batch * groups * dim
    first = message[:split].view(rows, batch, groups, dim).transpose(0, 1)
    second = message[split:].view(rows, batch, groups, v.shape[3]).transpose(0, 1)
    return first, second


def fill(message: Tensor, k: Tensor, v: Tensor, runs: Runs) -> Tensor:
    """Copies the runs' tokens in; returns the message."""
    for part, source in zip(parts_of(message, k, v), (k, v)):
        if len(runs) > _FEW:
            part.copy_(source[:, token_index(runs, source.device)])
            continue
        for (start, stop), place in zip(runs, _offsets(runs)):
            part[:, place : place + stop - start] = source[:, start:stop]
    return message


def add_to(k: Tensor, v: Tensor, message: Tensor, runs: Runs) -> None:
    """Adds a message to the runs' tokens. No token is in two runs."""
    for part, target in zip(parts_of(message, k, v), (k, v)):
        if len(runs) > _FEW:
            target.index_add_(1, token_index(runs, target.device), part)
            continue
        for (start, stop), place in zip(runs, _offsets(runs)):
            target[:, start:stop] += part[:, place : place + stop - start]


def _offsets(runs: Runs) -> Sequence[int]:
    offsets = [0]
    for start, stop in runs:
        offsets.append(offsets[-1] + stop - start)
    return offsets[:-1]


@functools.lru_cache(maxsize=256)
def token_index(runs: Runs, device: torch.device = CPU) -> Tensor:
    """int64: the tokens of the runs, end to end."""
    parts = [torch.empty(0, dtype=torch.int64), *(torch.arange(start, stop) for start, stop in runs)]
    return torch.cat(parts).to(device)
