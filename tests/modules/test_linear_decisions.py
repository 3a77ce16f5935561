"""What a module keeps from its first call gives way when what decided it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, megatron_config, normal_, plan, start_megatron

pytestmark = pytest.mark.megatron

HIDDEN, TOKENS = 64, 32


def _column(config: Any, recipe: str) -> Any:
    from primus_turbo_plugin.modules import TurboLayerNormColumnParallelLinear

    torch.manual_seed(11)
    return TurboLayerNormColumnParallelLinear(
        HIDDEN, 2 * HIDDEN, config=config, init_method=normal_, bias=True, skip_bias_add=False, plan=plan(recipe)
    )


def _row(config: Any, recipe: str) -> Any:
    from primus_turbo_plugin.modules import TurboRowParallelLinear

    torch.manual_seed(12)
    both: dict[str, Any] = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    return TurboRowParallelLinear(HIDDEN, HIDDEN, config=config, init_method=normal_, plan=plan(recipe), **both)


def _step(layer: Any, x: Tensor, dy: Tensor, *, autocast: bool = False) -> list[Tensor]:
    """y, dx and every gradient of one forward and backward."""
    parameters = list(layer.parameters())
    for parameter in parameters:
        parameter.grad = None
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()
    x = leaf(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)[0]
    y.backward(dy[: y.shape[0]].to(y.dtype))
    assert x.grad is not None
    found = [y.detach(), x.grad, *(p.grad for p in parameters), *(getattr(p, "main_grad", None) for p in parameters)]
    return [t.clone() for t in found if t is not None]


def _attach(layer: Any, dtype: torch.dtype) -> None:
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=dtype)
    layer.weight.grad_added_to_main_grad, layer.weight.zero_out_wgrad = False, True


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_dtype_autocast_gradient_buffer_and_frozen_weights_decide_anew(rank_info: RankInfo, recipe: str) -> None:
    """Every setting in turn on one used layer, against a layer that never knew another."""
    start_megatron()
    config = megatron_config(params_dtype=torch.float32, gradient_accumulation_fusion=True, normalization="RMSNorm")
    g = torch.Generator().manual_seed(rank_info.seed)
    x, dy = (torch.randn(TOKENS, 1, n, generator=g) for n in (HIDDEN, 2 * HIDDEN))

    def prepare(layer: Any, buffer: torch.dtype, frozen: bool, training: bool) -> None:
        _attach(layer, buffer)
        layer.weight.requires_grad_(not frozen)
        layer.train(training)

    settings = [
        (autocast, buffer, frozen, training)
        for frozen, training in ((False, True), (True, True), (False, False))
        for buffer in (torch.float32, torch.bfloat16)
        for autocast in (False, True)
    ]
    used = _column(config, recipe)
    for autocast, *rest in [*settings, *reversed(settings)]:
        prepare(used, *rest)
        fresh = _column(config, recipe)
        prepare(fresh, *rest)
        for got, expected in zip(_step(used, x, dy, autocast=autocast), _step(fresh, x, dy, autocast=autocast)):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), (autocast, rest)


@ranks(world_size=2, megatron=True)
def test_sequence_parallelism_may_be_turned_off_and_on(rank_info: RankInfo) -> None:
    """As Megatron's inference does to a layer's `sequence_parallel` between two forwards."""
    start_megatron(tp=2)
    g = torch.Generator().manual_seed(rank_info.seed)
    x, dy = (torch.randn(TOKENS, 1, n, generator=g).bfloat16() for n in (HIDDEN, HIDDEN))
    common = {"params_dtype": torch.bfloat16, "normalization": "RMSNorm", "tensor_model_parallel_size": 2}
    for make in (_column, _row):
        used = make(megatron_config(sequence_parallel=True, **common), "mxfp4")
        for sequence_parallel in (True, False, True, False):
            fresh = make(megatron_config(sequence_parallel=sequence_parallel, **common), "mxfp4")
            used.sequence_parallel = sequence_parallel
            if make is _column:
                used.allreduce_dgrad = not sequence_parallel
            own = x if make is _column else x[:, :, rank_info.rank * HIDDEN // 2 :][:, :, : HIDDEN // 2]
            if sequence_parallel and make is _column:
                own = x.chunk(2)[rank_info.rank]
            for got, expected in zip(_step(used, own, dy), _step(fresh, own, dy)):
                assert torch.equal(got, expected), (make, sequence_parallel)


@ranks(world_size=1, megatron=True)
def test_a_norm_can_be_copied_after_its_first_call(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.modules import TurboNorm

    start_megatron()
    norm = TurboNorm(megatron_config(normalization="RMSNorm"), HIDDEN)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank_info.seed))
    y = norm(x)
    assert torch.equal(copy.deepcopy(norm)(x), y)


@ranks(world_size=1, megatron=True)
def test_the_first_microbatch_is_over_after_a_forward(rank_info: RankInfo) -> None:
    start_megatron()
    layer = _column(megatron_config(normalization="RMSNorm"), "bf16")
    for _ in range(2):
        assert layer.is_first_microbatch
        for _ in range(2):
            layer(torch.ones(TOKENS, 1, HIDDEN))
            assert not layer.is_first_microbatch
        layer.is_first_microbatch = True
