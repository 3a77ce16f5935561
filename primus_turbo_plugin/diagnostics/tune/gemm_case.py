"""One product on a GPU, as the search wants it: operands, reference, checked runs, clocks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from primus_turbo_plugin.diagnostics.tune.gemm_tasks import GemmTask, Kind
from primus_turbo_plugin.kernels.registry import KernelRegistry
from primus_turbo_plugin.kernels.requests import QuantizeRequest
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig
from primus_turbo_plugin.kernels.triton.gemm_key import Operand, gpu_of
from primus_turbo_plugin.kernels.tuning.clock import Sample, Stopwatch, sets_for
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_TILE = 128
_SAMPLE_ROWS = 192
"""Rows and columns of the result that are compared with float64: at the start, in the middle and at the end of each axis."""

MIN_SNR_DB = {torch.float32: 90.0, torch.bfloat16: 48.0, torch.float16: 60.0}
"""Of the worst 128 x 128 tile. An fp32 sum of K = 65536 terms in any order keeps about 2^-24 * sqrt(K) of its size: 96 dB; a
rounding to bf16 leaves 2^-9 / sqrt(3) relative: 56 dB, to fp16 18 dB more. FP8 units of Hopper add with 14 bits (see `_bar`)."""
_FP8_UNITS_DB = 40.0

_SETS_LIMIT = 8


def launch_errors() -> tuple[type[BaseException], ...]:
    """What torch and Triton raise when a kernel does not compile, does not fit or does not launch."""
    found: list[type[BaseException]] = [
        RuntimeError,
        ValueError,
        TypeError,
        NotImplementedError,
        AssertionError,
        IndexError,
    ]
    try:
        found.append(importlib.import_module("triton.errors").TritonError)
    except ImportError:  # before Triton 3.4 its errors have no common base
        found.append(importlib.import_module("triton.runtime.errors").OutOfResources)
        found.append(importlib.import_module("triton.compiler.errors").CompilationError)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Inputs:
    a: Operand
    b: Operand
    out: Tensor | None


class GemmCase:
    """The operands of a task, several sets of them, and what the result must be.

    Args:
        task: The product.
        registry: Quantises operands and holds the backends compared.
        seed: Of the random inputs.
        sets: How many input sets; None for enough to exceed the cache.
    """

    def __init__(self, task: GemmTask, registry: KernelRegistry, *, seed: int = 0, sets: int | None = None) -> None:
        self.task, self.errors = task, launch_errors()
        self._registry = registry
        generator = torch.Generator(device="cuda").manual_seed(seed)
        first = self._inputs(generator)
        size = sum(_nbytes(item) for item in (first.a, first.b))
        count = min(sets_for(size), _SETS_LIMIT) if sets is None else sets
        self._sets = [first, *(self._inputs(generator) for _ in range(count - 1))]
        self._accepted: Tensor | None = None
        self._accepted_bar = math.inf
        self._start = first.out.clone() if first.out is not None else None
        self.key = task.key(*gpu_of(torch.cuda.current_device()))

    def check(self, config: GemmConfig) -> str | None:
        """Runs a configuration twice on poisoned memory; compares with float64 in part, with the first accepted result."""
        return self._compare(lambda inputs: self._triton(config, inputs), _bar(self.task, config.units == "fp8"))

    def launch(self, config: GemmConfig) -> None:
        """Runs a configuration once, unchecked; raises what it raises."""
        self._triton(config, self._sets[0])
        torch.cuda.synchronize()

    def watch(self, config: GemmConfig) -> Stopwatch:
        """A clock for a configuration that has passed `check`."""
        return Stopwatch(lambda index: self._triton(config, self._sets[index]), len(self._sets))

    def is_alive(self) -> str | None:
        """None, or the error that the device answers everything with since a kernel broke it."""
        try:
            torch.zeros(1, device="cuda").item()
        except RuntimeError as error:
            return f"the GPU takes no more work in this process: {str(error).splitlines()[0]}"
        return None

    def compare_backend(self, name: str) -> Sample | str:
        """Times another backend's kernel on the same inputs; or why it has no time."""
        backend = self._registry.backend("gemm_nt", name)
        refusal = backend.supports(self.task.request)
        if refusal is not None:
            return refusal
        out_dtype = self.task.out_dtype

        def run(inputs: _Inputs) -> Tensor:
            y: Tensor = backend.kernels.gemm_nt(inputs.a, inputs.b, out_dtype=out_dtype, out=inputs.out)
            return y

        try:
            wrong = self._compare(run, _bar(self.task, True))
            if wrong is not None:
                return f"failed: {wrong}"
            watch = Stopwatch(lambda index: run(self._sets[index]), len(self._sets))
            return Sample.of(watch.read(25))
        except self.errors as error:
            return f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"

    def _triton(self, config: GemmConfig, inputs: _Inputs) -> Tensor:
        from primus_turbo_plugin.kernels.triton.gemm import gemm_nt

        return gemm_nt(inputs.a, inputs.b, out_dtype=self.task.out_dtype, out=inputs.out, config=config)

    def _compare(self, run: Callable[[_Inputs], Tensor], bar: float) -> str | None:
        inputs = self._sets[0]
        first = self._run_fresh(run, inputs)
        if not bool(torch.isfinite(first).all()):
            return (
                f"{int((~torch.isfinite(first)).sum())} of {first.numel()} results are not finite, or were not written"
            )
        wrong = self._against_float64(first, bar)
        if wrong is None and self._accepted is not None:
            wrong = worst_tile(first, self._accepted, min(bar, self._accepted_bar), "the first accepted result")
        if wrong is None and not torch.equal(first, self._run_fresh(run, inputs)):
            wrong = "two runs on the same inputs differ"
        if wrong is None and self._accepted is None:
            self._accepted, self._accepted_bar = first, bar
        return wrong

    def _run_fresh(self, run: Callable[[_Inputs], Tensor], inputs: _Inputs) -> Tensor:
        """Runs into memory that holds NaN, or (accumulating) into the first output as it was."""
        if inputs.out is not None and self._start is not None:
            inputs.out.copy_(self._start)
            return run(inputs).clone()
        shape = (self.task.rows, self.task.cols)
        poison = torch.full(shape, math.nan, dtype=self.task.out_dtype, device="cuda")
        torch.cuda.synchronize()
        del poison  # the allocator gives the block to the result, which asks for the same size next
        return run(inputs)

    def _against_float64(self, y: Tensor, bar: float) -> str | None:
        task, inputs = self.task, self._sets[0]
        rows, cols = _sampled(task.rows), _sampled(task.cols)
        left, right = _values(inputs.a, rows), _values(inputs.b, cols)
        length = min(left.shape[1], right.shape[1])  # past the shorter padding both hold zeros
        want = left[:, :length] @ right[:, :length].t()
        got = y[rows.to(y.device)][:, cols.to(y.device)].double()
        if self._start is not None:
            want = want + self._start[rows.to(y.device)][:, cols.to(y.device)].double()
        return worst_tile(got, want, bar, "float64")

    def _inputs(self, generator: torch.Generator) -> _Inputs:
        task = self.task
        a = self._operand(task.a, task.rows, task.layout[0] == "t", generator)
        b = self._operand(task.b, task.cols, task.layout[1] == "n", generator)
        out = torch.randn(task.rows, task.cols, device="cuda", generator=generator) if task.accumulate else None
        return _Inputs(a, b, out)

    def _operand(self, kind: Kind, outer: int, transposed: bool, generator: torch.Generator) -> Operand:
        dtype = torch.bfloat16 if isinstance(kind, QuantSpec) else kind
        shape = (self.task.contraction, outer) if transposed else (outer, self.task.contraction)
        if not isinstance(kind, QuantSpec):
            plain = torch.randn(shape, device="cuda", generator=generator).to(dtype)
            return plain.t() if transposed else plain
        plain = torch.randn(outer, self.task.contraction, device="cuda", generator=generator).to(dtype)
        request = QuantizeRequest(device="cuda", dtype=dtype, row_spec=kind)
        quantized: QuantizedTensor = self._registry.select("quantize", request).kernels.quantize(plain, kind)
        return quantized


def _bar(task: GemmTask, fp8_units: bool) -> float:
    """The SNR that every tile needs."""
    bar = MIN_SNR_DB[task.out_dtype]
    return min(bar, _FP8_UNITS_DB) if fp8_units else bar


def worst_tile(got: Tensor, want: Tensor, bar: float, reference: str) -> str | None:
    """None, or which 128 x 128 tile of `got` is worst and how far it is from `want`: too far."""
    signal, error = _tile_sums(want), _tile_sums(got.to(want.dtype) - want)
    snr = 10 * torch.log10(signal / error)  # inf where equal
    snr[(error == 0)] = math.inf
    worst = float(snr.min())
    if worst >= bar:
        return None
    row, col = divmod(int(snr.argmin()), snr.shape[1])
    return f"tile ({row}, {col}) has {worst:.1f} dB against {reference}, at least {bar:.0f} dB is required"


def _tile_sums(t: Tensor) -> Tensor:
    """Sum of squares of every tile, fp64."""
    rows, cols = t.shape
    pad = (0, -cols % _TILE, 0, -rows % _TILE)
    squares = torch.nn.functional.pad(t.float() if t.dtype != torch.float64 else t, pad).square()
    tiles = squares.view(-(-rows // _TILE), _TILE, -(-cols // _TILE), _TILE)
    return tiles.sum((1, 3), dtype=torch.float64)


def _sampled(size: int) -> Tensor:
    if size <= _SAMPLE_ROWS:
        return torch.arange(size)
    third = _SAMPLE_ROWS // 3
    middle = size // 2
    return torch.cat(
        [torch.arange(third), torch.arange(middle, middle + third), torch.arange(size - third, size)]
    ).unique()


def _values(operand: Operand, rows: Tensor) -> Tensor:
    """The rows' values as a GEMM multiplies them, fp64."""
    if not isinstance(operand, QuantizedTensor):
        return operand[rows.to(operand.device)].double()
    picked: list[Any] = [operand.decode(int(start), int(stop)) for start, stop in _runs(rows)]
    return torch.cat(picked).double()


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Consecutive numbers as (first, one past the last)."""
    numbers = rows.tolist()
    starts = [index for index, number in enumerate(numbers) if index == 0 or number != numbers[index - 1] + 1]
    ends = [*starts[1:], len(numbers)]
    return [(numbers[start], numbers[end - 1] + 1) for start, end in zip(starts, ends)]


def _nbytes(operand: Operand) -> int:
    return operand.nbytes
