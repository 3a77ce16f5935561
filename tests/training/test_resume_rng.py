"""Building data loaders doesn't move the random numbers that the model sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from primus_turbo_plugin.training.resume_rng import keep_rng


def _run(num_loaders: int, state: torch.Tensor) -> list[float]:
    """A run from `state`: datasets, loaders, three steps that draw a number each."""

    def datasets(num_samples: list[int], vp_stage: int | None = None) -> list[int]:
        return list(range(4))

    def forward_step(iterator: Any, model: Any) -> float:
        return float(torch.rand(()))

    provide, step = keep_rng(datasets, forward_step)
    torch.set_rng_state(state)
    for _ in range(num_loaders):
        iter(DataLoader(provide([1, 1, 1]), batch_size=2))
    return [step(None, None) for _ in range(3)]


def test_the_model_draws_the_same_numbers_whatever_loaders_were_built() -> None:
    state = torch.Generator().manual_seed(11).get_state()
    reference = torch.Generator()
    reference.set_state(state)
    expected = [float(torch.rand((), generator=reference)) for _ in range(3)]
    assert _run(1, state) == _run(3, state) == expected


def test_megatron_still_sees_the_providers_signature_and_attributes() -> None:
    import inspect

    def datasets(num_samples: list[int], vp_stage: int | None = None) -> None:
        return None

    datasets.is_distributed = True  # type: ignore[attr-defined]
    provide, _ = keep_rng(datasets, datasets)
    assert "vp_stage" in inspect.signature(provide).parameters
    assert provide.is_distributed  # type: ignore[attr-defined]
