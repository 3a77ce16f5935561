"""Runs Megatron-Core on a machine without a GPU.

`megatron_on_cpu()` is the only way in: nothing is patched on import, and everything is put back on exit. What it
changes is listed as data in `torch_shims` and `megatron_shims`, each with its reason, and explained in
docs/training-on-cpu.md. Works with the megatron-core releases this package supports, single process or gloo.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from primus_turbo_plugin.errors import UnsupportedError

__all__ = ["megatron_on_cpu", "on_cpu"]


@dataclass
class _Active:
    depth: int = 0
    thread: int = 0
    training_loop: bool = False


_active = _Active()


def on_cpu() -> bool:
    """Whether `megatron_on_cpu()` is active."""
    return _active.depth > 0


class _ExpectedRngWarning(logging.Filter):
    """The RNG tracker warns when the CPU generator moves inside a fork; here that generator is the device's own."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


@contextlib.contextmanager
def megatron_on_cpu(*, training_loop: bool = False) -> Iterator[None]:
    """Makes Megatron-Core run on the CPU inside the `with` block, and leaves no trace behind.

    Tensors asked for on "cuda" come out on the CPU, streams and events are inert, the RNG tracker drives the CPU
    generator (so dropout differs between tensor-parallel ranks as it should), `torch.compile` runs eagerly, and a few
    Megatron functions that assume a GPU or Transformer Engine are replaced. May be nested; the outermost block counts.

    Args:
        training_loop: Also prepare `megatron.training` (absent from the wheel of 0.16); importing it takes seconds.

    Raises:
        UnsupportedError: Entered from a second thread; torch's function modes are per thread.
    """
    if _active.depth and _active.thread != threading.get_ident():
        raise UnsupportedError(
            "megatron_on_cpu() is active in another thread; a torch function mode covers one thread only. "
            "Enter it in the thread that trains."
        )
    before = _Active(_active.depth, _active.thread, _active.training_loop)
    with contextlib.ExitStack() as stack:
        if not before.depth:
            stack.enter_context(_core())
        if training_loop and not before.training_loop:
            stack.enter_context(_training_loop())
        _active.depth, _active.thread = before.depth + 1, threading.get_ident()
        _active.training_loop = before.training_loop or training_loop
        try:
            yield
        finally:
            _active.depth, _active.thread, _active.training_loop = before.depth, before.thread, before.training_loop


@contextlib.contextmanager
def _core() -> Iterator[None]:
    import torch

    from primus_turbo_plugin.training.cpu_device.megatron_shims import CORE_SHIMS
    from primus_turbo_plugin.training.cpu_device.patching import patched
    from primus_turbo_plugin.training.cpu_device.torch_shims import TORCH_SHIMS, CudaLiteralsToCpu
    from primus_turbo_plugin.training.wheels import WHEEL_SHIMS

    rng_logger = logging.getLogger("megatron.core.tensor_parallel.random")
    expected = _ExpectedRngWarning()
    with patched([*CORE_SHIMS, *WHEEL_SHIMS, *TORCH_SHIMS]), contextlib.ExitStack() as stack:
        rng_logger.addFilter(expected)
        stack.callback(rng_logger.removeFilter, expected)
        # Megatron decorates its fusions with torch.compile: 30-50 s of C++ compilation for a toy model, if it may.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(CudaLiteralsToCpu())
        yield


@contextlib.contextmanager
def _training_loop() -> Iterator[None]:
    from primus_turbo_plugin.training.cpu_device.megatron_shims import TRAINING_LOOP_SHIMS
    from primus_turbo_plugin.training.cpu_device.patching import patched

    with patched(TRAINING_LOOP_SHIMS):
        yield
