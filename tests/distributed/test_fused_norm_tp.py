"""A norm fused into a column-parallel linear, with the tokens spread over ranks: the bits of norm, gather, linear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_turbo_plugin.functional.fused_quantize import norm_fusion_refusal, rms_norm_input
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import TensorParallel
from primus_turbo_plugin.functional.norm import rms_norm
from primus_turbo_plugin.precision.tree_sum import tree_sum
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, make_call, plan


def _check(rank_info: RankInfo, recipe: str, tokens: int, sequence_parallel: bool) -> None:
    g = torch.Generator().manual_seed(rank_info.seed)
    k, n, size, rank = 128, 64, rank_info.world_size, rank_info.rank
    x, gamma, w, dy = (torch.randn(*s, generator=g).bfloat16() for s in ((tokens, k), (k,), (n, k), (tokens, n)))
    parallel = TensorParallel(mode="column", group=dist.group.WORLD, sequence_parallel=sequence_parallel)
    call = make_call(plan(recipe), torch.bfloat16, parallel=parallel)
    mine = slice(rank * n // size, (rank + 1) * n // size)
    rows = slice(rank * tokens // size, (rank + 1) * tokens // size) if sequence_parallel else slice(None)
    refusal = norm_fusion_refusal(x[rows], gamma, call, with_wgrad=True)
    if sequence_parallel and tokens // size % 32:
        assert "blocks lie across ranks" in str(refusal)
    else:
        assert refusal is None
    results: list[list[Any]] = []
    for fused in (True, False):
        leaves = [leaf(x[rows]), leaf(gamma), leaf(w[mine])]
        if fused:
            normed, used = rms_norm_input(*leaves[:2], 1e-5, call, zero_centered_gamma=False, with_wgrad=True)
        else:
            normed, used = rms_norm(*leaves[:2], 1e-5), call
        y = linear(normed, leaves[2], None, used)
        y.backward(dy[:, mine])
        results.append([y.detach(), *(t.grad for t in leaves)])
    for name, a, b in zip(("y", "dx", "dgamma", "dw"), *results):
        assert torch.equal(a, b), name


@ranks(world_size=[2])
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8"])
def test_fused_and_apart_agree_over_ranks(rank_info: RankInfo, recipe: str) -> None:
    for tokens, sequence_parallel in ((128, True), (96, True), (64, False)):
        _check(rank_info, recipe, tokens, sequence_parallel)


@ranks(world_size=[2])
@pytest.mark.parametrize("recipe", ["mxfp4", "fp8_tensorwise"])
def test_the_bias_gradient_of_a_row_parallel_layer_is_that_of_the_ranks_own_tokens(
    rank_info: RankInfo, recipe: str
) -> None:
    """dy is gathered for the GEMMs, quantised before (MXFP4) or after (a scale of all tokens); its sum is not."""
    g = torch.Generator().manual_seed(rank_info.seed)
    tokens, k, n, rank = 64, 128, 64, rank_info.rank
    x, w, b, dy = (torch.randn(*s, generator=g).bfloat16() for s in ((tokens, k), (n, k), (n,), (tokens, n)))
    parallel = TensorParallel(mode="row", group=dist.group.WORLD, sequence_parallel=True)
    mine, rows = slice(rank * k // 2, (rank + 1) * k // 2), slice(rank * tokens // 2, (rank + 1) * tokens // 2)
    bias = leaf(b)
    call = make_call(plan(recipe), torch.bfloat16, parallel=parallel)
    linear(leaf(x[:, mine]), leaf(w[:, mine]), bias, call).backward(dy[rows])
    assert torch.equal(bias.grad, tree_sum(dy[rows].float(), 0).bfloat16())
