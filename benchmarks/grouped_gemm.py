"""The three grouped GEMMs of experts: the Triton kernels against torch._grouped_mm and a loop of cuBLAS (hipBLASLt) calls.

    python -m benchmarks.grouped_gemm [--shapes mixtral_8x7b.fc1 ...] [--gemms fprop wgrad] [--formats bf16 mxfp4] [--json FILE]

fprop y = x @ w[e].T, dgrad dx = dy @ w[e], wgrad dw[e] += dy.T @ x in fp32, of tokens sorted by expert, with uneven loads (every
expert's share drawn anew, one expert without tokens) that only the GPU knows; the loop alone is told them on the host. bf16
operands lie as experts have them; quantised ones have the contraction last and are quantised before the clock starts. "emulated":
codes become bf16 and the bf16 units multiply; the time includes that decoding. torch._grouped_mm writes dw in bf16, and the time
of adding it to an fp32 main_grad is in its row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks._timing import HEADER, Row, describe_machine, measure, report
from primus_turbo_plugin.kernels.grouped_operands import depth_multiple, stack_weights
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.registry import default_registry
from primus_turbo_plugin.kernels.triton import grouped_gemm as turbo
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor

_SNR_DB = 40.0
_CHECK = 192
_GEMMS = ("fprop", "dgrad", "wgrad")
_FORMATS: dict[str, tuple[QuantSpec, QuantSpec] | None] = {
    "bf16": None,
    "mxfp4": (QuantSpec(format="mxfp4"), QuantSpec(format="mxfp4", block="32x32")),
    "mxfp8": (QuantSpec(format="mxfp8"), QuantSpec(format="mxfp8")),
    "fp8_rowwise": (QuantSpec(format="fp8", block="rowwise"), QuantSpec(format="fp8", block="rowwise")),
    "fp8_block128": (QuantSpec(format="fp8", block="1x128"), QuantSpec(format="fp8", block="128x128")),
}
"""Format -> specs of tokens and weights."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A layer of experts on one GPU.

    Attributes:
        name: Model and linear.
        experts: On this GPU.
        inputs: K.
        outputs: N.
        tokens: Rows that arrive: tokens times the experts each goes to.
    """

    name: str
    experts: int
    inputs: int
    outputs: int
    tokens: int

    def counts(self) -> list[int]:
        """Tokens of every expert: shares as of a softmax of normal numbers, the second expert's none."""
        generator = torch.Generator().manual_seed(self.experts)
        share = torch.softmax(0.5 * torch.randn(self.experts, generator=generator), 0)
        share[1] = 0
        counts = (share / share.sum() * self.tokens).floor().long()
        counts[0] += self.tokens - counts.sum()
        return [int(count) for count in counts]


LAYERS = (
    Experts(name="mixtral_8x7b.fc1", experts=8, inputs=4096, outputs=28672, tokens=16384 * 2),
    Experts(name="deepseek_v3.fc1", experts=32, inputs=7168, outputs=4096, tokens=16384 * 8),
)


@dataclass(frozen=True, kw_only=True)
class Product:
    """One grouped product with its operands.

    Attributes:
        layer: Whose.
        gemm: fprop, dgrad or wgrad.
        a: Tokens' operand (wgrad: dy, turned).
        b: Weights (wgrad: x, turned).
        groups: Known to the GPU alone.
        known: The same, known to the host.
        out: fp32 `[experts, N, K]` that wgrad adds to.
        scales_by_expert: Of FP8 rowwise wgrads.
    """

    layer: Experts
    gemm: str
    a: Tensor | QuantizedTensor
    b: Tensor | QuantizedTensor
    groups: Groups
    known: Groups
    out: Tensor | None
    scales_by_expert: bool = False

    def run(self) -> Tensor:
        """The product by the Triton kernels."""
        if self.out is None:
            return turbo.grouped_gemm_nt(self.a, self.b, self.groups, out_dtype=torch.bfloat16)
        return turbo.grouped_gemm_depth(
            self.a, self.b, self.groups, self.out, accumulate=True, scales_by_expert=self.scales_by_expert
        )


def make(layer: Experts, gemm: str, specs: tuple[QuantSpec, QuantSpec] | None, out: Tensor | None) -> Product:
    """A product of normal numbers."""
    counts = torch.tensor(layer.counts())
    known = Groups.of(counts, layer.tokens, torch.device("cuda"))
    groups = Groups(known.offsets, known.total)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    if gemm == "wgrad":
        tokens = randn(layer.tokens, layer.outputs), randn(layer.tokens, layer.inputs)
        if specs is None:
            return Product(
                layer=layer, gemm=gemm, a=tokens[0].t(), b=tokens[1].t(), groups=groups, known=known, out=out
            )
        multiple = depth_multiple(specs[0])
        padded, padded_known = groups.padded(multiple), known.padded(multiple)
        a, b = (_quantized(t, None, specs[0], groups, padded)[1] for t in tokens)
        by_expert = specs[0].block == "rowwise"
        return Product(
            layer=layer, gemm=gemm, a=a, b=b, groups=padded, known=padded_known, out=out, scales_by_expert=by_expert
        )  # type: ignore[arg-type]
    features = layer.inputs if gemm == "fprop" else layer.outputs
    x, weight = randn(layer.tokens, features), randn(layer.experts, layer.outputs, layer.inputs)
    if specs is None:
        b = weight if gemm == "fprop" else weight.transpose(1, 2)
        return Product(layer=layer, gemm=gemm, a=x, b=b, groups=groups, known=known, out=None)
    quantize = default_registry().backend("quantize", "triton").kernels.quantize
    a = _quantized(x, specs[0], None, groups, groups)[0]
    b = stack_weights([quantize(w, specs[1], columnwise=gemm == "dgrad") for w in weight])
    return Product(layer=layer, gemm=gemm, a=a, b=b, groups=groups, known=known, out=None)


def _quantized(
    t: Tensor, row: QuantSpec | None, column: QuantSpec | None, groups: Groups, padded: Groups
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    name = default_registry().names("grouped_quantize")[0]
    kernels = default_registry().backend("grouped_quantize", name).kernels
    copies: tuple[QuantizedTensor | None, QuantizedTensor | None] = kernels.grouped_quantize(
        t, row, column, groups, padded
    )
    return copies


def loop(product: Product) -> Tensor:
    """The product by a call of torch for every expert, whose tokens the host knows."""
    a, b, offsets = product.a, product.b, product.known.on_host()
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    y = product.out
    if y is None:
        y = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device="cuda")
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if product.out is None:
            torch.mm(a[start:stop], b[expert].t(), out=y[start:stop])
        elif stop > start:
            left, right = a[:, start:stop], b[:, start:stop].t()
            torch.addmm(y[expert], left, right, out_dtype=torch.float32, out=y[expert])
    return y


def grouped_mm(product: Product) -> Tensor:
    """The product by torch."""
    ends = product.groups.offsets[1:].to(torch.int32)
    if product.out is None:
        return torch._grouped_mm(product.a, product.b.transpose(1, 2), offs=ends)  # type: ignore[arg-type, union-attr]
    return product.out.add_(torch._grouped_mm(product.a, product.b.t(), offs=ends))  # type: ignore[arg-type, union-attr]


def check(product: Product, y: Tensor) -> str:
    """SNR of the last rows of every expert and the first columns against float64; of two experts for wgrad."""
    if product.out is not None:
        y = y[:, :_CHECK, :_CHECK]
    want, got = [], []
    offsets = product.known.on_host()
    width = y.shape[1] if product.out is None else 0
    for expert, (start, stop) in enumerate(pairwise(offsets)):
        if product.out is not None:
            if expert in (0, 1, len(offsets) - 2):
                left, right = (_values(t, 0, _CHECK)[:, start:stop] for t in (product.a, product.b))
                want.append(left @ right.t())
                got.append(y[expert])
            continue
        first = max(stop - _CHECK, start)
        rows = _values(product.a, first, stop)
        if isinstance(product.b, QuantizedTensor):
            columns = _values(product.b, expert * width, expert * width + _CHECK)
        else:
            columns = product.b[expert, :_CHECK].double()
        want.append((rows[:, : columns.shape[1]] @ columns.t()).flatten())
        got.append(y[first:stop, :_CHECK].flatten())
    reference, value = torch.cat(want), torch.cat(got).double()
    error = (value - reference).norm()
    snr = 20 * math.log10(float(reference.norm() / error)) if error else math.inf
    return f"{snr:.0f} dB" if snr > _SNR_DB else f"WRONG: {snr:.0f} dB"


def _values(operand: Tensor | QuantizedTensor, start: int, stop: int) -> Tensor:
    if isinstance(operand, QuantizedTensor):
        return operand.decode(start, stop).double()
    return operand[start:stop].double()


def rows_of(layer: Experts, gemm: str, formats: list[str]) -> list[Row]:
    """All measurements of one product."""
    size = layer.experts, layer.outputs, layer.inputs
    out = torch.zeros(size, device="cuda") if gemm == "wgrad" else None
    flops = 2.0 * layer.tokens * layer.inputs * layer.outputs
    weights = layer.experts * layer.inputs * layer.outputs
    moved = 2.0 * layer.tokens * (layer.inputs + layer.outputs) + (8.0 if gemm == "wgrad" else 2.0) * weights
    rows: list[Row] = []

    def add(name: str, product: Product, run: Callable[[Product], Tensor]) -> None:
        if out is not None:
            out.zero_()
        ok = check(product, run(product))
        us, low, high = measure(lambda i: run(product), 1)
        shape = f"{layer.name} {layer.tokens}x{layer.inputs}x{layer.outputs}/{layer.experts}"
        roof = rows[0].flops / (rows[0].us * 1e-6) if rows else flops / (us * 1e-6)
        rows.append(
            Row(op=gemm, shape=shape, backend=name, us=us, us_p20=low, us_p80=high, bytes=moved, flops=flops, roof=roof, ok=ok)
        )  # fmt: skip

    plain = make(layer, gemm, None, out)
    add("cuBLAS, a call an expert", plain, loop)
    if hasattr(torch, "_grouped_mm"):
        add("torch._grouped_mm", plain, grouped_mm)
    if "bf16" in formats:
        add("primus_turbo triton bf16", plain, Product.run)
    del plain
    for name in formats:
        specs = _FORMATS[name]
        if specs is not None:
            product = make(layer, gemm, specs, out)
            emulated = " (emulated)" if _units(product) == "half" else ""
            add(f"primus_turbo triton {name}{emulated}", product, Product.run)
            del product
            torch.cuda.empty_cache()
    return rows


def _units(product: Product) -> str:
    if product.out is None:
        cols = product.layer.outputs if product.gemm == "fprop" else product.layer.inputs
        key = turbo.rows_key(product.a, product.b, cols, product.groups, torch.bfloat16)
    else:
        key = turbo.depth_key(product.a, product.b, product.groups, product.out, accumulate=True)
    return turbo.resolve_config(key).units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="names such as mixtral_8x7b.fc1; default: all")
    parser.add_argument("--gemms", nargs="*", choices=_GEMMS, default=_GEMMS)
    parser.add_argument("--formats", nargs="*", choices=_FORMATS, default=tuple(_FORMATS))
    parser.add_argument("--json", help="append the rows to this JSON lines file")
    options = parser.parse_args()
    print(f"{describe_machine()}\n\n{HEADER}")
    for layer in LAYERS:
        if options.shapes and layer.name not in options.shapes:
            continue
        for gemm in options.gemms:
            report(rows_of(layer, gemm, list(options.formats)), options.json)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
