"""Quantised copies of a weight, kept from one microbatch to the next: quantised once per optimizer step.

A weight changes in ways that torch does not always record. Writing through `.data`, as Megatron's distributed optimizer and
its parameter all-gather do, leaves `_version` as it was. So a copy is reused only while all of this is as it was when it was
made:

    storage and strides   change with `weight.data = ...` or a move to another device; the old storage is kept meanwhile, so that
                          no other takes its address
    weight._version       with load_state_dict, copy_, optimizers that update parameters in place
    generation            when a schedule announces that it begins: `begin_step()`
    optimizer steps       when any torch optimizer steps in this process

and a layer passes its cache only where one of the last two is known to report every change (`covers`), else it quantises afresh.

What is not noticed: a write through `.data` between two forwards of one schedule, or before a forward in the same mode that no
schedule runs; and, in a module that no schedule announces to (outside `decoder.layers`, without fp8 or fp4), one between two
training forwards under DDP without an optimizer step. torch gives no sign of such a write short of reading the weight again,
which costs as much as the cast it would save. `begin_step()` or `clear()` after it is the remedy.

CUDA graphs: none of the above runs when a graph is replayed. So while one is captured nothing is reused and nothing kept: the
graph quantises the weight itself, in every replay and hence in every microbatch. An optimizer step that was captured is no longer
counted: a layer that no schedule announces to then quantises afresh in every forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from primus_turbo_plugin.precision.quantized_tensor import Copies


class OptimizerClock:
    """Counts the optimizer steps of this process.

    Megatron's optimizers end in a torch optimizer, whose public post-step hook is the only notice of a step that reaches a layer
    in every release and with every wrapper. A step only ever makes copies stale, so counting other models' steps is harmless.

    Attributes:
        steps: Those counted.
        is_captured: A step was captured in a CUDA graph (Megatron's `--optimizer-cuda-graph`): its replays are not counted.
    """

    def __init__(self) -> None:
        self.steps, self.is_captured = 0, False
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.steps += 1
        self.is_captured = self.is_captured or _stream_is_captured()


@functools.cache
def optimizer_clock() -> OptimizerClock:
    """The process's clock, started by the first layer that quantises its weight."""
    return OptimizerClock()


@dataclass(frozen=True, slots=True)
class _State:
    """What a weight was when its copies were made: equal facts, equal weight.

    Attributes:
        facts: Everything that is compared, the storage's address first.
        storage: Kept so that the address is not given to another weight meanwhile.
    """

    facts: tuple[Any, ...]
    storage: torch.UntypedStorage


class WeightCache:
    """Copies of one weight.

    Args:
        clock: Counts optimizer steps; None takes the process's.

    Attributes:
        clock: The clock.
    """

    def __init__(self, clock: OptimizerClock | None = None) -> None:
        self.clock = optimizer_clock() if clock is None else clock
        self._announced_in_training: bool | None = None
        self._generation = 0
        self._state: _State | None = None
        self._copies: Copies = (None, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()  # a copied or unpickled module has a weight of its own

    def begin_step(self, *, training: bool = True) -> None:
        """A schedule begins: the weight may have changed since the last forward.

        Args:
            training: Whether it trains, or evaluates.
        """
        self._announced_in_training = training
        self._generation += 1

    @property
    def announced(self) -> bool:
        """Whether a schedule has ever announced itself here."""
        return self._announced_in_training is not None

    def covers(self, *, training: bool, under_ddp: bool) -> bool:
        """Whether every change of the weight before a forward like this one is known to reach this cache.

        A schedule that announced itself covers its own forwards. What runs in the other mode was begun by somebody else, who may
        have swapped weights in through `.data` (averages, for an evaluation). Where no schedule ever announces itself, the
        optimizer clock stands in: under DDP and in training, weights change when an optimizer steps, which it counts unless they
        are replayed.
        """
        if self.announced:
            return self._announced_in_training == training
        return training and under_ddp and self.clock.steps > 0 and not self.clock.is_captured

    def tensors(self) -> list[Tensor]:
        """Codes and scales of the copies that are kept now."""
        return [t for copy in self._copies if copy is not None for t in (copy.data, copy.block_scale)]

    def clear(self) -> None:
        """Frees the copies."""
        self._state, self._copies = None, (None, None)

    def copies(
        self, weight: Tensor, dtype: torch.dtype, quantize: Callable[[bool, bool], Copies], *, row: bool, column: bool
    ) -> Copies:
        """Copies of the weight as it is now.

        Args:
            weight: [out, in].
            dtype: What the weight is cast to before it is quantised.
            quantize: Makes the row copy, the columnwise copy or both, as its two arguments say.
            row: Whether the row copy is wanted.
            column: Whether the columnwise copy is wanted.
        """
        if weight.is_inference() or torch.is_inference_mode_enabled():
            # Such a weight has no version, and copies made in this mode may not be saved for a later backward.
            return quantize(row, column)
        if _is_being_captured(weight):
            self.clear()  # made before the capture, for no replay to use
            return quantize(row, column)
        state = self._look(weight, dtype)
        if self._state is None or self._state.facts != state.facts:
            self._state, self._copies = state, (None, None)
        have_row, have_column = self._copies
        new_row, new_column = row and have_row is None, column and have_column is None
        if new_row or new_column:
            made_row, made_column = quantize(new_row, new_column)
            self._copies = (made_row if new_row else have_row, made_column if new_column else have_column)
        return self._copies

    def _look(self, weight: Tensor, dtype: torch.dtype) -> _State:
        storage = weight.untyped_storage()
        layout = (weight.storage_offset(), weight.stride(), weight.shape, weight.dtype, dtype)
        return _State((storage.data_ptr(), layout, weight._version, self._generation, self.clock.steps), storage)


def _is_being_captured(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream_is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
