"""benchmarks/experts.py times experts that compute the same: what it builds, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experts import KINDS, LAYERS, Layer, build, same_weights, snr_db, step_of
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import start_megatron

pytestmark = pytest.mark.megatron


@ranks(world_size=1, megatron=True)
def test_every_kind_of_experts_computes_the_same(rank_info: RankInfo) -> None:
    start_megatron(seed=rank_info.seed)
    layer = Layer(name="tiny", experts=4, hidden=64, ffn=96, tokens=130)
    for recipe in ("bf16", "mxfp4"):
        made = {kind: build(layer, kind, recipe, torch.device("cpu")) for kind in KINDS}
        results = {}
        for kind, experts in made.items():
            if kind != KINDS[1]:
                same_weights(experts, made[KINDS[1]])
            results[kind] = step_of(experts, layer, layer.counts(), torch.device("cpu"))()
        for kind in KINDS if recipe == "bf16" else KINDS[1:]:
            for ours, theirs in zip(results[kind], results[KINDS[1]]):
                assert snr_db(ours, theirs) > 40, (kind, recipe)
        wgrads = [
            made[KINDS[2]].linear_fc1.weight.main_grad[2],
            made[KINDS[1]].local_experts[2].linear_fc1.weight.main_grad,
        ]
        assert torch.equal(*wgrads)


def test_loads_are_uneven_and_whole() -> None:
    for layer in LAYERS:
        counts = layer.counts()
        assert counts.sum() == layer.tokens
        assert counts[1] == 0
        assert counts.max() > 1.3 * layer.tokens / layer.experts
