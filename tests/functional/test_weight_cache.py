"""The weight cache: copies are reused only while the weight is what it was, in every way a weight can change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from primus_turbo_plugin.functional import weight_cache
from primus_turbo_plugin.functional.weight_cache import OptimizerClock, WeightCache, optimizer_clock
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import Copies
from tests.support import seeded

SPEC = QuantSpec(format="mxfp8", block="32x32")


class _Layer:
    """A weight and a count of what was quantised."""

    def __init__(self, g: torch.Generator) -> None:
        self.weight = Parameter(torch.randn(64, 32, generator=g))
        self.cache = WeightCache()
        self.made: list[tuple[bool, bool]] = []

    def quantize(self, row: bool, column: bool) -> Copies:
        self.made.append((row, column))
        weight = self.weight.detach()
        return (
            quantize(weight, SPEC) if row else None,
            quantize(weight, SPEC, columnwise=True) if column else None,
        )

    def copies(self, *, row: bool = True, column: bool = True, dtype: torch.dtype = torch.float32) -> Copies:
        return self.cache.copies(self.weight, dtype, self.quantize, row=row, column=column)

    def assert_fresh(self) -> None:
        row, column = self.copies()
        assert row is not None
        assert column is not None
        weight = self.weight.detach()
        assert torch.equal(row.dequantize(), quantize(weight, SPEC).dequantize())
        assert torch.equal(column.dequantize(), quantize(weight, SPEC, columnwise=True).dequantize())


@pytest.fixture
def layer(request: Any) -> _Layer:
    return _Layer(seeded(request))


def test_copies_are_made_once_while_nothing_changes(layer: _Layer) -> None:
    first = layer.copies()
    for _ in range(3):
        assert all(a is b for a, b in zip(layer.copies(), first))
    assert layer.made == [(True, True)]


def test_a_copy_that_was_not_asked_for_is_made_when_it_is(layer: _Layer) -> None:
    layer.copies(column=False)
    layer.copies(column=False)
    layer.copies()
    layer.copies(row=False)
    assert layer.made == [(True, False), (False, True)]


def _step(w: Parameter, **kind: Any) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()


def _step_of_a_master_copy(w: Parameter) -> None:
    """As Megatron's mixed-precision optimizers: the torch optimizer sees another tensor, the weight is written through .data."""
    master = Parameter(w.detach().clone())
    master.grad = torch.ones_like(master)
    torch.optim.AdamW([master], lr=0.1).step()
    w.data.copy_(master.data)


def _no_grad_copy(w: Parameter) -> None:
    with torch.no_grad():
        w.copy_(w * 2)


CHANGES: dict[str, Callable[[Parameter], None]] = {
    "in place under no_grad": _no_grad_copy,
    "data replaced": lambda w: setattr(w, "data", w.data * 2),
    "load_state_dict": lambda w: None,
    "optimizer step": _step,
    "optimizer step on a master copy": _step_of_a_master_copy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_that_can_be_seen_gives_new_copies(layer: _Layer, change: str) -> None:
    for _ in range(3):
        layer.copies()
        if change == "load_state_dict":
            module = torch.nn.Linear(32, 64, bias=False)
            module.weight = layer.weight
            module.load_state_dict({"weight": torch.randn(64, 32)})
        else:
            CHANGES[change](layer.weight)
        layer.assert_fresh()


def test_the_old_weights_address_is_not_given_away_before_it_was_looked_at(layer: _Layer) -> None:
    """`weight.data = ...` leaves the version as it was: were the old memory freed, the new weight could take its address."""
    layer.copies()
    old = StorageWeakRef(layer.weight.untyped_storage())
    layer.weight.data = layer.weight.data * 2
    assert not old.expired()
    layer.assert_fresh()
    assert old.expired()


def test_a_step_that_is_announced_gives_new_copies_of_a_weight_written_behind_torchs_back(layer: _Layer) -> None:
    layer.copies()
    assert not layer.cache.announced
    layer.weight.data.mul_(2)
    layer.cache.begin_step()
    assert layer.cache.announced
    layer.assert_fresh()


def test_another_weight_or_another_dtype_is_another_entry(layer: _Layer) -> None:
    layer.copies()
    layer.copies(dtype=torch.bfloat16)
    whole = Parameter(torch.randn(128, 32))
    for start in (0, 64):
        layer.weight = whole[start : start + 64]  # type: ignore[assignment]
        layer.assert_fresh()
    layer.weight = whole.detach().t()[:, :64].contiguous().t()  # type: ignore[assignment]
    layer.assert_fresh()


def test_a_weight_made_in_inference_mode_is_never_cached(layer: _Layer) -> None:
    with torch.inference_mode():
        layer.weight = torch.randn(64, 32)  # type: ignore[assignment]
        layer.copies()
        layer.weight.mul_(2)
        layer.assert_fresh()


def test_clearing_frees_the_copies(layer: _Layer) -> None:
    row, _ = layer.copies()
    layer.cache.clear()
    assert layer.copies()[0] is not row


def test_a_copied_module_starts_with_an_empty_cache_of_its_own(layer: _Layer) -> None:
    layer.copies()
    other = copy.deepcopy(layer.cache)
    layer.made.clear()
    other.copies(layer.weight, torch.float32, layer.quantize, row=True, column=False)
    assert layer.made == [(True, False)]
    assert other.clock is layer.cache.clock


def test_the_clock_counts_steps_of_every_torch_optimizer() -> None:
    clock = OptimizerClock()
    parameter = Parameter(torch.ones(2))
    for count, kind in enumerate((torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad), start=1):
        parameter.grad = torch.ones(2)
        kind([parameter], lr=0.1).step()
        assert clock.steps == count
    assert optimizer_clock() is optimizer_clock()


def test_a_captured_optimizer_step_is_no_clock(layer: _Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's --optimizer-cuda-graph: the hook runs while the step is captured, and at none of its replays."""
    cache = WeightCache(OptimizerClock())
    _step(layer.weight)
    assert cache.covers(training=True, under_ddp=True)
    monkeypatch.setattr(weight_cache, "_stream_is_captured", lambda: True)
    _step(layer.weight)
    monkeypatch.undo()
    assert not cache.covers(training=True, under_ddp=True)
    _step(layer.weight)
    assert not cache.covers(training=True, under_ddp=True)
    cache.begin_step()  # a schedule that announces itself needs no clock
    assert cache.covers(training=True, under_ddp=True)


def test_copies_made_in_inference_mode_serve_no_training(layer: _Layer) -> None:
    """An inference tensor must not be saved for backward, so one that stayed in the cache would break the next step."""
    with torch.inference_mode():
        inside, _ = layer.copies()
    assert inside is not None
    assert inside.data.is_inference()
    row, column = layer.copies()
    assert row is not None
    assert column is not None
    assert not row.data.is_inference()
    assert not column.block_scale.is_inference()
    assert layer.made == [(True, True), (True, True)]


def test_a_graph_that_is_captured_quantises_the_weight_itself(layer: _Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the cache runs at a replay: what a graph reused would be the weight of the step it was captured in."""
    layer.copies()
    monkeypatch.setattr(weight_cache, "_is_being_captured", lambda weight: True)
    for _ in range(2):
        layer.assert_fresh()
    assert len(layer.made) == 3
    assert layer.cache.tensors() == []
    monkeypatch.undo()
    layer.assert_fresh()
    layer.assert_fresh()
    assert len(layer.made) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
def test_a_replay_has_the_weight_of_the_hour() -> None:
    weight, cache = Parameter(torch.randn(64, 32, device="cuda")), WeightCache()

    def doubled(row: bool, column: bool) -> Any:  # the reference's quantisation cannot be captured
        return weight.detach() * 2, None

    for _ in range(2):  # the cache holds a copy when the capture begins
        cache.copies(weight, torch.float32, doubled, row=True, column=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy, _ = cache.copies(weight, torch.float32, doubled, row=True, column=False)
    for factor in (3.0, -0.5):
        weight.data.mul_(factor)
        graph.replay()
        assert torch.equal(copy, weight.detach() * 2)  # type: ignore[arg-type]
