"""The provider honours Megatron's protocol, and any mix of providers builds."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.modules import (
    TurboColumnParallelGroupedLinear,
    TurboColumnParallelLinear,
    TurboDotProductAttention,
    TurboGroupedMLP,
    TurboLayerNormColumnParallelLinear,
    TurboLinear,
    TurboNorm,
    TurboRowParallelGroupedLinear,
    TurboRowParallelLinear,
)
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.specs import compat
from primus_turbo_plugin.specs.provider import TurboSpecProvider
from tests.megatron.tiny_gpt import Job, relative_difference, train
from tests.specs.configs import config
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron


def test_every_method_of_megatrons_protocol_takes_what_megatron_passes() -> None:
    """A signature of this release that ours could not serve would fail only where Megatron calls it."""
    from megatron.core.models.backends import BackendSpecProvider

    methods = {name for name in vars(BackendSpecProvider) if not name.startswith("_")}
    assert {"column_parallel_linear", "layer_norm", "grouped_mlp_modules", "activation_func"} <= methods
    for name in methods:
        theirs = inspect.signature(getattr(BackendSpecProvider, name)).parameters
        ours = inspect.signature(getattr(TurboSpecProvider, name)).parameters
        assert list(theirs) == list(ours)[: len(theirs)], name
        assert all(p.default is not p.empty for key, p in ours.items() if key not in theirs), name


def test_turbo_is_this_packages_classes() -> None:
    provider = TurboSpecProvider()
    assert provider.column_parallel_linear() is TurboColumnParallelLinear
    assert provider.row_parallel_linear() is TurboRowParallelLinear
    assert provider.column_parallel_layer_norm_linear() is TurboLayerNormColumnParallelLinear
    assert provider.linear() is TurboLinear
    assert provider.layer_norm(rms_norm=True) is TurboNorm
    assert provider.layer_norm(has_residual=True).module is TurboNorm
    assert provider.core_attention() is TurboDotProductAttention
    assert provider.fuse_layernorm_and_linear()
    assert provider.activation_func() is None


def test_megatron_is_megatrons_local_classes() -> None:
    from megatron.core.models import backends
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    before = backends.LNImpl
    provider = TurboSpecProvider(linear="megatron", norm="megatron", attention="megatron", normalization="RMSNorm")
    local = backends.LocalSpecProvider()
    assert provider.column_parallel_linear() is local.column_parallel_linear()
    assert provider.row_parallel_linear() is local.row_parallel_linear()
    assert provider.core_attention() is local.core_attention()
    assert provider.layer_norm() is WrappedTorchNorm
    assert backends.LNImpl is before, "asking for a norm changed a global of Megatron"
    assert not provider.fuse_layernorm_and_linear()
    assert provider.column_parallel_layer_norm_linear() is None


@pytest.mark.parametrize(("linear", "norm"), itertools.product(["turbo", "megatron"], repeat=2))
def test_norm_and_linear_are_fused_only_where_turbo_has_both(linear: str, norm: str) -> None:
    provider = TurboSpecProvider(linear=linear, norm=norm)
    assert provider.fuse_layernorm_and_linear() == (linear == norm == "turbo")


def test_experts_are_built_of_the_chosen_linears() -> None:
    """Megatron's own provider hard-codes its linears there, so that a mixture of experts would silently not be ours."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = TurboSpecProvider().grouped_mlp_modules(False)
    module, submodules = experts if isinstance(experts, tuple) else (experts.func, experts.keywords["submodules"])
    assert module is SequentialMLP
    assert submodules.linear_fc1 is TurboColumnParallelLinear
    assert submodules.linear_fc2 is TurboRowParallelLinear


def test_grouped_experts_are_this_packages() -> None:
    experts = TurboSpecProvider().grouped_mlp_modules(True)
    module, submodules = experts if isinstance(experts, tuple) else (experts.func, experts.keywords["submodules"])
    assert module is TurboGroupedMLP
    assert submodules.linear_fc1 is TurboColumnParallelGroupedLinear
    assert submodules.linear_fc2 is TurboRowParallelGroupedLinear


def test_grouped_gemm_of_megatrons_linears_is_refused_by_name() -> None:
    """Megatron's local provider ignores the flag from 0.17 on."""
    with pytest.raises(UnsupportedError, match=r"moe_grouped_gemm.*--moe-grouped-gemm.*'linear: turbo'"):
        TurboSpecProvider(linear="megatron").grouped_mlp_modules(True)


@pytest.mark.parametrize("component", ["linear", "norm", "attention"])
def test_absent_transformer_engine_is_refused_with_the_remedy(component: str) -> None:
    assert not compat.transformer_engine_is_installed()
    with pytest.raises(UnsupportedError, match=rf"{component}.*not installed.*'{component}: turbo'"):
        TurboSpecProvider(**{component: "transformer_engine"})


def test_unknown_provider_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"norm: must be one of turbo, megatron, transformer_engine; got 'apex'"):
        TurboSpecProvider(norm="apex")


class _Engine:
    """Stands for Transformer Engine's provider: says which method was asked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: (name, args, kwargs)


def test_transformer_engine_gets_every_question_of_its_components(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primus_turbo_plugin.specs.provider._transformer_engine_provider", lambda component: _Engine())
    turbo = TurboConfig(linear="transformer_engine", norm="transformer_engine")
    provider = TurboSpecProvider.from_config(config(), turbo)
    for method in ["column_parallel_linear", "row_parallel_linear", "linear", "column_parallel_layer_norm_linear"]:
        assert getattr(provider, method)() == (method, (), {})
    assert provider.activation_func()[0] == "activation_func"
    assert provider.grouped_mlp_modules(True)[0] == "grouped_mlp_modules"
    assert provider.layer_norm(rms_norm=True, has_residual=True)[0] == "layer_norm"
    assert provider.fuse_layernorm_and_linear()
    assert provider.core_attention() is TurboDotProductAttention


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
def test_every_mix_of_providers_gives_the_same_losses(rank_info: RankInfo) -> None:
    job = Job(steps=3, tensor=2, seed=rank_info.seed, model={"qk_layernorm": True})
    expected = train(job.but(spec="local")).losses
    for linear, norm, attention in itertools.product(["turbo", "megatron"], repeat=3):
        turbo = {"linear": linear, "norm": norm, "attention": attention}
        assert relative_difference(train(job.but(turbo=turbo)).losses, expected) <= 1e-5, turbo
