"""`--spec primus_turbo_plugin.megatron_lm gpt_spec`, the way each Megatron-LM hands it to the model."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.test_models import MOE
from tests.megatron.tiny_gpt import SEQ, VOCAB, Job, Result, load, make_config, run_steps, start, train, wrap
from tests.support.distributed import RankInfo, ranks

pytestmark = pytest.mark.megatron

ON_THE_COMMAND_LINE = ["primus_turbo_plugin.megatron_lm", "gpt_spec"]


def program(config: Any, *flags: str, **settings: Any) -> None:
    """Stands for a running Megatron-LM: its parsed arguments, and the configuration it makes of them."""
    from primus_turbo_plugin import megatron_lm
    from primus_turbo_plugin.specs import compat

    parser = megatron_lm.extra_args_provider(argparse.ArgumentParser())
    args = parser.parse_args(flags)
    for name, value in {"load": None, "ckpt_step": None, "pretrained_checkpoint": None, **settings}.items():
        setattr(args, name, value)
    compat.training_arguments = lambda: args
    compat.training_config = lambda: config


def build_as_up_to_018(config: Any, job: Job) -> list[Any]:
    """What gpt_builder does: the imported object goes straight to the model."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module

    models = []
    for chunk in range(job.virtual or 1):
        vp_stage = chunk if job.virtual else None
        first = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        models.append(
            GPTModel(
                config=config,
                transformer_layer_spec=import_module(ON_THE_COMMAND_LINE),
                vocab_size=VOCAB,
                max_sequence_length=SEQ,
                position_embedding_type="rope",
                pre_process=ps.is_pipeline_first_stage(**first),
                post_process=ps.is_pipeline_last_stage(**first),
                vp_stage=vp_stage,
            )
        )
    return models


def build_as_019(config: Any, job: Job) -> list[Any]:
    """Megatron's own builder calls the imported object."""
    pytest.importorskip("megatron.training.models.gpt", reason="this megatron-core has no model builders")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import import_module
    from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    settings = GPTModelConfig(
        transformer=config,
        transformer_layer_spec=import_module(ON_THE_COMMAND_LINE),
        vocab_size=VOCAB,
        seq_length=SEQ,
        position_embedding_type="rope",
    )
    assert settings.as_dict()["_builder_"]  # what Megatron saves of it
    builder = GPTModelBuilder(settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = range(job.virtual) if job.virtual else [None]
    return [builder.build_model(groups, vp_stage=chunk) for chunk in chunks]


BUILDERS = {"up_to_018": build_as_up_to_018, "019": build_as_019}


@contextlib.contextmanager
def variable(value: str | None) -> Iterator[None]:
    """PRIMUS_TURBO_CONFIG for the block."""
    if value is not None:
        os.environ["PRIMUS_TURBO_CONFIG"] = value
    yield
    os.environ.pop("PRIMUS_TURBO_CONFIG", None)


def train_program(job: Job, how: str, *flags: str, **arguments: Any) -> tuple[Result, str]:
    """Trains the model the program builds; also returns what it printed."""
    start(job)
    config = make_config(job)
    program(config, *flags, **arguments)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        models = BUILDERS[how](config, job)
    models, optimizer = wrap(job, config, models)
    if job.load is not None:
        load(job, models, optimizer)
    return Result(*run_steps(job, config, models, optimizer), models, optimizer, config), printed.getvalue()


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("how", BUILDERS)
@pytest.mark.parametrize(
    "settings",
    [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"pipeline": 2, "virtual": 2}],
    ids=["tp2_sp", "pp2", "vpp2"],
)
def test_command_line_trains_what_the_function_trains(
    rank_info: RankInfo, how: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Recipe and pinned layers come from the file the variable names; every layer knows its number."""
    turbo = {"precision": "mxfp4", "bf16_first_layers": 1, "modules": {"*.layers.2.mlp.*": "mxfp8"}}
    (tmp_path / "recipe.yaml").write_text(
        "precision: mxfp4\nbf16_first_layers: 1\nmodules: {'*.layers.2.mlp.*': mxfp8}\n"
    )
    job = Job(model={"num_layers": 4}, turbo=turbo, steps=2, seed=rank_info.seed, **settings)
    with variable(str(tmp_path / "recipe.yaml")):
        result, printed = train_program(job, how)
    expected = train(job)
    assert result.losses == expected.losses
    assert result.gradient_norms == expected.gradient_norms
    assert printed.count("primus-turbo: precision") == (1 if rank_info.rank == 0 else 0)
    if rank_info.rank == 0:
        assert "mxfp8" in printed
        assert "bf16_first_layers" in printed


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("how", BUILDERS)
def test_flags_of_an_entry_script_reach_the_modules(rank_info: RankInfo, how: str) -> None:
    result, _ = train_program(Job(steps=1), how, "--turbo-precision", "mxfp8", "--turbo-norm", "megatron")
    layer = result.models[0].module.decoder.layers[0]
    assert layer.self_attention.linear_qkv.plan.recipe == "mxfp8"
    assert type(layer.input_layernorm).__name__ == "RMSNorm"


@ranks(world_size=1, megatron=True)
def test_wrong_key_in_the_file_is_one_error_with_its_name(rank_info: RankInfo, tmp_path: Path) -> None:
    from primus_turbo_plugin.errors import ConfigError

    (tmp_path / "recipe.yaml").write_text("precison: mxfp4\n")
    job = Job()
    start(job)
    config = make_config(job)
    program(config)
    with variable(str(tmp_path / "recipe.yaml")), pytest.raises(ConfigError, match=r"precison.*precision"):
        build_as_up_to_018(config, job)


@ranks(world_size=1, megatron=True)
@pytest.mark.parametrize("how", BUILDERS)
def test_mtp_is_refused_because_megatron_ignores_the_spec_there(rank_info: RankInfo, how: str) -> None:
    from primus_turbo_plugin.errors import UnsupportedError

    job = Job(model={"mtp_num_layers": 1})
    start(job)
    config = make_config(job)
    program(config)
    with pytest.raises(UnsupportedError, match=r"mtp_num_layers: 1 with --spec.*examples/pretrain_gpt\.py"):
        BUILDERS[how](config, job)


@ranks(world_size=2, megatron=True)
def test_chunks_of_unequal_size_are_refused_where_the_spec_cannot_tell_them_apart(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ConfigError

    job = Job(pipeline=2, virtual=2, model={"num_layers": 4, "pipeline_model_parallel_layout": "Ett|t|t|L"})
    start(job)
    config = make_config(job)
    program(config)
    if rank_info.rank == 0:
        with pytest.raises(ConfigError, match=r"--spec: the model chunks of a pipeline rank have \[1, 2\] layers"):
            build_as_up_to_018(config, job)
    else:
        with pytest.raises(ConfigError, match=r"have \[0, 1\] layers"):
            build_as_up_to_018(config, job)


@pytest.mark.slow
@ranks(world_size=2, megatron=True)
@pytest.mark.parametrize("how", BUILDERS)
def test_checkpoint_of_megatrons_local_moe_spec_is_found_by_load(rank_info: RankInfo, how: str, tmp_path: Path) -> None:
    """Its norms have other keys than this package writes; afterwards a checkpoint has this package's."""
    run = tmp_path / "run"
    job = Job(model=MOE, expert=2, steps=2, seed=rank_info.seed)
    train(job.but(spec="local", save=str(run / "iter_0000002")))
    (run / "latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    resumed = job.but(first_step=2, load=str(run / "iter_0000002"))
    result, _ = train_program(resumed, how, load=str(run))
    assert result.losses == train(resumed).losses
    keys = {item.key for item in result.models[0].module.sharded_state_dict().values() if hasattr(item, "key")}
    assert "decoder.layers.pre_mlp_layernorm.weight" in keys


@ranks(world_size=1, megatron=True)
def test_hybrid_spec_on_the_command_line(rank_info: RankInfo, tmp_path: Path) -> None:
    from primus_turbo_plugin import megatron_lm
    from primus_turbo_plugin.specs import hybrid

    job = Job(model={"num_layers": 4}, hybrid="*-*-", steps=2, turbo={"precision": "mxfp4"})
    expected = train(job)
    (tmp_path / "recipe.yaml").write_text("precision: mxfp4\n")
    program(None)
    original = hybrid.hybrid_stack_spec
    hybrid.hybrid_stack_spec = lambda config, turbo: megatron_lm.hybrid_spec  # as --spec hands it over
    with variable(str(tmp_path / "recipe.yaml")), contextlib.redirect_stdout(io.StringIO()) as printed:
        result = train(job.but(turbo={}))
    hybrid.hybrid_stack_spec = original
    assert result.losses == expected.losses
    assert printed.getvalue().count("primus-turbo: precision") == 1
    assert torch.tensor(result.gradient_norms).isfinite().all()


def test_spec_outside_a_megatron_lm_program_says_what_to_call() -> None:
    from primus_turbo_plugin.errors import UnsupportedError
    from primus_turbo_plugin.megatron_lm import gpt_spec

    with pytest.raises(UnsupportedError, match=r"no Megatron-LM program is running.*gpt_layer_spec"):
        _ = gpt_spec.layer_specs
    assert repr(gpt_spec) == "primus_turbo_plugin.megatron_lm.gpt_spec"


def test_importing_the_spec_imports_no_training_loop() -> None:
    """`megatron.training` takes seconds, and is not in the wheel of 0.16."""
    import subprocess
    import sys

    code = "import sys, primus_turbo_plugin.megatron_lm; print([m for m in sys.modules if m.startswith('megatron.training')])"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
