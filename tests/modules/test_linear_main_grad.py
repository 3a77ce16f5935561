"""Weight gradients into `main_grad`, under Megatron's own DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, megatron_config, normal_, plan, relative_error, start_megatron

pytestmark = pytest.mark.megatron

MICROBATCHES, HIDDEN, TOKENS = 4, 32, 16


def _network(config: Any, *, turbo: bool, seed: int, recipe: str = "bf16") -> Any:
    """Two layers, a column- and a row-parallel one."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.module import MegatronModule

    from primus_turbo_plugin.modules import TurboColumnParallelLinear, TurboRowParallelLinear

    class Network(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            column, row = (
                (TurboColumnParallelLinear, TurboRowParallelLinear)
                if turbo
                else (ColumnParallelLinear, RowParallelLinear)
            )
            own = {"plan": plan(recipe)} if turbo else {}
            torch.manual_seed(seed)
            both: dict[str, Any] = {
                "config": config,
                "init_method": normal_,
                "bias": True,
                "skip_bias_add": False,
                **own,
            }
            self.fc1 = column(HIDDEN, 2 * HIDDEN, gather_output=False, **both)
            self.fc2 = row(2 * HIDDEN, HIDDEN, input_is_parallel=True, **both)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(torch.nn.functional.gelu(self.fc1(x)[0]))[0]

    return Network()


def _ddp(network: Any, config: Any, **settings: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": False, **settings}
    return DistributedDataParallel(config, DistributedDataParallelConfig(**settings), network)


def _step(model: Any, inputs: list[Tensor], after_backward: Any = None) -> tuple[dict[str, Tensor], list[str]]:
    """Gradients of `len(inputs)` microbatches, and the parameters in the order in which DDP's hooks saw them."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    seen: list[str] = []
    hook = type(model.bucket_groups[0]).register_grad_ready

    def noting(group: Any, parameter: Any, *rest: Any) -> Any:
        seen.append(names[id(parameter)])
        return hook(group, parameter, *rest)

    model.zero_grad_buffer()
    type(model.bucket_groups[0]).register_grad_ready = noting
    try:
        for index, x in enumerate(inputs):
            last = index == len(inputs) - 1
            with torch.enable_grad() if last else model.no_sync():
                y = model(x)
                (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
                if after_backward is not None:
                    after_backward()
        model.finish_grad_sync()
    finally:
        type(model.bucket_groups[0]).register_grad_ready = hook
    grads = {name: parameter.main_grad.clone() for name, parameter in model.module.named_parameters()}
    return grads, seen


@ranks(world_size=[1, 2], megatron=True)
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_four_microbatches_equal_megatrons(rank_info: RankInfo, overlap: bool) -> None:
    """The fault of a peer: only the first microbatch reached main_grad. Data-parallel ranks see different inputs."""
    start_megatron()
    g = torch.Generator().manual_seed(rank_info.seed + rank_info.rank)
    for dtype, bar in ((torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)):
        inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=g).to(dtype) for _ in range(MICROBATCHES)]
        results, orders = {}, {}
        for name, turbo, fused in (("megatron", False, False), ("unfused", True, False), ("fused", True, True)):
            config = megatron_config(params_dtype=dtype, gradient_accumulation_fusion=fused)
            model = _ddp(_network(config, turbo=turbo, seed=rank_info.seed), config, overlap_grad_reduce=overlap)
            for _ in range(2):  # a second step must start from zero again
                results[name], orders[name] = _step(model, inputs)
            assert all(p.grad is None for p in model.module.parameters())
        for name, expected in results["megatron"].items():
            assert torch.equal(results["unfused"][name], expected), name
            assert relative_error(results["fused"][name], expected) < bar, (name, dtype)
            assert results["fused"][name].dtype == torch.float32
        assert orders["fused"] == orders["unfused"]
        layers = {key: [name.split(".")[0] for name in order] for key, order in orders.items()}
        assert layers["fused"] == layers["megatron"]  # within a layer, ours hands over weight and bias together
        assert len(orders["fused"]) == (4 * MICROBATCHES if overlap else 0)


@ranks(world_size=1, megatron=True)
def test_fused_gradients_lose_less_than_bf16_ones(rank_info: RankInfo) -> None:
    """What fp32 accumulation is for: unfused, each microbatch's gradient is rounded to bf16 first."""
    start_megatron()
    g = torch.Generator().manual_seed(rank_info.seed)
    inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=g).bfloat16() for _ in range(MICROBATCHES)]
    grads = {}
    for name, dtype, fused in (
        ("exact", torch.float32, False),
        ("fused", torch.bfloat16, True),
        ("unfused", torch.bfloat16, False),
    ):
        config = megatron_config(params_dtype=dtype, gradient_accumulation_fusion=fused)
        network = _network(config, turbo=True, seed=rank_info.seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(parameter.bfloat16())
        # Only the last layer's gradient: its operands are the same bf16 numbers in all three up to fc1's rounding.
        model = _ddp(network, config)
        grads[name] = _step(model, [x.to(dtype) for x in inputs])[0]["fc1.weight"]
    fused, unfused = (relative_error(grads[name], grads["exact"]) for name in ("fused", "unfused"))
    assert fused <= unfused


@ranks(world_size=1, megatron=True)
def test_quantised_gradients_accumulate_over_microbatches(rank_info: RankInfo) -> None:
    """mxfp4: the fused sum equals the sum of the unfused gradients."""
    start_megatron()
    g = torch.Generator().manual_seed(rank_info.seed)
    inputs = [torch.randn(TOKENS, 2, HIDDEN, generator=g) for _ in range(MICROBATCHES)]
    results = []
    for fused in (False, True):
        config = megatron_config(gradient_accumulation_fusion=fused)
        model = _ddp(_network(config, turbo=True, seed=rank_info.seed, recipe="mxfp4"), config)
        results.append(_step(model, inputs)[0])
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-6, name


@ranks(world_size=1, megatron=True)
def test_a_16_bit_buffer_takes_rounded_sums(rank_info: RankInfo) -> None:
    start_megatron()
    g = torch.Generator().manual_seed(rank_info.seed)
    inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=g).bfloat16() for _ in range(MICROBATCHES)]
    results = []
    for fused in (False, True):
        config = megatron_config(params_dtype=torch.bfloat16, gradient_accumulation_fusion=fused)
        network = _network(config, turbo=True, seed=rank_info.seed)
        model = _ddp(network, config, grad_reduce_in_fp32=False)
        assert network.fc1.weight.main_grad.dtype == torch.bfloat16
        results.append(_step(model, inputs)[0])
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 2e-2, name


@ranks(world_size=1, megatron=True)
def test_a_weight_shared_with_an_embedding_gets_both_gradients(rank_info: RankInfo) -> None:
    """With zero_out_wgrad DDP adds what backward returned: it must be zeros, plus the embedding's own gradient."""
    start_megatron()
    results = []
    for fused in (False, True):
        config = megatron_config(gradient_accumulation_fusion=fused)
        network = _network(config, turbo=True, seed=rank_info.seed)
        network.fc1.weight.zero_out_wgrad = True

        def forward(x: Tensor, network: Any = network) -> Tensor:
            rows = torch.nn.functional.embedding(torch.arange(TOKENS), network.fc1.weight)  # [tokens, hidden]
            return network.fc2(network.fc1(x + rows.unsqueeze(1))[0])[0]

        network.forward = forward
        model = _ddp(network, config)
        inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        poison = torch.full((1 << 20,), float("nan"))  # what torch.empty may be given
        del poison
        results.append(_step(model, inputs)[0])
    for name, expected in results[0].items():
        assert relative_error(results[1][name], expected) < 1e-6, name


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_delayed_gradients_come_with_backward_dw(rank_info: RankInfo, fused: bool, overlap: bool) -> None:
    start_megatron()
    g = torch.Generator().manual_seed(rank_info.seed)
    inputs = [torch.randn(TOKENS, 1, HIDDEN, generator=g) for _ in range(MICROBATCHES)]
    config = megatron_config(gradient_accumulation_fusion=fused)
    model = _ddp(_network(config, turbo=True, seed=rank_info.seed), config)
    expected, _ = _step(model, inputs)

    config = megatron_config(gradient_accumulation_fusion=fused)
    config.delay_wgrad_compute = True  # Megatron's own check wants expert overlap with it
    network = _network(config, turbo=True, seed=rank_info.seed)
    model = _ddp(network, config, overlap_grad_reduce=overlap, delay_wgrad_compute=True)
    before: list[Tensor] = []

    def later() -> None:
        before.append(network.fc1.weight.main_grad.clone())
        network.fc2.backward_dw()
        network.fc1.backward_dw()
        network.fc1.backward_dw()  # nothing left: harmless

    grads, seen = _step(model, inputs, after_backward=later)
    assert not before[0].any()  # backward itself computed no weight gradient
    for name, value in expected.items():
        assert relative_error(grads[name], value) < 1e-6, name
    if overlap:
        assert seen.count("fc1.weight") == seen.count("fc1.bias") == MICROBATCHES
        assert seen.index("fc1.weight") > seen.index("fc1.bias")


@ranks(world_size=1, megatron=True)
def test_delayed_gradients_reach_a_ddp_that_does_not_know_of_the_delay(rank_info: RankInfo) -> None:
    start_megatron()
    x = [torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(rank_info.seed))]
    for fused in (False, True):
        config = megatron_config(gradient_accumulation_fusion=fused)
        expected, _ = _step(_ddp(_network(config, turbo=True, seed=1), config), x)
        config.delay_wgrad_compute = True
        network = _network(config, turbo=True, seed=1)

        def later(network: Any = network) -> None:
            network.fc1.backward_dw()
            network.fc2.backward_dw()

        grads, _ = _step(_ddp(network, config), x, after_backward=later)
        for name, value in expected.items():
            assert relative_error(grads[name], value) < 1e-6, name


@ranks(world_size=1, megatron=True)
def test_frozen_weights_are_left_alone(rank_info: RankInfo) -> None:
    start_megatron()
    config = megatron_config(gradient_accumulation_fusion=True)
    network = _network(config, turbo=True, seed=rank_info.seed)
    network.fc1.weight.requires_grad_(False)
    model = _ddp(network, config, overlap_grad_reduce=True)
    attributes = dict(vars(network.fc1.weight))
    x = torch.randn(TOKENS, 1, HIDDEN)
    model.zero_grad_buffer()
    model(x).sum().backward()
    model.finish_grad_sync()
    assert vars(network.fc1.weight) == attributes
    assert network.fc1.weight.grad is None
    assert network.fc2.weight.main_grad.any()


def _single(config: Any) -> Any:
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    return TurboColumnParallelLinear(
        HIDDEN, HIDDEN, config=config, init_method=normal_, bias=False, gather_output=False, plan=plan(path="fc1")
    )


@ranks(world_size=1, megatron=True)
def test_overwrite_main_grad_replaces_stale_contents(rank_info: RankInfo) -> None:
    start_megatron()
    for dtype in (torch.float32, torch.bfloat16):
        layer = _single(megatron_config(gradient_accumulation_fusion=True))
        x = torch.randn(TOKENS, 1, HIDDEN)
        layer.weight.main_grad = torch.full((HIDDEN, HIDDEN), float("nan"), dtype=dtype)
        layer.weight.overwrite_main_grad = True
        layer.weight.grad_added_to_main_grad = False
        for _ in range(2):
            layer(x)[0].sum().backward()
            assert layer.weight.grad_added_to_main_grad
            layer.weight.grad = None
            expected = torch.ones(TOKENS, HIDDEN).t() @ x.squeeze(1)
            assert relative_error(layer.weight.main_grad, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@ranks(world_size=1, megatron=True)
def test_fusion_without_main_grad_and_fsdp_are_refused_by_name(rank_info: RankInfo) -> None:
    start_megatron()
    layer = _single(megatron_config(gradient_accumulation_fusion=True))
    y = layer(torch.randn(TOKENS, 1, HIDDEN))[0]
    with pytest.raises(ConfigError, match=r"fc1: gradient_accumulation_fusion needs weight\.main_grad"):
        y.sum().backward()
    layer.weight.__fsdp_param__ = True
    with pytest.raises(UnsupportedError, match="fc1: Megatron-FSDP"):
        layer(torch.randn(TOKENS, 1, HIDDEN))


@ranks(world_size=[1, 2], megatron=True)
def test_a_deferred_output_layer_leaves_its_operands_to_megatron(rank_info: RankInfo) -> None:
    """defer_embedding_wgrad_compute: Megatron drains the two buffers itself, when the pipeline is idle."""
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    size = rank_info.world_size
    start_megatron(tp=size)
    for limit, deferred in ((0, 2), (1, 1)):
        config = megatron_config(
            gradient_accumulation_fusion=True, tensor_model_parallel_size=size, sequence_parallel=size > 1
        )
        config.defer_embedding_wgrad_compute, config.wgrad_deferral_limit = True, limit
        activations: list[Tensor] = []
        gradients: list[Tensor] = []
        layer = TurboColumnParallelLinear(
            HIDDEN,
            2 * HIDDEN,
            config=config,
            init_method=normal_,
            bias=False,
            embedding_activation_buffer=activations,
            grad_output_buffer=gradients,
        )
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        layer.weight.grad_added_to_main_grad = False
        xs = [torch.randn(TOKENS // size, 2, HIDDEN) for _ in range(2)]
        sources = [leaf(x) for x in xs]
        for source in sources:
            y = layer(source)[0]
            y.backward(torch.ones_like(y))
            layer.weight.grad = None
        assert [len(activations), len(gradients)] == [deferred, deferred]
        assert all(torch.equal(kept, x) for kept, x in zip(activations, xs))
        assert all(dy.shape == (TOKENS, 2, 2 * HIDDEN // size) for dy in gradients)
        assert all(source.grad.shape == source.shape for source in sources)
        assert bool(layer.weight.main_grad.any()) == (deferred < 2)
        assert layer.weight.grad_added_to_main_grad
