"""Self-test of compiled kernels as the emulator knows them: each target for this architecture, launched on the GPU itself.

A target (`amdgcn.targets.KernelTarget`) holds a kernel's arguments, its compile-time choices and the right result. What
`primus-turbo emulate all` runs in the emulator this runs on the hardware: all tiles, layouts, tails, experts and ablations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from primus_turbo_plugin.devices import detect
from primus_turbo_plugin.errors import UnsupportedError

if TYPE_CHECKING:
    from primus_turbo_plugin.amdgcn.targets import KernelTarget

Named = tuple[str, str, Callable[[torch.device], "str | None"]]

_TORCH_TYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""Triton's names of types that numpy has not, and torch's."""


def target_tests(torch_device: str) -> Iterator[Named]:
    """Name, case and check of every target for the GPU of this machine; none elsewhere."""
    if torch_device == "cpu":
        return
    arch = detect().capabilities.arch
    try:
        from primus_turbo_plugin.amdgcn.resolve import built_in_targets

        targets = built_in_targets()
    except (ImportError, UnsupportedError):  # no Triton, or an older one: then no backend claims these kernels either
        return
    for name, target in targets.items():
        if arch in target.archs:
            yield (
                name,
                f"{target.kernel.fn.__name__} as emulated for {arch}",
                functools.partial(run_target, target, arch),
            )


def run_target(target: KernelTarget, arch: str, device: torch.device) -> str | None:
    """Launches a target on a GPU and compares: None, or what is wrong."""
    import copy

    import numpy as np

    from primus_turbo_plugin.amdgcn.targets import compare, decoded

    arguments = target.arguments()
    expected = target.expected(copy.deepcopy(arguments)) if target.expected is not None else {}
    grid = target.grid(arguments) if callable(target.grid) else target.grid
    options = target.options(arch) if callable(target.options) else target.options
    there = {name: _on_device(value, target.types.get(name, ""), device) for name, value in arguments.items()}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        target.kernel[(grid,) if isinstance(grid, int) else tuple(grid)](**there, **target.constants, **options)
    complaints = []
    for name, want in expected.items():
        got = there[name].cpu()
        values = got.float() if got.dtype.is_floating_point and got.dtype != torch.float64 else got
        _, complaint = compare(decoded(values.numpy(), ""), np.asarray(want), target.tolerance)
        complaints += [f"output {name!r} {complaint}"] if complaint is not None else []
    return "; ".join(complaints) or None


def _on_device(value: Any, kind: str, device: torch.device) -> Any:
    """A copy of an array on the device, strides kept, as the type that the kernel is compiled for; numbers as they are."""
    import numpy as np

    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(value.copy())
        dtype = _TORCH_TYPES.get(kind.removeprefix("*"))
        return (tensor if dtype is None else tensor.view(dtype)).to(device)
    if not isinstance(value, torch.Tensor):
        return value
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return there.copy_(value)
