"""What Megatron asks of a linear besides its numbers: arguments, returned tuples, state, checkpoints, settings."""

from __future__ import annotations

import io
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, megatron_config, normal_, plan, relative_error, start_megatron

pytestmark = pytest.mark.megatron

K, N = 32, 64
KINDS = ("column", "row", "layernorm_column", "duplicated")


def _layer(kind: str, config: Any, *, bias: bool = True, skip_bias_add: bool = False, **arguments: Any) -> Any:
    from primus_turbo_plugin import modules

    cls, own = {
        "column": (modules.TurboColumnParallelLinear, {"gather_output": False}),
        "row": (modules.TurboRowParallelLinear, {"input_is_parallel": True}),
        "layernorm_column": (modules.TurboLayerNormColumnParallelLinear, {"gather_output": False}),
        "duplicated": (modules.TurboLinear, {"parallel_mode": "duplicated"}),
    }[kind]
    kind_of = {"init_method": normal_, "bias": bias, "skip_bias_add": skip_bias_add, "is_expert": False, **own}
    return cls(K, N, config=config, **{**kind_of, **arguments})


def _megatrons(kind: str, config: Any, **arguments: Any) -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    both = {"config": config, "init_method": normal_, "bias": True, "skip_bias_add": False, **arguments}
    if kind == "row":
        return RowParallelLinear(K, N, input_is_parallel=True, **both)
    return ColumnParallelLinear(K, N, gather_output=False, **both)


@ranks(world_size=1, megatron=True)
def test_both_releases_arguments_are_accepted_and_others_named(rank_info: RankInfo) -> None:
    start_megatron()
    config = megatron_config()
    group = torch.distributed.group.WORLD
    collection = types.SimpleNamespace(tp=group, expt_tp=group)
    for kind in KINDS:
        layer = _layer(kind, config, tp_comm_buffer_name="fc1", name="decoder.layers.0", pg_collection=collection)
        y, bias = layer(torch.randn(3, 2, K))
        assert y.shape == (3, 2, N)
        assert bias is None
        skipping = _layer(kind, config, skip_bias_add=True)
        y, bias = skipping(torch.randn(3, 2, K))
        assert bias is skipping.bias
        assert _layer(kind, config, bias=False, skip_bias_add=True)(torch.randn(3, 2, K))[1] is None
        with pytest.raises(ConfigError, match=r"unknown keyword 'nmae' \(value 'x'\).*known: .*name, pg_collection"):
            _layer(kind, config, nmae="x")
        with pytest.raises(UnsupportedError, match="gtp_remat_group="):
            _layer(kind, config, gtp_remat_group=group)
        with pytest.raises(UnsupportedError, match="symmetric_ar_type='two_shot'"):
            _layer(kind, config, symmetric_ar_type="two_shot")
        assert _layer(kind, config, symmetric_ar_type=None, gtp_remat_group=None)


@ranks(world_size=1, megatron=True)
def test_a_process_group_collection_names_the_group(rank_info: RankInfo) -> None:
    start_megatron()
    mine, experts = torch.distributed.new_group([0]), torch.distributed.new_group([0])
    collection = types.SimpleNamespace(tp=mine, expt_tp=experts)
    assert _layer("column", megatron_config(), pg_collection=collection).tp_group is mine
    assert _layer("row", megatron_config(), pg_collection=collection, is_expert=True).tp_group is experts
    assert _layer("row", megatron_config(), pg_collection=collection, tp_group=experts).tp_group is experts


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize(
    ("setting", "value"),
    [("fp8", "hybrid"), ("fp4", "e2m1"), ("cpu_offloading", True), ("symmetric_ar_type", "one_shot")],
)
def test_settings_that_would_be_ignored_are_refused_by_name(rank_info: RankInfo, setting: str, value: Any) -> None:
    start_megatron()
    config = megatron_config()
    setattr(config, setting, value)  # some are checked by Megatron's own constructor too, which needs a GPU's libraries
    for kind in KINDS:
        with pytest.raises(UnsupportedError, match=f"{setting}={value!r}: "):
            _layer(kind, config)
        if setting in ("fp8", "fp4"):  # whoever made the plan has weighed them
            _layer(kind, config, plan=plan("mxfp8"))


@ranks(world_size=2, megatron=True)
def test_tp_comm_overlap_is_refused_where_no_plan_answers_it(rank_info: RankInfo) -> None:
    start_megatron(tp=2)
    config = megatron_config(tensor_model_parallel_size=2, sequence_parallel=True)
    config.tp_comm_overlap = True
    for kind in ("column", "row", "layernorm_column"):
        with pytest.raises(UnsupportedError, match=r"tp_comm_overlap=True.*no plan that answers it"):
            _layer(kind, config)
        _layer(kind, config, plan=plan())
    _layer("duplicated", config)


@ranks(world_size=1, megatron=True)
def test_arguments_a_layer_cannot_honour_are_refused(rank_info: RankInfo) -> None:
    start_megatron()
    config = megatron_config()
    for arguments in ({"parallel_mode": "column"}, {"gather_output": True}, {"is_expert": True}):
        with pytest.raises(ConfigError, match="Use TurboColumnParallelLinear"):
            _layer("duplicated", config, **arguments)
    for arguments in ({"is_expert": True}, {"skip_weight_param_allocation": True}):
        with pytest.raises(ConfigError, match="Use a norm and a TurboColumnParallelLinear"):
            _layer("layernorm_column", config, **arguments)
    config.normalization = "L2Norm"
    with pytest.raises(ConfigError, match="normalization must be LayerNorm or RMSNorm, got 'L2Norm'"):
        _layer("layernorm_column", config)
    refusing = plan("mxfp4", padding="refuse", path="decoder.layers.3.mlp.linear_fc1")
    from primus_turbo_plugin.modules import TurboColumnParallelLinear

    with pytest.raises(ShapeError, match=r"^recipe 'mxfp4', decoder\.layers\.3\.mlp\.linear_fc1: K, .* got 100"):
        TurboColumnParallelLinear(100, 64, config=megatron_config(), init_method=normal_, plan=refusing)


@ranks(world_size=1, megatron=True)
def test_a_quantisation_recipe_of_megatrons_for_this_module_is_refused(rank_info: RankInfo) -> None:
    """GPTModel calls finish_init on every module with what `quant_recipe` matched."""
    start_megatron()
    for kind in KINDS:
        layer = _layer(kind, megatron_config(), plan=plan(path="decoder.layers.0.mlp.linear_fc1"))
        layer.finish_init(None)
        with pytest.raises(ConfigError, match=r"linear_fc1: quant_recipe"):
            layer.finish_init(types.SimpleNamespace(config={"fp8": "mxfp8"}))


@ranks(world_size=1, megatron=True)
def test_instances_are_megatrons_own_kinds_and_keep_the_callers_config(rank_info: RankInfo) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    start_megatron()
    config = megatron_config(gradient_accumulation_fusion=True)  # without Apex
    for kind, cls in {
        "column": ColumnParallelLinear,
        "layernorm_column": ColumnParallelLinear,
        "row": RowParallelLinear,
    }.items():
        layer = _layer(kind, config)
        assert isinstance(layer, cls)
        assert layer.config is config
        assert config.gradient_accumulation_fusion
        assert layer.gradient_accumulation_fusion


@ranks(world_size=1, megatron=True)
def test_state_dicts_load_from_megatrons_and_transformer_engines_and_back(rank_info: RankInfo) -> None:
    """Transformer Engine writes its extra state as bytes in a uint8 tensor or a buffer; Megatron's local layers None."""
    start_megatron()
    config = megatron_config()
    for kind in ("column", "row"):
        mine, theirs = _layer(kind, config), _megatrons(kind, config)
        assert list(mine.state_dict()) == list(theirs.state_dict())
        mine.load_state_dict(theirs.state_dict())
        assert torch.equal(mine.weight, theirs.weight)
        torch.nn.init.normal_(mine.weight)
        theirs.load_state_dict(mine.state_dict())
        assert torch.equal(mine.weight, theirs.weight)
    for kind in KINDS:
        layer = _layer(kind, config)
        state = layer.state_dict()
        assert state["_extra_state"] is None
        for extra in (torch.zeros(7, dtype=torch.uint8), io.BytesIO(b"te"), None):
            layer.load_state_dict({**state, "_extra_state": extra})
        without = {name: value for name, value in state.items() if name != "_extra_state"}
        layer.load_state_dict(without)
    assert list(_layer("layernorm_column", config).state_dict()) == [
        "layer_norm_weight",
        "layer_norm_bias",
        "weight",
        "bias",
        "_extra_state",
    ]
    config.normalization = "RMSNorm"
    assert "layer_norm_bias" not in _layer("layernorm_column", config).state_dict()


def _described(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint's metadata says of each entry."""
    fields = (
        "key",
        "global_shape",
        "global_offset",
        "axis_fragmentations",
        "local_shape",
        "dtype",
        "replica_id",
        "prepend_axis_num",
    )
    return {name: {f: getattr(entry, f, None) for f in fields} for name, entry in state.items()}


@ranks(world_size=2, megatron=True)
def test_sharded_state_dicts_are_megatrons(rank_info: RankInfo) -> None:
    from megatron.core import parallel_state

    start_megatron(tp=2)
    config = megatron_config(tensor_model_parallel_size=2)
    where = {
        "prefix": "decoder.layers.mlp.linear_fc1.",
        "sharded_offsets": ((0, 1, 4),),
        "metadata": {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)},
    }
    for kind in ("column", "row"):
        mine, theirs = (_described(of(kind, config).sharded_state_dict(**where)) for of in (_layer, _megatrons))
        assert mine == theirs
    fused = _described(_layer("layernorm_column", config).sharded_state_dict(**where))
    linear = _described(_layer("column", config).sharded_state_dict(**where))
    norms = {f"{where['prefix']}layer_norm_{name}" for name in ("weight", "bias")}
    assert set(fused) == {*linear, *norms}
    assert {name: fused[name] for name in linear} == linear
    for name in norms:  # one copy for all ranks of the group: replica ids differ, offsets do not
        assert fused[name]["global_shape"] == (4, K)
        assert fused[name]["replica_id"] == (0, rank_info.rank, 0)
    duplicated = _described(_layer("duplicated", config).sharded_state_dict(**where))
    assert duplicated[f"{where['prefix']}weight"]["global_shape"] == (4, N, K)
    assert duplicated[f"{where['prefix']}weight"]["replica_id"] == (0, rank_info.rank, 0)


@ranks(world_size=[1, 2], megatron=True)
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_and_linear_in_one_equal_the_two_apart(
    rank_info: RankInfo, normalization: str, zero_centered: bool
) -> None:
    """Values and gradients against fp64, and the linear's initialisation against Megatron's."""
    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    config = megatron_config(
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centered,
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
    )
    torch.manual_seed(rank_info.seed)
    layer = _layer("layernorm_column", config)
    torch.manual_seed(rank_info.seed)
    assert torch.equal(layer.weight, _megatrons("column", config).weight)
    expected_gamma = torch.zeros(K) if zero_centered else torch.ones(K)
    assert torch.equal(layer.layer_norm_weight, expected_gamma)
    norm_parameters = [p for n, p in layer.named_parameters() if n.startswith("layer_norm_")]
    assert len(norm_parameters) == (2 if normalization == "LayerNorm" else 1)
    assert all(p.sequence_parallel == (size > 1) for p in norm_parameters)

    torch.manual_seed(rank_info.seed + 1)  # the same on all ranks
    with torch.no_grad():
        for parameter in norm_parameters:
            parameter.add_(torch.randn(K))
    x, dy = torch.randn(8, 2, K), torch.randn(8, 2, N)
    source = leaf(x.chunk(size)[rank])
    y, _ = layer(source)
    y.backward(dy.chunk(size, -1)[rank].contiguous())

    whole = leaf(x.double())
    gamma = leaf(layer.layer_norm_weight.double())
    scale = gamma + 1 if zero_centered else gamma
    weights: list[Tensor] = [torch.empty_like(layer.weight) for _ in range(size)]
    torch.distributed.all_gather(weights, layer.weight.detach())
    if normalization == "LayerNorm":
        beta = layer.layer_norm_bias.detach().double()
        normed = torch.nn.functional.layer_norm(whole, (K,), scale, beta, config.layernorm_epsilon)
    else:
        normed = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + config.layernorm_epsilon) * scale
    reference = normed @ torch.cat(weights).double().t()
    reference.backward(dy)
    dgamma = layer.layer_norm_weight.grad.clone()
    if size > 1:
        torch.distributed.all_reduce(dgamma)  # what Megatron does for parameters marked sequence_parallel
    assert relative_error(y, reference.chunk(size, -1)[rank]) < 2e-6
    assert relative_error(source.grad, whole.grad.chunk(size)[rank]) < 4e-6
    assert relative_error(dgamma, gamma.grad) < 4e-6


@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("cpu_initialization", [True, False])
def test_a_duplicated_linear_is_whole_and_alike_on_every_rank(rank_info: RankInfo, cpu_initialization: bool) -> None:
    start_megatron(tp=2, seed=rank_info.seed)
    config = megatron_config(
        tensor_model_parallel_size=2, sequence_parallel=True, use_cpu_initialization=cpu_initialization
    )
    if cpu_initialization:
        torch.manual_seed(rank_info.seed)
    layer = _layer("duplicated", config)
    assert layer.weight.std() > 0.05
    shards = [torch.empty_like(layer.weight) for _ in range(2)]
    torch.distributed.all_gather(shards, layer.weight.detach())
    assert torch.equal(*shards)
    for parameter in layer.parameters():
        assert (parameter.allreduce, parameter.sequence_parallel, parameter.tensor_model_parallel) == (
            True,
            True,
            False,
        )
    x = torch.randn(5, 2, K, requires_grad=True)  # this rank's tokens
    y, _ = layer(x)
    y.square().sum().backward()
    mine = x.detach().flatten(0, 1)
    assert torch.equal(y.flatten(0, 1), mine @ layer.weight.t() + layer.bias)
    assert relative_error(layer.weight.grad, (2 * y.detach().flatten(0, 1)).t() @ mine) < 1e-6


@ranks(world_size=1, megatron=True)
def test_a_stochastic_recipe_draws_once_a_forward_from_the_checkpointed_generator(rank_info: RankInfo) -> None:
    """And a recipe that rounds to nearest leaves the generator alone: dropout must not depend on the precision."""
    start_megatron()
    stochastic = plan("mxfp4", dgrad={"dy": {"rounding": "stochastic"}}, path="decoder.layers.0.mlp.linear_fc1")
    x = torch.randn(16, 2, K)
    gradients = []
    for of in (plan("mxfp4"), stochastic):
        layer = _layer("column", megatron_config(), plan=of)
        state = torch.get_rng_state()
        source = leaf(x)
        y = layer(source)[0]
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        gradients.append(source.grad)
        assert torch.equal(torch.get_rng_state(), state) == (of is not stochastic)
    repeated = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        source = leaf(x)
        layer(source)[0].backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        repeated.append(source.grad)
    assert torch.equal(repeated[0], repeated[1])
    assert not torch.equal(repeated[0], repeated[2])


@ranks(world_size=1, megatron=True)
def test_megatrons_recomputation_replays_the_draw(rank_info: RankInfo) -> None:
    """Megatron saves and restores the CPU generator around the second forward; the codes of both must be the same."""
    from megatron.core.tensor_parallel import checkpoint

    start_megatron()
    stochastic = plan("mxfp4", fprop={"x": {"rounding": "stochastic"}}, wgrad={"dy": {"rounding": "stochastic"}})
    layer = _layer("column", megatron_config(), plan=stochastic)
    x, outputs = torch.randn(16, 2, K), []
    layer.register_forward_hook(lambda module, args, result: outputs.append(result[0].detach()))
    gradients = []
    for recompute in (False, True):
        layer.zero_grad()
        torch.manual_seed(rank_info.seed)
        source = leaf(x)
        y = checkpoint(lambda t: layer(t)[0], False, source) if recompute else layer(source)[0]
        torch.randn(3)  # whatever runs between forward and backward
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
        gradients.append((source.grad, layer.weight.grad))
    assert len(outputs) == 3
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


@ranks(world_size=1, megatron=True)
def test_autocast_and_odd_shapes_pass_through_the_module(rank_info: RankInfo) -> None:
    start_megatron()
    layer = _layer("column", megatron_config(), plan=plan("mxfp8"))
    for shape in ((4, K), (3, 2, K), (0, 2, K), (1, 1, K), (2, 0, K), (2, 3, 2, K)):
        assert layer(torch.randn(*shape))[0].shape == (*shape[:-1], N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(3, 2, K))[0]
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@ranks(world_size=1, megatron=True)
def test_evaluation_draws_only_where_it_rounds_stochastically(rank_info: RankInfo) -> None:
    """Otherwise how often one evaluates would change the random bits, and the dropout, of training."""
    start_megatron()
    x = torch.randn(16, 2, K)
    for gemm, operand, draws in (("dgrad", "dy", False), ("fprop", "x", True)):
        of = plan("mxfp4", **{gemm: {operand: {"rounding": "stochastic"}}})
        layer = _layer("column", megatron_config(), plan=of).eval()
        state = torch.get_rng_state()
        with torch.no_grad():
            layer(x)
        assert torch.equal(torch.get_rng_state(), state) != draws


@ranks(world_size=2, megatron=True)
def test_copies_of_a_weight_that_would_be_rounded_apart_are_refused(rank_info: RankInfo) -> None:
    """Without sequence parallelism both ranks compute the same gradient, and draw different random bits for it."""
    start_megatron(tp=2)
    stochastic = plan(
        "mxfp4", dgrad={"dy": {"rounding": "stochastic"}}, path="decoder.layers.0.self_attention.linear_kv_down_proj"
    )
    config = megatron_config(tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"linear_kv_down_proj.*2 tensor-parallel ranks.*sequence parallelism on"):
        _layer("duplicated", config, plan=stochastic)
    _layer("duplicated", config, plan=plan("mxfp4"))
    sharded = megatron_config(tensor_model_parallel_size=2, sequence_parallel=True)
    _layer("duplicated", sharded, plan=stochastic)


@ranks(world_size=2, megatron=True)
def test_a_sequence_that_cannot_be_scattered_is_named(rank_info: RankInfo) -> None:
    """3 x 2 tokens divide by two ranks, a sequence of 3 does not."""
    start_megatron(tp=2)
    config = megatron_config(tensor_model_parallel_size=2, sequence_parallel=True)
    layer = _layer("row", config)
    with pytest.raises(ShapeError, match="tensor-parallel size 2, got 3"):
        layer(torch.randn(3, 2, layer.weight.shape[1]))
