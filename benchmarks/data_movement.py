"""What the data-movement features of AMD GPUs are worth: the same GEMM with and without them.

    python -m benchmarks.data_movement [--shapes llama3_8b.fc1 ...] [--json FILE]    on a gfx950 or gfx1250
    python -m benchmarks.data_movement --static [--arch gfx1250]                     anywhere: what the compiler made of each

tensor data mover (gfx1250)           tiles by TDM, or by asynchronous copies through pointers
transpose load (gfx950 and gfx1250)   K-strided operands by transpose loads, or transposed through LDS by plain loads and stores

The published gains to reproduce are printed beside: 1.88x for TDM, 1.19x for transpose loads. `--static` measures nothing and
cannot confirm them: it shows where the work went, as a static estimate.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from primus_turbo_plugin.kernels.gluon import gemm_gfx950, gemm_gfx950_plan, gemm_gfx1250, gemm_gfx1250_plan
from primus_turbo_plugin.kernels.gluon.gemm_gfx1250 import Ablation
from primus_turbo_plugin.kernels.triton.gemm_launch import KernelCall

_CHECK_ROWS = 256
_SNR_DB = 40.0
_STATIC_SIZE = 4096


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One ablation.

    Attributes:
        name: What is switched off.
        published: Gain a paper reports.
        layouts: Products it matters for: whether a and b are contiguous along K.
        off: The kernel without it.
    """

    name: str
    published: float
    layouts: tuple[tuple[str, bool, bool], ...]
    off: Ablation


TDM = Feature(
    name="tensor data mover",
    published=1.88,
    layouts=(("NT", True, True), ("NN", True, False), ("TN", False, False)),
    off=Ablation(tdm=False),
)
TRANSPOSE_LOAD = Feature(
    name="transpose load",
    published=1.19,
    layouts=(("NN", True, False), ("TN", False, False)),
    off=Ablation(transpose_load=False),
)
Calls = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, Ablation], KernelCall]


def _gfx1250(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, programs: int, ablation: Ablation) -> KernelCall:
    tile = gemm_gfx1250_plan.tiles_for("bf16", "bf16")[0]  # the same for both variants
    return gemm_gfx1250.gemm_call(a, b, y, cus=programs, tile=tile, ablation=ablation)


def _gfx950(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, programs: int, ablation: Ablation) -> KernelCall:
    off = gemm_gfx950.Ablation(transpose_load=ablation.transpose_load)
    tile = gemm_gfx950_plan.tiles_for("bf16")[1]  # the largest whose variant without transpose loads does not spill
    return gemm_gfx950.gemm_call(a, b, y, cus=programs, tile=tile, ablation=off)


ARCHS: dict[str, tuple[Calls, tuple[Feature, ...]]] = {
    "gfx950": (_gfx950, (TRANSPOSE_LOAD,)),
    "gfx1250": (_gfx1250, (TDM, TRANSPOSE_LOAD)),
}
"""Architecture -> how its GEMM is called with a feature switched off, and the features it has."""


def operands(rows: int, cols: int, depth: int, a_k: bool, b_k: bool, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 a `[rows, depth]` and b `[cols, depth]`, each contiguous along the contraction or along its rows."""
    shapes = [(outer, depth) if k_inner else (depth, outer) for outer, k_inner in ((rows, a_k), (cols, b_k))]
    a, b = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    return (a if a_k else a.t()), (b if b_k else b.t())


# -- without a GPU ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class StaticRow:
    """A variant's hot loop, as the ISA report sees it. Clocks are a static estimate of one iteration on one compute unit."""

    arch: str
    feature: str
    layout: str
    variant: str
    instructions: int
    matrix: int
    vector: int
    scalar: int
    barriers: int
    tensor_transfers: int
    copies: int
    lds_instructions: int
    mma_clocks: float
    lds_clocks: float
    valu_clocks: float
    vgprs: int

    @property
    def mma_share(self) -> float:
        return self.mma_clocks / max(self.mma_clocks, self.lds_clocks, self.valu_clocks)

    def text(self) -> str:
        counts = (
            self.instructions,
            self.matrix,
            self.vector,
            self.scalar,
            self.lds_instructions,
            self.tensor_transfers,
        )
        clocks = (self.mma_clocks, self.lds_clocks, self.valu_clocks)
        return (
            f"{self.arch:8} {self.feature:18} {self.layout:3} {self.variant:8}"
            + "".join(f" {count:6}" for count in (*counts, self.copies, self.barriers))
            + "".join(f" {item:7.0f}" for item in clocks)
            + f" {self.mma_share:6.0%} {self.vgprs:6}"
        )


STATIC_HEADER = (
    f"{'arch':8} {'feature':18} {'':3} {'':8} {'insts':>6} {'matrix':>6} {'vector':>6} {'scalar':>6} {'LDS':>6} {'TDM':>6} "
    f"{'copies':>6} {'barr.':>6} {'MMA clk':>7} {'LDS clk':>7} {'vec clk':>7} {'MMA':>6} {'VGPR':>6}"
)


def static_rows(arch: str) -> Iterator[StaticRow]:
    """Compile every variant for an architecture and read its hot loop.

    Raises:
        UnsupportedError: Triton is missing.
    """
    from primus_turbo_plugin import amdgcn

    call_of, features = ARCHS[arch]
    for feature in features:
        for layout, a_k, b_k in feature.layouts:
            a, b = operands(_STATIC_SIZE, _STATIC_SIZE, _STATIC_SIZE, a_k, b_k, "cpu")
            y = torch.empty(_STATIC_SIZE, _STATIC_SIZE, dtype=torch.bfloat16)
            for variant, ablation in (("with", Ablation()), ("without", feature.off)):
                call = call_of(a, b, y, 256, ablation)
                report = amdgcn.isa_report(amdgcn.compile(call.kernel, arch, call.args, call.constants, **call.options))
                loop, mix = report.loop, report.loop_mix
                assert loop is not None, "a GEMM has a loop"
                yield StaticRow(
                    arch=arch, feature=feature.name, layout=layout, variant=variant, instructions=loop.instructions,
                    matrix=loop.matrix, vector=loop.vector, scalar=loop.scalar, tensor_transfers=loop.tensor_transfers,
                    barriers=sum(count for name, count in mix.items() if name in ("s_barrier", "s_barrier_wait")),
                    copies=sum(count for name, count in mix.items() if name.startswith(("global_load", "buffer_load"))),
                    lds_instructions=sum(count for name, count in mix.items() if name.startswith("ds_")),
                    mma_clocks=loop.mma_clocks, lds_clocks=loop.lds_clocks, valu_clocks=loop.valu_clocks, vgprs=report.vgprs,
                )  # fmt: skip


def run_static(archs: list[str], json_path: str | None) -> None:
    print("Static estimate from the compiled code, nothing was run: one iteration of the hot loop.")
    print(f"Published gains: tensor data mover {TDM.published}x, transpose load {TRANSPOSE_LOAD.published}x.")
    print(STATIC_HEADER)
    for arch in archs:
        for row in static_rows(arch):
            print(row.text(), flush=True)
            if json_path:
                with open(json_path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"kind": "static estimate", **asdict(row)}) + "\n")


# -- on the GPU ---------------------------------------------------------------------------------------------------------
def _snr_db(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    want = a[:_CHECK_ROWS].double() @ b[:_CHECK_ROWS].double().t()
    error = (y[:_CHECK_ROWS, :_CHECK_ROWS].double() - want).norm()
    return 20 * math.log10(float(want.norm() / error)) if error else math.inf


def _compare(
    feature: Feature, call_of: Calls, sets: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[float], float]:
    """Microseconds with and without the feature, and the worse SNR of the two results."""
    from benchmarks._timing import measure

    programs = torch.cuda.get_device_properties(0).multi_processor_count
    times, checks = [], []
    for ablation in (Ablation(), feature.off):

        def product(i: int, ablation: Ablation = ablation) -> torch.Tensor:
            a, b = sets[i]
            y = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
            call_of(a, b, y, programs, ablation).run()
            return y

        checks.append(_snr_db(product(0), *sets[0]))
        times.append(measure(product, len(sets))[0])
    return times, min(checks)


def run_measured(arch: str, shapes: list[str], json_path: str | None) -> None:
    """Time every variant of every product; the result of each is checked first."""
    from benchmarks._timing import describe_machine, sets_for
    from tests.support.shapes import BENCHMARK_TOKENS, LINEARS

    print(describe_machine())
    print(f"{'feature':18} {'':3} {'shape':34} {'with us':>9} {'without':>9} {'gain':>6} {'published':>9}  ok")
    call_of, features = ARCHS[arch]
    products = [(feature, layout) for feature in features for layout in feature.layouts]
    for linear in (item for item in LINEARS if not shapes or item.name in shapes):
        m, n, k = BENCHMARK_TOKENS, linear.out_features, linear.in_features
        for feature, (layout, a_k, b_k) in products:
            sets = [operands(m, n, k, a_k, b_k, "cuda") for _ in range(sets_for(2 * (m + n) * k))]
            times, snr = _compare(feature, call_of, sets)
            ok = f"{snr:.0f} dB" if snr > _SNR_DB else f"WRONG: {snr:.0f} dB"
            shape, gain = f"{linear.name} {m}x{n}x{k}", f"{times[1] / times[0]:5.2f}x {feature.published:8.2f}x"
            print(f"{feature.name:18} {layout:3} {shape:34} {times[0]:9.1f} {times[1]:9.1f} {gain}  {ok}", flush=True)
            if json_path:
                row = {"kind": "measured", "arch": arch, "feature": feature.name, "layout": layout, "shape": shape}
                with open(json_path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({**row, "us_with": times[0], "us_without": times[1], "ok": ok}) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="compare what the compiler made of each; needs no GPU")
    parser.add_argument(
        "--arch", action="append", default=[], choices=sorted(ARCHS), help="with --static; default: all"
    )
    parser.add_argument("--shapes", nargs="*", default=[], help="names of linears, as in benchmarks.gemm")
    parser.add_argument("--json", metavar="FILE", help="append rows as JSON lines")
    args = parser.parse_args(argv)
    if args.static:
        run_static(args.arch or sorted(ARCHS), args.json)
        return 0
    arch = _this_arch()
    if arch not in ARCHS:
        known = ", ".join(ARCHS)
        print(
            f"data_movement: needs a GPU of {known}, found {arch or 'none'}. --static compares the compiled code without one.",
            file=sys.stderr,
        )
        return 1
    run_measured(arch, args.shapes, args.json)
    return 0


def _this_arch() -> str:
    if not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(0)
    return str(getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")).split(":")[0]


if __name__ == "__main__":
    sys.exit(main())
