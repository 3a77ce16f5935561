"""What MXFP4 does to weight gradients, linear by linear, and what the rotation does to the tensors behind them.

Of one batch through a trained BF16 model: for every linear, x [tokens, in] and dy [tokens, out] as wgrad gets them.

    error      |dw_q - dw| / |dw| (Frobenius), dw = dy.T @ x in float64, dw_q of the quantised operands, for each stabiliser
    quiet      of the half of the tokens with the smallest dy alone: <dw_q, dw> / <dw, dw>, the share of their gradient that gets
               through; 1 without bias, less where they share blocks with loud tokens and are rounded to zero
    crest      amax / rms of a block of 32 tokens, mean and 99th percentile: how far its largest element stands out
    kurtosis   of all elements; 3 for a Gaussian
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.mxfp4_study.grid import STABILISERS, precision
from examples.mxfp4_study.model import StudyModel
from primus_turbo_plugin.functional.linear_kernels import LinearKernels, operand_specs
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.rotation import rotate
from primus_turbo_plugin.precision.rounding import RoundingKey

_TOKENS = 4096
"""Tokens of the batch that enter, at most: enough for the statistics, little enough for float64."""


def measure(model: StudyModel, tokens: Tensor, seed: int) -> list[dict[str, Any]]:
    """One row a linear: path, error by stabiliser, crest and kurtosis of x and dy before and after H16 and H32."""
    linears = model.linears()
    for module in linears.values():
        module.taken = []
    model(tokens).backward()
    model.zero_grad(set_to_none=True)
    rows = []
    for path, module in linears.items():
        taken, module.taken = module.taken, None
        assert taken
        x, dy = (t[:_TOKENS].bfloat16() for t in taken[0])
        x, dy = (t[: len(t) // 128 * 128] for t in (x, dy))
        row: dict[str, Any] = {"linear": path, "tokens": len(x)}
        for name in STABILISERS:
            row[f"error {name}"], row[f"quiet {name}"] = _error(name, x, dy, seed)
        for name, tensor in (("x", x), ("dy", dy)):
            for size in (0, 16, 32):
                row |= {f"{name} H{size} {key}": value for key, value in _outliers(tensor, size).items()}
        rows.append(row)
    return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """As CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, Any]]:
    """What `write` wrote."""
    with path.open(newline="") as file:
        return [
            {key: value if key == "linear" else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def _error(stabiliser: str, x: Tensor, dy: Tensor, seed: int) -> tuple[float, float]:
    """Relative error of dw, and the share of the quiet tokens' dw that gets through."""
    value = precision("fprop+dgrad+wgrad", stabiliser, "wgrad")
    plan = TurboConfig.from_dict({"precision": value, "signs_seed": seed}).plan("linear")
    kernels = LinearKernels.select(plan, x.device, x.dtype, wgrad_dtype=torch.float32, accumulate=False)
    columns = []
    for number, (name, tensor) in enumerate((("dy", dy), ("x", x))):
        key = RoundingKey(seed=seed, draw=0, tensor=number, rank=0) if stabiliser == "sr" else None
        _, column = kernels.quantize(name, tensor, None, operand_specs(plan, name)[1], key)
        assert column is not None
        columns.append(
            column.dequantize().double()
        )  # [features, tokens], turned back: the product is that of the rotated
    exact = dy.double().t() @ x.double()
    error = float((columns[0] @ columns[1].t() - exact).norm() / exact.norm())
    quiet = dy.float().norm(dim=1).argsort()[: len(dy) // 2]
    exact = dy[quiet].double().t() @ x[quiet].double()
    got = columns[0][:, quiet] @ columns[1][:, quiet].t()
    return error, float((got * exact).sum() / exact.square().sum())


def _outliers(tensor: Tensor, hadamard: int) -> dict[str, float]:
    values = tensor.float()
    if hadamard:
        values = rotate(values, hadamard, dim=0)
    blocks = values.reshape(-1, 32, values.shape[1])
    rms = blocks.square().mean(1).sqrt()
    crest = (blocks.abs().amax(1) / rms)[rms > 0]
    moments = values.double().flatten()
    moments = moments - moments.mean()
    kurtosis = moments.pow(4).mean() / moments.square().mean().square()
    sample = crest[:: max(1, crest.numel() // 1_000_000)]
    return {
        "crest mean": float(crest.mean()),
        "crest p99": float(sample.quantile(0.99)),
        "kurtosis": float(kurtosis),
    }
