"""`examples/pretrain.sh` and the models beside it: what it starts, that the files are those models, that they train."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODELS = sorted(path.stem for path in (ROOT / "examples" / "models").glob("*.args"))
#: Billions of parameters that the models' publishers state.
PUBLISHED = {"llama3_8b": 8.03, "llama3_70b": 70.55, "qwen3_8b": 8.19, "mixtral_8x7b": 46.70, "deepseek_v2_lite": 15.7}


def _arguments(model: str) -> list[str]:
    lines = (ROOT / "examples" / "models" / f"{model}.args").read_text().splitlines()
    return [part for line in lines if line and not line.startswith("#") for part in line.split(maxsplit=1)]


def _values(argv: list[str]) -> dict[str, str]:
    """Flag without dashes -> value; the last wins, as in argparse."""
    pairs = zip(argv, [*argv[1:], "--"], strict=True)
    return {a[2:]: ("" if b.startswith("--") else b) for a, b in pairs if a.startswith("--")}


def _script(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain.sh"), *argv],
        env={**inherited, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _printed(*argv: str, **environment: str) -> list[str]:
    ran = _script(*argv, "--print", **{"GPUS_PER_NODE": "8", **environment})
    assert ran.returncode == 0, ran.stderr
    return shlex.split(ran.stdout)


def test_every_model_is_known_here() -> None:
    assert set(MODELS) == set(PUBLISHED)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_are_those_of_the_published_model(model: str) -> None:
    v = _values(_arguments(model))
    hidden, layers, heads = int(v["hidden-size"]), int(v["num-layers"]), int(v["num-attention-heads"])
    if "multi-latent-attention" in v:
        nope, rope, wide, latent = (
            int(v[name]) for name in ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "kv-lora-rank")
        )
        attention = hidden * heads * (nope + rope) + hidden * (latent + rope) + latent * heads * (nope + wide)
        attention += heads * wide * hidden
    else:
        attention = hidden * int(v["kv-channels"]) * 2 * (heads + int(v["num-query-groups"]))
    experts = int(v.get("num-experts", 0))
    dense = 3 * hidden * int(v["ffn-hidden-size"])
    sparse = 3 * hidden * experts * int(v.get("moe-ffn-hidden-size", v["ffn-hidden-size"])) + hidden * experts
    sparse += 3 * hidden * int(v.get("moe-shared-expert-intermediate-size", 0))
    sparse_layers = (layers - 1 if "moe-layer-freq" in v else layers) if experts else 0
    total = 2 * int(v["vocab-size"]) * hidden + layers * attention
    total += sparse_layers * sparse + (layers - sparse_layers) * dense
    assert total / 1e9 == pytest.approx(PUBLISHED[model], rel=3e-3)


def test_router_weighs_experts_as_the_published_models_do() -> None:
    """DeepSeek's `norm_topk_prob: false`: a share of all experts' probabilities. Mixtral's add up to one over the chosen ones."""
    before = {
        model: "moe-router-pre-softmax" in _values(_arguments(model)) for model in ("deepseek_v2_lite", "mixtral_8x7b")
    }
    assert before == {"deepseek_v2_lite": True, "mixtral_8x7b": False}


@pytest.mark.parametrize("model", MODELS)
def test_parallelism_fits_whole_nodes(model: str) -> None:
    v = _values(_arguments(model))
    ranks = int(v.get("tensor-model-parallel-size", 1)) * int(v.get("pipeline-model-parallel-size", 1))
    ranks = max(ranks, int(v.get("expert-model-parallel-size", 1)))
    world = -(-ranks // 8) * 8
    assert world % ranks == 0
    assert int(v["global-batch-size"]) % (world // ranks * int(v["micro-batch-size"])) == 0


def test_command_of_one_node() -> None:
    command = _printed("llama3_8b", "--num-layers", "4")
    assert command[0] == sys.executable
    assert "--standalone" in command
    assert "--master-addr" not in command
    values = _values(command)
    assert (values["nproc-per-node"], values["tokenizer-type"], values["num-layers"]) == ("8", "NullTokenizer", "4")
    assert "mock-data" in values
    assert "save" not in values


def test_command_of_many_nodes_with_data_and_checkpoints() -> None:
    command = _printed(
        "deepseek_v2_lite", NNODES="4", NODE_RANK="3", MASTER_ADDR="first", DATA_PATH="0.5 a b c", TOKENIZER_MODEL="/t p",
        CHECKPOINT_PATH="/c",
    )  # fmt: skip
    values = _values(command)
    assert (values["nnodes"], values["node-rank"], values["master-addr"], values["master-port"]) == (
        "4", "3", "first", "29500",
    )  # fmt: skip
    assert (values["tokenizer-model"], values["save"], values["load"]) == ("/t p", "/c", "/c")
    assert command[command.index("--data-path") + 1 :][:4] == ["0.5", "a", "b", "c"]
    assert values["moe-layer-freq"] == "([0]+[1]*26)"
    assert "mock-data" not in values
    assert "standalone" not in values


def test_slurm_says_where_the_ranks_meet(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[7-8]" ] && printf "n7\\nn8\\n"\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[7-8]"}
    values = _values(_printed("llama3_70b", PATH=f"{tmp_path}:{os.environ['PATH']}", **slurm))
    assert (values["nnodes"], values["node-rank"], values["master-addr"]) == ("2", "1", "n7")


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        ([], {}, "the first argument is the model"),
        (["--num-layers", "4"], {}, "the first argument is the model"),
        (["llama4"], {}, "no model 'llama4'. Known: deepseek_v2_lite"),
        (["llama3_8b"], {"NNODES": "2"}, "set MASTER_ADDR"),
        (["llama3_8b"], {"GPUS_PER_NODE": "0"}, "torch sees no GPU"),
        (["llama3_8b"], {"DATA_PATH": "a"}, "TOKENIZER_MODEL is not"),
        (["llama3_8b", "--data-path", "a"], {}, "name the data by DATA_PATH"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], environment: dict[str, str], message: str) -> None:
    ran = _script(*argv, **{"GPUS_PER_NODE": "8", **environment})
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert message in ran.stderr


#: What makes each model small; the flags that say what kind of model it is stay.
_SMALL = (
    "--device cpu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 256 "
    "--seq-length 32 --max-position-embeddings 32 --global-batch-size 4 --train-iters 3 --eval-iters 1 --lr-warmup-fraction 0 "
    "--lr 1e-2 --min-lr 1e-2"
)
_HEADS = "--kv-channels 16 --num-query-groups 2"
_SCALED = {
    "llama3_8b": (1, _HEADS),
    "qwen3_8b": (1, _HEADS),
    "llama3_70b": (
        4,
        f"{_HEADS} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "mixtral_8x7b": (2, f"{_HEADS} --expert-model-parallel-size 2"),
    "deepseek_v2_lite": (
        2,
        "--kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --moe-ffn-hidden-size 32 "
        "--moe-shared-expert-intermediate-size 64 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
        "--moe-layer-freq ([0]+[1]*1)",
    ),
}


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.parametrize("model", MODELS)
def test_the_script_s_command_trains_a_small_one(model: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.training", reason="the wheel of megatron-core 0.16 has no training loop")
    from primus_turbo_plugin.training import launch
    from primus_turbo_plugin.training.metrics import MetricsReader

    processes, sizes = _SCALED[model]
    command = _printed(model, *_SMALL.split(), *sizes.split(), "--turbo-precision", "mxfp4")
    metrics = tmp_path / "metrics.jsonl"
    argv = [*command[command.index(str(ROOT / "examples" / "pretrain_gpt.py")) + 1 :], "--turbo-metrics", str(metrics)]
    with launch.start_ranks("primus_turbo_plugin.training.pretrain:train", argv, processes, logs=tmp_path) as running:
        running.wait()
    losses = [metric.value for metric in MetricsReader(metrics).new() if metric.tag == "lm loss"]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
