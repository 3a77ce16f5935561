"""Norms over a split sequence: Megatron must find and sum the gradients of their parameters."""

from __future__ import annotations

import pytest
import torch

from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

pytestmark = pytest.mark.megatron


@ranks(world_size=[2, 4], megatron=True)
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gradients_of_a_split_sequence_equal_those_of_the_whole(rank_info: RankInfo, normalization: str) -> None:
    """Through DistributedDataParallel and finalize_model_grads, as in training."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from primus_turbo_plugin.modules import TurboNorm

    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    config = megatron_config(
        hidden_size=32, normalization=normalization, tensor_model_parallel_size=size, sequence_parallel=True
    )
    x, dy = torch.randn(4 * size, 2, 32), torch.randn(4 * size, 2, 32)
    weight, bias = torch.randn(32), torch.randn(32)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.norm = TurboNorm(config, 32, 1e-5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x)

    model = Model()
    with torch.no_grad():
        model.norm.weight.copy_(weight)
        if model.norm.bias is not None:
            model.norm.bias.copy_(bias)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    for _ in range(2):  # two microbatches
        wrapped(x.chunk(size)[rank]).backward(dy.chunk(size)[rank])
    finalize_model_grads([wrapped])

    whole = [t.double().requires_grad_() for t in (weight, bias)]
    if normalization == "RMSNorm":
        y = torch.nn.functional.rms_norm(x.double(), (32,), whole[0], 1e-5)
    else:
        y = torch.nn.functional.layer_norm(x.double(), (32,), whole[0], whole[1], 1e-5)
    y.backward(2 * dy.double())
    for parameter, reference in zip(model.parameters(), whole):
        torch.testing.assert_close(parameter.main_grad.double(), reference.grad, rtol=1e-5, atol=1e-5)
