"""What Megatron itself does inside `megatron_on_cpu`, in real processes, on every supported release."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(out, tensor)
    return out


@ranks(world_size=2, megatron=True)
def test_tensor_parallel_ranks_draw_their_own_numbers_in_the_tracker_and_common_ones_outside(
    rank_info: RankInfo,
) -> None:
    """Dropout must differ on what is split, and agree on what is replicated."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(rank_info.seed % 2**31)
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        own = _gathered(torch.nn.functional.dropout(torch.ones(4096), 0.5))
    common = _gathered(torch.nn.functional.dropout(torch.ones(4096), 0.5))
    with tracker.fork():
        later = _gathered(torch.nn.functional.dropout(torch.ones(4096), 0.5))
    assert not torch.equal(own[0], own[1])
    assert torch.equal(common[0], common[1])
    assert not torch.equal(own[0], later[0])


@ranks(world_size=2, megatron=True)
def test_recomputed_dropout_is_the_same_dropout(rank_info: RankInfo) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(rank_info.seed % 2**31)

    def layer(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            x = torch.nn.functional.dropout(x, 0.5)
        return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(512, requires_grad=True)
    y = checkpoint(layer, False, x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())  # both are the mask times 4


def _optimizer(seed: int) -> tuple[Any, Any]:
    """A module under Megatron's DDP and its distributed optimizer over torch's Adam."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    module.config = config  # type: ignore[assignment]
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), module)
    settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    chained = get_megatron_optimizer(settings, [model])
    return model, getattr(chained, "chained_optimizers", [chained])[0]


def _step(model: Any, optimizer: Any) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    model.finish_grad_sync()
    optimizer.step()


@ranks(world_size=[1, 2], megatron=True)
def test_a_loaded_distributed_optimizer_counts_its_steps_once_a_parameter(rank_info: RankInfo) -> None:
    """Adam corrects its moments by the step count: zero, or one that all parameters advance, changes every update."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    _, fresh = _optimizer(seed=1)
    assert {group["step"] for group in fresh.state_dict()["optimizer"]["param_groups"]} == {0.0}  # before any step

    model, trained = _optimizer(seed=1)
    for _ in range(3):
        _step(model, trained)
    fresh.load_state_dict(copy.deepcopy(trained.state_dict()))
    steps = [state["step"] for state in fresh.optimizer.state.values()]
    assert [float(step) for step in steps] == [3.0] * len(steps)
    assert len({step.data_ptr() for step in steps}) == len(steps)


@ranks(world_size=2, megatron=True)
def test_restoring_parameter_state_leaves_the_step_count_alone(rank_info: RankInfo) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    model, optimizer = _optimizer(seed=2)
    for _ in range(2):
        _step(model, optimizer)
    for parameter in optimizer.model_param_group_index_map:
        group, order = optimizer.model_param_group_index_map[parameter]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        state = optimizer.optimizer.state[main]
        saved = {name: torch.full_like(main, 0.5) for name in ("param", "exp_avg", "exp_avg_sq")}
        for stale in ({}, {"step": torch.tensor(0.0)}):  # checkpoint formats leave it out, or hold a stale one
            optimizer._set_main_param_and_optimizer_states(parameter, {**saved, **stale})
            assert float(state["step"]) == 2.0
        assert torch.equal(main, saved["param"])
        assert torch.equal(state["exp_avg"], saved["exp_avg"])
