"""Low precision in whole models: the modules that a recipe names compute in it, in all three GEMMs, and no others do."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron.test_models import MOE
from tests.megatron.tiny_gpt import (
    MICRO_BATCH,
    SEQ,
    VOCAB,
    Job,
    Result,
    bare,
    build,
    make_config,
    relative_difference,
    run_steps,
    start,
    train,
)
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron

#: Relative error of a GEMM, by what it computes in: exact in fp32, a few per cent in FP8, more in MXFP4.
EXACT, MXFP8, MXFP4 = (0.0, 1e-5), (1e-3, 0.08), (0.05, 0.6)


def gemm_errors(job: Job) -> dict[str, tuple[float, float, float]]:
    """Module -> relative errors of fprop, dgrad and wgrad against autograd in fp64, over one forward and backward pass.

    The reference sees what each module saw: its input, its weights and the gradient of its output.
    """
    from primus_turbo_plugin.specs.provider import LINEAR_CLASSES

    start(job)
    config = make_config(job)
    model = build(job, config)[0]
    seen: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LINEAR_CLASSES):
            at = seen.setdefault(name, {})
            module.register_forward_hook(lambda _, x, y, at=at: at.update(x=x[0].detach(), y=y[0].detach()))
            module.register_full_backward_hook(lambda _, dx, dy, at=at: at.update(dx=dx[0], dy=dy[0]))
    tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ), generator=torch.Generator().manual_seed(job.seed))
    mask = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1)
    model(tokens, torch.arange(SEQ)[None].expand(MICRO_BATCH, -1), mask, labels=tokens.roll(-1, 1)).mean().backward()
    modules = dict(model.named_modules())
    return {name: _errors(modules[name], at, config.layernorm_epsilon) for name, at in seen.items()}


def _errors(module: Any, at: dict[str, Tensor], epsilon: float) -> tuple[float, float, float]:
    x = at["x"].double().requires_grad_()
    w = module.weight.detach().double().requires_grad_()
    norm = getattr(module, "layer_norm_weight", None)
    h = x if norm is None else torch.nn.functional.rms_norm(x, x.shape[-1:], norm.detach().double(), epsilon)
    y = h @ w.t()
    dx, dw = torch.autograd.grad(y, (x, w), at["dy"].double())
    return _relative(at["y"], y), _relative(at["dx"], dx), _relative(module.weight.grad, dw)


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(errors: dict[str, tuple[float, float, float]], expected: dict[str, tuple[float, float]]) -> None:
    """The last matching pattern gives a module's bounds."""
    assert errors
    for name, three in errors.items():
        (low, high) = [bounds for pattern, bounds in expected.items() if fnmatch.fnmatchcase(name, pattern)][-1]
        for gemm, error in zip(("fprop", "dgrad", "wgrad"), three):
            assert low <= error <= high, f"{name} {gemm}: relative error {error:.2g} is not in [{low}, {high}]"


WIDE = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 4}


@ranks(world_size=1, megatron=True)
def test_each_module_computes_in_its_own_precision(rank_info: RankInfo) -> None:
    """A layer pinned to BF16 must not run in MXFP4, and one that is not must not fall back."""
    turbo = {
        "precision": "mxfp4",
        "bf16_first_layers": 1,
        "bf16_last_layers": 1,
        "modules": {"*.mlp.linear_fc2": "mxfp8", "decoder.layers.2.self_attention.*": "bf16"},
    }
    errors = gemm_errors(Job(model=WIDE, turbo=turbo, seed=rank_info.seed))
    assert len(errors) == 16
    check(
        errors,
        {
            "*": MXFP4,
            "*.linear_fc2": MXFP8,
            "*.layers.2.self_attention.*": EXACT,
            "*.layers.0.*": EXACT,
            "*.layers.3.*": EXACT,
        },
    )


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("spec", [{"linear": "megatron"}, {}])
def test_without_a_recipe_everything_is_exact(rank_info: RankInfo, spec: dict[str, str]) -> None:
    job = Job(model=WIDE, turbo=spec, seed=rank_info.seed)
    if spec:
        assert gemm_errors(job) == {}
    else:
        check(gemm_errors(job), {"*": EXACT})


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize(
    ("flags", "bounds"),
    [
        ({"fp4": "e2m1", "fp4_recipe": "mxfp4"}, MXFP4),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, MXFP8),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, (1e-3, 0.2)),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, MXFP8),
    ],
    ids=["mxfp4", "mxfp8", "tensorwise_hybrid", "blockwise"],
)
def test_megatrons_own_flags_reach_the_modules(
    rank_info: RankInfo, flags: dict[str, Any], bounds: tuple[float, float]
) -> None:
    """Without Transformer Engine Megatron enters a null context and computes in BF16 for these."""
    model = {**WIDE, **flags, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    errors = gemm_errors(Job(model=model, seed=rank_info.seed))
    check(errors, {"*": bounds, "*.layers.0.*": EXACT})


@ranks(world_size=1, megatron=True)
def test_wgrad_stays_exact_where_megatron_says_so(rank_info: RankInfo) -> None:
    model = {**WIDE, "fp8": "hybrid", "fp8_recipe": "mxfp8", "fp8_wgrad": False}
    for name, (fprop, dgrad, wgrad) in gemm_errors(Job(model=model, seed=rank_info.seed)).items():
        assert MXFP8[0] < fprop < MXFP8[1], name
        assert MXFP8[0] < dgrad < 2 * MXFP8[1], name
        assert wgrad <= EXACT[1], name


@ranks(world_size=1, megatron=True)
def test_mtp_follows_the_recipe_and_stays_exact_under_megatrons_fp4(rank_info: RankInfo) -> None:
    model = {**WIDE, "num_layers": 2, "mtp_num_layers": 1}
    check(gemm_errors(Job(model=model, turbo={"precision": "mxfp4"}, seed=rank_info.seed)), {"*": MXFP4})
    flags = {**model, "fp4": "e2m1", "fp4_recipe": "mxfp4"}
    check(gemm_errors(Job(model=flags, seed=rank_info.seed)), {"*": MXFP4, "mtp.*": EXACT})


@ranks(world_size=2, megatron=True)
def test_mxfp4_learns_and_is_not_bf16(rank_info: RankInfo) -> None:
    job = Job(model=WIDE | {"num_layers": 2}, bf16=True, steps=20, seed=rank_info.seed, distributed_optimizer=True)
    bf16, mxfp4 = train(job), train(job.but(turbo={"precision": "mxfp4"}))
    assert relative_difference(bf16.losses, mxfp4.losses) > 1e-3
    assert sum(mxfp4.losses[-1]) < 0.95 * sum(mxfp4.losses[0])


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
def test_quantised_weights_are_never_stale(rank_info: RankInfo) -> None:
    """The distributed optimizer writes parameters behind torch's back, and may gather them while the next step begins."""
    model = {**WIDE, "num_layers": 2}
    job = Job(model=model, turbo={"precision": "mxfp4"}, steps=5, seed=rank_info.seed, micro_batches=3)
    plain = train(job)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    for other in [job.but(distributed_optimizer=True), job.but(distributed_optimizer=True, ddp=overlap)]:
        same_numbers(train(other), plain)


@ranks(world_size=1, megatron=True)
def test_weights_loaded_between_steps_are_quantised_afresh(rank_info: RankInfo) -> None:
    """Megatron copies loaded weights into its buffers; the copies made before must not be used again."""
    initial: dict[str, Tensor] = {}

    def keep(models: list[Any]) -> None:
        initial.update({name: value.clone() for name, value in models[0].state_dict().items() if value is not None})

    model = {**WIDE, "num_layers": 2}
    job = Job(model=model, turbo={"precision": "mxfp4"}, steps=3, seed=rank_info.seed, on_model=keep)
    for distributed in (False, True):
        first = train(job.but(distributed_optimizer=distributed))
        bare(first.models[0]).load_state_dict(initial, strict=False)
        first.optimizer.reload_model_params()
        again, _ = run_steps(job.but(steps=1), first.config, first.models, first.optimizer)
        assert again[0] == first.losses[0]
        assert again[0] != first.losses[2]


@ranks(world_size=1, megatron=True)
def test_stochastic_rounding_is_not_ignored(rank_info: RankInfo) -> None:
    """It is drawn anew for every step and seed, and repeats with the seed of the run."""
    stochastic = {"precision": {"preset": "mxfp4", "dy": {"rounding": "stochastic"}}}
    job = Job(model={**WIDE, "num_layers": 2}, steps=2, seed=rank_info.seed)
    nearest, one = train(job.but(turbo={"precision": "mxfp4"})), train(job.but(turbo=stochastic))
    other = train(job.but(turbo={**stochastic, "rounding_seed": 1}))
    assert one.losses == train(job.but(turbo=stochastic)).losses
    assert nearest.losses[0] == one.losses[0] == other.losses[0], "only gradients are rounded stochastically"
    assert len({nearest.gradient_norms[0][0], one.gradient_norms[0][0], other.gradient_norms[0][0]}) == 3


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(("precision", "steps"), [("bf16", 4), ("mxfp4", 1)])
def test_fused_gradient_accumulation_counts_every_micro_batch(rank_info: RankInfo, precision: str, steps: int) -> None:
    """Accumulating into `main_grad` inside the wgrad GEMM gives what accumulating in `.grad` gives, overlap or not.

    One step in MXFP4: the sums differ in their last bits, and a bit of a weight may move it to another code.
    """
    model = {**WIDE, "num_layers": 2}
    job = Job(model=model, turbo={"precision": precision}, steps=steps, seed=rank_info.seed, micro_batches=3)
    plain = train(job)
    fused = job.but(model={**model, "gradient_accumulation_fusion": True})
    for other in [
        fused,
        fused.but(ddp={"overlap_grad_reduce": True}),
        fused.but(ddp={"overlap_grad_reduce": True}, distributed_optimizer=True),
    ]:
        same_numbers(train(other), plain)


def same_numbers(result: Result, expected: Result) -> None:
    """Equal up to the order in which gradients are summed."""
    assert relative_difference(result.losses, expected.losses) <= 1e-5
    assert relative_difference(result.gradient_norms, expected.gradient_norms) <= 1e-4


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
def test_tensor_parallel_quantises_to_the_same_numbers(rank_info: RankInfo) -> None:
    """Where no block of 32 lies across two ranks, TP=2 multiplies the same quantised operands: one step agrees."""
    model = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_query_groups": 4}
    job = Job(model=model, turbo={"precision": "mxfp4"}, steps=1, seed=rank_info.seed, micro_batches=2)
    one = train(job)
    for sequence_parallel in (False, True):
        two = train(job.but(tensor=2, sequence_parallel=sequence_parallel, micro_batches=4))
        assert relative_difference([two.losses[0][:2]], one.losses) <= 1e-4 or rank_info.rank == 1
        assert relative_difference(two.gradient_norms, one.gradient_norms) <= 2e-2


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("precision", ["mxfp4", "mxfp8", "fp8_tensorwise", "fp8_block128"])
def test_experts_without_tokens_give_finite_gradients(rank_info: RankInfo, precision: str) -> None:
    """Every token goes to the first experts: the others' inputs have no rows."""

    def route_all_alike(models: list[Any]) -> None:
        for name, parameter in models[0].named_parameters():
            if "router" in name:
                torch.nn.init.zeros_(parameter)

    job = Job(model={**WIDE, "num_layers": 2, **MOE}, turbo={"precision": precision}, steps=3, on_model=route_all_alike)
    result = train(job)
    assert all(torch.isfinite(value).all() for value in result.parameters.values())
    assert all(0 < norm[0] < 100 for norm in result.gradient_norms)


@ranks(world_size=1, megatron=True)
def test_odd_sizes_are_padded_or_refused(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ShapeError

    model = {"num_layers": 1, "hidden_size": 36, "ffn_hidden_size": 52, "kv_channels": 8}
    job = Job(model=model, turbo={"precision": "mxfp4"}, steps=2)
    check(gemm_errors(job), {"*": MXFP4})
    with pytest.raises(ShapeError, match=r"decoder\.layers\.0\..*36.*padding: pad"):
        train(job.but(turbo={"precision": "mxfp4", "padding": "refuse"}))
