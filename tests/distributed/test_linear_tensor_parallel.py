"""Turbo linears next to Megatron's own, in the same processes: the same bits, values and all gradients, for every split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, megatron_config, normal_, start_megatron

pytestmark = pytest.mark.megatron

K, N, SEQ, BATCH = 24, 40, 12, 2  # nothing a multiple of 32


def _classes(split: str) -> tuple[type, type]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from primus_turbo_plugin.modules import TurboColumnParallelLinear, TurboRowParallelLinear

    if split == "column":
        return TurboColumnParallelLinear, ColumnParallelLinear
    return TurboRowParallelLinear, RowParallelLinear


def _pair(split: str, config: Any, seed: int, **arguments: Any) -> list[Any]:
    """Our layer and Megatron's, initialised from the same state."""
    layers = []
    for cls in _classes(split):
        torch.manual_seed(seed)
        own = {"gather_output": False} if split == "column" else {"input_is_parallel": True}
        kind = {"bias": True, "skip_bias_add": False, **own, **arguments}
        layer = cls(K, N, config=config, init_method=normal_, **kind)
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias)
        layers.append(layer)
    return layers


def _assert_same_parameters(mine: Any, theirs: Any) -> None:
    named = dict(theirs.named_parameters())
    assert {name for name, _ in mine.named_parameters()} == set(named)
    for name, parameter in mine.named_parameters():
        assert torch.equal(parameter, named[name]), name
        attributes = {key: value for key, value in vars(named[name]).items() if not key.startswith("_")}
        assert {key: value for key, value in vars(parameter).items() if not key.startswith("_")} == attributes, name


def _run(layer: Any, x: Tensor, dy: Tensor | None, **forward: Any) -> dict[str, Tensor]:
    layer.zero_grad()
    source = leaf(x)
    y, bias = layer(source, **forward)
    y.backward(torch.ones_like(y) if dy is None else dy)
    grads = {
        f"grad of {name}": parameter.grad for name, parameter in layer.named_parameters() if parameter.requires_grad
    }
    return {"y": y, "returned bias": bias, "dx": source.grad, **grads}


def _assert_same_bits(mine: dict[str, Any], theirs: dict[str, Any], what: object) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        reference = theirs[name]
        if value is None or reference is None:
            assert value is reference, (what, name)
            continue
        assert value.shape == reference.shape, (what, name)
        assert torch.equal(value, reference), (what, name, (value - reference).abs().max().item())


@ranks(world_size=[1, 2, 4], megatron=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("split", ["column", "row"])
def test_unquantised_layers_give_megatrons_bits(rank_info: RankInfo, split: str, sequence_parallel: bool) -> None:
    """Loss equality with Megatron's local spec, step by step, rests on this."""
    size = rank_info.world_size
    start_megatron(tp=size)
    g = torch.Generator().manual_seed(rank_info.seed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        config = megatron_config(
            sequence_parallel=sequence_parallel and size > 1, tensor_model_parallel_size=size, params_dtype=dtype
        )
        for options in ({}, {"bias": False}, {"skip_bias_add": True}):
            mine, theirs = _pair(split, config, rank_info.seed, **options)
            _assert_same_parameters(mine, theirs)
            for batch in (BATCH, 1):
                mine_x, dy = _tensors(g, split, size, batch, rank_info.rank, config.sequence_parallel, dtype)
                what = (dtype, options, batch)
                _assert_same_bits(_run(mine, mine_x, dy), _run(theirs, mine_x, dy), what)


def _tensors(
    g: torch.Generator, split: str, size: int, batch: int, rank: int, sequence_parallel: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """This rank's x and dy, cut from tensors that all ranks draw alike."""
    x = torch.randn(SEQ, batch, K, generator=g).to(dtype)
    dy = torch.randn(SEQ, batch, N, generator=g).to(dtype)
    if split == "column":
        dy = dy.chunk(size, dim=-1)[rank].contiguous()
        return (x.chunk(size)[rank] if sequence_parallel else x), dy
    x = x.chunk(size, dim=-1)[rank].contiguous()
    return x, (dy.chunk(size)[rank] if sequence_parallel else dy)


@ranks(world_size=[2], megatron=True)
def test_the_whole_layer_is_recovered_from_its_shards(rank_info: RankInfo) -> None:
    """Against one fp64 linear on the gathered weight: that ours equals Megatron's would not notice a fault in both uses."""
    from megatron.core.tensor_parallel.mappings import _gather_along_first_dim, _gather_along_last_dim

    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    group = torch.distributed.group.WORLD
    g = torch.Generator().manual_seed(rank_info.seed)
    for split in ("column", "row"):
        for sequence_parallel in (False, True):
            config = megatron_config(sequence_parallel=sequence_parallel, tensor_model_parallel_size=size)
            layer, _ = _pair(split, config, rank_info.seed)
            x = torch.randn(SEQ, BATCH, K, generator=g)
            dy = torch.randn(SEQ, BATCH, N, generator=g)
            gather_w = _gather_along_first_dim if split == "column" else _gather_along_last_dim
            weight = leaf(gather_w(layer.weight.detach(), group).double())
            bias = leaf((gather_w(layer.bias.detach(), group) if split == "column" else layer.bias).double())
            source = leaf(x.double())
            y = torch.nn.functional.linear(source, weight, bias)
            y.backward(dy.double())

            def cut(t: Tensor, side: str, split: str = split, sequence_parallel: bool = sequence_parallel) -> Tensor:
                if side == split:
                    return t.chunk(size, dim=-1)[rank].contiguous()
                return t.chunk(size)[rank] if sequence_parallel else t

            # A column-parallel layer splits its outputs, a row-parallel one its inputs.
            inside, outside = ("row", "column")
            got = _run(layer, cut(x, inside), cut(dy, outside))
            torch.testing.assert_close(got["y"].double(), cut(y, outside), rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(got["dx"].double(), cut(source.grad, inside), rtol=2e-6, atol=2e-6)
            own = weight.grad.chunk(size, dim=0 if split == "column" else 1)[rank]
            torch.testing.assert_close(got["grad of weight"].double(), own, rtol=2e-6, atol=4e-6)
            db = got["grad of bias"].double()
            if (
                split == "row" and sequence_parallel
            ):  # of this rank's tokens; Megatron sums what is marked sequence_parallel
                assert layer.bias.sequence_parallel
                torch.distributed.all_reduce(db)
            own_bias = bias.grad.chunk(size)[rank] if split == "column" else bias.grad
            torch.testing.assert_close(db, own_bias, rtol=2e-6, atol=2e-6)


@ranks(world_size=[2], megatron=True)
def test_options_of_megatrons_forward_give_its_bits(rank_info: RankInfo) -> None:
    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    g = torch.Generator().manual_seed(rank_info.seed)
    config = megatron_config(tensor_model_parallel_size=size)
    x = torch.randn(SEQ, BATCH, K, generator=g)

    pair = _pair("column", config, rank_info.seed, gather_output=True)
    _assert_same_bits(*(_run(layer, x, None) for layer in pair), what="gather_output")
    _assert_same_bits(*(_run(layer, x, None, runtime_gather_output=False) for layer in pair), what="runtime")

    pair = _pair("column", config, rank_info.seed, disable_grad_reduce=True)
    _assert_same_bits(*(_run(layer, x, None) for layer in pair), what="disable_grad_reduce")

    pair = _pair("row", config, rank_info.seed, input_is_parallel=False)
    _assert_same_bits(*(_run(layer, x, None) for layer in pair), what="input_is_parallel=False")

    pair = _pair("column", config, rank_info.seed, stride=2)
    _assert_same_parameters(*pair)

    shared = torch.randn(N // size, K, generator=torch.Generator().manual_seed(rank))
    results = []
    for layer in _pair("column", config, rank_info.seed, skip_weight_param_allocation=True, bias=False):
        assert layer.weight is None
        with pytest.raises(RuntimeError, match="weight was not supplied"):
            layer(x)
        weight = leaf(shared)
        results.append({**_run(layer, x, None, weight=weight), "dw": weight.grad})
    _assert_same_bits(*results, what="weight of the caller")

    for split in ("column", "row"):
        pair = _pair(split, config, rank_info.seed)
        for layer in pair:  # the bias too: Megatron gives it no gradient once the weight is frozen, ours does
            layer.requires_grad_(False)
        local = x if split == "column" else x.chunk(size, dim=-1)[rank].contiguous()
        _assert_same_bits(*(_run(layer, local, None) for layer in pair), what=f"{split}, frozen")


@ranks(world_size=[2], megatron=True)
@pytest.mark.parametrize(("etp", "ep"), [(2, 1), (1, 2)])
def test_expert_layers_leave_communication_to_the_dispatcher(rank_info: RankInfo, etp: int, ep: int) -> None:
    """With sequence parallelism on: an expert's tokens were gathered by the dispatcher and must not be gathered again."""
    size = rank_info.world_size
    start_megatron(tp=size, expert_tensor_parallel_size=etp, expert_model_parallel_size=ep)
    config = megatron_config(
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_moe_experts=2,
        add_bias_linear=False,
    )
    g = torch.Generator().manual_seed(rank_info.seed + rank_info.rank)
    for split in ("column", "row"):
        pair = _pair(split, config, rank_info.seed, is_expert=True, bias=False, skip_bias_add=True)
        _assert_same_parameters(*pair)
        assert pair[0].explicit_expert_comm
        x = torch.randn(7, 1, K // (etp if split == "row" else 1), generator=g)
        _assert_same_bits(*(_run(layer, x, None) for layer in pair), what=split)
    empty = _pair("row", config, rank_info.seed, is_expert=True, bias=False, skip_bias_add=True)
    results = [_run(layer, torch.zeros(0, 1, K // etp), None) for layer in empty]
    _assert_same_bits(*results, what="an expert without tokens")
    assert results[0]["y"].shape == (0, 1, N)


@ranks(world_size=[2], megatron=True)
def test_layers_on_a_device_are_initialised_from_megatrons_random_state(rank_info: RankInfo) -> None:
    start_megatron(tp=rank_info.world_size, seed=rank_info.seed)
    config = megatron_config(tensor_model_parallel_size=rank_info.world_size, use_cpu_initialization=False)
    weights = []
    for split in ("column", "row"):
        for cls in _classes(split):
            start_megatron(tp=rank_info.world_size, seed=rank_info.seed)
            own = {"gather_output": False} if split == "column" else {"input_is_parallel": True}
            weights.append(cls(K, N, config=config, init_method=normal_, bias=False, skip_bias_add=False, **own).weight)
        assert torch.equal(weights[-1], weights[-2])
    shards = [torch.empty_like(weights[0]) for _ in range(2)]
    torch.distributed.all_gather(shards, weights[0].detach())
    assert not torch.equal(*shards)


@ranks(world_size=[2], megatron=True)
@pytest.mark.parametrize("split", ["column", "row"])
def test_fused_and_delayed_gradients_of_a_split_layer_equal_megatrons(rank_info: RankInfo, split: str) -> None:
    """The transfers belong to backward even where the GEMM is put off, so that their order is the same on every rank."""
    size, rank = rank_info.world_size, rank_info.rank
    start_megatron(tp=size)
    g = torch.Generator().manual_seed(rank_info.seed)
    for sequence_parallel in (False, True):
        config = megatron_config(sequence_parallel=sequence_parallel, tensor_model_parallel_size=size)
        x, dy = _tensors(g, split, size, BATCH, rank, sequence_parallel, torch.float32)
        expected = _run(_pair(split, config, rank_info.seed)[1], x, dy)
        for fused in (False, True):
            for delayed in (False, True):
                config = megatron_config(sequence_parallel=sequence_parallel, tensor_model_parallel_size=size)
                layer, _ = _pair(split, config, rank_info.seed)
                layer.gradient_accumulation_fusion = fused
                config.delay_wgrad_compute = delayed
                if fused:
                    layer.weight.main_grad = torch.ones_like(layer.weight)
                got = _run(layer, x, dy)
                if delayed:
                    assert layer.weight.grad is None
                    assert not fused or torch.equal(layer.weight.main_grad, torch.ones_like(layer.weight))
                    layer.backward_dw()
                dw = layer.weight.main_grad - 1 if fused and layer.weight.grad is None else layer.weight.grad
                torch.testing.assert_close(dw, expected["grad of weight"], rtol=1e-5, atol=1e-5)
                assert torch.equal(got["dx"], expected["dx"])
                assert torch.equal(got["grad of bias"], expected["grad of bias"])
