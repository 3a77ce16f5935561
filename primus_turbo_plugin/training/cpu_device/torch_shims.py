"""The parts of `torch.cuda` that Megatron-Core calls unconditionally, answered for a CPU.

Everything not listed keeps torch's own behaviour: a call that really needs a GPU still fails with torch's own error.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from primus_turbo_plugin.training.cpu_device.patching import Shim

CPU = torch.device("cpu")

# Megatron asks for the CUDA compute capability to decide whether CUDA_DEVICE_MAX_CONNECTIONS=1 must be exported (below
# 10) and whether grouped GEMM kernels can run (8 and more). Neither concerns a CPU; 10 is the answer that asks nothing.
COMPUTE_CAPABILITY = (10, 0)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _identity(args: Any, kwargs: Any) -> Any:
    return args[0]


def _type(args: Any, kwargs: Any) -> Any:
    name = torch.Tensor.type(*args, **kwargs)
    asked_for_a_name = len(args) == 1 and not kwargs
    return name.replace("torch.", "torch.cuda.", 1) if asked_for_a_name else name


def _to(args: Any, kwargs: Any) -> Any:
    args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
    return torch.Tensor.to(*args, **kwargs)


class CudaLiteralsToCpu(TorchFunctionMode):
    """Runs `device="cuda"` literals, `.cuda()`, `pin_memory` and the optimizer's type strings on the CPU.

    Sees every torch call of the training process, tens of thousands a step, so the common case comes first.
    """

    # clip_grads and the distributed optimizer compare Tensor.type() against "torch.cuda.FloatTensor" and its siblings.
    _REPLACED: ClassVar[dict[Any, Callable[[Any, Any], Any]]] = {
        torch.Tensor.cuda: _identity,
        torch.Tensor.pin_memory: _identity,
        torch.Tensor.type: _type,
        torch.Tensor.to: _to,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._REPLACED.get(func)
        if not kwargs:
            return func(*args) if replacement is None else replacement(args, {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs) if replacement is None else replacement(args, kwargs)


class InertStream:
    """A CUDA stream on a device that executes in program order: everything it could wait for has happened."""

    cuda_stream = 0
    stream_id = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> InertStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return InertEvent() if event is None else event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class InertEvent:
    """A CUDA event on the same device: recorded is completed. It measures no time: `elapsed_time` is 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


_DEFAULT_STREAM = InertStream()


def resident_bytes() -> int:
    """Bytes of RAM this process holds now; the peak where the operating system doesn't tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most RAM this process ever held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _memory_stats(*_: Any) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)  # counters of the CUDA caching allocator: no such allocator, so zero
    for kind in ("allocated_bytes", "reserved_bytes"):
        stats[f"{kind}.all.current"] = resident_bytes()
        stats[f"{kind}.all.peak"] = peak_resident_bytes()
    return stats


def _device_properties(*_: Any) -> SimpleNamespace:
    major, minor = COMPUTE_CAPABILITY
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return SimpleNamespace(
        name="cpu", major=major, minor=minor, total_memory=total, multi_processor_count=os.cpu_count() or 1
    )


def _always(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda original: lambda *args, **kwargs: value


def _use(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


def _cuda(names: str, make: Callable[[Any], Any], why: str) -> list[Shim]:
    return [Shim(target=f"torch:cuda.{name}", make=make, why=why) for name in names.split()]


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls torch.cuda.manual_seed_all, which is this function.
    torch.default_generator.manual_seed(int(seed))


TORCH_SHIMS: list[Shim] = [
    *_cuda("is_available", _always(False), "a GPU in the machine must not be used by half of the code"),
    *_cuda("device_count", _always(1), "megatron.training builds its process groups and RNG tracker only if > 0"),
    *_cuda("current_device", _always(CPU), "handed to device= of new tensors all over Megatron"),
    *_cuda("set_device synchronize empty_cache", _always(None), "called unconditionally; no device to act on"),
    *_cuda("get_device_capability", _always(COMPUTE_CAPABILITY), "argument checks of megatron.training"),
    *_cuda("get_device_properties", _use(_device_properties), "argument checks of megatron.training"),
    *_cuda("get_device_name", _always("cpu"), "logging"),
    *_cuda("current_stream default_stream", _always(_DEFAULT_STREAM), "DDP and the schedules order streams"),
    *_cuda("stream", _use(lambda *_: contextlib.nullcontext()), "side streams: a CPU runs in program order"),
    *_cuda("set_stream", _always(None), "side streams"),
    *_cuda("Stream", _use(InertStream), "side streams of DDP, MoE and the p2p communicator"),
    *_cuda("Event", _use(InertEvent), "events between side streams, and timers"),
    *_cuda("is_current_stream_capturing", _always(False), "CUDA graph capture is asked for in hot paths"),
    *_cuda("get_rng_state random.get_rng_state", _use(lambda *_, **__: torch.get_rng_state()), "RNG tracker"),
    *_cuda("set_rng_state random.set_rng_state", _use(_set_rng_state), "RNG tracker and checkpoints"),
    *_cuda("manual_seed manual_seed_all", _use(_manual_seed), "RNG tracker: the CPU generator is the device's"),
    *_cuda("memory_allocated memory_reserved", _use(lambda *_: resident_bytes()), "memory report: process RSS"),
    *_cuda("max_memory_allocated max_memory_reserved", _use(lambda *_: peak_resident_bytes()), "memory report"),
    *_cuda("device_memory_used", _use(lambda *_: resident_bytes()), "memory report"),
    *_cuda("memory_stats", _use(_memory_stats), "memory report"),
    *_cuda("reset_peak_memory_stats", _always(None), "memory report"),
]
