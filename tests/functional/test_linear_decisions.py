"""What a linear and a norm decide once, and when they decide again."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu

from primus_turbo_plugin.errors import ConfigError, UnsupportedError
from primus_turbo_plugin.functional import fused_quantize, norm
from primus_turbo_plugin.functional.autocast import no_autocast
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, TensorParallel
from primus_turbo_plugin.functional.linear_kernels import OPERANDS, LinearKernels, operand_specs
from primus_turbo_plugin.functional.norm import NormChoice, rms_norm
from primus_turbo_plugin.kernels.norm import NormRequest
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from tests.support.linear import QUANTIZED_RECIPES, leaf, make_call, plan

_PLAIN = torch.zeros(4, 8)


class _Counting:
    """The default registry, noting what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self._inner = default_registry()

    def select(self, op: str, request: Any, order: Any = None) -> Any:
        self.asked.append(request)
        return self._inner.select(op, request, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> _Counting:
    counting = _Counting()
    monkeypatch.setattr(norm, "default_registry", lambda *_: counting)
    return counting


def _norm(choice: Any, hidden: int, dtype: torch.dtype, weight_dtype: torch.dtype | None = None) -> Tensor:
    return rms_norm(
        torch.ones(3, hidden, dtype=dtype), torch.ones(hidden, dtype=weight_dtype or dtype), 1e-5, kernels=choice
    )


def test_a_norm_chooses_once_for_tensors_alike_and_again_where_dtype_or_width_differ(registry: _Counting) -> None:
    choice, bf16, fp32 = NormChoice(), torch.bfloat16, torch.float32
    kinds = [(8, bf16, bf16), (8, bf16, fp32), (8, fp32, fp32), (16, bf16, bf16)]
    for _ in range(3):
        for kind in kinds:
            _norm(choice, *kind)
    wanted = [(request.hidden, request.dtype, request.weight_dtype) for request in registry.asked]
    assert wanted == kinds


def test_a_norm_that_changes_its_width_may_get_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the width in what is remembered, the first width's kernels would run, or fail, on the second's."""
    reference, ran = default_registry().backend("norm", "reference"), []

    def kernels(name: str) -> Any:
        def forward(*arguments: Any, **options: Any) -> Any:
            ran.append(name)
            return reference.kernels.rms_norm_fwd(*arguments, **options)

        return SimpleNamespace(
            **{**{f: getattr(reference.kernels, f) for f in NormRequest.functions}, "rms_norm_fwd": forward}
        )

    def backend(name: str, limit: int) -> Any:
        def supports(request: NormRequest) -> str | None:
            return None if request.hidden <= limit else f"is for rows of at most {limit}"

        return type(reference)(name=name, request=NormRequest, kernels=kernels(name), supports=supports)

    two = KernelRegistry([backend("narrow", 8), backend("wide", 64)])
    monkeypatch.setattr(norm, "default_registry", lambda: two)
    choice = NormChoice()
    for hidden in (8, 64, 8, 64):
        _norm(choice, hidden, torch.float32)
    assert ran == ["narrow", "wide"] * 2
    for _ in range(2):  # a refusal is not remembered as a choice
        with pytest.raises(UnsupportedError, match="at most 64"):
            _norm(choice, 65, torch.float32)


def test_an_order_without_a_choice_is_asked_in_every_call(registry: _Counting) -> None:
    for order in (["reference"], None, ("reference",)):
        _norm(order, 8, torch.float32)
    assert len(registry.asked) == 3
    with pytest.raises(ConfigError, match="Known"):
        _norm(NormChoice(["refrence"]), 8, torch.float32)


def test_threads_get_one_choice_and_copies_start_anew() -> None:
    choice = NormChoice(("reference",))
    x, weight = torch.ones(3, 8), torch.ones(8)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: choice.kernels("rms_norm", x, weight), range(64)))
    assert len({id(kernels) for kernels in found}) == 1
    for made in (copy.deepcopy(choice), pickle.loads(pickle.dumps(choice))):
        assert made.kernels("rms_norm", x, weight) is found[0]


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED_RECIPES])
def test_kernels_know_the_plans_specs(recipe: str) -> None:
    kernels = make_call(plan(recipe), torch.bfloat16).kernels
    for operand in OPERANDS:
        row, column = operand_specs(kernels.plan, operand)
        assert kernels.specs[operand] == (row, column)
        assert kernels.wanted_specs(operand, row=True, column=False) == (row, None)
        assert kernels.wanted_specs(operand, row=False, column=True) == (None, column)
    assert kernels.is_stochastic == kernels.plan.precision.is_stochastic


def test_fused_kernels_are_looked_for_once_for_tensors_alike() -> None:
    asked: list[Any] = []
    backend = default_registry().backend("fused_quantize", "reference")
    supports = backend.supports
    object.__setattr__(backend, "supports", lambda request: asked.append(request) or supports(request))  # it is frozen
    try:
        call, gamma = make_call(plan("mxfp4"), torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
        for _ in range(2):
            for with_wgrad in (True, False):
                for wide in (64, 96):
                    x = torch.randn(32, wide, dtype=torch.bfloat16)
                    assert fused_quantize.norm_fusion_refusal(x, gamma, call, with_wgrad=with_wgrad) is None
            assert fused_quantize.norm_fusion_refusal(x[:, :64], gamma.float(), call, with_wgrad=True) is None
    finally:
        object.__setattr__(backend, "supports", supports)
    found = [(request.hidden, request.col_spec is not None, request.weight_dtype) for request in asked]
    bf16 = torch.bfloat16
    assert found == [
        (64, True, bf16),
        (96, True, bf16),
        (64, False, bf16),
        (96, False, bf16),
        (64, True, torch.float32),
    ]


def test_what_is_remembered_holds_no_tensors() -> None:
    call, gone = make_call(plan("mxfp4"), torch.bfloat16), []
    choice = NormChoice()
    for _ in range(2):
        x, gamma, w = (leaf(torch.randn(*shape, dtype=torch.bfloat16)) for shape in ((32, 64), (64,), (32, 64)))
        normed, used = fused_quantize.rms_norm_input(
            x, gamma, 1e-5, call, zero_centered_gamma=False, with_wgrad=True, kernels=choice
        )
        bias = leaf(torch.zeros(32, dtype=torch.bfloat16))
        linear(normed, w, bias, used).sum().backward()
        rms_norm(x, gamma, 1e-5, kernels=choice)
        gone += [weakref.ref(t) for t in (x, gamma, w, bias, normed)]
    del x, gamma, w, bias, normed, used
    gc.collect()
    assert not any(reference() is not None for reference in gone)


def test_layers_share_the_nan_that_stands_in_for_their_inputs(rng: torch.Generator) -> None:
    """Made under inference mode or by fake tensors first, or used twice in a graph, it serves training all the same."""
    fused_quantize._nan.cache_clear()
    call = make_call(plan("mxfp4"), torch.bfloat16)
    x, gamma, w = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((32, 64), (64,), (64, 64)))

    def layer(x: Tensor, gamma: Tensor, w: Tensor) -> Tensor:
        normed, used = fused_quantize.rms_norm_input(x, gamma, 1e-5, call, zero_centered_gamma=False, with_wgrad=True)
        assert normed.shape == x.shape
        assert bool(normed.isnan().all())
        return linear(normed, w, None, used)

    with FakeTensorMode():
        assert fused_quantize.stand_in(torch.empty(4, 8), 6).shape == (4, 6)
    with torch.inference_mode():
        expected = layer(x, gamma, w).clone()
    grads = []
    for _ in range(2):
        leaves = [leaf(t) for t in (x, gamma, w)]
        first, second = layer(*leaves), layer(*leaves)
        assert torch.equal(first, expected)
        (first.square() + second).sum().backward()
        grads.append([t.grad for t in leaves])
    for a, b in zip(*grads):
        assert bool(a.isfinite().all())
        assert torch.equal(a, b)


def test_a_fake_among_plain_tensors_is_not_what_layers_share() -> None:
    fused_quantize._nan.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fused_quantize.stand_in(_PLAIN, 6)
    assert fused_quantize.stand_in(_PLAIN, 6).isnan().all()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "mxfp8"])
def test_which_gradients_are_wanted_is_asked_in_every_call(recipe: str, rng: torch.Generator) -> None:
    """One call object, first without and then with a gradient of weight or input: nothing sticks."""
    call = make_call(plan(recipe), torch.bfloat16)
    x, w, dy = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((32, 64), (96, 64), (32, 96)))
    expected: dict[str, Tensor] = {}
    for x_grad, w_grad in ((True, True), (False, True), (True, False), (True, True), (False, False)):
        leaves = leaf(x, x_grad), leaf(w, w_grad)
        y = linear(*leaves, None, call)
        assert y.requires_grad == (x_grad or w_grad)
        if y.requires_grad:
            y.backward(dy)
        for name, t, wanted in zip("xw", leaves, (x_grad, w_grad)):
            assert (t.grad is not None) == wanted
            if t.grad is not None:
                assert torch.equal(expected.setdefault(name, t.grad), t.grad)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_operands_survive_hooks_on_saved_tensors(recipe: str, rng: torch.Generator) -> None:
    call = make_call(plan(recipe), torch.bfloat16)
    x, w, dy = (torch.randn(*shape, generator=rng).bfloat16() for shape in ((32, 64), (96, 64), (32, 96)))
    grads = []
    for hooks in (contextlib.nullcontext(), save_on_cpu(), save_on_cpu()):
        leaves = leaf(x), leaf(w)
        with hooks:
            y = linear(*leaves, None, call)
        for _ in range(2):
            y.backward(dy, retain_graph=True)
        grads.append([t.grad for t in leaves])
    for got in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, grads[0]))


def test_no_autocast_does_something_only_under_autocast() -> None:
    x = torch.ones(2, 2)
    assert isinstance(no_autocast(x), contextlib.nullcontext)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            with no_autocast(x):
                assert torch.mm(x, x).dtype == torch.float32
                with no_autocast(x):  # none left to turn off
                    assert torch.mm(x, x).dtype == torch.float32
            assert torch.mm(x, x).dtype == torch.bfloat16


def test_backward_of_a_call_under_autocast_casts_nothing_twice(rng: torch.Generator) -> None:
    """Backward runs under autocast too where the caller leaves it on; its GEMMs must stay those of the forward."""
    call = make_call(plan("bf16"), torch.float32)
    x, w, dy = (torch.randn(*shape, generator=rng) for shape in ((8, 16), (24, 16), (8, 24)))
    grads = []
    for enabled in (False, True):
        leaves = leaf(x), leaf(w)
        y = linear(*leaves, None, call)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y.backward(dy)
        grads.append([t.grad for t in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2])
def test_a_split_knows_its_collectives(size: int) -> None:
    for mode in ("column", "row"):
        for sequence_parallel in (False, True):
            for reduce in (False, True):
                split = TensorParallel(
                    mode=mode,  # type: ignore[arg-type]
                    group=_Group(size),  # type: ignore[arg-type]
                    sequence_parallel=sequence_parallel,
                    reduce=reduce,
                )
                several = size > 1
                assert split.size == size
                assert split.gathers_input == (several and sequence_parallel and mode == "column")
                assert split.scatters_output == (several and sequence_parallel and mode == "row")
                assert [split.sums(m) for m in ("column", "row")] == [
                    several and reduce and not sequence_parallel and m == mode for m in ("column", "row")
                ]
    alone = TensorParallel()
    assert (alone.size, alone.gathers_input, alone.scatters_output) == (1, False, False)


def test_stochastic_plans_still_need_random_bits() -> None:
    rounds = plan("mxfp4", dgrad={"dy": {"rounding": "stochastic"}})
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    chosen = LinearKernels.select(rounds, cpu, bf16, wgrad_dtype=bf16, accumulate=False)
    assert chosen.is_stochastic
    with pytest.raises(ConfigError, match="needs random bits"):
        LinearCall(plan=rounds, kernels=chosen)


def test_an_unquantised_layer_and_a_norm_are_one_graph_of_torch_compile(rng: torch.Generator) -> None:
    """What is remembered in backward would be a side effect, which dynamo refuses there: it breaks the graph."""
    call, choice = make_call(plan("bf16"), torch.float32), NormChoice()
    x, w, b, gamma = (torch.randn(*shape, generator=rng) for shape in ((8, 16), (24, 16), (24,), (16,)))

    def layer(x: Tensor, gamma: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear(rms_norm(x, gamma, 1e-5, kernels=choice), w, b, call)

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="eager")):
        leaves = [leaf(t) for t in (x, gamma, w, b)]
        y = run(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
