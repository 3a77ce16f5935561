"""FP8 attention over a context-parallel group: one rank's numbers where chunks divide into blocks, FP8's errors elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.kernels.attention import AttentionMask, Packing
from primus_turbo_plugin.precision.attention import BLOCK_TOKENS, AttentionPrecision
from tests.distributed.context_parallel_cases import algorithms_for, inputs, over_all, share
from tests.support.distributed import RankInfo, ranks
from tests.tolerances import fp8_attention_bar

NAMES = ("out", "dq", "dk", "dv")
SAME_BLOCKS_BAR = 2e-3
"""RMS error over RMS value. Scores whose last bit differs put some 2e-5 of the probabilities on the other side of a rounding
boundary, which is 2^-4 of them off: 3e-4, and more where few keys are seen."""


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt()).item()


def problems(
    info: RankInfo,
    tokens: int,
    mask: AttentionMask,
    precision: AttentionPrecision,
    *,
    against_fp8: bool,
    rooms: list[int] | None = None,
) -> list[str]:
    """What is further from one rank, in the same precision or in float64, than it may be."""
    packed = mask.packing is not None
    layout = "thd" if packed else "sbhd"
    qkv = inputs((tokens,) if packed else (tokens, 2), torch.float32, v_dim=8)
    more = {"mask": mask, "layout": layout, "scale": 0.35}
    alone = [(x if against_fp8 else x.double()).requires_grad_() for x in qkv]
    want_out = attention(*alone, precision=precision if against_fp8 else None, **more)  # type: ignore[arg-type]
    dout = torch.randn(want_out.shape)
    want = (want_out, *torch.autograd.grad(want_out, alone, dout.to(want_out.dtype)))
    found = []
    for algorithm in algorithms_for(4, 2):
        local = [share(x, info, rooms=rooms).detach().requires_grad_() for x in qkv]
        out = attention(*local, precision=precision, context=over_all(algorithm), **more)  # type: ignore[arg-type]
        got = (out, *torch.autograd.grad(out, local, share(dout, info, rooms=rooms)))
        for name, value, whole in zip(NAMES, got, want):
            error = relative(value, share(whole.detach(), info, rooms=rooms))
            bar = SAME_BLOCKS_BAR if against_fp8 else 1.2 * fp8_attention_bar(name, precision.gradients)
            if not error <= bar:
                found.append(f"{algorithm} {name}: off by {error:.3g}")
    return found


@ranks(world_size=2)
def test_every_algorithm_has_one_ranks_numbers_where_chunks_divide_into_blocks(rank_info: RankInfo) -> None:
    """Causal, full, a window that cuts messages inside a block; packed sequences of which one is a block a chunk."""
    chunk = BLOCK_TOKENS
    ends = torch.tensor([0, 4 * chunk, 12 * chunk], dtype=torch.int32)
    packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends)
    found = []
    for gradients in ("e4m3", "bf16"):
        precision = AttentionPrecision(format="fp8", gradients=gradients)
        for mask in (AttentionMask(causal=True), AttentionMask(), AttentionMask(causal=True, window=(150, 0))):
            found += problems(rank_info, 4 * chunk, mask, precision, against_fp8=True)
    mask = AttentionMask(causal=True, packing=packing)
    rooms = [4 * chunk, 8 * chunk]
    found += problems(rank_info, 12 * chunk, mask, precision, against_fp8=True, rooms=rooms)
    assert found == []


@ranks(world_size=[2, 4])
def test_other_chunks_err_as_fp8_does(rank_info: RankInfo) -> None:
    for gradients in ("e4m3", "e5m2"):
        precision = AttentionPrecision(format="fp8", gradients=gradients)
        found = problems(rank_info, 240, AttentionMask(causal=True, window=(90, 0)), precision, against_fp8=False)
        assert found == []
