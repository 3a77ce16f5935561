"""How a layer's linears learn that a schedule begins, so that they quantise their weights anew.

Megatron's schedules call `set_is_first_microbatch` only for its own fp8 and fp4 modes, but in every release and mode they give
each layer of `decoder.layers` and of MTP the number of the microbatch at hand, `layer.current_microbatch`. Number 0 begins a
schedule: of a training step, or of an evaluation.
"""

from __future__ import annotations

from typing import Any

from primus_turbo_plugin.modules.linear_base import TurboLinearMixin


class AnnouncesSchedules:
    """Mixed into a Megatron layer, in front of it."""

    _current_microbatch = 0

    @property
    def current_microbatch(self) -> int:
        """What Megatron's schedules write, and its CUDA graphs read."""
        return self._current_microbatch

    @current_microbatch.setter
    def current_microbatch(self, number: int) -> None:
        self._current_microbatch = number
        if number == 0:
            layer: Any = self
            for module in layer.modules():
                if isinstance(module, TurboLinearMixin):
                    module.is_first_microbatch = True
