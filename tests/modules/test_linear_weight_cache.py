"""Weights are quantised once a step and never used stale, through Megatron's schedules, optimizers, recomputation, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.reference.gemm import gemm_nt
from primus_turbo_plugin.kernels.reference.quantize import quantize
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, normal_, plan, start_megatron

pytestmark = pytest.mark.megatron

HIDDEN, TOKENS, MICROBATCHES = 32, 16, 4


class _Count:
    """How often weights were quantised (either copy, or both at once)."""

    def __init__(self) -> None:
        self.weights = 0

    def take(self) -> int:
        taken, self.weights = self.weights, 0
        return taken


@contextmanager
def _counting() -> Iterator[_Count]:
    count, quantize = _Count(), LinearKernels.quantize

    def counted(self: Any, operand: str, t: Tensor, row: Any, column: Any, key: Any, **options: Any) -> Any:
        count.weights += operand == "w" and (row is not None or column is not None)
        return quantize(self, operand, t, row, column, key, **options)

    LinearKernels.quantize = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        LinearKernels.quantize = quantize  # type: ignore[method-assign]


def _model(config: Any, *, recompute: bool = False, **ddp: Any) -> Any:
    """One quantised layer under DDP, which checks each of its forwards against a fresh quantisation."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.transformer.module import MegatronModule

    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            of = plan("mxfp4", path="decoder.layers.0.mlp.linear_fc1")
            self.fc1 = TurboColumnParallelLinear(
                HIDDEN, HIDDEN, config=config, init_method=normal_, bias=False, gather_output=False, plan=of
            )
            self.scale = torch.nn.Parameter(torch.ones(HIDDEN, dtype=config.params_dtype))

        def set_input_tensor(self, _: Any) -> None: ...

        def forward(self, x: Tensor) -> Tensor:
            x = (
                x * self.scale
            )  # Megatron's checkpoint runs its first pass without gradients, and needs an input that wants one
            return (checkpoint(self._layer, False, x) if recompute else self._layer(x)).float()

        def _layer(self, x: Tensor) -> Tensor:
            y = self.fc1(x)[0]
            stale = not torch.equal(y.detach().flatten(0, -2), _fresh(x, self.fc1.weight))
            assert not stale, "a stale copy of the weight was used"
            return y

    settings = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": False, **ddp}
    return DistributedDataParallel(config, DistributedDataParallelConfig(**settings), Model())


def _fresh(x: Tensor, weight: Tensor) -> Tensor:
    """What the layer must give: nothing cached, straight through the kernels."""
    precision = plan("mxfp4").precision
    rows = x.detach().flatten(0, -2)
    return gemm_nt(quantize(rows, precision.fprop_x), quantize(weight.detach(), precision.fprop_w), out_dtype=x.dtype)


def _optimizer(model: Any, **settings: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(optimizer="adam", lr=0.05, clip_grad=0.0, **settings)
    return get_megatron_optimizer(config, [model])


def _schedule(model: Any, *, forward_only: bool = False) -> None:
    """`MICROBATCHES` microbatches through Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[Tensor], module: Any) -> Any:
        y = module(next(data))
        return y, lambda out: (out.square().mean(), {"loss": out.detach().mean()})

    dtype = next(model.parameters()).dtype
    batches = iter([torch.randn(TOKENS, 1, HIDDEN).to(dtype) for _ in range(MICROBATCHES)])
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _train(model: Any, optimizer: Any, count: _Count, steps: int, evaluate: bool) -> tuple[list[int], list[int]]:
    """Quantisations in each training step and each evaluation."""
    training, evaluation = [], []
    for _ in range(steps):
        model.train()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        count.take()
        _schedule(model)
        training.append(count.take())
        optimizer.step()
        if evaluate:
            model.eval()
            with torch.no_grad():
                _schedule(model, forward_only=True)
            evaluation.append(count.take())
    return training, evaluation


@ranks(world_size=[1, 2], megatron=True)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_once_a_step_over_four_microbatches(rank_info: RankInfo, distributed_optimizer: bool, recompute: bool) -> None:
    """Both with Megatron's announcements (fp8 set) and without, where the optimizer clock stands in from the second step on."""
    start_megatron()
    torch.manual_seed(rank_info.seed + rank_info.rank)
    for announced in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            config = megatron_config(
                params_dtype=dtype, bf16=dtype == torch.bfloat16, fp8="hybrid" if announced else None
            )
            model = _model(config, recompute=recompute, use_distributed_optimizer=distributed_optimizer)
            optimizer = _optimizer(model, bf16=dtype == torch.bfloat16, use_distributed_optimizer=distributed_optimizer)
            cache = model.module.fc1._weight_cache
            with _counting() as count:
                fresh_clock = cache.clock.steps == 0
                training, _ = _train(model, optimizer, count, 3, evaluate=False)
            assert cache.announced == announced
            first = 1 if announced or not fresh_clock else MICROBATCHES * (2 if recompute else 1)
            assert training == [first, 1, 1], (announced, dtype, training)


@ranks(world_size=1, megatron=True)
def test_evaluation_between_steps_sees_the_new_weight_and_leaves_training_alone(rank_info: RankInfo) -> None:
    start_megatron()
    for announced in (False, True):
        config = megatron_config(fp8="hybrid" if announced else None)
        model = _model(config, use_distributed_optimizer=True)
        optimizer = _optimizer(model, use_distributed_optimizer=True)
        with _counting() as count:
            training, evaluation = _train(model, optimizer, count, 3, evaluate=True)
        assert training[1:] == [1, 1]
        # Unannounced, evaluation may run on averaged weights that nothing tells of: quantised afresh each time.
        assert evaluation == ([1, 1, 1] if announced else [MICROBATCHES] * 3)


@ranks(world_size=1, megatron=True)
def test_a_weight_swapped_behind_torchs_back_for_evaluation_is_seen(rank_info: RankInfo) -> None:
    """Averaged weights are swapped in through .data, without a version or a step."""
    start_megatron()
    model = _model(megatron_config())
    optimizer = _optimizer(model)
    with _counting() as count:
        _train(model, optimizer, count, 2, evaluate=False)
        for announced in (False, True):
            weight = model.module.fc1.weight
            weight.data.mul_(-1.5)
            if announced:
                for module in model.modules():
                    if getattr(module, "is_first_microbatch", None) is not None:
                        module.is_first_microbatch = True
            else:
                model.eval()
            with torch.no_grad():
                model(torch.randn(TOKENS, 1, HIDDEN))  # checks itself
            weight.data.div_(-1.5)


@ranks(world_size=1, megatron=True)
def test_a_checkpoint_loaded_between_microbatches_is_seen(rank_info: RankInfo) -> None:
    start_megatron()
    model = _model(megatron_config())
    optimizer = _optimizer(model)
    with _counting() as count:
        _train(model, optimizer, count, 2, evaluate=False)
        _schedule(model)
        state = {name: value * 2 for name, value in model.module.state_dict().items() if value is not None}
        model.module.load_state_dict(state)
        count.take()
        _schedule(model)  # each forward checks itself
        assert count.take() == 1


@ranks(world_size=1, megatron=True)
def test_without_megatrons_training_loop_every_forward_quantises(rank_info: RankInfo) -> None:
    """Nobody then reports a change through .data: correctness before speed."""
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    start_megatron()
    layer = TurboColumnParallelLinear(
        HIDDEN, HIDDEN, config=megatron_config(), init_method=normal_, bias=False, plan=plan("mxfp4")
    )
    x = torch.randn(TOKENS, 1, HIDDEN)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()  # nothing to do, yet the clock ticks
    with _counting() as count:
        for _ in range(3):
            y = layer(x)[0]
            assert torch.equal(y[:, 0], _fresh(x, layer.weight))
            layer.weight.data.mul_(1.5)
        assert count.take() == 3


@ranks(world_size=1, megatron=True)
def test_only_the_first_microbatch_begins_a_step(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    start_megatron()
    layer = TurboColumnParallelLinear(
        HIDDEN, HIDDEN, config=megatron_config(), init_method=normal_, bias=False, plan=plan("mxfp4")
    )
    layer.is_first_microbatch = True
    with _counting() as count:
        for first in (True, False, False, True):
            layer.is_first_microbatch = first
            layer(torch.randn(TOKENS, 1, HIDDEN))
        assert count.take() == 2


@ranks(world_size=1, megatron=True)
def test_an_unquantised_layer_has_no_cache(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    start_megatron()
    layer = TurboColumnParallelLinear(HIDDEN, HIDDEN, config=megatron_config(), init_method=normal_, bias=False)
    assert layer._weight_cache is None
    assert layer.is_first_microbatch
    layer.is_first_microbatch = True
    layer(torch.randn(TOKENS, 1, HIDDEN))
    assert not layer.is_first_microbatch
