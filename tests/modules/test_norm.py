"""modules/norm.py: against the norms Megatron's local spec runs, and the contract of parameters and checkpoints, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

pytestmark = pytest.mark.megatron


def _config(**fields: Any) -> Any:
    return megatron_config(**fields)


def _turbo(config: Any, hidden: int = 64, **arguments: Any) -> Any:
    from primus_turbo_plugin.modules import TurboNorm

    return TurboNorm(config=config, hidden_size=hidden, eps=config.layernorm_epsilon, **arguments)


def _randomise(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


def _run(module: Any, x: Tensor) -> list[Tensor]:
    y = module(x)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_equals_the_norm_of_megatrons_local_spec(rank_info: RankInfo, normalization: str) -> None:
    """fp32 to 1e-6; bf16 within one step of bf16, since both round once (layer norm's weight gradients, which torch sums in
    bf16 on a CPU, aside: those are held to float64 in tests/functional/test_norm.py)."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for dtype in (torch.float32, torch.bfloat16):
        config = _config(normalization=normalization, params_dtype=dtype, layernorm_epsilon=1e-4)
        theirs = WrappedTorchNorm(config, 64, config.layernorm_epsilon).to(dtype)
        ours = _turbo(config)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        for mine, torchs in zip(ours.parameters(), theirs.parameters()):
            assert torch.equal(mine, torchs)
            assert mine.dtype == torchs.dtype
        _randomise(theirs)
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(9, 2, 64).to(dtype).requires_grad_()
        compared = list(zip(_run(ours, x), _run(theirs, x)))
        if dtype == torch.bfloat16 and normalization == "LayerNorm":
            compared = compared[:1]
        for got, want in compared:
            assert got.dtype == want.dtype
            bar = 1e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(
                got, want, rtol=bar, atol=bar * want.abs().max().item() * (dtype == torch.float32)
            )


@ranks(world_size=1, megatron=True)
def test_a_zero_centred_gamma_starts_at_zero_and_means_the_same(rank_info: RankInfo) -> None:
    for normalization in ("RMSNorm", "LayerNorm"):
        plain = _turbo(_config(normalization=normalization))
        centred = _turbo(_config(normalization=normalization, layernorm_zero_centered_gamma=True))
        assert not centred.weight.any()
        x = torch.randn(5, 3, 64)
        assert torch.equal(plain(x), centred(x))
        _randomise(plain)
        centred.load_state_dict({**plain.state_dict(), "weight": plain.weight - 1})
        torch.testing.assert_close(centred(x), plain(x), rtol=1e-5, atol=1e-5)


@ranks(world_size=1, megatron=True)
def test_queries_and_keys_are_normalised_over_the_head_dimension(rank_info: RankInfo) -> None:
    config = _config(normalization="RMSNorm", qk_layernorm=True)
    norm = _turbo(config, hidden=16)
    _randomise(norm)
    mixed = torch.randn(7, 2, 4, 48, requires_grad=True)
    query = mixed[..., 16:32]  # [seq, batch, heads, dim], a slice of the projection
    got = norm(query)
    want = torch.nn.functional.rms_norm(query, (16,), norm.weight, config.layernorm_epsilon)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(y.square().sum(), mixed)[0] for y in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@ranks(world_size=1, megatron=True)
def test_parameters_say_whether_the_sequence_is_split(rank_info: RankInfo) -> None:
    """finalize_model_grads sums the gradients of those that say so, and of no others."""
    for sequence_parallel in (False, True):
        config = _config(normalization="LayerNorm", tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        parameters = list(_turbo(config).parameters())
        assert len(parameters) == 2
        assert all(parameter.sequence_parallel is sequence_parallel for parameter in parameters)


@ranks(world_size=1, megatron=True)
def test_a_fused_residual_is_returned_only_where_both_ask_for_it(rank_info: RankInfo) -> None:
    x = torch.randn(3, 2, 64)
    for fused in (False, True):
        config = _config(normalization="RMSNorm")
        config.fused_residual_rmsnorm = fused  # a field from 0.17
        assert isinstance(_turbo(config)(x), Tensor)
        result = _turbo(config, has_residual=True)(x)
        if fused:
            y, residual = result
            assert torch.equal(residual, x)
            assert torch.equal(y, _turbo(config)(x))
        else:
            assert isinstance(result, Tensor)


@ranks(world_size=1, megatron=True)
def test_checkpoints_of_transformer_engine_load(rank_info: RankInfo) -> None:
    """Their norms write an empty `_extra_state` beside the parameters."""
    block = torch.nn.ModuleDict({"final_layernorm": _turbo(_config(normalization="LayerNorm"))})
    state = {f"final_layernorm.{name}": torch.randn(64) for name in ("weight", "bias")}
    block.load_state_dict({**state, "final_layernorm._extra_state": torch.empty(0)}, strict=True)
    assert torch.equal(block["final_layernorm"].bias, state["final_layernorm.bias"])
    assert sorted(block.state_dict()) == sorted(state)


@ranks(world_size=1, megatron=True)
def test_the_sharded_state_is_replicated_and_named_as_megatrons(rank_info: RankInfo) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.utils import sharded_state_dict_default

    start_megatron()
    config = _config(normalization="LayerNorm")
    states = [
        sharded_state_dict_default(norm, "final_layernorm.") for norm in (WrappedTorchNorm(config, 64), _turbo(config))
    ]
    assert list(states[0]) == list(states[1]) == ["final_layernorm.weight", "final_layernorm.bias"]
    for key, theirs in states[0].items():
        assert states[1][key].global_shape == theirs.global_shape == (64,)
        assert states[1][key].replica_id == theirs.replica_id


@ranks(world_size=1, megatron=True)
def test_bf16_activations_meet_fp32_weights(rank_info: RankInfo) -> None:
    norm = _turbo(_config(normalization="RMSNorm", params_dtype=torch.float32))
    _randomise(norm)
    x = torch.randn(5, 64).bfloat16().requires_grad_()
    y = norm(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert norm.weight.grad.dtype == torch.float32
    want = torch.nn.functional.rms_norm(x.double(), (64,), norm.weight.double(), norm.eps)
    torch.testing.assert_close(y.double(), want, rtol=2**-8 * 1.01, atol=1e-6)


@ranks(world_size=1, megatron=True)
def test_settings_are_honoured_or_refused_by_name(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ConfigError
    from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan

    _turbo(_config(normalization="LayerNorm", persist_layer_norm=True))
    _turbo(_config(normalization="RMSNorm", memory_efficient_layer_norm=True))
    _turbo(_config(normalization="RMSNorm"), name="decoder.final_layernorm")
    with pytest.raises(ConfigError, match="memory_efficient_layer_norm=True"):
        _turbo(_config(normalization="LayerNorm", memory_efficient_layer_norm=True))
    config = _config()
    config.normalization = "BatchNorm"
    plan = ModulePlan(path="decoder.final_layernorm")
    with pytest.raises(
        ConfigError, match=r"decoder\.final_layernorm: normalization must be RMSNorm or LayerNorm, got 'BatchNorm'"
    ):
        _turbo(config, plan=plan)
    with pytest.raises(ConfigError, match="unknown keyword 'flavour'"):
        _turbo(_config(), flavour=1)
    plan = ModulePlan(kernels=KernelOrders.from_value({"norm": ["nobody"]}))
    with pytest.raises(ConfigError, match="nobody"):
        _turbo(_config(), plan=plan)(torch.ones(2, 64))


@ranks(world_size=1, megatron=True)
def test_parameters_can_be_made_on_the_meta_device_first(rank_info: RankInfo) -> None:
    config = _config(normalization="RMSNorm", use_cpu_initialization=False)
    config.init_model_with_meta_device = True
    norm = _turbo(config)
    assert norm.weight.is_meta
    norm.to_empty(device="cpu")
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(64))
