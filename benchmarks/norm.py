"""RMS norm and layer norm: the Triton kernels against torch's own, eager and compiled.

    python -m benchmarks.norm [--widths 4096 8192 ...] [--json rows.jsonl]

16,384 tokens of bf16. The share of the roof is the bytes that must move (forward: x read, y written; backward: x and dy read, dx
written) over the time, against a device copy of the same run: what a kernel that only moves them, such as a hand-written one,
could reach. "fwd+bwd" is the differentiable function with everything around the kernels. Rows are checked before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._timing import HEADER, Row, copy_bandwidth, describe_machine, measure, report, sets_for
from primus_turbo_plugin.functional import norm as functional
from primus_turbo_plugin.kernels.triton import norm as turbo
from tests.support.shapes import BENCHMARK_TOKENS

_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class _Inputs:
    x: Tensor
    dy: Tensor
    weight: Tensor
    bias: Tensor | None


def _inputs(rms: bool, width: int) -> _Inputs:
    x, dy = (torch.randn(BENCHMARK_TOKENS, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, bias = (torch.randn(width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    weight.requires_grad_()
    return _Inputs(x, dy, weight, None if rms else bias.requires_grad_())


def _torch(i: _Inputs) -> Tensor:
    if i.bias is None:
        return F.rms_norm(i.x, i.x.shape[-1:], i.weight, _EPS)
    return F.layer_norm(i.x, i.x.shape[-1:], i.weight, i.bias, _EPS)


def _ours(i: _Inputs) -> Tensor:
    if i.bias is None:
        return functional.rms_norm(i.x, i.weight, _EPS, kernels=["triton"])
    return functional.layer_norm(i.x, i.weight, i.bias, _EPS, kernels=["triton"])


def _grads(forward: Callable[[_Inputs], Tensor], i: _Inputs) -> tuple[Tensor, ...]:
    leaves = [i.x, i.weight] + ([] if i.bias is None else [i.bias])
    return torch.autograd.grad(forward(i), leaves, i.dy)


def _backward_kernels(rms: bool, sets: list[_Inputs]) -> dict[str, Callable[[int], object]]:
    """Backward alone, from the forward's statistics."""
    i, width = sets[0], [sets[0].x.shape[-1]]
    with torch.no_grad():
        if rms:
            rstd = [turbo.rms_norm_fwd(j.x, j.weight, _EPS)[1] for j in sets]
            found: dict[str, Callable[[int], object]] = {
                "primus_turbo triton": lambda n: turbo.rms_norm_bwd(sets[n].dy, sets[n].x, i.weight, rstd[n])
            }
            if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
                op = torch.ops.aten._fused_rms_norm_backward
                found["torch"] = lambda n: op(sets[n].dy, sets[n].x, width, rstd[n][:, None], i.weight, [True, True])
            return found
        mean_rstd = [turbo.layer_norm_fwd(j.x, j.weight, j.bias, _EPS)[1:] for j in sets]
    op = torch.ops.aten.native_layer_norm_backward
    return {
        "primus_turbo triton": lambda n: turbo.layer_norm_bwd(sets[n].dy, sets[n].x, i.weight, *mean_rstd[n]),
        "torch": lambda n: op(
            sets[n].dy, sets[n].x, width, *(t[:, None] for t in mean_rstd[n]), i.weight, i.bias, [True] * 3
        ),
    }


def _ok(got: Tensor, want: Tensor) -> str:
    """Signal to error of the first 512 rows (or of all columns of a parameter's gradient) against float64."""
    error = (got.double() - want).square().sum()
    return f"{float(10 * torch.log10(want.square().sum() / error)):.1f} dB"


def _exact(i: _Inputs, rows: int) -> tuple[Tensor, Tensor]:
    """y and dx of the first rows in float64."""
    x, weight = i.x[:rows].detach().double().requires_grad_(), i.weight.detach().double()
    part = _Inputs(x, i.dy, weight, None if i.bias is None else i.bias.detach().double())
    y = _torch(part)
    return y.detach(), torch.autograd.grad(y, x, i.dy[:rows].double())[0]


def _rows(rms: bool, width: int, roof: float) -> Iterator[Row]:
    sets = [_inputs(rms, width) for _ in range(min(sets_for(BENCHMARK_TOKENS * width * 2), 4))]
    name = "rms_norm" if rms else "layer_norm"
    one = 2.0 * BENCHMARK_TOKENS * width
    y, dx = _exact(sets[0], 512)

    def row(op: str, backend: str, call: Callable[[int], Any], passes: int, ok: str) -> Row:
        us, low, high = measure(call, len(sets))
        sizes: dict[str, Any] = {"bytes": passes * one, "flops": 0.0, "roof": roof, "ok": ok}
        return Row(
            op=f"{name} {op}",
            shape=f"{BENCHMARK_TOKENS}x{width}",
            backend=backend,
            us=us,
            us_p20=low,
            us_p80=high,
            **sizes,
        )

    compiled = torch.compile(_torch, dynamic=False)
    forwards = {"primus_turbo triton": _ours, "torch": _torch, "torch compiled": compiled}
    with torch.no_grad():
        for backend, forward in forwards.items():
            yield row("fwd", backend, lambda n, f=forward: f(sets[n]), 2, _ok(forward(sets[0])[:512], y))
        for backend, call in _backward_kernels(rms, sets).items():
            yield row("bwd", backend, call, 3, _ok(call(0)[0][:512], dx))  # type: ignore[index]
    for backend, forward in forwards.items():
        ok = _ok(_grads(forward, sets[0])[0][:512], dx)
        yield row("fwd+bwd", backend, lambda n, f=forward: _grads(f, sets[n]), 5, ok)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="*", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--kinds", nargs="*", choices=("rms_norm", "layer_norm"), default=["rms_norm", "layer_norm"])
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    print(describe_machine())
    roof = copy_bandwidth()
    print(f"roof: device copy {roof / 1e12:.2f} TB/s\n\n{HEADER}")
    for kind in options.kinds:
        for width in options.widths:
            report(_rows(kind == "rms_norm", width, roof), options.json)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
