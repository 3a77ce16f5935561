"""Targets of the emulator run on a device by the self-test: here by functions on the CPU that stand for kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from primus_turbo_plugin.amdgcn.targets import KernelTarget, from_bf16, to_bf16
from primus_turbo_plugin.diagnostics import selftest_targets
from primus_turbo_plugin.diagnostics.selftest import selftests
from primus_turbo_plugin.diagnostics.selftest_targets import run_target, target_tests
from primus_turbo_plugin.kernels.registry import KernelRegistry


class Kernel:
    """Adds, as a launched kernel would; `error` is added on top."""

    def __init__(self, error: float = 0.0) -> None:
        self.fn = SimpleNamespace(__name__="vector_add")
        self.error = error
        self.seen: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(**args: Any) -> None:
            self.seen = args | {"grid": grid}
            args["z"].copy_(args["x"] + args["y"] + self.error)

        return launch


def target(kernel: Kernel, bf16: bool = False) -> KernelTarget:
    def inputs(rng: np.random.Generator) -> dict[str, Any]:
        x, y = (rng.integers(-9, 9, (3, 5)).astype(np.float32) for _ in range(2))
        if bf16:
            return {"x": to_bf16(x), "y": to_bf16(y), "z": np.zeros((3, 5), np.uint16), "n": 15}
        return {"x": torch.from_numpy(x).t(), "y": torch.from_numpy(y).t(), "z": torch.full((5, 3), torch.nan), "n": 15}

    def expected(args: dict[str, Any]) -> dict[str, Any]:
        return {"z": from_bf16(args["x"]) + from_bf16(args["y"]) if bf16 else args["x"] + args["y"]}

    return KernelTarget(
        name="add",
        kernel=kernel,
        archs=("gfx950",),
        inputs=inputs,
        grid=lambda args: args["n"],
        constants={"BLOCK": 16},
        options=lambda arch: {"num_warps": 4 if arch == "gfx950" else 8},
        types=dict.fromkeys("xyz", "*bf16") if bf16 else {},
        expected=expected,
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_a_right_kernel_passes_with_its_strides_types_constants_and_options(bf16: bool) -> None:
    kernel = Kernel()
    assert run_target(target(kernel, bf16), "gfx950", torch.device("cpu")) is None
    assert (kernel.seen["grid"], kernel.seen["BLOCK"], kernel.seen["num_warps"], kernel.seen["n"]) == ((15,), 16, 4, 15)
    assert kernel.seen["x"].dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert kernel.seen["x"].stride() == ((5, 1) if bf16 else (1, 5))


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_wrong_kernel_fails_with_the_first_wrong_element(error: float) -> None:
    wrong = run_target(target(Kernel(error)), "gfx950", torch.device("cpu"))
    assert "output 'z' 15 of 15 elements are wrong, first at (0, 0)" in str(wrong)


def test_every_target_of_this_gpu_is_run_and_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the targets are kernels in Triton")
    from primus_turbo_plugin.amdgcn.resolve import built_in_targets
    from primus_turbo_plugin.errors import UnsupportedError

    try:
        known = built_in_targets()
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert list(target_tests("cpu")) == []
    for arch in ("gfx942", "gfx950", "gfx1250"):
        machine = SimpleNamespace(capabilities=SimpleNamespace(arch=arch))
        monkeypatch.setattr(selftest_targets, "detect", lambda machine=machine: machine)
        names = {test.backend for test in selftests(KernelRegistry([]), "cuda")}
        assert names == {name for name, item in known.items() if arch in item.archs}
        assert names, arch
