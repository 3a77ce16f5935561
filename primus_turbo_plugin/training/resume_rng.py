"""Random numbers that go on after a resume as if nothing had happened.

Megatron loads the generators' states with the checkpoint and builds its data loaders after that. Each `iter(DataLoader)`
draws a seed from torch's default CPU generator, on the ranks that read data only. A resumed run would therefore continue
with other numbers than the uninterrupted one (stochastic rounding draws from that generator), and on a CPU, where it is
also the device's generator, tensor-parallel ranks would drop different elements of what they hold in common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def keep_rng(
    datasets: Callable[..., Any], forward_step: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Wrap both so that the first forward step sees the generator as it was before any data loader was built.

    Args:
        datasets: The dataset provider; Megatron calls it after loading, before it makes the loaders.
        forward_step: Megatron calls it for every micro batch.

    Returns:
        The wrapped functions, for one run.
    """
    noted: list[torch.Tensor | None] = []

    @functools.wraps(datasets)
    def datasets_noting_the_state(*args: Any, **kwargs: Any) -> Any:
        if not noted:  # virtual pipelining calls once a model chunk, with loaders made in between
            noted.append(torch.get_rng_state())
        return datasets(*args, **kwargs)

    @functools.wraps(forward_step)
    def forward_step_from_that_state(*args: Any, **kwargs: Any) -> Any:
        if noted and noted[0] is not None:
            torch.set_rng_state(noted[0])
            noted[0] = None
        return forward_step(*args, **kwargs)

    return datasets_noting_the_state, forward_step_from_that_state
