"""Ranks that would run different kernels, recipes or tuned configurations are refused before a forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.kernels.triton.gemm_defaults import default_config
from primus_turbo_plugin.kernels.triton.gemm_key import GemmKey, OperandKey
from primus_turbo_plugin.kernels.triton.gemm_tuning import TUNABLE
from primus_turbo_plugin.kernels.tuning.codec import encode
from primus_turbo_plugin.kernels.tuning.entry import Entry
from primus_turbo_plugin.kernels.tuning.file import write_entries
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import plan


def _select(registry: KernelRegistry | None = None) -> LinearKernels:
    dtype = torch.bfloat16
    return LinearKernels.select(
        plan("bf16"), torch.device("cpu"), dtype, wgrad_dtype=dtype, accumulate=False, registry=registry
    )


def _errors(rank_info: RankInfo, act: Any) -> list[str | None]:
    error: str | None = None
    try:
        act()
    except ConfigError as raised:
        error = str(raised)
    errors: list[str | None] = [None] * rank_info.world_size
    dist.all_gather_object(errors, error)
    return errors


@ranks(world_size=3)
def test_a_rank_whose_software_serves_with_another_backend_is_refused(rank_info: RankInfo) -> None:
    """As when one node has an older torch: the same configuration, another choice."""
    registry = default_registry()
    if rank_info.rank == 1:
        backends = [registry.backend(op, name) for op in registry.ops for name in registry.names(op) if name != "torch"]
        registry = KernelRegistry(backends)
    errors = _errors(rank_info, lambda: _select(registry))
    message = next(error for error in errors if error is not None)
    for words in ("fprop GEMM: torch", "fprop GEMM: reference", "rank 1 on"):
        assert words in message
    told = {rank for rank, error in enumerate(errors) if error is not None}
    assert told in ({1}, {0, 2}), "those who came after the first"


@ranks(world_size=2)
def test_ranks_that_choose_alike_run_and_a_second_selection_is_silent(rank_info: RankInfo) -> None:
    assert _errors(rank_info, _select) == [None, None]
    assert _errors(rank_info, _select) == [None, None]


def _config() -> Any:
    from tests.specs.configs import config

    return config()


def _model(turbo: dict[str, Any]) -> Any:
    from primus_turbo_plugin.precision.config import TurboConfig
    from primus_turbo_plugin.specs.gpt import gpt_layer_spec

    return gpt_layer_spec(_config(), TurboConfig.from_dict(turbo))


@pytest.mark.megatron
@ranks(world_size=2, megatron=True)
def test_another_recipe_order_seed_or_tuning_file_is_refused_where_the_specs_are_built(
    rank_info: RankInfo, tmp_path: Path
) -> None:
    from tests.support.linear import start_megatron

    start_megatron()
    base = {"precision": "mxfp4"}
    assert _errors(rank_info, lambda: _model(base)) == [None, None]
    others: dict[str, tuple[dict[str, Any], list[str]]] = {
        "recipe": ({"modules": {"decoder.layers.2.mlp.linear_fc2": "mxfp8"}}, ["linear_fc2", "mxfp8", "mxfp4"]),
        "order": ({"kernels": ["reference"]}, ["order ['reference']"]),
        "seed": ({"rounding_seed": 3}, ["rounding 0", "rounding 3"]),
        "tuning": ({"tuning_file": _tuning_file(tmp_path / f"{rank_info.rank}.json")}, ["tuned configurations"]),
    }
    for number, (name, (change, words)) in enumerate(others.items()):
        turbo = {**base, "signs_seed": 1 + number} | (change if rank_info.rank == 1 else {})
        errors = _errors(rank_info, lambda turbo=turbo: _model(turbo))
        assert sum(error is not None for error in errors) == 1, (name, errors)
        message = next(error for error in errors if error)
        assert [word for word in [*words, "rank 0 on", "rank 1 on"] if word not in message] == [], message


def _tuning_file(path: Path) -> str:
    key = GemmKey(
        arch="sm90", compute_units=132, rows=8, cols=8, contraction=64, a=OperandKey(element="bf16"),
        b=OperandKey(element="bf16"), out="bf16",
    )  # fmt: skip
    entry = Entry(
        op="triton.gemm_nt", versions=TUNABLE.versions, key=encode(key), config=encode(default_config(key)), source="measured",
        device="H200", us=1.0, default_us=1.0, date="2026-12-01",
    )  # fmt: skip
    write_entries(path, [entry])
    assert json.loads(path.read_text())["entries"]
    return str(path)


@pytest.mark.megatron
@ranks(world_size=2, megatron=True)
def test_pipeline_stages_build_different_layers_of_one_model(rank_info: RankInfo) -> None:
    """Each stage has its own layers, in different precisions, and that is no disagreement; nor is a second model."""
    from primus_turbo_plugin.precision.config import TurboConfig
    from primus_turbo_plugin.specs.gpt import gpt_layer_spec
    from tests.specs.configs import config
    from tests.support.linear import start_megatron

    start_megatron(pipeline_model_parallel_size=2)
    for turbo in ({"precision": "mxfp4", "bf16_first_layers": 2}, {"precision": "mxfp8"}, {"precision": "mxfp4"}):
        gpt_layer_spec(config(pipeline_model_parallel_size=2), TurboConfig.from_dict(turbo))
