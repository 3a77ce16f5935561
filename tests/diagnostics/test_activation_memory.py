"""What the linears keep for backward: the prediction is what a real forward keeps, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from primus_turbo_plugin.cli import main
from primus_turbo_plugin.diagnostics.activation_memory import Layout, linear_keeps, predict, quantized_bytes, totals
from primus_turbo_plugin.diagnostics.memory_report import memory_lines, plans_of_sizes, size, startup_rows
from primus_turbo_plugin.diagnostics.model_sizes import ModelSizes, linears_of, model_sizes
from primus_turbo_plugin.diagnostics.saved_tensors import Measurement, measure_saved
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.precision.config import TurboConfig
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import Recipe
from tests.support.distributed import RankInfo, ranks

BATCH, LAYERS = 4, 3
SIZES = ModelSizes(num_layers=LAYERS, hidden=128, ffn=256, heads=4, groups=2, head_dim=32)
RECIPES = ("bf16", "mxfp4", "mxfp4_all", "mxfp8", "fp8_tensorwise", "fp8_rowwise", "fp8_block128")


@pytest.mark.parametrize("shape", [(64, 128), (33, 77), (1, 1), (128, 300)])
@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec(format="mxfp4"),
        QuantSpec(format="mxfp4", block="32x32"),
        QuantSpec(format="mxfp4", hadamard=64),
        QuantSpec(format="mxfp8"),
        QuantSpec(format="fp8", block="tensorwise"),
        QuantSpec(format="fp8", block="rowwise"),
        QuantSpec(format="fp8", block="1x128"),
    ],
    ids=str,
)
def test_bytes_of_an_operand_are_those_of_a_quantised_tensor(
    rng: torch.Generator, spec: QuantSpec, shape: tuple[int, int]
) -> None:
    assert quantized_bytes(spec, *shape) == quantize(torch.randn(shape, generator=rng), spec).nbytes


def _measure(turbo: Mapping[str, Any], *, tp: int, sequence_parallel: bool) -> tuple[Measurement, Any]:
    """What one forward and backward of the tiny GPT keeps."""
    from tests.megatron import tiny_gpt

    model = {
        "num_layers": LAYERS,
        "hidden_size": SIZES.hidden,
        "ffn_hidden_size": SIZES.ffn,
        "num_query_groups": SIZES.groups,
    }
    job = tiny_gpt.Job(turbo=turbo, bf16=True, tensor=tp, sequence_parallel=sequence_parallel, model=model)
    tiny_gpt.start(job)
    config = tiny_gpt.make_config(job)
    built = tiny_gpt.build(job, config)[0]
    tokens = torch.randint(tiny_gpt.VOCAB, (BATCH, tiny_gpt.SEQ))
    positions = torch.arange(tiny_gpt.SEQ)[None].expand(BATCH, -1)
    mask = torch.ones(1, 1, tiny_gpt.SEQ, tiny_gpt.SEQ, dtype=torch.bool).triu(1)
    with measure_saved(built) as kept:
        loss = built(tokens, positions, mask, labels=tokens)
    loss.sum().backward()  # what was measured is enough for it
    return kept, config


def _linears(kept: Measurement) -> dict[str, int]:
    """Path in the model -> bytes that a linear (and the norm inside it) was the first to keep."""
    names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return {path.removeprefix("module."): nbytes for path, nbytes in kept.by_module().items() if path.endswith(names)}


def _check(turbo: dict[str, Any], tp: int, sequence_parallel: bool) -> Measurement:
    from tests.megatron import tiny_gpt

    layout = Layout(tokens=BATCH * tiny_gpt.SEQ, tp=tp, sequence_parallel=sequence_parallel)
    groups = predict(SIZES, layout, plans_of_sizes(TurboConfig.from_dict(turbo), SIZES))
    paths = {linear.name: linear.path for linear in linears_of(SIZES)}
    predicted = {
        paths[item.name].replace("*", str(layer)): item.nbytes + item.norm_nbytes
        for group in groups
        for layer in group.layers
        for item in group.linears
    }
    kept, _ = _measure(turbo, tp=tp, sequence_parallel=sequence_parallel)
    measured = _linears(kept)
    assert {path: nbytes for path, nbytes in predicted.items() if nbytes} == measured, (turbo, tp)
    return kept


@pytest.mark.megatron
@ranks(world_size=[1, 2], megatron=True)
def test_prediction_equals_what_a_forward_keeps(rank_info: RankInfo) -> None:
    tp = rank_info.world_size
    for sequence_parallel in {False, tp > 1}:
        others: set[int] = set()
        saved: dict[str, int] = {}
        for recipe in RECIPES:
            kept = _check({"precision": recipe}, tp, sequence_parallel)
            saved[recipe] = kept.nbytes
            others.add(kept.nbytes - sum(_linears(kept).values()))
        assert len(others) == 1, "what the rest keeps does not depend on the recipe"
        assert saved["mxfp4"] < saved["mxfp8"] < saved["bf16"]


@pytest.mark.megatron
@ranks(world_size=1, megatron=True)
def test_layers_in_bf16_and_patterns_count_as_they_run(rank_info: RankInfo) -> None:
    turbo = {"precision": "mxfp4", "bf16_first_layers": 1, "modules": {"decoder.layers.2.mlp.linear_fc2": "mxfp8"}}
    _check(turbo, 1, False)


@pytest.mark.megatron
@ranks(world_size=1, megatron=True)
def test_no_bf16_copy_of_a_quantised_input_is_kept(rank_info: RankInfo) -> None:
    """Beside norm inputs, the linears keep bytes only; weights are kept once, as parameters or quantised copies."""
    kept, _ = _measure({"precision": "mxfp4"}, tp=1, sequence_parallel=False)
    for name in ("linear_proj", "linear_fc2"):
        assert {item.dtype for item in kept.of(name)} == {torch.uint8}
    for name in ("linear_qkv", "linear_fc1"):
        plain = [item for item in kept.of(name) if item.dtype == torch.bfloat16]
        assert len(plain) == LAYERS, "the norm's input"
    codes = [item for item in kept.weights if item.dtype == torch.uint8]
    assert len(codes) == LAYERS * 4 * 2, "codes and scales of each weight's columnwise copy"


@pytest.mark.megatron
@ranks(world_size=1, megatron=True)
def test_attention_keeps_no_more_than_its_tensors(rank_info: RankInfo) -> None:
    """Values are a view into qkv's output, which nothing else needs once queries and keys are rotated."""
    kept, _ = _measure({}, tp=1, sequence_parallel=False)
    saved = kept.of("core_attention")
    assert len(saved) == LAYERS * 5, "q, k, v, output, log-sum-exp"
    assert all(item.nbytes == item.seen_bytes for item in saved)


def test_quantised_input_of_proj_costs_what_attention_keeps_anyway() -> None:
    """An honest figure: BF16 shares attention's output, a quantised copy comes on top."""
    proj = linears_of(SIZES)[1]
    keeps = linear_keeps(proj, "mxfp4", Recipe.preset("mxfp4").linear(), Layout(tokens=64))
    assert keeps.bf16_nbytes == 0
    assert keeps.nbytes == 128 * 64 // 2 + 128 * 2
    assert "core attention" in keeps.note


def test_llama_8b_by_hand() -> None:
    sizes = model_sizes("llama3_8b")
    layout = Layout(tokens=16384)
    groups = predict(sizes, layout, plans_of_sizes(TurboConfig.from_dict({"precision": "mxfp4"}), sizes))
    kept, in_bf16 = totals(groups)
    inputs = 4096 + 4096 + 14336  # qkv, fc1, fc2; attention keeps proj's
    assert in_bf16 == 32 * 16384 * 2 * inputs
    assert kept == 32 * 16384 * (inputs + 4096) * (1 / 2 + 1 / 32)
    text = "\n".join(memory_lines(sizes, layout, groups))
    assert "Layers 0-31, each" in text
    assert f"{size(kept)}" in text


def test_startup_lines_are_silent_in_bf16_and_per_token_where_the_microbatch_is_unknown() -> None:
    sizes, layout = model_sizes("llama3_8b"), Layout(tokens=4096)
    assert startup_rows(sizes, layout, plans_of_sizes(TurboConfig(), sizes), per_token=True) == []
    plans = plans_of_sizes(TurboConfig.from_dict({"precision": "mxfp4", "bf16_first_layers": 2}), sizes)
    rows = dict(startup_rows(sizes, layout, plans, per_token=True))
    assert rows["layers 2-31, each"] == f"{26624 * 17 // 32} bytes a token, in BF16 45056 bytes a token"
    assert list(rows) == ["layers 0-1, each", "layers 2-31, each", "all layers"]


def test_memory_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIMUS_TURBO_CONFIG", raising=False)
    arguments = ["memory", "--model", "llama3_8b", "--turbo-precision", "mxfp4", "--tp", "2", "--tokens", "4096"]
    assert main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    assert main([*arguments, "--sequence-parallel", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["linears_bytes"] < plain["linears_bf16_bytes"]
    assert plain["layers"][0]["linears"][0]["shape"] == [2048, 4096]
    assert main([*arguments, "--tp", "3"]) == 1
    assert "--tp 3" in capsys.readouterr().err
    assert main(["memory", "--model", "llama3_8b", "--tokens", "4095", "--tp", "2", "--sequence-parallel"]) == 1
    assert "must divide" in capsys.readouterr().err
    own = ["memory", "--hidden", "64", "--ffn", "96", "--heads", "4", "--turbo-precision", "mxfp4"]
    assert main([*own, "--turbo-bf16-first-layers", "1"]) == 1
    assert "Give --num-layers" in capsys.readouterr().err
    assert main([*own, "--turbo-bf16-first-layers", "1", "--num-layers", "3"]) == 0
    assert "Layers 1-2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["memory", "--help"])
    assert "mixtral_8x7b" in capsys.readouterr().out


@pytest.mark.parametrize(("hidden", "heads"), [("64", "0"), ("65", "4")])
def test_a_width_that_heads_do_not_divide_is_refused(
    hidden: str, heads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "--hidden", hidden, "--ffn", "96", "--heads", heads]) == 1
    assert f"a width of {hidden} does not divide into {heads} heads. Give --head-dim." in capsys.readouterr().err


def test_a_storage_is_counted_once_and_a_view_keeps_all_of_it() -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return (y[:1] * y[:1]) + torch.nn.functional.silu(y)[:1]

    x = torch.randn(8, 4, requires_grad=True)
    model = torch.nn.Sequential(Double())
    with measure_saved(model) as kept:
        model(x)
    assert [(item.module, item.nbytes) for item in kept.activations] == [("0", 128)]
    assert kept.activations[0].seen_bytes == 128
