"""The three GEMMs of a linear in every format: the Triton kernels against torch (cuBLAS or hipBLASLt).

    python -m benchmarks.gemm [--shapes llama3_8b.fc1 ...] [--gemms fprop dgrad wgrad] [--formats bf16 mxfp4 ...] [--json FILE]

fprop y[T, out] = x @ w.T, dgrad dx[T, in] = dy @ w, wgrad dw[out, in] += dy.T @ x in fp32. bf16 operands lie as a linear has
them, so these are NT, NN and TN products; quantised operands have the contraction last in all three. The roof is what torch
reaches with bf16 in the same product of the same run. "emulated": codes become bf16 and the bf16 units multiply, the format's
numbers, not its speed; the time includes that decoding. No row includes the quantisation.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks._timing import HEADER, Row, describe_machine, measure, report, sets_for
from primus_turbo_plugin.kernels.reference import quantize
from primus_turbo_plugin.kernels.requests import GemmRequest
from primus_turbo_plugin.kernels.torch_native import gemm as torch_native
from primus_turbo_plugin.kernels.torch_native import gemm_scaled
from primus_turbo_plugin.kernels.triton import gemm as turbo
from primus_turbo_plugin.kernels.triton.gemm_key import Operand, key_of
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from tests.support.shapes import BENCHMARK_TOKENS, LINEARS, LinearShape

_CHECK_ROWS = 256
_SNR_DB = 40.0
_GEMMS = ("fprop", "dgrad", "wgrad")
_FORMATS: dict[str, tuple[QuantSpec, QuantSpec] | None] = {
    "bf16": None,
    "mxfp4": (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4")),
    "mxfp8": (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8")),
    "fp8_tensorwise": (QuantSpec(format="fp8", block="tensorwise"), QuantSpec(format="fp8", block="tensorwise")),
    "fp8_rowwise": (QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8", block="rowwise")),
    "fp8_block128": (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")),
}
"""Format -> specs of the left and right operand; in wgrad both have the left one's, for both are activations."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product `[m, k] x [n, k].T`, added to an fp32 result where it is a wgrad."""

    gemm: str
    shape: str
    m: int
    n: int
    k: int

    @classmethod
    def of(cls, linear: LinearShape, gemm: str, tokens: int) -> Case:
        wide, deep = linear.out_features, linear.in_features
        m, n, k = {"fprop": (tokens, wide, deep), "dgrad": (tokens, deep, wide), "wgrad": (wide, deep, tokens)}[gemm]
        return cls(gemm=gemm, shape=f"{linear.name} {m}x{n}x{k}", m=m, n=n, k=k)

    @property
    def accumulate(self) -> bool:
        return self.gemm == "wgrad"

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 operands, laid out as a linear has them."""
        a_shape = (self.k, self.m) if self.gemm == "wgrad" else (self.m, self.k)
        b_shape = (self.n, self.k) if self.gemm == "fprop" else (self.k, self.n)
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in (a_shape, b_shape))
        return (a.t() if self.gemm == "wgrad" else a), (b if self.gemm == "fprop" else b.t())

    def row(self, backend: str, times: tuple[float, float, float], roof: float, ok: str) -> Row:
        flops = 2.0 * self.m * self.n * self.k
        size = 2.0 * (self.m + self.n) * self.k + (8.0 if self.accumulate else 2.0) * self.m * self.n
        return Row(
            op=self.gemm, shape=self.shape, backend=backend, us=times[0], us_p20=times[1], us_p80=times[2],
            bytes=size, flops=flops, roof=roof or flops / (times[0] * 1e-6), ok=ok,
        )  # fmt: skip


def _quantized(
    case: Case, operands: tuple[torch.Tensor, torch.Tensor], specs: tuple[QuantSpec, QuantSpec]
) -> tuple[Operand, Operand]:
    right = specs[0] if case.gemm == "wgrad" else specs[1]
    return quantize.quantize(operands[0].contiguous(), specs[0]), quantize.quantize(operands[1].contiguous(), right)


def _values(operand: Operand) -> torch.Tensor:
    return (
        operand.decode(stop=_CHECK_ROWS) if isinstance(operand, QuantizedTensor) else operand[:_CHECK_ROWS]
    ).double()


def _check(y: torch.Tensor, a: Operand, b: Operand) -> str:
    """SNR of the first rows and columns against the float64 product of the decoded operands."""
    left, right = _values(a), _values(b)
    length = min(left.shape[1], right.shape[1])
    want = left[:, :length] @ right[:, :length].t()
    error = (y[:_CHECK_ROWS, :_CHECK_ROWS].double() - want).norm()
    snr = 20 * math.log10(float(want.norm() / error)) if error else math.inf
    return f"{snr:.0f} dB" if snr > _SNR_DB else f"WRONG: {snr:.0f} dB"


def _call(kernel: Callable[..., torch.Tensor], a: Operand, b: Operand, out: torch.Tensor | None) -> torch.Tensor:
    if out is not None:
        return kernel(a, b, out_dtype=torch.float32, out=out)
    return kernel(a, b, out_dtype=torch.bfloat16)


def _emulated(case: Case, a: Operand, b: Operand, out: torch.Tensor | None) -> bool:
    if not isinstance(a, QuantizedTensor):
        return False
    y = out if out is not None else torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda")
    return turbo.resolve_config(key_of(a, b, y, case.k, bias=False, accumulate=case.accumulate)).units == "half"


def _rows(case: Case, formats: list[str]) -> list[Row]:
    sets = sets_for(2 * (case.m + case.n) * case.k)
    plain = [case.operands() for _ in range(sets)]
    outs = [torch.zeros(case.m, case.n, device="cuda") if case.accumulate else None for _ in range(sets)]
    rows: list[Row] = []

    def add(name: str, kernel: Callable[..., torch.Tensor], inputs: list[tuple[Operand, Operand]]) -> None:
        a, b = inputs[0]
        # A rounding to bf16 leaves about 54 dB; accumulated results are checked in fp32, others as they are used.
        first = torch.zeros_like(outs[0]) if outs[0] is not None else None
        ok = _check(_call(kernel, a, b, first), a, b)
        times = measure(lambda i: _call(kernel, *inputs[i], outs[i]), len(inputs))
        rows.append(case.row(name, times, rows[0].flops / (rows[0].us * 1e-6) if rows else 0.0, ok))

    add("torch bf16", torch_native.gemm_nt, plain)
    for name in formats:
        specs = _FORMATS[name]
        if specs is None:
            add("primus_turbo triton bf16", turbo.gemm_nt, plain)
            continue
        inputs = [_quantized(case, operands, specs) for operands in plain]
        label = " (emulated)" if _emulated(case, *inputs[0], outs[0]) else ""
        add(f"primus_turbo triton {name}{label}", turbo.gemm_nt, inputs)
        request = GemmRequest.of(
            *inputs[0], torch.float32 if case.accumulate else torch.bfloat16, accumulate=case.accumulate
        )
        if gemm_scaled.supports(request) is None:
            add(f"torch._scaled_mm {name}", gemm_scaled.gemm_nt, inputs)
        del inputs
    return rows


def _host_us(kernel: Callable[..., torch.Tensor], a: Operand, b: Operand, calls: int = 200) -> float:
    """Microseconds of host time a call takes, on a product so small that the GPU waits for the host."""
    for _ in range(5):
        kernel(a, b, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        kernel(a, b, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


def _report_host_time(formats: list[str]) -> None:
    case = Case(gemm="fprop", shape="128x128x128", m=128, n=128, k=128)
    plain = case.operands()
    print(
        f"\nHost time of a call on {case.shape}: torch.matmul {_host_us(torch_native.gemm_nt, *plain):.0f} us", end=""
    )
    for name in formats:
        specs = _FORMATS[name]
        operands = plain if specs is None else _quantized(case, plain, specs)
        print(f", triton {name} {_host_us(turbo.gemm_nt, *operands):.0f} us", end="")
        if specs is not None and gemm_scaled.supports(GemmRequest.of(*operands, torch.bfloat16)) is None:
            print(f", _scaled_mm {name} {_host_us(gemm_scaled.gemm_nt, *operands):.0f} us", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="names such as llama3_8b.fc1; default: all")
    parser.add_argument("--gemms", nargs="*", choices=_GEMMS, default=_GEMMS)
    parser.add_argument("--formats", nargs="*", choices=_FORMATS, default=tuple(_FORMATS))
    parser.add_argument("--tokens", type=int, default=BENCHMARK_TOKENS)
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    print(f"{describe_machine()}\n\n{HEADER}")
    for linear in LINEARS:
        if options.shapes and linear.name not in options.shapes:
            continue
        for gemm in options.gemms:
            report(_rows(Case.of(linear, gemm, options.tokens), options.formats), options.json)
            torch.cuda.empty_cache()
    _report_host_time(options.formats)


if __name__ == "__main__":
    main()
