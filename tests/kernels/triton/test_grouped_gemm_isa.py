"""ISA gates of the grouped Triton GEMMs' shipped configurations for AMD GPUs. None needs an AMD GPU, none is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="compiling needs triton, which is not installed")

from primus_turbo_plugin import amdgcn
from primus_turbo_plugin.amdgcn import IsaGate
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.kernels.triton import grouped_gemm_key
from primus_turbo_plugin.kernels.triton.grouped_gemm_key import default_config
from primus_turbo_plugin.kernels.triton.grouped_gemm_launch import plan_depth, plan_rows
from tests.kernels.triton.test_gemm_isa import BF16_UNIT, COMPUTE_UNITS, COPY, NEVER, TRANSPOSING

EXPERTS, TOKENS, N, K = 8, 4096, 1024, 512


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPUTE_UNITS)
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_bf16_neither_spills_nor_reads_halves(arch, gemm, monkeypatch) -> None:
    """The code of 4,096 tokens an expert. The loop's limits are those of the ordinary GEMM, whose gate has the shares."""
    monkeypatch.setattr(grouped_gemm_key, "gpu_of", lambda index: (arch, COMPUTE_UNITS[arch]))
    groups = Groups.of(torch.full((EXPERTS,), TOKENS // EXPERTS), TOKENS, torch.device("cpu"))
    x, dy, weight = (torch.zeros(*size, dtype=torch.bfloat16) for size in ((TOKENS, K), (TOKENS, N), (EXPERTS, N, K)))
    if gemm == "wgrad":
        out = torch.zeros(EXPERTS, N, K)
        key = replace(grouped_gemm_key.depth_key(dy.t(), x.t(), groups, out, accumulate=True), tokens=4096)
        call = plan_depth(dy.t(), x.t(), groups, out, key, default_config(key), multiple=1)[-1]
    else:
        a, b, cols = (x, weight, N) if gemm == "fprop" else (dy, weight.transpose(1, 2), K)
        y = torch.zeros(TOKENS, cols, dtype=torch.bfloat16)
        key = replace(grouped_gemm_key.rows_key(a, b, cols, groups, y.dtype), tokens=4096)
        call = plan_rows(a, b, groups, y, key, default_config(key))[-1]
    compiled = amdgcn.compile(call.kernel, arch, call.args, call.constants, **call.options)
    transposing = TRANSPOSING[arch] if gemm != "fprop" else ()
    gate = IsaGate(required=(COPY[arch], BF16_UNIT[arch], *transposing), forbidden_anywhere=NEVER)
    assert amdgcn.check_gate(amdgcn.isa_report(compiled), gate) == []
