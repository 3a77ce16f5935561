"""GEMM y[M, N] = a[M, K] @ b[N, K].T: the Triton kernel in every format against cuBLAS (or hipBLASLt) through torch.

    python -m benchmarks.gemm [--shapes llama3_8b.fc1 ...] [--json rows.jsonl]

The roof is what torch's bf16 product of the same shape reached in the same run. Rows marked "emulated" decode the codes in the
kernel and multiply on the bf16 units: the format's numbers, not its speed.
"""

from __future__ import annotations

import argparse
import math

import torch

from benchmarks._timing import HEADER, Row, describe_machine, measure, report, sets_for
from primus_turbo_plugin.kernels.triton import gemm as turbo
from primus_turbo_plugin.kernels.triton import quantize
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from tests.support.shapes import BENCHMARK_TOKENS, LINEARS, LinearShape

_CHECK_ROWS = 256
_SNR_DB = 40.0
_FORMATS = {
    "mxfp4": (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4")),
    "mxfp8": (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8")),
    "fp8 rowwise": (QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8", block="rowwise")),
}

Operand = torch.Tensor | QuantizedTensor


def _values(operand: Operand, rows: int) -> torch.Tensor:
    return (operand.decode(stop=rows) if isinstance(operand, QuantizedTensor) else operand[:rows]).double()


def _check(y: torch.Tensor, a: Operand, b: Operand) -> str:
    """SNR of the first rows and columns against the float64 product of the decoded operands."""
    want = _values(a, _CHECK_ROWS) @ _values(b, _CHECK_ROWS).t()
    error = (y[:_CHECK_ROWS, :_CHECK_ROWS].double() - want).norm()
    snr = 20 * math.log10(float(want.norm() / error)) if error else math.inf
    return f"{snr:.0f} dB" if snr > _SNR_DB else f"WRONG: {snr:.0f} dB"


def _rows(linear: LinearShape, tokens: int) -> list[Row]:
    m, n, k = tokens, linear.out_features, linear.in_features
    sets = sets_for(2 * (m * k + n * k))
    plain = [
        (torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()) for _ in range(sets)
    ]
    shape = f"{linear.name} {m}x{n}x{k}"
    flops = 2.0 * m * n * k
    times = measure(lambda i: torch.matmul(plain[i][0], plain[i][1].t()), sets)
    roof = flops / (times[0] * 1e-6)

    def row(backend: str, times: tuple[float, float, float], ok: str) -> Row:
        return Row(
            op="gemm_nt", shape=shape, backend=backend, us=times[0], us_p20=times[1], us_p80=times[2],
            bytes=2.0 * (m * k + n * k + m * n), flops=flops, roof=roof, ok=ok,
        )  # fmt: skip

    # A rounding to bf16 leaves about 54 dB, so the bar of 40 dB is checked on the fp32 output.
    rows = [row("torch.matmul bf16", times, _check(torch.matmul(plain[0][0], plain[0][1].t()), *plain[0]))]
    cases = {"bf16": plain[:1]}
    cases |= {
        f"{name} (emulated)": [(quantize.quantize(plain[0][0], specs[0]), quantize.quantize(plain[0][1], specs[1]))]
        for name, specs in _FORMATS.items()
    }
    for name, operands in cases.items():
        a, b = operands[0]
        ok = _check(turbo.gemm_nt(a, b, out_dtype=torch.float32), a, b)
        inputs = plain if name == "bf16" else operands
        times = measure(lambda i, inputs=inputs: turbo.gemm_nt(*inputs[i], out_dtype=torch.bfloat16), len(inputs))
        rows.append(row(f"primus_turbo triton {name}", times, ok))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="names such as llama3_8b.fc1; default: all")
    parser.add_argument("--tokens", type=int, default=BENCHMARK_TOKENS)
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    print(f"{describe_machine()}\n\n{HEADER}")
    for linear in LINEARS:
        if not options.shapes or linear.name in options.shapes:
            report(_rows(linear, options.tokens), options.json)


if __name__ == "__main__":
    main()
