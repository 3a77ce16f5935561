"""Quantisation: the one-read Triton kernels against what a user would call instead.

    python -m benchmarks.quantize [--shapes llama3_8b.fc1 ...] [--json rows.jsonl] [--no-torchao]

"mxfp4 row+col H16" makes a rowwise MXFP4 copy and a columnwise one rotated along tokens, as a Wgrad operand needs them. The
share of the roof is the bytes that must move (2 read, 1 + 1/16 written per element) over the time, against a device copy measured
in the same run. torchao has no such rotation: its rows quantise x, and a rotated x.T that torch prepares as a bf16 matrix product
(so its bits differ), which is what a user would write; they copy scalars from the host, cannot be captured in a graph, and are
timed launch by launch. Every row is checked before it is timed; `ok` says what was compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from benchmarks._timing import (
    HEADER,
    Row,
    copy_bandwidth,
    describe_machine,
    measure,
    measure_launches,
    report,
    sets_for,
)
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.triton import quantize as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from primus_turbo_plugin.precision.rotation import hadamard_matrix
from tests.support.shapes import BENCHMARK_TOKENS, LINEARS

_CHECK_TOKENS = 1024
"""Rows of x that are compared with the reference."""

_ROW = QuantSpec(format="mxfp4")
_COL = QuantSpec(format="mxfp4", hadamard=16)
_MXFP8 = QuantSpec(format="mxfp8")
_FP8_ROW = QuantSpec(format="fp8", block="rowwise")

Pair = tuple[QuantSpec | None, QuantSpec | None]
_OPS: dict[str, Pair] = {
    "mxfp4 row+col H16": (_ROW, _COL),
    "mxfp4 row": (_ROW, None),
    "mxfp4 col H16": (None, _COL),
    "mxfp8 row+col": (_MXFP8, _MXFP8),
    "fp8 rowwise row+col": (_FP8_ROW, _FP8_ROW),
}


def _bytes(x: torch.Tensor, specs: Pair) -> float:
    """x once, every code and every scale once."""
    written = [copy.nbytes for copy in reference.quantize_both(x[:128], *specs) if copy is not None]
    return x.nbytes + sum(written) * (x.shape[0] / 128)


def _same(got: QuantizedTensor | None, want: QuantizedTensor | None) -> bool:
    if got is None or want is None:
        return got is want
    return torch.equal(got.data, want.data) and torch.equal(got.block_scale, want.block_scale)


def _check(function: Callable[[torch.Tensor], tuple[QuantizedTensor | None, ...]], x: torch.Tensor, specs: Pair) -> str:
    piece = x[:_CHECK_TOKENS]
    pairs = zip(function(piece), reference.quantize_both(piece, *specs))
    return "bit-equal" if all(_same(got, want) for got, want in pairs) else "WRONG"


def _turbo_rows(inputs: list[torch.Tensor], shape: str, roof: float) -> Iterator[Row]:
    for op, specs in _OPS.items():
        ok = _check(lambda piece, specs=specs: turbo.quantize_both(piece, *specs), inputs[0], specs)
        times = measure(lambda i, specs=specs: turbo.quantize_both(inputs[i], *specs), len(inputs))
        yield _row(op, shape, "primus_turbo triton", times, _bytes(inputs[0], specs), roof, ok)


def _row(
    op: str, shape: str, backend: str, times: tuple[float, float, float], num_bytes: float, roof: float, ok: str
) -> Row:
    us, low, high = times
    return Row(
        op=op, shape=shape, backend=backend, us=us, us_p20=low, us_p80=high, bytes=num_bytes, flops=0, roof=roof, ok=ok
    )


def _copy_row(inputs: list[torch.Tensor], shape: str, roof: float) -> Row:
    times = measure(lambda i: inputs[i].clone(), len(inputs))
    return _row("copy", shape, "torch clone", times, 2 * inputs[0].nbytes, roof, "-")


def _torchao_rows(inputs: list[torch.Tensor], shape: str, roof: float) -> Iterator[Row]:
    """torchao's MX cast, eager and compiled: the row copy alone, and the row copy with a rotated, transposed one."""
    try:
        from torch._inductor.exc import InductorError
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"torchao: not measured: {error}")
        return
    h16 = hadamard_matrix(16).to(device="cuda", dtype=torch.bfloat16)
    rules = {"even": ScaleCalculationMode.EVEN, "floor": ScaleCalculationMode.FLOOR}

    def row(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
        return to_mx(x, torch.float4_e2m1fn_x2, 32, rules[rule])

    def both(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, ...]:
        rotated = torch.matmul(h16, x.view(-1, 16, x.shape[1])).view(x.shape)
        return *row(x, rule), *row(rotated.t().contiguous(), rule)

    for op, function, specs in (("mxfp4 row", row, (_ROW, None)), ("mxfp4 row+col H16", both, (_ROW, _COL))):
        variants = [
            ("eager", function, "even"),
            *(("compiled", torch.compile(function, dynamic=False), r) for r in rules),
        ]
        for name, call, rule in variants:
            want = reference.quantize(inputs[0][:_CHECK_TOKENS], QuantSpec(format="mxfp4", scale_rule=rule))
            backend = f"torchao {name}, {rule} rule"
            try:
                scale, data = call(inputs[0], rule)[:2]
            except InductorError as error:
                print(f"{backend}, {op}: not measured, torch.compile fails: {str(error).splitlines()[0][:100]}")
                continue
            same = torch.equal(data[:_CHECK_TOKENS].view(torch.uint8), want.data)
            same &= torch.equal(scale[:_CHECK_TOKENS].view(torch.uint8), want.block_scale)
            ok = ("row copy bit-equal" if same else "row copy DIFFERS") + (
                ", column in bf16" if function is both else ""
            )
            times = measure_launches(lambda call=call, rule=rule: call(inputs[0], rule))
            yield _row(op, shape, backend, times, _bytes(inputs[0], specs), roof, ok)
            if name == "compiled":
                break  # the floor rule only stands in where the even rule does not compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="names such as llama3_8b.fc2; default: every distinct width")
    parser.add_argument("--tokens", type=int, default=BENCHMARK_TOKENS)
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    parser.add_argument("--no-torchao", action="store_true")
    options = parser.parse_args()
    names: dict[int, str] = {}
    for linear in LINEARS:
        for side, width in (("x", linear.in_features), ("dy", linear.out_features)):
            if not options.shapes or linear.name in options.shapes:
                names.setdefault(width, f"{linear.name}.{side}")
    print(describe_machine())
    roof = copy_bandwidth()
    print(f"roof: device copy {roof / 1e12:.2f} TB/s (read + written)\n\n{HEADER}")
    for width, name in sorted(names.items()):
        num_bytes = 2 * options.tokens * width
        inputs = [
            torch.randn(options.tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(sets_for(num_bytes))
        ]
        shape = f"{name} {options.tokens}x{width}"
        rows = [_copy_row(inputs, shape, roof), *_turbo_rows(inputs, shape, roof)]
        rows += [] if options.no_torchao else _torchao_rows(inputs, shape, roof)
        report(rows, options.json)


if __name__ == "__main__":
    main()
