"""Which layers a stage builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.specs.gpt import gpt_layer_spec
from primus_turbo_plugin.specs.pipeline import moe_pattern, stage_layers
from tests.megatron.tiny_gpt import Job, build, make_config, start
from tests.specs.configs import MOE, config
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron

#: (settings, [[layers of chunk 0, of chunk 1...] for each pipeline rank])
SPLITS: list[tuple[dict[str, Any], list[list[list[int]]]]] = [
    ({"pipeline_model_parallel_size": 1}, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
    ({"pipeline_model_parallel_size": 2}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
    (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]],
    ),
    (
        {
            "pipeline_model_parallel_size": 3,
            "num_layers_in_first_pipeline_stage": 1,
            "num_layers_in_last_pipeline_stage": 3,
        },
        [[[0]], [[1, 2, 3, 4]], [[5, 6, 7]]],
    ),
    ({"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 2}, [[[0, 1, 2, 3, 4, 5]], [[6, 7]]]),
    (
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        [[[0, 1, 2]], [[3, 4, 5]]],
    ),
    (
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        [[[0], [3, 4]], [[1, 2], [5]]],
    ),
    (
        {"num_layers": 5, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|ttttL"},
        [[[0]], [[1, 2, 3, 4]]],
    ),
    (
        {"num_layers": 5, "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "E|ttttt|L"},
        [[[]], [[0, 1, 2, 3, 4]], [[]]],
    ),
    (
        {
            "num_layers": 5,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|t|tt|tL",
        },
        [[[0], [2, 3]], [[1], [4]]],
    ),
]


@pytest.fixture
def virtual_stages() -> Iterator[Any]:
    """Megatron asks its global state whether pipelining is virtual."""
    from megatron.core import parallel_state

    yield parallel_state.set_virtual_pipeline_model_parallel_world_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


@pytest.mark.parametrize(("settings", "expected"), SPLITS, ids=range(len(SPLITS)))
def test_each_stage_gets_its_own_layers(
    settings: dict[str, Any], expected: list[list[list[int]]], virtual_stages: Any
) -> None:
    cfg = config(**{"num_layers": 8, **settings})
    virtual_stages(cfg.virtual_pipeline_model_parallel_size)
    chunks = range(cfg.virtual_pipeline_model_parallel_size or 1)
    stages = [None] if cfg.virtual_pipeline_model_parallel_size is None else list(chunks)
    got = [
        [stage_layers(cfg, vp_stage=stage, pp_rank=rank) for stage in stages]
        for rank in range(cfg.pipeline_model_parallel_size)
    ]
    assert got == expected
    assert sorted(layer for rank in got for chunk in rank for layer in chunk) == list(range(cfg.num_layers))
    for rank, of_rank in enumerate(expected):
        for stage, layers in zip(stages, of_rank):
            block = gpt_layer_spec(cfg, vp_stage=stage, pp_rank=rank)
            plans = [spec.submodules.self_attention.submodules.linear_qkv.params["plan"] for spec in block.layer_specs]
            assert [plan.layer_number for plan in plans] == layers
            assert [plan.path for plan in plans] == [f"decoder.layers.{i}.self_attention.linear_qkv" for i in layers]


def test_virtual_pipelining_without_a_stage_is_an_error() -> None:
    cfg = config(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"virtual_pipeline_model_parallel_size is 2.*vp_stage"):
        gpt_layer_spec(cfg, pp_rank=0)


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": 2},
        {"pipeline": 2, "virtual": 2},
        {"pipeline": 2, "model": {"num_layers_in_first_pipeline_stage": 1}},
        {"pipeline": 2, "model": {"pipeline_model_parallel_layout": "Ettt|tL"}},
    ],
    ids=["even", "virtual", "uneven", "layout"],
)
def test_plans_agree_with_the_numbers_megatron_gives_the_layers(rank_info: RankInfo, settings: dict[str, Any]) -> None:
    """Plans are bound before the layers are built; Megatron numbers them when it builds them."""
    settings = dict(settings)
    job = Job(model={"num_layers": 4, **settings.pop("model", {})}, **settings)
    start(job)
    for model in build(job, make_config(job)):
        for layer in model.decoder.layers:
            assert layer.self_attention.linear_qkv.plan.layer_number == layer.layer_number - 1


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [
        (1, [True] * 4),
        (2, [True, False] * 2),
        (3, [True, False, False, True]),
        ([0, 0, 1, 1], [False, False, True, True]),
    ],
)
def test_moe_pattern(freq: Any, pattern: list[bool]) -> None:
    assert moe_pattern(config(moe_layer_freq=freq, **MOE)) == pattern


@pytest.mark.parametrize("freq", [[1, 0], [1, 0, 2, 1], 0, "[1,0,1,0]", None])
def test_moe_pattern_that_fits_no_model_is_an_error(freq: Any) -> None:
    cfg = config(**MOE)
    cfg.moe_layer_freq = freq
    with pytest.raises(ConfigError, match=r"moe_layer_freq: .*list of 4 zeros and ones.*got"):
        moe_pattern(cfg)


def test_dense_model_has_no_experts_whatever_the_frequency() -> None:
    assert moe_pattern(config(moe_layer_freq=1)) == [False] * 4
