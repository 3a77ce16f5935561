"""What the linears of experts keep for backward: the prediction is what a real forward keeps, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.diagnostics.activation_memory import Layout, predict
from primus_turbo_plugin.diagnostics.expert_memory import MODELS, ExpertSizes, expert_predictions
from primus_turbo_plugin.diagnostics.memory_report import plans_of_sizes
from primus_turbo_plugin.diagnostics.model_sizes import ModelSizes
from primus_turbo_plugin.diagnostics.saved_tensors import measure_saved
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.precision.config import TurboConfig
from tests.support.distributed import RankInfo, ranks

BATCH = 6
SIZES = ModelSizes(num_layers=2, hidden=64, ffn=128, heads=4, groups=2, head_dim=16)
EXPERTS = ExpertSizes(experts=4, topk=2, ffn=96)
RECIPES = ("bf16", "mxfp4", "mxfp8", "fp8_tensorwise", "fp8_rowwise", "fp8_block128")
#: Every expert gets as many tokens: what the prediction supposes.
EVEN = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def _measured(turbo: Mapping[str, Any], *, grouped: bool, ep: int) -> dict[str, int]:
    """Path -> bytes that the linears of the experts of a tiny GPT were the first to keep."""
    from tests.megatron import tiny_gpt
    from tests.megatron.test_models import MOE

    model = {**MOE, **EVEN, "hidden_size": 64, "moe_ffn_hidden_size": 96, "moe_grouped_gemm": grouped}
    job = tiny_gpt.Job(turbo=turbo, bf16=True, expert=ep, model=model)
    tiny_gpt.start(job)
    built = tiny_gpt.build(job, tiny_gpt.make_config(job))[0]
    tokens = torch.randint(tiny_gpt.VOCAB, (BATCH, tiny_gpt.SEQ))
    positions = torch.arange(tiny_gpt.SEQ)[None].expand(BATCH, -1)
    mask = torch.ones(1, 1, tiny_gpt.SEQ, tiny_gpt.SEQ, dtype=torch.bool).triu(1)
    with measure_saved(built) as kept:
        built(tokens, positions, mask, labels=tokens)
    found: dict[str, int] = {}
    for path, nbytes in kept.by_module().items():
        if ".experts." in path and path.endswith(("linear_fc1", "linear_fc2")):
            name = path.removeprefix("module.").partition(".local_experts.")
            key = name[0] + "." + path.rpartition(".")[2] if name[1] else name[0]
            found[key] = found.get(key, 0) + nbytes
    return found


@pytest.mark.megatron
@ranks(world_size=2, megatron=True)
def test_prediction_equals_what_a_forward_keeps(rank_info: RankInfo) -> None:
    """96 tokens a rank, of 2 experts each: 96 or 48 for every local expert, which MX and FP8 blocks pad differently."""
    from dataclasses import replace

    layout = Layout(tokens=BATCH * 16)
    for ep in (1, 2):
        for recipe in RECIPES:
            for grouped in (True, False) if ep == 2 else (True,):
                experts = replace(EXPERTS, ep=ep, grouped=grouped)
                turbo = {"precision": recipe}
                plans = plans_of_sizes(TurboConfig.from_dict(turbo), SIZES, experts)
                groups = predict(SIZES, layout, plans, expert_predictions(SIZES, layout, experts))
                predicted = {
                    f"decoder.layers.{layer}.mlp.{item.name}": item.nbytes
                    for group in groups
                    for layer in group.layers
                    for item in group.linears
                    if item.name.startswith("experts.")
                }
                assert _measured(turbo, grouped=grouped, ep=ep) == predicted, (recipe, ep, grouped)


def test_command_knows_models_of_experts_and_their_layouts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRIMUS_TURBO_CONFIG", raising=False)
    arguments = ["memory", "--model", "mixtral_8x7b", "--turbo-precision", "mxfp4", "--tokens", "8192"]
    assert main(arguments) == 0
    assert "experts.linear_fc1" in capsys.readouterr().out
    assert main([*arguments, "--ep", "8", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    linears = {item["name"]: item for item in plain["layers"][0]["linears"]}
    assert linears["experts.linear_fc1"]["shape"] == [2 * 8192, 4096]
    assert linears["experts.linear_fc1"]["bytes"] == 2 * 8192 * 4096 * 17 // 32
    own = ["--hidden", "64", "--ffn", "128", "--heads", "4", "--num-layers", "3", "--first-dense", "1"]
    assert main(["memory", *own, "--experts", "4", "--topk", "2", "--expert-ffn", "32", "--shared-ffn", "32"]) == 0
    report = capsys.readouterr().out
    assert "Layer 0" in report
    assert "Layers 1-2, each" in report
    assert "shared_experts.linear_fc2" in report


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--experts", "4"], "give --topk, --expert-ffn as well"),
        (["--experts", "4", "--topk", "5", "--expert-ffn", "8"], "cannot go to 5 of 4 experts"),
        (["--model", "mixtral_8x7b", "--ep", "3"], "8 experts do not divide over 3"),
        (["--model", "mixtral"], "known: .*mixtral_8x7b"),
    ],
)
def test_impossible_experts_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [] if "--model" in given else ["--hidden", "64", "--ffn", "96", "--heads", "4"]
    assert main(["memory", *sizes, *given]) == 1
    import re

    assert re.search(message, capsys.readouterr().err)


def test_even_load_loses_no_token() -> None:
    layout = Layout(tokens=100, tp=2, sequence_parallel=True)
    for sizes in (ExpertSizes(experts=8, topk=3, ffn=4, ep=2), ExpertSizes(experts=8, topk=3, ffn=4, etp=2)):
        counts = sizes.counts(layout)
        assert len(counts) == 8 // sizes.ep
        assert sum(counts) == 50 * sizes.etp * 3
        assert max(counts) - min(counts) <= 1
    with pytest.raises(ConfigError, match="ffn must be at least 1"):
        ExpertSizes(experts=1, topk=1, ffn=0)
    assert all(sizes.hidden % 32 == 0 for sizes, _ in MODELS.values())
