"""Grouped experts against Megatron's experts one by one: the same weights, outputs and every gradient.

The reference is SequentialMLP of Megatron's own linears, in float64, where equal formulas give equal results up to the order of
sums. Quantised recipes are compared with a SequentialMLP of this package's linears, expert by expert, bit for bit: no scale,
block or rotation may span two experts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from tests.support.distributed import RankInfo, ranks
from tests.support.experts import (
    FFN,
    HIDDEN,
    copy_weights,
    experts_config,
    grouped,
    run,
    sequential,
    stacked_gradients,
)
from tests.support.linear import QUANTIZED_RECIPES, plan, start_megatron
from tests.tolerances import BF16_UNIT

pytestmark = pytest.mark.megatron

#: Counts of tokens: an expert without any, first, last, one token; no multiple of a block, whole blocks, nobody at all.
COUNTS = [[5, 0, 7, 1], [0, 40, 33, 0], [32, 64, 0, 96], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 3]]


def _inputs(counts: list[int], dtype: torch.dtype, probs_dtype: torch.dtype | None = None) -> list[Tensor]:
    tokens = sum(counts)
    x, dy = torch.randn(2, tokens, HIDDEN, dtype=dtype).unbind(0)
    return [x, torch.rand(tokens, dtype=probs_dtype or dtype), dy]


def _random_biases(one: Any) -> None:
    for parameter in one.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)


def _assert_same(
    one: Any,
    every: Any,
    counts: list[int],
    inputs: list[Tensor],
    *,
    gradients: dict[str, float] | None = None,
    **tolerance: float,
) -> None:
    """y, dx, dprobs within `tolerance`, and so the gradients of the weights unless they have one of their own."""
    x, probs, dy = inputs
    expected, got = run(one, x, probs, counts, dy), run(every, x, probs, counts, dy)
    for name, theirs, ours in zip(("y", "dx", "dprobs"), expected, got):
        torch.testing.assert_close(ours, theirs, msg=lambda m, name=name: f"{name} for {counts}: {m}", **tolerance)
    stacked = stacked_gradients(one)
    assert set(stacked) == {name for name, _ in every.named_parameters()}
    for name, theirs in stacked.items():
        ours = every.get_parameter(name).grad
        bar = tolerance if gradients is None else gradients
        torch.testing.assert_close(ours, theirs, msg=lambda m, name=name: f"{name} for {counts}: {m}", **bar)


# Megatron's SequentialMLP adds its bias in place, which torch allows only where it reduces nothing: with expert parallelism.
BIAS = {"add_bias_linear": True, "expert_model_parallel_size": 2}
TOP_1 = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "gelu": {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
    "bias": BIAS,
    "bias, no gate": {**BIAS, "gated_linear_unit": False},
    "probabilities on the input": {"moe_apply_probs_on_input": True, **TOP_1},
    "clamped, with an offset": {"activation_func_clamp_value": 0.3, "glu_linear_offset": 1.0},
    "fused swiglu": {"bias_activation_fusion": True},
    "width of its own": {"ffn_hidden_size": 2 * FFN},
}


@ranks(world_size=1, megatron=True)
def test_outputs_and_gradients_are_those_of_megatrons_experts(rank_info: RankInfo) -> None:
    """float64: rounding cannot hide a wrong expert, a lost probability or a missing term."""
    from megatron.core.activations import squared_relu

    start_megatron(seed=rank_info.seed)
    relu = {"activation_func": squared_relu, "use_fused_weighted_squared_relu": True}
    relus = {"fused squared relu": {**relu, "gated_linear_unit": False}, "squared relu with a gate, never fused": relu}
    for name, fields in {**VARIANTS, **relus}.items():
        config = experts_config(params_dtype=torch.float64, **fields)
        for counts in COUNTS:
            one, every = sequential(config), grouped(config)
            _random_biases(one)
            copy_weights(one, every)
            exact = {"rtol": 1e-12, "atol": 1e-12}
            if fields.get("bias_activation_fusion"):
                exact = {"rtol": 1e-5, "atol": 1e-6}  # Megatron's fused functions compute in float32
            try:
                _assert_same(one, every, counts, _inputs(counts, torch.float64), **exact)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


@ranks(world_size=1, megatron=True)
def test_bf16_with_fp32_probabilities_rounds_where_megatrons_experts_round(rank_info: RankInfo) -> None:
    """`moe_router_dtype` gives probabilities of another dtype. The same kernels on the same operands: the same bits."""
    start_megatron(seed=rank_info.seed)
    config = experts_config(params_dtype=torch.bfloat16)
    for probs_dtype in (torch.bfloat16, torch.float32, torch.float64):
        for counts in COUNTS:
            one, every = sequential(config, turbo=True), grouped(config)
            copy_weights(one, every)
            _assert_same(one, every, counts, _inputs(counts, torch.bfloat16, probs_dtype), rtol=0, atol=0)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_quantised_experts_give_the_bits_of_each_expert_alone(rank_info: RankInfo, recipe: str) -> None:
    """FP8 with one scale for all of an expert's tokens: grouped kernels apply it within the sum of wgrad, not behind it. Codes
    are the same; the fp32 sum may round otherwise, and its bf16 result with it, by one unit.
    """
    start_megatron(seed=rank_info.seed)
    config = experts_config(params_dtype=torch.bfloat16)
    one_scale = recipe in ("fp8_tensorwise", "fp8_rowwise")
    for counts in COUNTS[:4]:
        one, every = sequential(config, plan(recipe), turbo=True), grouped(config, plan(recipe))
        copy_weights(one, every)
        inputs = _inputs(counts, torch.bfloat16)
        sums = {"rtol": 2 * BF16_UNIT, "atol": 1e-5} if one_scale else None
        _assert_same(one, every, counts, inputs, rtol=0, atol=0, gradients=sums)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "device"])
def test_initial_weights_are_the_ones_that_megatrons_experts_draw(rank_info: RankInfo, on_cpu: bool) -> None:
    """And the random state behind them is the same, so that all layers after them agree too."""
    config = experts_config(use_cpu_initialization=on_cpu)
    drawn = []
    for build in (sequential, grouped):
        start_megatron(seed=rank_info.seed % 1000)
        torch.manual_seed(rank_info.seed)
        drawn.append((build(config), torch.get_rng_state(), torch.rand(2)))
    (one, state, after), (every, own_state, own_after) = drawn
    for name in ("linear_fc1", "linear_fc2"):
        theirs = torch.stack([getattr(expert, name).weight for expert in one.local_experts])
        assert torch.equal(getattr(every, name).weight, theirs), name
        assert not torch.equal(theirs[0], theirs[1])
    assert torch.equal(state, own_state)
    assert torch.equal(after, own_after)


@ranks(world_size=1, megatron=True)
def test_weights_about_to_be_loaded_are_not_drawn(rank_info: RankInfo) -> None:
    """`--no-initialization`: no random state is needed, nor touched; attributes are there all the same."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    start_megatron(seed=rank_info.seed)
    get_cuda_rng_tracker().reset()
    before = torch.get_rng_state()
    every = grouped(experts_config(perform_initialization=False, use_cpu_initialization=False))
    assert torch.equal(torch.get_rng_state(), before)
    assert every.linear_fc1.weight.tensor_model_parallel
    assert every.linear_fc2.weight.partition_dim == 2


@ranks(world_size=1, megatron=True)
def test_parameters_carry_the_attributes_of_megatrons(rank_info: RankInfo) -> None:
    """The optimizer, gradient reduction and clipping find an expert's parameters by them."""
    start_megatron(seed=rank_info.seed)
    for fields in [{}, {"expert_model_parallel_size": 2, "add_bias_linear": True}]:
        config = experts_config(**fields)
        one, every = sequential(config), grouped(config)
        for name, ours in every.named_parameters():
            theirs = one.local_experts[0].get_parameter(name)
            assert ours.tensor_model_parallel, (
                "counted in the norm of gradients on every rank, as no other rank holds it"
            )
            for attribute in ("allreduce", "partition_stride"):
                assert getattr(ours, attribute, None) == getattr(theirs, attribute, None), (name, attribute)
            if getattr(theirs, "partition_dim", -1) >= 0:
                assert ours.partition_dim == theirs.partition_dim + 1, name


@ranks(world_size=1, megatron=True)
def test_gradients_accumulate_in_main_grad_over_microbatches(rank_info: RankInfo) -> None:
    """Fused wgrad under Megatron's DDP, experts without tokens in one microbatch included."""
    from tests.modules.test_linear_main_grad import _ddp

    start_megatron(seed=rank_info.seed)
    batches = [_inputs(counts, torch.float32) for counts in COUNTS[:2]]
    one, every = (
        build(experts_config(gradient_accumulation_fusion=fused))
        for build, fused in ((sequential, False), (grouped, True))
    )
    copy_weights(one, every)
    model = _ddp(every, every.config)
    model.zero_grad_buffer()
    for counts, (x, probs, dy) in zip(COUNTS, batches):
        run(one, x, probs, counts, dy)
        last = counts is COUNTS[1]
        with torch.enable_grad() if last else model.no_sync():
            run(model, x, probs, counts, dy)
    model.finish_grad_sync()
    for name, theirs in stacked_gradients(one).items():
        parameter = every.get_parameter(name)
        assert parameter.grad is None, name
        torch.testing.assert_close(parameter.main_grad, theirs, rtol=1e-5, atol=1e-6)


@ranks(world_size=1, megatron=True)
def test_a_rank_without_tokens_still_reports_every_gradient(rank_info: RankInfo) -> None:
    """Else DDP would wait for it for ever: its hooks fire when a gradient arrives."""
    from tests.modules.test_linear_main_grad import _ddp

    start_megatron(seed=rank_info.seed)
    for fused in (False, True):
        for recipe in ("bf16", "mxfp4"):
            dtype = torch.bfloat16
            config = experts_config(params_dtype=dtype, gradient_accumulation_fusion=fused)
            every = grouped(config, plan(recipe))
            model = _ddp(every, config, overlap_grad_reduce=True)
            model.zero_grad_buffer()
            seen: list[Any] = []
            for group in model.bucket_groups:
                group.register_grad_ready = _noting(group.register_grad_ready, seen)
            run(model, *_at(_inputs([0] * 4, dtype), [0] * 4))
            model.finish_grad_sync()
            assert {id(p) for p in seen} == {id(p) for p in every.parameters()}, (fused, recipe)
            assert all(not p.main_grad.any() for p in every.parameters())


def _noting(hook: Any, seen: list[Any]) -> Any:
    """DDP's hook, which also writes down for whom it was called."""

    def noted(parameter: Any, *rest: Any) -> Any:
        seen.append(parameter)
        return hook(parameter, *rest)

    return noted


def _at(inputs: list[Tensor], counts: list[int]) -> tuple[Any, ...]:
    x, probs, dy = inputs
    return x, probs, counts, dy


@ranks(world_size=1, megatron=True)
def test_frozen_experts_give_dx_and_keep_nothing_for_wgrad(rank_info: RankInfo) -> None:
    start_megatron(seed=rank_info.seed)
    config = experts_config(params_dtype=torch.float64)
    one, every = sequential(config), grouped(config)
    copy_weights(one, every)
    for module in (one, every):
        module.requires_grad_(False)
    inputs = _at(_inputs(COUNTS[0], torch.float64), COUNTS[0])
    for theirs, ours in zip(run(one, *inputs), run(every, *inputs)):
        torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in every.parameters())


@ranks(world_size=1, megatron=True)
def test_delayed_wgrad_comes_with_backward_dw(rank_info: RankInfo) -> None:
    start_megatron(seed=rank_info.seed)
    delayed = experts_config(params_dtype=torch.float64)
    delayed.delay_wgrad_compute = True  # Megatron's own check wants an overlap that needs a GPU
    one, every = sequential(experts_config(params_dtype=torch.float64)), grouped(delayed)
    copy_weights(one, every)
    inputs = _at(_inputs(COUNTS[0], torch.float64), COUNTS[0])
    run(one, *inputs)
    run(every, *inputs)
    assert all(p.grad is None for p in every.parameters())
    every.backward_dw()
    for name, theirs in stacked_gradients(one).items():
        torch.testing.assert_close(every.get_parameter(name).grad, theirs)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_delayed_wgrad_under_ddp_reaches_main_grad(rank_info: RankInfo, recipe: str) -> None:
    """Fused or not, with an fp32 `main_grad` or one of 16 bits, over two microbatches and a recomputed activation: what backward
    gives at once, and DDP's hooks find a gradient.
    """
    from tests.modules.test_linear_main_grad import _ddp

    start_megatron(seed=rank_info.seed)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    batches = [_inputs(counts, torch.bfloat16) for counts in COUNTS[:2]]
    for fused, wide in ((False, True), (True, True), (True, False)):
        found = []
        for delay in (False, True):
            config = experts_config(params_dtype=torch.bfloat16, gradient_accumulation_fusion=fused, **recompute)
            config.delay_wgrad_compute = delay  # Megatron's own check wants an overlap that needs a GPU
            every = grouped(config, plan(recipe))
            for parameter in every.parameters():
                parameter.data = torch.linspace(-0.2, 0.2, parameter.numel()).view_as(parameter).bfloat16()
            how = {"overlap_grad_reduce": True, "grad_reduce_in_fp32": wide, "delay_wgrad_compute": delay}
            model = _ddp(every, config, **how)
            model.zero_grad_buffer()
            for counts, inputs in zip(COUNTS, batches):
                with torch.enable_grad() if counts is COUNTS[1] else model.no_sync():
                    run(model, *_at(inputs, counts))
                    every.backward_dw()
            model.finish_grad_sync()
            assert all(parameter.grad is None for parameter in every.parameters())
            found.append([parameter.main_grad.clone() for parameter in every.parameters()])
        for at_once, later in zip(*found):
            assert at_once.any()
            assert torch.equal(at_once, later), (fused, wide)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_recomputed_activation_gives_the_same_bits_and_is_not_kept(rank_info: RankInfo, recipe: str) -> None:
    """`--recompute-modules moe_act`."""
    from primus_turbo_plugin.modules import experts

    start_megatron(seed=rank_info.seed)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    inputs = _at(_inputs(COUNTS[2], torch.bfloat16), COUNTS[2])
    kept: list[tuple[Tensor, Any]] = []
    hooks = experts.saved_tensors_hooks
    experts.saved_tensors_hooks = lambda pack, unpack: hooks(lambda t: kept.append((t, pack(t))) or kept[-1][1], unpack)
    results = []
    for fields in ({}, recompute):
        every = grouped(experts_config(params_dtype=torch.bfloat16, **fields), plan(recipe))
        with torch.no_grad():
            for p in every.parameters():
                p.copy_(torch.linspace(-0.2, 0.2, p.numel()).view_as(p))
        results.append([*run(every, *inputs), *(p.grad for p in every.parameters())])
    for plain, again in zip(*results):
        assert torch.equal(plain, again)
    activation = (sum(COUNTS[2]), FFN)
    discarded = [tuple(t.shape) for t, packed in kept if packed is None]
    assert discarded == ([activation] if recipe == "bf16" else [])
    assert activation not in [tuple(packed.shape) for _, packed in kept if packed is not None]


@ranks(world_size=1, megatron=True)
def test_weights_are_quantised_once_a_step(rank_info: RankInfo) -> None:
    """Both copies, of all experts, at the first microbatch of a schedule; and anew at the next."""
    start_megatron(seed=rank_info.seed)
    every = grouped(experts_config(params_dtype=torch.bfloat16), plan("mxfp4"))
    made: list[tuple[bool, bool]] = []
    for linear in (every.linear_fc1, every.linear_fc2):
        cache = linear._weight_cache
        original = cache.copies

        def counting(weight: Any, dtype: Any, quantize: Any, original: Any = original, **wanted: bool) -> Any:
            def noted(row: bool, column: bool) -> Any:
                made.append((row, column))
                return quantize(row, column)

            return original(weight, dtype, noted, **wanted)

        cache.copies = counting
    inputs = _at(_inputs(COUNTS[0], torch.bfloat16), COUNTS[0])
    for _ in range(2):
        for linear in (every.linear_fc1, every.linear_fc2):
            linear.is_first_microbatch = True
        for _ in range(3):
            run(every, *inputs)
    assert made == [(True, True)] * 4


@ranks(world_size=1, megatron=True)
def test_the_first_pass_of_a_recomputation_makes_the_copies_that_the_second_needs(rank_info: RankInfo) -> None:
    """It runs without gradients, in training; an evaluation makes fprop's only."""
    start_megatron(seed=rank_info.seed)
    every = grouped(experts_config(params_dtype=torch.bfloat16), plan("mxfp4"))
    linears = (every.linear_fc1, every.linear_fc2)
    x, probs, _ = _inputs(COUNTS[0], torch.bfloat16)
    for training, copies in ((True, 2), (False, 1)):
        every.train(training)
        for linear in linears:
            linear.is_first_microbatch = True
        with torch.no_grad():
            every(x, torch.tensor(COUNTS[0]), probs)
        assert [len(linear._weight_cache.tensors()) for linear in linears] == [2 * copies] * 2


@ranks(world_size=1, megatron=True)
def test_weights_that_change_are_quantised_anew(rank_info: RankInfo) -> None:
    """By loading, by an optimizer, and by one that writes through `.data`, which torch records nowhere."""
    start_megatron(seed=rank_info.seed)
    config = experts_config(params_dtype=torch.bfloat16)
    every = grouped(config, plan("mxfp4"))
    inputs = _at(_inputs(COUNTS[0], torch.bfloat16), COUNTS[0])

    class ByData(torch.optim.Optimizer):
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(1.5)

    changes = {
        "loaded": lambda: every.load_state_dict({name: t * 2 for name, t in every.state_dict().items()}),
        "stepped": torch.optim.SGD(every.parameters(), lr=0.5).step,
        "written through .data": ByData(every.parameters(), {}).step,
    }
    for linear in (every.linear_fc1, every.linear_fc2):
        linear.is_first_microbatch = True
    before = run(every, *inputs)[0]
    for what, change in changes.items():
        change()
        fresh = grouped(config, plan("mxfp4"))
        fresh.load_state_dict(every.state_dict())
        y = run(every, *inputs)[0]
        assert torch.equal(y, run(fresh, *inputs)[0]), what
        assert not torch.equal(y, before), what
        before = y
    every.eval()
    with torch.no_grad():  # whose schedule was not announced: somebody may swap averaged weights in
        before = every(inputs[0], torch.tensor(COUNTS[0]), inputs[1])[0]
        every.linear_fc1.weight.data.mul_(2.0)
        assert not torch.equal(every(inputs[0], torch.tensor(COUNTS[0]), inputs[1])[0], before)


@ranks(world_size=1, megatron=True)
def test_plain_state_dicts_of_megatrons_experts_load(rank_info: RankInfo) -> None:
    """SequentialMLP's, and TEGroupedMLP's with its numbered weights; extra states of other backends are dropped."""
    start_megatron(seed=rank_info.seed)
    config = experts_config(add_bias_linear=True, expert_model_parallel_size=2)
    one, every = sequential(config), grouped(config)
    _random_biases(one)
    states = [dict(one.state_dict())]
    engine = {}
    for name, value in states[0].items():
        _, expert, rest = name.split(".", 2)
        engine[rest + expert if "_extra" not in rest else rest] = value
    states.append(engine)
    states.append({name: value * 2 for name, value in every.state_dict().items()})
    for state in states:
        other = torch.nn.ModuleDict({"experts": grouped(config)})
        other.load_state_dict({f"experts.{name}": value for name, value in state.items()}, strict=True)
        expected = grouped(config)
        copy_weights(one, expected)
        if state is states[2]:
            expected.load_state_dict(state)
        for name, value in expected.state_dict().items():
            assert torch.equal(other.state_dict()[f"experts.{name}"], value), name


@ranks(world_size=1, megatron=True)
def test_counts_on_either_side_and_as_a_list(rank_info: RankInfo) -> None:
    """Dispatchers hand over an int64 tensor, of whatever device; int32 from those that count on the GPU."""
    start_megatron(seed=rank_info.seed)
    every = grouped(experts_config(params_dtype=torch.float64))
    x, probs, _ = _inputs(COUNTS[0], torch.float64)
    results = [every(x, counts, probs)[0] for counts in (torch.tensor(COUNTS[0]), torch.tensor(COUNTS[0]).int())]
    assert torch.equal(*results)
    assert torch.equal(every.linear_fc1(x, COUNTS[0])[0], every.linear_fc1(x, torch.tensor(COUNTS[0]))[0])


@ranks(world_size=1, megatron=True)
def test_mistakes_are_named(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.modules import TurboColumnParallelGroupedLinear

    start_megatron(seed=rank_info.seed)
    every = grouped(experts_config())
    x, probs, _ = _inputs(COUNTS[0], torch.float32)
    with pytest.raises(ShapeError, match=r"sum to the rows of x, 13.*\[5, 0, 7, 2\]"):
        every(x, torch.tensor([5, 0, 7, 2]), probs)
    with pytest.raises(ShapeError, match=r"tokens_per_expert must be \[experts\] = \[4\]"):
        every(x, torch.tensor([6, 7]), probs)
    with pytest.raises(ConfigError, match="is_expert=False"):
        TurboColumnParallelGroupedLinear(
            4, 8, 8, config=experts_config(), init_method=None, bias=False, skip_bias_add=False, is_expert=False
        )
    config = experts_config(gated_linear_unit=False)
    config.bias_activation_fusion, config.activation_func = True, torch.nn.functional.relu
    with pytest.raises(UnsupportedError, match=r"fuses SwiGLU and quick GeGLU only, got relu without a gate"):
        grouped(config)
    config = experts_config(bias_activation_fusion=True, activation_func_clamp_value=7.0)
    with pytest.raises(
        UnsupportedError, match=r"neither clamps.*activation_func_clamp_value=7\.0 and glu_linear_offset=0"
    ):
        grouped(config)
    config = experts_config()
    config.moe_mlp_glu_interleave_size = 32
    with pytest.raises(UnsupportedError, match=r"moe_mlp_glu_interleave_size=32.*Leave it out"):
        grouped(config)
    every.linear_fc2.weight.__fsdp_param__ = True
    with pytest.raises(UnsupportedError, match="Megatron-FSDP"):
        every(x, torch.tensor(COUNTS[0]), probs)
    with pytest.raises(ConfigError, match="moe_apply_probs_on_input needs moe_router_topk=1, got 2"):
        grouped(experts_config(moe_apply_probs_on_input=True))
    with pytest.raises(ConfigError, match="unknown keyword 'colour'"):
        TurboColumnParallelGroupedLinear(
            4, 8, 8, config=experts_config(), init_method=None, bias=False, skip_bias_add=False, colour=1
        )
