"""ISA gates: what the compiler makes of the GEMM's shipped configurations for AMD GPUs. None needs an AMD GPU, none is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn import IsaGate
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.triton.gemm_defaults import default_config
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, OperandKey
from primus_turbo_plugin.kernels.triton.gemm_launch import plan
from primus_turbo_plugin.precision.quant_spec import QuantSpec

COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}
LLAMA3_8B_FC1 = (16384, 28672, 4096)
NEVER = ("ds_read_u16.*", "ds_load_u16.*", "scratch_.*")
COPY = {
    "gfx942": "buffer_load_dwordx4",
    "gfx950": "buffer_load_dwordx4 lds",
    "gfx1250": "global_load_async_to_lds_b128",
}
BF16_UNIT = {
    "gfx942": r"v_mfma_f32_16x16x16_bf16",
    "gfx950": r"v_mfma_f32_16x16x32_bf16",
    "gfx1250": r"v_wmma_f32_16x16x32_bf16",
}
FP8_UNIT = {
    "gfx942": r"v_mfma_f32_16x16x32_fp8_fp8",
    "gfx950": r"v_mfma_f32_16x16x128_f8f6f4",
    "gfx1250": r"v_wmma_f32_16x16x128_fp8_fp8",
}
MX_UNIT = {"gfx950": r"v_mfma_scale_f32_16x16x128_f8f6f4", "gfx1250": r"v_wmma_scale_f32_16x16x128_f8f6f4"}
TRANSPOSING = {"gfx950": ("ds_read_b64_tr_b16",), "gfx1250": ("ds_load_tr16_b128",), "gfx942": ()}


def violations(arch: str, layout: str, spec: QuantSpec | None, gate: IsaGate, **epilogue: bool) -> list[str]:
    """The gate's complaints about the multiplying kernel that this GPU would run for a large product."""
    m, n, k = 512, 512, 1024  # divisible as the large product is, so the same code comes out
    a, b = (torch.zeros(rows, k, dtype=torch.bfloat16) for rows in (m, n))
    a = a.t().contiguous().t() if layout[0] == "t" else a
    b = b.t().contiguous().t() if layout[1] == "n" else b
    left, right = (x if spec is None else quantize(x, spec) for x in (a, b))
    y = torch.zeros(m, n, dtype=torch.float32 if epilogue else torch.bfloat16)
    rows, cols, contraction = LLAMA3_8B_FC1
    large = GemmKey(
        arch=arch, compute_units=COMPUTE_UNITS[arch], rows=rows, cols=cols, contraction=contraction,
        a=OperandKey.of(left), b=OperandKey.of(right), out="fp32" if epilogue else "bf16", **epilogue,
    )  # fmt: skip
    call = plan(left, right, None, y, replace(large, rows=m, cols=n, contraction=k), default_config(large))[-1]
    compiled = amdgcn.compile(call.kernel, arch, call.args, call.constants, **call.options)
    return amdgcn.check_gate(amdgcn.isa_report(compiled), gate)


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPUTE_UNITS)
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_bf16_neither_spills_nor_reads_halves_and_is_bound_by_the_matrix_units(arch, layout) -> None:
    transposing = TRANSPOSING[arch] if layout != "nt" else ()
    gate = IsaGate(
        required=(COPY[arch], BF16_UNIT[arch], *transposing),
        forbidden_anywhere=NEVER,
        bound_by="mma",
        min_mma_share=0.9,
    )
    epilogue = {"accumulate": True} if layout == "tn" else {}
    assert violations(arch, layout, None, gate, **epilogue) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", FP8_UNIT)
@pytest.mark.parametrize("block", ["rowwise", "1x128"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_fp8_operands_go_to_the_fp8_units_undecoded(arch, block, accumulate) -> None:
    gate = IsaGate(required=(COPY[arch], FP8_UNIT[arch]), forbidden=("v_cvt_.*",), forbidden_anywhere=NEVER)
    epilogue = {"accumulate": True} if accumulate else {}
    assert violations(arch, "nt", QuantSpec(format="fp8", block=block), gate, **epilogue) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", MX_UNIT)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_two_mx_operands_go_to_the_scaled_matrix_units_undecoded(arch, fmt, accumulate) -> None:
    gate = IsaGate(required=(COPY[arch], MX_UNIT[arch]), forbidden=("v_cvt_.*",), forbidden_anywhere=NEVER)
    epilogue = {"accumulate": True} if accumulate else {}
    assert violations(arch, "nt", QuantSpec(format=fmt), gate, **epilogue) == []


@pytest.mark.slow
def test_gfx942_decodes_mx_once_and_multiplies_as_bf16() -> None:
    gate = IsaGate(required=(COPY["gfx942"], BF16_UNIT["gfx942"]), forbidden=("v_cvt_.*",), forbidden_anywhere=NEVER)
    assert violations("gfx942", "nt", QuantSpec(format="mxfp4"), gate) == []
