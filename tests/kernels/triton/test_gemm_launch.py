"""Programs of the Triton GEMM: a later launch hands each kernel what the first one did, with its own tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels' signatures need triton, which is not installed")

from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.triton.gemm_config import GemmConfig, refusal
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, Operand, OperandKey
from primus_turbo_plugin.kernels.triton.gemm_launch import Program, facts, program_of
from primus_turbo_plugin.precision.quant_spec import QuantSpec

SMALL = GemmConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2)
MX, ROW = QuantSpec(format="mxfp4"), QuantSpec(format="fp8", block="rowwise")
CASES: dict[str, tuple[str, QuantSpec | None, GemmConfig]] = {
    "pointers": ("sm90", None, SMALL),
    "split": ("sm90", None, replace(SMALL, split_k=2)),
    "descriptors": ("sm90", None, replace(SMALL, loads="descriptors", persistent=True)),
    "scratch": ("sm90", MX, replace(SMALL, decode="scratch", loads="descriptors")),
    "fp8": ("sm90", ROW, replace(SMALL, units="fp8", block_k=128)),
    "fnuz": ("gfx942", ROW, replace(SMALL, units="fp8", block_k=128, decode="scratch")),
}


class Kernel:
    """Stands for a JIT function: launched by name it records and gives a compiled kernel, which is launched by position."""

    def __init__(self, real: Any, launches: list[dict[str, Any]]) -> None:
        self.arg_names = real.arg_names
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        names = self.arg_names
        launches = self._launches

        class Compiled:
            def __getitem__(self, again: tuple[int, ...]) -> Callable[..., None]:
                assert again == (*grid, 1, 1)[:3]

                def launch(*args: Any) -> None:
                    launches.append(dict(zip(names, args, strict=True)))

                return launch

        def first(**arguments: Any) -> Compiled:
            launches.append({name: arguments.pop(name) for name in names})
            assert arguments.keys() <= {"num_warps", "num_stages"}
            return Compiled()

        return first


def watched(program: Program, launches: list[dict[str, Any]]) -> Program:
    return replace(program, calls=tuple(replace(call, kernel=Kernel(call.kernel, launches)) for call in program.calls))


def product(spec: QuantSpec | None, rng: torch.Generator) -> tuple[Operand, Operand, torch.Tensor, torch.Tensor]:
    plain = [torch.randn(rows, 256, generator=rng).bfloat16() for rows in (96, 128)]
    a, b = (x if spec is None else quantize(x, spec) for x in plain)
    return a, b, torch.randn(128, generator=rng), torch.zeros(96, 128, dtype=torch.bfloat16)


def pointers(value: Any) -> Any:
    """What tells two arguments apart: a tensor's address and dtype, a descriptor's with its block, else the value."""
    base = getattr(value, "base", value)
    if isinstance(base, torch.Tensor):
        return base.data_ptr(), base.dtype, tuple(base.shape), base.stride(), tuple(getattr(value, "block_shape", ()))
    return value


@pytest.mark.parametrize("case", CASES)
def test_a_later_launch_passes_the_same_with_its_own_tensors(case, rng) -> None:
    arch, spec, config = CASES[case]
    a, b, bias, y = product(spec, rng)
    key = GemmKey(
        arch=arch,
        compute_units=8,
        rows=96,
        cols=128,
        contraction=256,
        a=OperandKey.of(a),
        b=OperandKey.of(b),
        out="bf16",
        bias=True,
    )
    assert refusal(key, config) is None
    launches: list[dict[str, Any]] = []
    program = watched(program_of(a, b, y, key, config), launches)
    program.run(a, b, bias, y)
    first = launches.copy()
    launches.clear()
    others = product(spec, rng)
    program.run(*others)
    assert len(launches) == len(first) == len(program.calls)
    given = {x.data_ptr() for x in (*others[2:], *_tensors(others[0]), *_tensors(others[1]))}
    stale = {x.data_ptr() for x in (bias, y, *_tensors(a), *_tensors(b))}
    seen = set()
    for earlier, later in zip(first, launches):
        assert earlier.keys() == later.keys()
        for name, value in later.items():
            now, before = pointers(value), pointers(earlier[name])
            if isinstance(now, tuple) and isinstance(now[0], int) and len(now) == 5:
                assert now[1:] == before[1:], name
                assert now[0] not in stale, name
                seen.add(now[0])
            else:
                assert now == before, name
    assert given <= seen, "every tensor of the later product is read or written"


def _tensors(operand: Operand) -> list[torch.Tensor]:
    return [operand] if isinstance(operand, torch.Tensor) else [operand.data, operand.block_scale]


def test_facts_tell_apart_what_a_kernel_is_compiled_for() -> None:
    x = torch.zeros(64, 80, dtype=torch.bfloat16)
    alike = [x, torch.ones(64, 80, dtype=torch.bfloat16)]
    different = [
        x.half(),
        x[:, :64],
        x.t().contiguous().t(),
        x[:, 1:65],
        x[:63],
        quantize(x, MX),
        quantize(x, ROW),
        None,
    ]
    assert len({facts(item) for item in alike}) == 1
    assert len({facts(item) for item in [x, *different]}) == len(different) + 1
    rotated = QuantSpec(format="mxfp4", hadamard=16, random_signs=True)
    assert facts(quantize(x, rotated, signs_seed=1)) != facts(quantize(x, rotated, signs_seed=2))
    assert facts(quantize(x, MX)) != facts(quantize(x, MX).with_scale_layout("gfx950"))
