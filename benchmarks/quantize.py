"""Quantisation: the one-read Triton kernels, alone and fused, against what a user would call instead.

    python -m benchmarks.quantize [--shapes llama3_8b.fc1 ...] [--ops mxfp4 norm ...] [--json rows.jsonl] [--no-torchao]

"mxfp4 row+col H16" makes a rowwise MXFP4 copy and a columnwise one rotated along tokens, as a Wgrad operand needs them. The
share of the roof is the bytes that must move (x read once, every code and scale written once) over the time, against a device
copy measured in the same run; FP8 scales that span an axis cost a second read that is not counted.

"norm+mxfp4" is RMS norm in front of the same copies, "swiglu+mxfp4" SwiGLU, "mxfp4+sum" the sum over tokens for a bias gradient;
their second row is torch's own op and then the quantisation. torchao has no rotation: its rows quantise x, and a rotated x.T
that torch prepares as a bf16 matrix product (so its bits differ), which is what a user would write; they copy scalars from the
host, cannot be captured in a graph, and are timed launch by launch. Every row is checked before it is timed; `ok` says what was
compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

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
from primus_turbo_plugin.kernels.reference import fused as reference_fused
from primus_turbo_plugin.kernels.reference import quantize as reference
from primus_turbo_plugin.kernels.triton import fused
from primus_turbo_plugin.kernels.triton import quantize as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.rotation import hadamard_matrix
from primus_turbo_plugin.precision.rounding import RoundingKey
from tests.support.shapes import BENCHMARK_TOKENS, LINEARS

_CHECK_TOKENS = 1024
"""Rows of x that are compared with the reference."""
_EPS = 1e-5
_KEY = RoundingKey(seed=1, draw=2, tensor=3, rank=0)

_ROW = QuantSpec(format="mxfp4")
_COL = QuantSpec(format="mxfp4", hadamard=16)
_MXFP8 = QuantSpec(format="mxfp8")
_SR_ROW = QuantSpec(format="mxfp4", rounding="stochastic")
_SR_COL = QuantSpec(format="mxfp4", hadamard=16, rounding="stochastic")

Pair = tuple[QuantSpec | None, QuantSpec | None]
Call = Callable[[torch.Tensor], tuple[Any, ...]]
Times = tuple[float, float, float]


def _fp8(block: str) -> Pair:
    return (QuantSpec(format="fp8", block=block),) * 2


_OPS: dict[str, Pair] = {
    "mxfp4 row+col H16": (_ROW, _COL),
    "mxfp4 row": (_ROW, None),
    "mxfp4 col H16": (None, _COL),
    "mxfp4 row+col H16 SR": (_SR_ROW, _SR_COL),
    "mxfp4 row SR": (_SR_ROW, None),
    "mxfp8 row+col": (_MXFP8, _MXFP8),
    "fp8 1x128 row+col": _fp8("1x128"),
    "fp8 rowwise row+col": _fp8("rowwise"),
    "fp8 tensorwise row+col": _fp8("tensorwise"),
}


def _bytes(x: torch.Tensor, specs: Pair, cols: int | None = None) -> float:
    """x once, every code and every scale of `[tokens, cols]` once."""
    tokens, cols = x.shape[0], cols or x.shape[1]
    sample = torch.zeros(128, cols, dtype=x.dtype)
    written = [copy.nbytes for copy in reference.quantize_both(sample, *specs, key=_KEY) if copy is not None]
    return x.nbytes + sum(written) * (tokens / 128)


def _same(got: Any, want: Any) -> bool:
    if got is None or want is None:
        return got is want
    if isinstance(got, torch.Tensor):
        return torch.equal(got, want)
    return torch.equal(got.data, want.data) and torch.equal(got.block_scale, want.block_scale)


def _check(call: Call, oracle: Call, x: torch.Tensor) -> str:
    piece = x[:_CHECK_TOKENS]
    return "bit-equal" if all(_same(got, want) for got, want in zip(call(piece), oracle(piece))) else "WRONG"


def _row(op: str, shape: str, backend: str, times: Times, num_bytes: float, roof: float, ok: str) -> Row:
    us, low, high = times
    return Row(
        op=op, shape=shape, backend=backend, us=us, us_p20=low, us_p80=high, bytes=num_bytes, flops=0, roof=roof, ok=ok
    )


def _copy_row(inputs: list[torch.Tensor], shape: str, roof: float) -> Row:
    times = measure(lambda i: inputs[i].clone(), len(inputs))
    return _row("copy", shape, "torch clone", times, 2 * inputs[0].nbytes, roof, "-")


def _plain_rows(inputs: list[torch.Tensor], shape: str, roof: float, wanted: list[str]) -> Iterator[Row]:
    for op, specs in _OPS.items():
        if not any(word in op for word in wanted):
            continue

        def call(x: torch.Tensor, specs: Pair = specs) -> tuple[Any, ...]:
            return turbo.quantize_both(x, *specs, key=_KEY)

        def oracle(x: torch.Tensor, specs: Pair = specs) -> tuple[Any, ...]:
            return reference.quantize_both(x, *specs, key=_KEY)

        ok = _check(call, oracle, inputs[0])
        times = measure(lambda i, call=call: call(inputs[i]), len(inputs))
        yield _row(op, shape, "primus_turbo triton", times, _bytes(inputs[0], specs), roof, ok)


def _fused_rows(inputs: list[torch.Tensor], shape: str, roof: float, wanted: list[str]) -> Iterator[Row]:
    """Each fusion of the MXFP4 pair, and below it torch's op followed by the quantisation."""
    hidden = inputs[0].shape[1]
    gamma = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    half = hidden // 2
    cases: dict[str, tuple[int, Call, Call, Call]] = {
        "norm+mxfp4": (
            hidden,
            lambda x: fused.rms_norm_quantize(x, gamma, _EPS, _ROW, _COL),
            lambda x: reference_fused.rms_norm_quantize(x, gamma, _EPS, _ROW, _COL),
            lambda x: turbo.quantize_both(torch.nn.functional.rms_norm(x, (hidden,), gamma, _EPS), _ROW, _COL),
        ),
        "mxfp4+sum": (
            hidden,
            lambda x: fused.quantize_and_sum(x, _ROW, _COL),
            lambda x: reference_fused.quantize_and_sum(x, _ROW, _COL),
            lambda x: (*turbo.quantize_both(x, _ROW, _COL), x.sum(0)),
        ),
        "swiglu+mxfp4": (
            half,
            lambda x: fused.swiglu_quantize(x, _ROW, _COL),
            lambda x: reference_fused.swiglu_quantize(x, _ROW, _COL),
            lambda x: turbo.quantize_both(torch.nn.functional.silu(x[:, :half]) * x[:, half:], _ROW, _COL),
        ),
    }
    for op, (cols, call, oracle, apart) in cases.items():
        if not any(word in op for word in wanted):
            continue
        num_bytes = _bytes(inputs[0], (_ROW, _COL), cols)
        for backend, function in (("primus_turbo triton", call), ("torch's op, then triton", apart)):
            ok = _check(function, oracle, inputs[0]) if function is call else "not comparable in bits"
            times = measure(lambda i, function=function: function(inputs[i]), len(inputs))
            yield _row(op, shape, backend, times, num_bytes, roof, ok)


def _torchao_rows(inputs: list[torch.Tensor], shape: str, roof: float) -> Iterator[Row]:
    """torchao's MX cast, eager and compiled: the row copy alone, with a rotated, transposed one, and both behind a norm."""
    try:
        from torch._inductor.exc import InductorError
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"torchao: not measured: {error}")
        return
    h16 = hadamard_matrix(16).to(device="cuda", dtype=torch.bfloat16)
    rules = {"even": ScaleCalculationMode.EVEN, "floor": ScaleCalculationMode.FLOOR}
    hidden = inputs[0].shape[1]
    gamma = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)

    def row(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
        return to_mx(x, torch.float4_e2m1fn_x2, 32, rules[rule])

    def both(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, ...]:
        rotated = torch.matmul(h16, x.view(-1, 16, x.shape[1])).view(x.shape)
        return *row(x, rule), *row(rotated.t().contiguous(), rule)

    def norm(x: torch.Tensor, rule: str) -> tuple[torch.Tensor, ...]:
        return both(torch.nn.functional.rms_norm(x, (hidden,), gamma, _EPS), rule)

    cases: list[tuple[str, Any, Pair]] = [
        ("mxfp4 row", row, (_ROW, None)),
        ("mxfp4 row+col H16", both, (_ROW, _COL)),
        ("norm+mxfp4", norm, (_ROW, _COL)),
    ]
    for op, function, specs in cases:
        compiled = torch.compile(function, dynamic=False)
        for name, call, rule in (
            ("eager", function, "even"),
            ("compiled", compiled, "even"),
            ("compiled", compiled, "floor"),
        ):
            backend = f"torchao {name}, {rule} rule"
            try:
                scale, data = call(inputs[0], rule)[:2]
            except InductorError as error:
                print(f"{backend}, {op}: not measured, torch.compile fails: {str(error).splitlines()[0][:100]}")
                continue
            ok = "not compared"
            if function is not norm:
                want = reference.quantize(inputs[0][:_CHECK_TOKENS], QuantSpec(format="mxfp4", scale_rule=rule))
                same = torch.equal(data[:_CHECK_TOKENS].view(torch.uint8), want.data)
                same &= torch.equal(scale[:_CHECK_TOKENS].view(torch.uint8), want.block_scale)
                ok = "row copy bit-equal" if same else "row copy DIFFERS"
            times = measure_launches(lambda call=call, rule=rule: call(inputs[0], rule))
            yield _row(op, shape, backend, times, _bytes(inputs[0], specs), roof, ok)
            if name == "compiled":
                break  # the floor rule only stands in where the even rule does not compile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="names such as llama3_8b.fc2; default: every distinct width")
    parser.add_argument(
        "--ops", nargs="*", default=[""], help="words of the ops to measure: mxfp4, fp8, SR, norm, swiglu, sum"
    )
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
        rows = [_copy_row(inputs, shape, roof), *_plain_rows(inputs, shape, roof, options.ops)]
        rows += _fused_rows(inputs, shape, roof, options.ops)
        if not options.no_torchao:
            rows += _torchao_rows(inputs, shape, roof)
        report(rows, options.json)


if __name__ == "__main__":
    main()
