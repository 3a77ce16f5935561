"""What is tuned: the products a linear runs, and keys that equal those the kernels look up."""

from __future__ import annotations

import pytest
import torch

from primus_turbo_plugin.diagnostics.model_sizes import MODELS, linears_of, model_sizes, override
from primus_turbo_plugin.diagnostics.tune.gemm_tasks import (
    FORMATS,
    LAYOUTS,
    GemmTask,
    distinct,
    kind_of,
    linear_tasks,
    shape_tasks,
)
from primus_turbo_plugin.errors import ConfigError
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.gemm_checks import common_length
from primus_turbo_plugin.kernels.reference.quantize import quantize
from primus_turbo_plugin.kernels.triton import gemm_key
from primus_turbo_plugin.precision.quant_spec import QuantSpec
from primus_turbo_plugin.precision.recipe import Recipe
from tests.support.linear import leaf, make_call, plan


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_key, "gpu_of", lambda index: ("sm90", 132))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*FORMATS, "rotated"])
@pytest.mark.parametrize("shape", [(64, 96, 128), (33, 40, 77), (8, 5, 200)])
def test_the_key_of_sizes_is_the_key_of_tensors(
    on_an_h200: None, rng: torch.Generator, name: str, layout: str, shape: tuple[int, int, int]
) -> None:
    rows, cols, contraction = shape
    kind = QuantSpec(format="mxfp4", hadamard=32) if name == "rotated" else kind_of(name)  # type: ignore[arg-type]
    task = GemmTask(name=name, rows=rows, cols=cols, contraction=contraction, a=kind, b=kind, layout=layout)  # type: ignore[arg-type]

    def operand(outer: int, transposed: bool) -> gemm_key.Operand:
        plain = torch.randn(outer, contraction, generator=rng)
        if isinstance(kind, QuantSpec):
            return quantize(plain, kind)
        return plain.to(kind).t().contiguous().t() if transposed else plain.to(kind)

    a, b = operand(rows, layout[0] == "t"), operand(cols, layout[1] == "n")
    y = torch.empty(rows, cols, dtype=task.out_dtype)
    assert task.key("sm90", 132) == gemm_key.key_of(a, b, y, common_length(a, b), bias=False, accumulate=False)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "mxfp8", "fp8_block128"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_tasks_of_a_linear_are_the_products_it_runs(
    on_an_h200: None, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, recipe: str, fused: bool
) -> None:
    """Keys of what a forward and backward really multiply, against those that would be tuned for it."""
    tokens, out_features, in_features = 64, 96, 160
    seen = []

    def noted(
        self: LinearKernels, gemm: str, a: gemm_key.Operand, b: gemm_key.Operand, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = out if out is not None else torch.zeros(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        seen.append(gemm_key.key_of(a, b, y, common_length(a, b), bias=False, accumulate=out is not None))
        return y

    class Sink:
        def buffer(self) -> torch.Tensor:
            return torch.zeros(out_features, in_features)

        def overwrites(self) -> bool:
            return False

        def delivered(self) -> None: ...

    monkeypatch.setattr(LinearKernels, "gemm_nt", noted)
    x = leaf(torch.randn(tokens, in_features, generator=rng).bfloat16())
    w = leaf(torch.randn(out_features, in_features, generator=rng).bfloat16())
    call = make_call(plan(recipe), torch.bfloat16, fused=fused, sink=Sink() if fused else None)
    y = linear(x, w, None, call)
    y.backward(torch.randn(tokens, out_features, generator=rng).bfloat16())
    of = linears_of(override(None, hidden=in_features, ffn=out_features, heads=1, gated=False))[2]
    assert (of.name, of.out_features, of.in_features) == ("linear_fc1", out_features, in_features)
    tasks = linear_tasks("m", [of], [(recipe, Recipe.preset(recipe).linear())], tokens=tokens, accumulate=fused)
    assert {task.key("sm90", 132) for task in tasks} == set(seen)


def test_linears_of_known_models_have_their_published_sizes() -> None:
    sizes = {item.name: (item.out_features, item.in_features) for item in linears_of(model_sizes("llama3_8b"))}
    assert sizes == {
        "linear_qkv": (6144, 4096),
        "linear_proj": (4096, 4096),
        "linear_fc1": (28672, 4096),
        "linear_fc2": (4096, 14336),
    }
    parameters = {
        name: model.num_layers * sum(linear.out_features * linear.in_features for linear in linears_of(model))
        for name, model in MODELS.items()
    }
    assert {name: round(count / 1e9, 1) for name, count in parameters.items()} == {
        "llama2_7b": 6.5,
        "llama2_70b": 68.5,
        "llama3_8b": 7.0,
        "llama3_70b": 68.5,
        "llama3_405b": 401.6,
    }


def test_tensor_parallel_ranks_hold_their_share_and_indivisible_sizes_are_refused() -> None:
    sizes = {item.name: (item.out_features, item.in_features) for item in linears_of(model_sizes("llama3_70b"), tp=8)}
    assert sizes["linear_qkv"] == (1280, 8192)
    assert sizes["linear_fc2"] == (8192, 3584)
    with pytest.raises(ConfigError, match="--tp 16: linear_qkv cannot be split, 8 does not divide"):
        linears_of(model_sizes("llama3_70b"), tp=16)


def test_layers_that_share_a_shape_are_tuned_once() -> None:
    linears = linears_of(override(None, hidden=64, ffn=64, heads=1, gated=False))
    tasks = list(linear_tasks("m", linears, [("bf16", Recipe.preset("bf16").linear())], tokens=32))
    assert len(tasks) == 12
    assert distinct(tasks, "sm90", 132)[0].name == "m.linear_qkv fprop bf16"
    assert len(distinct(tasks, "sm90", 132)) == len({task.key("sm90", 132) for task in tasks})


@pytest.mark.parametrize("shape", ["1,2", "a,2,3", "1,2,3,4", "-1,2,3", "0,8,8"])
def test_a_shape_that_is_none_is_refused(shape: str) -> None:
    with pytest.raises(ConfigError, match=r"M, ?N"):
        list(shape_tasks([shape], ["bf16"], ["nt"], accumulate=False))


def test_wrong_names_are_refused_with_what_is_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3_8b'"):
        model_sizes("llama3-8b")
    with pytest.raises(ConfigError, match="unknown format 'fp5'"):
        kind_of("fp5")
    with pytest.raises(ConfigError, match="--heads"):
        override(None, hidden=64, ffn=64)
