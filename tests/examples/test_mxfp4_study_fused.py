"""What lies between the study's linears: the Triton kernels against the plain formulas, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.mxfp4_study import fused

BF16 = 2.0**-8
"""Largest relative error of a truncation to bf16, which is how Triton's interpreter rounds; a GPU rounds to nearest."""


def _cases(device: str, seed: int) -> list[tuple[str, Callable[..., Any], Callable[..., Any], list[Tensor | None]]]:
    """Name, kernels, plain formulas, inputs; odd sizes throughout."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    angle = random(9, 16)
    table = angle.cos().to(device), angle.sin().to(device)
    targets = torch.randint(0, 300, (11,), generator=generator).to(device)

    def heads(kernels: bool) -> Callable[[Tensor], Any]:
        if kernels:
            return lambda qkv: fused._SplitHeads.apply(qkv, *table, 3, 1)
        return lambda qkv: fused.split_heads(qkv, (table[0].cpu(), table[1].cpu()), 3, 1)

    stream, delta, weight = random(2, 37, 96), random(2, 37, 96).bfloat16(), random(96)
    return [
        ("add and norm", fused._AddNorm.apply, fused.add_norm, [stream, delta, weight]),
        ("norm", fused._AddNorm.apply, fused.add_norm, [stream, None, weight]),
        ("swiglu", fused._Swiglu.apply, fused.swiglu, [random(5, 7, 2200).bfloat16()]),
        ("heads", heads(True), heads(False), [random(2, 9, 160).bfloat16()]),
        (
            "cross entropy",
            lambda logits: fused._CrossEntropy.apply(logits, targets),
            lambda logits: fused.cross_entropy(logits, targets.cpu()),
            [random(11, 300).bfloat16()],
        ),
    ]


def _run(function: Callable[..., Any], inputs: list[Tensor | None], seed: int, device: str) -> list[Tensor]:
    """Outputs and gradients, on the CPU."""
    leaves = [None if t is None else t.detach().to(device, copy=True).requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(y.shape, generator=generator).to(device) for y in outputs]
    sum((y.float() * weight).sum() for y, weight in zip(outputs, weights)).backward()
    return [t.detach().cpu() for t in (*outputs, *(leaf.grad for leaf in leaves if leaf is not None))]


def compare(device: str, seed: int) -> None:
    """Every case on the device's kernels against plain formulas on the CPU."""
    for name, kernels, plain, inputs in _cases(device, seed):
        for got, wanted in zip(_run(kernels, inputs, seed, device), _run(plain, inputs, seed, "cpu"), strict=True):
            assert got.dtype == wanted.dtype, name
            assert got.shape == wanted.shape, name
            bar = 2 * BF16 if torch.bfloat16 in (got.dtype, inputs[0].dtype) else 1e-5  # type: ignore[union-attr]
            error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            assert error < bar, f"{name}: {error}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch sees none")
def test_kernels_compute_the_plain_formulas(rng: torch.Generator) -> None:
    compare("cuda", int(torch.randint(2**31, (), generator=rng)))


def test_kernels_in_tritons_interpreter_compute_the_plain_formulas(rng: torch.Generator) -> None:
    """A process of its own: Triton reads the variable when a kernel is defined."""
    pytest.importorskip("triton")
    seed = int(torch.randint(2**31, (), generator=rng))
    code = f"from tests.examples.test_mxfp4_study_fused import compare; compare('cpu', {seed})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
