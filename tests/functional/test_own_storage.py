"""A saved view is copied where that frees memory, and only there."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.functional.own_storage import in_own_storage


def _views(rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    whole = torch.randn(6, 12, generator=rng).requires_grad_() * 1
    return whole, whole[:, :8], whole[:, 8:10], whole[:, 10:]


def test_a_small_view_of_a_storage_that_nobody_else_keeps_is_copied(rng: torch.Generator) -> None:
    _, q, k, v = _views(rng)
    own = in_own_storage(v, q.clone(), k.clone())
    assert torch.equal(own, v)
    assert own.untyped_storage().nbytes() == own.nbytes
    own.sum().backward()


def test_gradients_go_through_unchanged(rng: torch.Generator) -> None:
    x = torch.randn(6, 12, generator=rng, requires_grad=True)
    own = in_own_storage((x * 1)[:, 10:])
    dy = torch.randn(own.shape, generator=rng)
    own.backward(dy)
    assert x.grad is not None
    assert torch.equal(x.grad[:, 10:], dy)
    assert not x.grad[:, :10].any()


@pytest.mark.parametrize("why", ["shared", "whole", "half or more", "no grad", "not wanted"])
def test_else_it_stays_as_it_is(rng: torch.Generator, why: str) -> None:
    whole, q, k, v = _views(rng)
    if why == "shared":
        assert in_own_storage(v, q, k.clone()) is v
    elif why == "whole":
        assert in_own_storage(whole) is whole
    elif why == "half or more":
        assert in_own_storage(q) is q
    elif why == "no grad":
        with torch.no_grad():
            assert in_own_storage(v) is v
    else:
        frozen = v.detach()
        assert in_own_storage(frozen) is frozen
