"""The loss of one micro batch, against a float64 sum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")

from primus_turbo_plugin.training import gpt_step


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was handed to Megatron's rerun state machine; all checks are on."""
    made: list[dict[str, Any]] = []
    machine = SimpleNamespace(validate_result=lambda **k: made.append(k), is_unexpectedly_large=lambda *a, **k: False)
    args = SimpleNamespace(check_for_nan_in_loss_and_grad=True, check_for_spiky_loss=True)
    monkeypatch.setattr(gpt_step, "get_args", lambda: args)
    monkeypatch.setattr(gpt_step, "get_rerun_state_machine", lambda: machine)
    return made


def test_masked_tokens_count_neither_in_the_sum_nor_in_the_number(rng: torch.Generator, checks: list[Any]) -> None:
    losses = torch.rand(3, 17, generator=rng, dtype=torch.bfloat16).requires_grad_()
    mask = (torch.rand(3, 17, generator=rng) > 0.4).float()
    total, tokens, logged = gpt_step.masked_loss(mask, losses)
    expected = (losses.detach().double() * mask.double()).sum()
    torch.testing.assert_close(total.detach().double(), expected, rtol=1e-6, atol=0)
    assert tokens.dtype == torch.int32
    assert int(tokens) == int(mask.sum())
    assert logged["lm loss"].tolist() == [float(total.detach()), float(tokens)]
    assert not logged["lm loss"].requires_grad
    total.backward()
    assert losses.grad is not None
    assert torch.equal(losses.grad.float(), mask)


def test_every_check_is_made_on_the_loss_and_only_nan_and_inf_are_fatal(checks: list[dict[str, Any]]) -> None:
    total, _, _ = gpt_step.masked_loss(torch.ones(1, 4), torch.full((1, 4), float("nan")))
    assert [check["fatal"] for check in checks] == [True, True, False]
    assert all(check["result"] is total for check in checks)
    assert checks[0]["rejection_func"](total)
    assert not checks[1]["rejection_func"](total)
