"""`megatron_on_cpu` works while it is entered, and leaves nothing behind."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode

from primus_turbo_plugin.errors import UnsupportedError
from primus_turbo_plugin.training.cpu_device import megatron_on_cpu, on_cpu
from primus_turbo_plugin.training.cpu_device.megatron_shims import CORE_SHIMS, TRAINING_LOOP_SHIMS
from primus_turbo_plugin.training.cpu_device.patching import Shim, patched
from primus_turbo_plugin.training.cpu_device.torch_shims import TORCH_SHIMS
from primus_turbo_plugin.training.wheels import WHEEL_SHIMS, without_engine

EVERY_SHIM = [*CORE_SHIMS, *WHEEL_SHIMS, *TORCH_SHIMS]


DOCUMENT = Path(__file__).parents[2] / "docs" / "training-on-cpu.md"


def shim_table() -> str:
    """The table of docs/training-on-cpu.md: targets that share a reason stand together."""
    by_reason: dict[str, list[str]] = {}
    for shim in [*TORCH_SHIMS, *CORE_SHIMS, *WHEEL_SHIMS, *TRAINING_LOOP_SHIMS]:
        by_reason.setdefault(shim.why, []).append(f"`{shim.target.replace(':', '.')}`")
    rows = [f"| {', '.join(targets)} | {why} |" for why, targets in by_reason.items()]
    return "\n".join(["| attribute | why |", "|---|---|", *rows]) + "\n"


def test_the_documented_list_is_the_list() -> None:
    text = DOCUMENT.read_text()
    assert f"<!-- shims: begin -->\n{shim_table()}<!-- shims: end -->" in text, (
        f"paste into {DOCUMENT.name}:\n{shim_table()}"
    )


def _objects() -> dict[str, Any]:
    return {shim.target: shim.current() for shim in EVERY_SHIM}


def test_every_patched_attribute_is_the_original_object_after_exit() -> None:
    before = _objects()
    with megatron_on_cpu():
        inside = _objects()
    after = _objects()
    assert all(after[target] is before[target] for target in before)
    changed = {target for target in before if inside[target] is not before[target]}
    assert changed == {shim.target for shim in EVERY_SHIM if shim.needed()}


def test_everything_is_undone_when_the_block_raises() -> None:
    before = _objects()
    with pytest.raises(ZeroDivisionError), megatron_on_cpu():
        raise ZeroDivisionError
    assert all(_objects()[target] is before[target] for target in before)
    assert _get_current_function_mode() is None
    assert not on_cpu()


def test_on_a_gpu_only_what_the_wheel_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _objects()
    with without_engine():
        changed = {target for target, now in _objects().items() if now is not before[target]}
    assert changed == {shim.target for shim in WHEEL_SHIMS if shim.needed()}
    assert (
        "megatron.core.datasets.utils:compile_helpers" in changed
    )  # or the wheel has a Makefile by now: delete the shim
    assert all(now is before[target] for target, now in _objects().items())
    monkeypatch.setattr("megatron.core.optimizer.Adam", type("FusedAdam", (torch.optim.Optimizer,), {}))
    with without_engine():
        changed = {target for target, now in _objects().items() if now is not before[target]}
    assert not any("Optimizer" in target for target in changed)


def test_a_shim_that_cannot_be_built_undoes_those_before_it() -> None:
    def fail(original: Any) -> Any:
        raise RuntimeError("no replacement")

    before = torch.cuda.synchronize
    first = Shim(target="torch:cuda.synchronize", make=lambda _: print, why="test")
    second = Shim(target="torch:cuda.empty_cache", make=fail, why="test")
    with pytest.raises(RuntimeError, match="no replacement"), patched([first, second]):
        pass
    assert torch.cuda.synchronize is before


def test_function_mode_compile_stance_and_log_filter_are_gone_after_exit() -> None:
    from torch._dynamo.eval_frame import _stance

    stance, filters = _stance.stance, list(logging.getLogger("megatron.core.tensor_parallel.random").filters)
    with megatron_on_cpu():
        assert _get_current_function_mode() is not None
    assert _get_current_function_mode() is None
    from torch._dynamo.eval_frame import _stance as after

    assert after.stance == stance
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == filters
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_nested_blocks_are_undone_by_the_outermost_one_only() -> None:
    before = torch.cuda.current_device
    with megatron_on_cpu():
        with megatron_on_cpu():
            pass
        assert on_cpu()
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.current_device is before


def test_a_second_thread_is_refused() -> None:
    caught: list[BaseException] = []

    def enter() -> None:
        try:
            with megatron_on_cpu():
                pass
        except UnsupportedError as error:
            caught.append(error)

    with megatron_on_cpu():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert on_cpu()
    assert len(caught) == 1


def test_cuda_literals_come_out_on_the_cpu() -> None:
    with megatron_on_cpu():
        x = torch.arange(6, device="cuda:0").cuda().to("cuda", torch.float32).pin_memory()
        assert x.device.type == "cpu"
        assert torch.equal(x, torch.arange(6.0))
        assert torch.empty(2, pin_memory=True).device.type == "cpu"
        assert x.type() == "torch.cuda.FloatTensor"
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        torch.cuda.current_stream().wait_event(event)
        torch.cuda.synchronize()


def test_memory_statistics_are_those_of_the_process() -> None:
    with megatron_on_cpu():
        before = torch.cuda.memory_allocated()
        held = torch.ones(64 << 20, dtype=torch.uint8)
        grown = torch.cuda.memory_allocated() - before
        assert 32 << 20 < grown < 128 << 20
        assert torch.cuda.max_memory_allocated() >= held.numel()
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] >= held.numel()


def test_compiled_functions_run_eagerly_inside() -> None:
    compiling: list[bool] = []

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x * 2

    with megatron_on_cpu():
        double(torch.ones(1))
    double(torch.ones(1))
    assert compiling == [False, True]


def test_the_rng_tracker_drives_the_cpu_generator_and_restores_it() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with megatron_on_cpu():
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 1234)
        tracker.add("b", 1235)
        torch.manual_seed(7)
        outside = torch.rand(4)
        torch.manual_seed(7)
        with tracker.fork("a"):
            first = torch.rand(4)
        with tracker.fork("b"):
            other = torch.rand(4)
        with tracker.fork("a"):
            second = torch.rand(4)
        assert torch.equal(torch.rand(4), outside)
    reference = torch.Generator().manual_seed(1234)
    assert torch.equal(first, torch.rand(4, generator=reference))
    assert torch.equal(second, torch.rand(4, generator=reference))
    assert not torch.equal(first, other)
