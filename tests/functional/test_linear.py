"""The linear's autograd function on one process: equations, what it saves, what it refuses, what it leaves alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import TensorParallel
from primus_turbo_plugin.functional.linear_kernels import LinearKernels
from primus_turbo_plugin.kernels.registry import KernelRegistry, default_registry
from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan
from tests.support import seeded
from tests.support.linear import QUANTIZED_RECIPES, leaf, make_call, plan, relative_error
from tests.tolerances import BF16_UNIT, FP16_UNIT

# Twice the largest relative error of rounding the result: y is rounded again behind the bias. In fp32, that of summing 160 terms.
BARS = {torch.float32: 2e-6, torch.bfloat16: 2 * BF16_UNIT, torch.float16: 2 * FP16_UNIT}


def _inputs(g: torch.Generator, tokens: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, w, b, dy."""
    shapes = ((tokens, k), (n, k), (n,), (tokens, n))
    return [torch.randn(*shape, generator=g).to(dtype) for shape in shapes]


def _expected(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dw, db in fp64, through autograd's own linear."""
    leaves = [leaf(t.double()) for t in (x, w, b)]
    y = torch.nn.functional.linear(*leaves)
    y.backward(dy.double())
    return [y, *(t.grad for t in leaves)]


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize(("tokens", "k", "n"), [(96, 64, 160), (1, 33, 7), (5, 1, 1), (33, 123, 35)])
def test_forward_and_gradients_match_fp64(request: Any, dtype: torch.dtype, tokens: int, k: int, n: int) -> None:
    x, w, b, dy = _inputs(seeded(request), tokens, k, n, dtype)
    leaves = [leaf(t) for t in (x, w, b)]
    y = linear(*leaves, make_call(plan(), dtype))
    y.backward(dy)
    for name, value, reference in zip(["y", "dx", "dw", "db"], [y, *(t.grad for t in leaves)], _expected(x, w, b, dy)):
        assert value.dtype == dtype
        bar = BARS[dtype]
        if name == "y":  # rounded before the bias is added, too: of one number, a bias that cancels leaves that error
            product = (reference.detach() - b.double()).norm() / reference.detach().norm()
            bar *= max(1.0, float(1 + product) / 2)
        assert relative_error(value, reference) <= bar, name


def test_unquantised_gradients_pass_gradcheck(request: Any) -> None:
    g = seeded(request)
    x, w, b, _ = (leaf(t.double()) for t in _inputs(g, 4, 6, 3))
    call = make_call(plan(), torch.float64)
    torch.autograd.gradcheck(lambda *t: linear(*t, call), (x, w, b))


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED_RECIPES])
def test_every_combination_of_required_gradients_gives_just_those(request: Any, recipe: str) -> None:
    """A gradient must not depend on which others are computed, and none may appear unasked."""
    x, w, b, dy = _inputs(seeded(request), 64, 96, 32)
    everything = [leaf(t) for t in (x, w, b)]
    linear(*everything, make_call(plan(recipe), torch.float32)).backward(dy)
    for needed in itertools.product((False, True), repeat=3):
        leaves = [leaf(t, flag) for t, flag in zip((x, w, b), needed)]
        y = linear(*leaves, make_call(plan(recipe), torch.float32))
        assert y.requires_grad == any(needed)
        if not any(needed):
            continue
        y.backward(dy)
        for mine, reference, flag in zip(leaves, everything, needed):
            assert (mine.grad is not None) == flag
            assert not flag or torch.equal(mine.grad, reference.grad)


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED_RECIPES])
def test_no_tokens_give_empty_outputs_and_zero_weight_gradients(request: Any, recipe: str) -> None:
    """An expert without tokens must not leave its gradient unwritten."""
    x, w, b, dy = _inputs(seeded(request), 0, 64, 32)
    leaves = [leaf(t) for t in (x, w, b)]
    y = linear(*leaves, make_call(plan(recipe), torch.float32))
    y.backward(dy)
    assert y.shape == (0, 32)
    assert leaves[0].grad.shape == (0, 64)
    assert torch.equal(leaves[1].grad, torch.zeros(32, 64))
    assert torch.equal(leaves[2].grad, torch.zeros(32))


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED_RECIPES])
def test_strides_do_not_matter_and_the_incoming_gradient_is_left_alone(request: Any, recipe: str) -> None:
    x, w, _, dy = _inputs(seeded(request), 64, 96, 32)
    reference = [leaf(t) for t in (x, w)]
    linear(*reference, None, make_call(plan(recipe), torch.float32)).backward(dy)
    strided = [leaf(t) for t in (x, w)]
    views = [t.t().contiguous().t() for t in strided]
    wide = torch.stack((dy, dy), dim=-1)[..., 0]  # stride 2
    before = wide.clone()
    linear(*views, None, make_call(plan(recipe), torch.float32)).backward(wide)
    assert torch.equal(wide, before)
    for mine, theirs in zip(strided, reference):
        assert relative_error(mine.grad, theirs.grad) < 1e-6
    expanded = torch.ones(1, 32).expand(64, 32)  # what .sum().backward() hands over
    leaves = [leaf(t) for t in (x, w)]
    linear(*leaves, None, make_call(plan(recipe), torch.float32)).backward(expanded)
    again = [leaf(t) for t in (x, w)]
    linear(*again, None, make_call(plan(recipe), torch.float32)).backward(torch.ones(64, 32))
    for mine, theirs in zip(leaves, again):
        assert relative_error(mine.grad, theirs.grad) < 1e-6


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_a_weight_used_twice_gets_the_sum_of_both_gradients(request: Any, recipe: str) -> None:
    x, w, _, dy = _inputs(seeded(request), 64, 96, 32)
    x2, dy2 = x.flip(0).contiguous() * 0.5, dy.flip(1).contiguous()
    apart = []
    for inputs, gradient in ((x, dy), (x2, dy2)):
        alone = leaf(w)
        linear(inputs, alone, None, make_call(plan(recipe), torch.float32)).backward(gradient)
        apart.append(alone.grad)
    shared = leaf(w)
    y = linear(x, shared, None, make_call(plan(recipe), torch.float32))
    y2 = linear(x2, shared, None, make_call(plan(recipe), torch.float32))
    torch.autograd.backward((y, y2), (dy, dy2))
    assert torch.equal(shared.grad, apart[0] + apart[1])


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_decides_the_dtype_once_as_it_does_for_matmul(request: Any, weight_dtype: torch.dtype) -> None:
    x, w, b, dy = _inputs(seeded(request), 64, 96, 32)
    leaves = [leaf(x), leaf(w.to(weight_dtype)), leaf(b.to(weight_dtype))]
    theirs = [leaf(t) for t in leaves]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(*leaves, make_call(plan(), torch.bfloat16))
        expected = torch.nn.functional.linear(*theirs)
        assert y.dtype == expected.dtype == torch.bfloat16
        y.backward(dy.bfloat16())  # still inside: backward must not be cast again
    expected.backward(dy.bfloat16())
    for mine, reference in zip([y, *leaves], [expected, *theirs]):
        assert relative_error(mine.detach(), reference.detach()) < 8e-3
    for mine, reference in zip(leaves, theirs):
        assert mine.grad.dtype == mine.dtype
        assert relative_error(mine.grad, reference.grad) < 8e-3
    assert leaves[1].grad.dtype == weight_dtype


@pytest.mark.parametrize("recipe", ["mxfp4", "fp8_rowwise"])
def test_autocast_to_the_dtype_at_hand_changes_no_bit(request: Any, recipe: str) -> None:
    """Inside, FP8 values are products of a code and an fp32 scale: autocast would round them to bf16."""
    x, w, b, dy = _inputs(seeded(request), 64, 96, 32, torch.bfloat16)
    results = []
    for enabled in (False, True):
        leaves = [leaf(t) for t in (x, w, b)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = linear(*leaves, make_call(plan(recipe), torch.bfloat16))
            y.backward(dy)
        results.append([y, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_autocast_around_backward_alone_changes_no_bit(request: Any) -> None:
    x, w, b, dy = _inputs(seeded(request), 64, 96, 32)
    results = []
    for enabled in (False, True):
        leaves = [leaf(t) for t in (x, w, b)]
        y = linear(*leaves, make_call(plan(), torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y.backward(dy)
        results.append([t.grad for t in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results))


class _Saved:
    """Notes every tensor autograd saves."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __enter__(self) -> _Saved:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, t: Tensor) -> Tensor:
        self.tensors.append(t)
        return t

    def nbytes_beside(self, *known: Tensor) -> int:
        pointers = {t.untyped_storage().data_ptr() for t in known}
        return sum(t.nbytes for t in self.tensors if t.untyped_storage().data_ptr() not in pointers)


@pytest.mark.parametrize(
    ("recipe", "x_bytes", "w_bytes"),
    [
        ("bf16", 0.0, 0.0),
        ("mxfp4", 1 / 2 + 1 / 32, 1 / 2 + 1 / 1024),  # w has a scale for 32x32
        ("mxfp8", 1 + 1 / 32, 1 + 1 / 32),
        ("fp8_rowwise", 1 + 4 / 512, 1 + 4 / 128),  # a row is as long as the contraction
    ],
)
def test_backward_keeps_the_quantised_copies_and_not_the_inputs(
    request: Any, recipe: str, x_bytes: float, w_bytes: float
) -> None:
    """An implementation that also keeps x in BF16 takes more memory than no quantisation at all."""
    x, w, _, _ = (leaf(t) for t in _inputs(seeded(request), 512, 256, 128, torch.bfloat16))
    with _Saved() as saved:
        linear(x, w, None, make_call(plan(recipe), torch.bfloat16))
    assert saved.nbytes_beside(x, w) == x_bytes * x.numel() + w_bytes * w.numel()
    kept_inputs = [t for t in saved.tensors if t.data_ptr() in (x.data_ptr(), w.data_ptr())]
    assert len(kept_inputs) == (2 if recipe == "bf16" else 0)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
def test_a_gemm_that_will_not_run_keeps_nothing(request: Any, recipe: str) -> None:
    x, w, _, _ = _inputs(seeded(request), 64, 96, 32)
    with _Saved() as frozen:
        linear(leaf(x), w, None, make_call(plan(recipe), torch.float32))
    with _Saved() as first_layer:
        linear(x, leaf(w), None, make_call(plan(recipe), torch.float32, transpose_weight=True))
    shapes = {tuple(t.shape) for t in frozen.tensors}, {tuple(t.shape) for t in first_layer.tensors}
    quantised = {(96, 16), (3, 1)}, {(96, 32), (96, 2)}  # w in 32x32 blocks; x along 64 tokens
    assert shapes == (({(32, 96)}, {(64, 96)}) if recipe == "bf16" else quantised)
    with torch.no_grad(), _Saved() as inference:
        linear(leaf(x), leaf(w), None, make_call(plan(recipe), torch.float32))
    assert inference.tensors == []


def test_only_copies_that_will_be_multiplied_are_made(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, bool, bool]] = []
    quantize = LinearKernels.quantize

    def noting(self: Any, operand: str, t: Tensor, row: Any, column: Any, key: Any, **options: Any) -> Any:
        made.append((operand, row is not None, column is not None))
        return quantize(self, operand, t, row, column, key, **options)

    monkeypatch.setattr(LinearKernels, "quantize", noting)
    x, w, _, dy = _inputs(seeded(request), 64, 96, 32)
    call = make_call(plan("mxfp4"), torch.float32)

    def ran(*leaves: Tensor) -> list[tuple[str, bool, bool]]:
        made.clear()
        y = linear(*leaves, None, call)
        if y.requires_grad:
            y.backward(dy)
        return list(made)

    with torch.no_grad():
        assert ran(leaf(x), leaf(w)) == [("x", True, False), ("w", True, False)]
    assert ran(leaf(x), w) == [("x", True, False), ("w", True, True), ("dy", True, False)]
    assert ran(x, leaf(w)) == [("x", True, True), ("w", True, False), ("dy", False, True)]
    assert ran(leaf(x), leaf(w)) == [("x", True, True), ("w", True, True), ("dy", True, True)]


def test_mixed_formats_quantise_just_the_gemms_that_say_so(request: Any) -> None:
    x, w, b, dy = _inputs(seeded(request), 64, 96, 32)
    mixed = plan("mxfp4", wgrad={"format": "bf16", "hadamard": 0})
    results = {}
    for name, of in {"mixed": mixed, "mxfp4": plan("mxfp4"), "bf16": plan()}.items():
        leaves = [leaf(t) for t in (x, w, b)]
        y = linear(*leaves, make_call(of, torch.float32))
        y.backward(dy)
        results[name] = [y, *(t.grad for t in leaves)]
    for index, same_as in enumerate(("mxfp4", "mxfp4", "bf16", "mxfp4")):  # db is summed where dy is quantised
        assert torch.equal(results["mixed"][index], results[same_as][index])
        assert index == 3 or not torch.equal(results["mxfp4"][index], results["bf16"][index])


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
@pytest.mark.parametrize(("tokens", "k", "n"), [(33, 100, 70), (1, 1, 1), (7, 31, 33)])
def test_padded_contractions_change_nothing(request: Any, recipe: str, tokens: int, k: int, n: int) -> None:
    """Padding by hand with zeros, to sizes that need none, must give the same numbers."""
    x, w, b, dy = _inputs(seeded(request), tokens, k, n)
    leaves = [leaf(t) for t in (x, w, b)]
    y = linear(*leaves, make_call(plan(recipe), torch.float32))
    y.backward(dy)
    wide = [torch.zeros(128, 128), torch.zeros(128, 128), torch.zeros(128), torch.zeros(128, 128)]
    for target, source in zip(wide, (x, w, b, dy)):
        target[tuple(slice(0, size) for size in source.shape)] = source
    big = [leaf(t) for t in wide[:3]]
    big_y = linear(*big, make_call(plan(recipe), torch.float32))
    big_y.backward(wide[3])
    torch.testing.assert_close(y, big_y[:tokens, :n], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[0].grad, big[0].grad[:tokens, :k], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(leaves[1].grad, big[1].grad[:n, :k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "k", "n", "said"),
    [
        (64, 100, 64, "K, the contraction of fprop (x and w), must be a multiple of 32, got 100"),
        (64, 64, 70, "N, the contraction of dgrad (dy and w), must be a multiple of 32, got 70"),
        (33, 64, 64, "tokens, the contraction of wgrad (dy and x), must be a multiple of 32, got 33"),
    ],
)
def test_padding_is_refused_by_name_where_the_plan_says_so(tokens: int, k: int, n: int, said: str) -> None:
    call = make_call(plan("mxfp4", padding="refuse", path="decoder.layers.3.mlp.linear_fc1"), torch.float32)
    x, w = torch.zeros(tokens, k, requires_grad=True), torch.zeros(n, k, requires_grad=True)
    with pytest.raises(ShapeError) as error:
        linear(x, w, None, call)
    assert str(error.value).startswith(f"recipe 'mxfp4', decoder.layers.3.mlp.linear_fc1: {said}. ")
    assert "bf16" in str(error.value)


def test_a_refused_padding_counts_only_gemms_that_run() -> None:
    call = make_call(plan("mxfp4", padding="refuse"), torch.float32)
    with torch.no_grad():
        assert linear(torch.zeros(33, 64), torch.zeros(70, 64), None, call).shape == (33, 70)


@pytest.mark.parametrize(
    ("x", "w", "b", "said"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(5, 4), None, "x must be [tokens, in]"),
        (torch.zeros(2, 4), torch.zeros(5, 3), None, "got [2, 4] and [5, 3]"),
        (torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(4), "bias must be [out] = [5], got [4]"),
        (torch.zeros(2, 4), torch.zeros(5, 4).bfloat16(), None, "x and weight must share a dtype"),
        (torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(5).half(), "x and bias must share a dtype"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_named(x: Tensor, w: Tensor, b: Tensor | None, said: str) -> None:
    with pytest.raises(ShapeError) as error:
        linear(x, w, b, make_call(plan(path="decoder.layers.0.mlp.linear_fc2"), torch.float32))
    assert said in str(error.value)
    assert str(error.value).startswith("decoder.layers.0.mlp.linear_fc2: ")


def test_a_second_derivative_is_refused() -> None:
    x, w = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    y = linear(x, w, None, make_call(plan(), torch.float32))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_kernels_are_refused_before_forward_runs_where_backward_could_not() -> None:
    """Found only in backward, a missing kernel would cost the first step."""
    only_torch = ModulePlan(precision=plan("mxfp4").precision, kernels=KernelOrders(default=("torch",)))
    with pytest.raises((UnsupportedError, ConfigError)):
        make_call(only_torch, torch.float32)
    names = [default_registry().backend("gemm_nt", "torch"), default_registry().backend("quantize", "reference")]
    registry = KernelRegistry(names)
    wgrad_only = plan("bf16", wgrad={"format": "mxfp8"})
    with pytest.raises(UnsupportedError, match="gemm_nt mxfp8"):
        LinearKernels.select(
            wgrad_only,
            torch.device("cpu"),
            torch.float32,
            wgrad_dtype=torch.float32,
            accumulate=False,
            registry=registry,
        )


def test_the_order_of_backends_in_the_plan_decides(request: Any) -> None:
    x, w, _, _ = _inputs(seeded(request), 64, 96, 32, torch.bfloat16)
    for name in ("torch", "reference"):
        ordered = ModulePlan(kernels=KernelOrders(by_op=(("gemm_nt", (name,)),)))
        call = make_call(ordered, torch.bfloat16)
        assert {backend.name for backend in call.kernels.gemms.values()} == {name}
        assert relative_error(linear(x, w, None, call), x.double() @ w.double().t()) < BARS[torch.bfloat16]


def test_tensor_parallel_descriptions_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="'none' has no collective"):
        TensorParallel(mode="none", sequence_parallel=True)
    with pytest.raises(ConfigError, match="'diagonal'"):
        TensorParallel(mode="diagonal")  # type: ignore[arg-type]


def test_stochastic_rounding_without_random_bits_is_refused() -> None:
    stochastic = plan("mxfp4", dgrad={"dy": {"rounding": "stochastic"}}, path="decoder.layers.0.mlp.linear_fc1")
    with pytest.raises(ConfigError, match=r"linear_fc1: recipe 'mxfp4' rounds stochastically"):
        make_call(stochastic, torch.float32)
