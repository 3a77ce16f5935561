"""Experts' linears against the ordinary linear on every expert's tokens alone, and against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError, UnsupportedError
from primus_turbo_plugin.functional.expert_bias import expert_bias_rows
from primus_turbo_plugin.functional.grouped_linear import grouped_linear
from primus_turbo_plugin.functional.grouped_linear_call import GroupedLinearCall
from primus_turbo_plugin.functional.grouped_linear_kernels import GroupedLinearKernels
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import Rounding
from primus_turbo_plugin.functional.linear_kernels import operand_specs
from primus_turbo_plugin.functional.weight_cache import WeightCache
from primus_turbo_plugin.kernels.groups import Groups
from primus_turbo_plugin.precision.module_plan import KernelOrders, ModulePlan
from tests.support import seeded
from tests.support.grouped import LOADS
from tests.support.linear import QUANTIZED_RECIPES, leaf, make_call, plan, relative_error
from tests.tolerances import BF16_UNIT

CPU = torch.device("cpu")
NAMES = ("y", "dx", "dw", "db")


def grouped_call(of: ModulePlan, dtype: torch.dtype = torch.float32, *, fused: bool = False, **fields: Any) -> Any:
    """A call for CPU tensors; `fused` writes dw to an fp32 sink."""
    kernels = GroupedLinearKernels.select(
        of, CPU, dtype, wgrad_dtype=torch.float32 if fused else dtype, accumulate=fused
    )
    return GroupedLinearCall(plan=of, kernels=kernels, **fields)


def inputs(g: torch.Generator, counts: Any, k: int, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, w, b, dy; every expert's tokens of another size."""
    size = torch.cat([torch.full((count, 1), 8.0 ** (expert % 3 - 1)) for expert, count in enumerate(counts)])
    shapes = ((sum(counts), k), (len(counts), n, k), (len(counts), n), (sum(counts), n))
    x, w, b, dy = (torch.randn(*shape, generator=g) for shape in shapes)
    return [t.to(dtype) for t in (x * size, w, b, dy * size)]


def run(call: Any, counts: Any, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor) -> list[Any]:
    """y, dx, dw, db."""
    leaves = [None if t is None else leaf(t) for t in (x, w, b)]
    y = grouped_linear(leaves[0], leaves[1], torch.tensor(counts), call, leaves[2])
    y.backward(dy)
    return [y.detach(), *(None if t is None else t.grad for t in leaves)]


def one_by_one(of: ModulePlan, counts: Any, x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> list[Tensor]:
    """The same through a linear for every expert."""
    leaves = [leaf(t) for t in (x, w, b)]
    pieces = leaves[0].split(list(counts))
    parts = [linear(p, w_e, b_e, make_call(of, x.dtype)) for p, w_e, b_e in zip(pieces, *leaves[1:])]
    y = torch.cat(parts)
    y.backward(dy)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("recipe", ["bf16", *QUANTIZED_RECIPES])
@pytest.mark.parametrize("load", LOADS)
def test_every_expert_computes_what_a_linear_on_its_tokens_alone_does(request: Any, recipe: str, load: str) -> None:
    """No scale, block or rotation of one expert depends on another. K and N are no multiples of a block."""
    counts, of = LOADS[load], plan(recipe)
    tensors = inputs(seeded(request), counts, 68, 35)
    for name, mine, theirs in zip(NAMES, run(grouped_call(of), counts, *tensors), one_by_one(of, counts, *tensors)):
        if name == "db" or (name == "dw" and recipe in ("fp8_tensorwise", "fp8_rowwise")):  # sums in another order
            assert relative_error(mine, theirs) < 2e-6, name
        else:
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("name", ["x", "w", "dy"])
def test_square_blocks_and_mixed_formats_too(request: Any, name: str) -> None:
    """Blocks of 32x32 or 128x128 on tokens would hold two experts'; a GEMM may have one operand in bf16."""
    counts = LOADS["uneven"]
    tensors = inputs(seeded(request), counts, 68, 35)
    for overrides in ({name: {"block": "32x32"}}, {"wgrad": {name: {"format": "bf16"}}} if name != "w" else {}):
        of = plan("mxfp4_none", **overrides)
        for mine, theirs in zip(run(grouped_call(of), counts, *tensors), one_by_one(of, counts, *tensors)):
            assert relative_error(mine, theirs) < 2e-6
    of = plan("fp8_block128", **{name: {"block": "128x128"}})
    for mine, theirs in zip(run(grouped_call(of), counts, *tensors), one_by_one(of, counts, *tensors)):
        assert relative_error(mine, theirs) < 2e-6


def test_gradients_match_fp64_and_pass_gradcheck(request: Any) -> None:
    counts = (3, 0, 2, 1)
    x, w, b, dy = (t.double() for t in inputs(seeded(request), counts, 5, 4))
    call = grouped_call(plan(), torch.float64)
    want = []
    for piece, w_e, b_e in zip(x.split(counts), w, b):
        want.append(piece @ w_e.t() + b_e)
    assert relative_error(run(call, counts, x, w, b, dy)[0], torch.cat(want)) < 1e-14
    leaves = [leaf(t) for t in (x, w, b)]
    torch.autograd.gradcheck(
        lambda x, w, b: grouped_linear(x, w, torch.tensor(counts), call, b), leaves, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "fp8_rowwise"])
def test_every_combination_of_required_gradients_gives_just_those(request: Any, recipe: str) -> None:
    counts = LOADS["uneven"]
    *tensors, dy = inputs(seeded(request), counts, 64, 32)
    everything = run(grouped_call(plan(recipe)), counts, *tensors, dy)[1:]
    for needed in itertools.product((False, True), repeat=3):
        leaves = [leaf(t, flag) for t, flag in zip(tensors, needed)]
        y = grouped_linear(leaves[0], leaves[1], torch.tensor(counts), grouped_call(plan(recipe)), leaves[2])
        assert y.requires_grad == any(needed)
        if any(needed):
            y.backward(dy)
        for mine, reference, flag in zip(leaves, everything, needed):
            assert (mine.grad is not None) == flag
            assert not flag or torch.equal(mine.grad, reference)


def test_gradients_of_biases_are_summed_in_fp32_and_rounded_once(request: Any) -> None:
    """Of bf16 rows, thousands of them: added at once by `grouped_linear`, and as the rows that `expert_bias_rows` gives."""
    counts, n = (3000, 0, 1000), 8
    x, w, b, dy = inputs(seeded(request), counts, 8, n, torch.bfloat16)
    want = torch.stack([piece.double().sum(0) for piece in dy.split(counts)])
    leaves = [leaf(b), leaf(b)]
    run_rows = expert_bias_rows(leaves[0], Groups.of(torch.tensor(counts), sum(counts), CPU))
    assert torch.equal(run_rows, b.repeat_interleave(torch.tensor(counts), 0))
    run_rows.backward(dy)
    y = grouped_linear(x, w, torch.tensor(counts), grouped_call(plan(), torch.bfloat16), leaves[1])
    y.backward(dy)
    for found in leaves:
        close = {"rtol": BF16_UNIT, "atol": 2e-3 * float(dy.abs().max())}
        torch.testing.assert_close(found.grad.double(), want, **close)
    nobody = leaf(b)
    expert_bias_rows(nobody, Groups.of(torch.tensor((0, 0, 0)), 0, CPU)).backward(dy[:0])
    assert torch.equal(nobody.grad, torch.zeros_like(b))
    with pytest.raises(ShapeError, match=r"must be \[2, features\].*got \[3, 8\]. Stack one bias"):
        expert_bias_rows(b, Groups.of(torch.tensor((3, 4)), 7, CPU))


class Sink:
    """A main_grad."""

    def __init__(self, buffer: Tensor, overwrites: bool = False) -> None:
        self.grad, self.stale, self.deliveries = buffer, overwrites, 0

    def buffer(self) -> Tensor:
        return self.grad

    def overwrites(self) -> bool:
        return self.stale

    def delivered(self) -> None:
        self.deliveries += 1


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4", "fp8_tensorwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_accumulate_and_those_of_idle_experts_stay(
    request: Any, recipe: str, dtype: torch.dtype
) -> None:
    """Two microbatches with other loads into one buffer; a stale one is overwritten, idle experts' part with zero."""
    g, k, n = seeded(request), 64, 32
    first, second = inputs(g, (33, 0, 7), k, n), inputs(g, (0, 0, 40), k, n)
    second[1:3] = first[1:3]
    apart = [
        run(grouped_call(plan(recipe)), counts, *t)[2] for counts, t in (((33, 0, 7), first), ((0, 0, 40), second))
    ]
    start = torch.randn(3, n, k, generator=g).to(dtype)
    sink = Sink(start.clone())
    for counts, t in (((33, 0, 7), first), ((0, 0, 40), second)):
        assert run(grouped_call(plan(recipe), fused=True, sink=sink), counts, *t)[2] is None
    assert sink.deliveries == 2
    assert relative_error(sink.grad, start.double() + apart[0] + apart[1]) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(sink.grad[1], start[1])
    stale = Sink(torch.full((3, n, k), float("nan"), dtype=dtype), overwrites=True)
    run(grouped_call(plan(recipe), fused=True, sink=stale), (33, 0, 7), *first)
    assert relative_error(stale.grad, apart[0]) < (1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(stale.grad[1], torch.zeros(n, k, dtype=dtype))


def test_a_buffer_of_another_shape_is_refused(request: Any) -> None:
    t = inputs(seeded(request), (3, 4), 8, 6)
    with pytest.raises(ShapeError, match=r"must be \[experts, out, in\] = \[2, 6, 8\], got \[12, 8\]"):
        run(grouped_call(plan(), fused=True, sink=Sink(torch.zeros(12, 8))), (3, 4), *t)


def test_a_delayed_wgrad_computes_the_same_later(request: Any) -> None:
    counts, pending = LOADS["uneven"], []
    t = inputs(seeded(request), counts, 64, 32)
    want = run(grouped_call(plan("mxfp4")), counts, *t)[2]

    def later(compute: Any) -> None:
        pending.append(compute)

    assert run(grouped_call(plan("mxfp4"), delay=later), counts, *t)[2] is None
    assert torch.equal(pending[0](), want)


def test_only_quantised_copies_are_kept_for_backward(request: Any) -> None:
    """MXFP4: half a byte and a 32nd an element, tokens padded to whole blocks."""
    counts, k, n = (33, 0, 64, 1, 30), 64, 32
    x, w, _, _ = inputs(seeded(request), counts, k, n)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        grouped_linear(leaf(x), leaf(w), torch.tensor(counts), grouped_call(plan("mxfp4")))
    assert {t.dtype for t in kept} == {torch.uint8}
    padded = 64 + 64 + 32 + 32
    assert sum(t.nbytes for t in kept) == (k * padded // 2 + k * padded // 32) + (
        5 * k * n // 2 + 5 * k * n // 32 // 32
    )


def test_weights_are_quantised_once_a_step(request: Any) -> None:
    counts = LOADS["uneven"]
    x, w, _, dy = inputs(seeded(request), counts, 64, 32)
    weight, cache = leaf(w), WeightCache()
    call = grouped_call(plan("mxfp4"), cache=cache)
    copies = []
    for _ in range(2):
        grouped_linear(leaf(x), weight, torch.tensor(counts), call).backward(dy)
        copies.append([t.data_ptr() for t in cache.tensors()])
    assert len(copies[0]) == 4
    assert copies[0] == copies[1]
    with torch.no_grad():
        weight.mul_(2.0)
    y = grouped_linear(x, weight, torch.tensor(counts), call)
    assert torch.equal(y, run(grouped_call(plan("mxfp4")), counts, x, 2.0 * w, None, dy)[0])


def test_stochastic_rounding_repeats_with_its_key_and_differs_between_experts(request: Any) -> None:
    everywhere = {name: {"rounding": "stochastic"} for name in ("x", "w", "dy")}
    of = plan("mxfp4", **everywhere)
    with pytest.raises(ConfigError, match="rounds stochastically and needs random bits"):
        grouped_call(of)
    x, w, _, dy = inputs(seeded(request), (64,), 64, 32)
    twice = [torch.cat([x, x]), torch.cat([w, w]), None, torch.cat([dy, dy])]
    results = []
    for draw in (1, 1, 2):
        rounding = Rounding(seed=1, draw=draw, rank=0, path="experts")
        results.append(run(grouped_call(of, rounding=rounding), (64, 64), *twice))
    for mine, again, other in zip(*(result[:3] for result in results)):
        assert torch.equal(mine, again)
        assert not torch.equal(mine, other)
        half = mine.shape[0] // 2
        assert not torch.equal(mine[:half], mine[half:])
        assert relative_error(mine, other) < 0.4


def test_strides_do_not_matter_and_the_incoming_gradient_is_left_alone(request: Any) -> None:
    counts = LOADS["uneven"]
    x, w, _, dy = inputs(seeded(request), counts, 64, 32)
    for recipe in ("bf16", "mxfp4", "fp8_tensorwise"):
        want = run(grouped_call(plan(recipe)), counts, x, w, None, dy)
        wide = torch.stack((dy, dy), dim=-1)[..., 0]
        before = wide.clone()
        got = run(
            grouped_call(plan(recipe)), counts, x.t().contiguous().t(), w.transpose(0, 1).contiguous().transpose(0, 1), None, wide
        )  # fmt: skip
        assert torch.equal(wide, before)
        for mine, theirs in zip(got[:3], want[:3]):
            assert relative_error(mine, theirs) < 1e-6


def test_autocast_decides_the_dtype_once(request: Any) -> None:
    counts = LOADS["uneven"]
    x, w, b, dy = inputs(seeded(request), counts, 64, 32)
    leaves = [leaf(t) for t in (x, w, b)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_linear(leaves[0], leaves[1], torch.tensor(counts), grouped_call(plan(), torch.bfloat16), leaves[2])
        assert y.dtype == torch.bfloat16
        y.backward(dy.bfloat16())
    want = run(grouped_call(plan()), counts, x, w, b, dy)
    for mine, theirs in zip([y.detach(), *(t.grad for t in leaves)], want):
        assert relative_error(mine, theirs) < 1e-2
    assert all(t.grad.dtype == torch.float32 for t in leaves)


def test_what_does_not_fit_is_refused_by_name(request: Any) -> None:
    x, w, b, _ = inputs(seeded(request), (3, 4), 8, 6)
    counts, call = torch.tensor([3, 4]), grouped_call(plan(path="decoder.layers.3.mlp.experts"))
    with pytest.raises(ShapeError, match=r"decoder\.layers\.3.*weight \[experts, out, in\], got \[7, 8\] and \[6, 8\]"):
        grouped_linear(x, w[0], counts, call)
    with pytest.raises(ShapeError, match=r"\[experts\] = \[2\] for 7 tokens, got \[3\] for 7"):
        grouped_linear(x, w, torch.tensor([3, 2, 2]), call)
    with pytest.raises(ShapeError, match=r"sum to the rows of x, 7; got \[3, 3\]"):
        grouped_linear(x, w, torch.tensor([3, 3]), call)
    with pytest.raises(ShapeError, match=r"bias must be \[experts, out\] = \[2, 6\], got \[6\]"):
        grouped_linear(x, w, counts, call, b[0])
    with pytest.raises(ShapeError, match=r"share a dtype, got torch\.float32 and torch\.bfloat16"):
        grouped_linear(x, w.bfloat16(), counts, call)
    strict = grouped_call(plan("mxfp4", path="experts", padding="refuse"))
    with pytest.raises(
        ShapeError, match=r"recipe 'mxfp4', experts: K, the contraction of fprop.*multiple of 32, got 8"
    ):
        grouped_linear(x, w, counts, strict)
    orders = KernelOrders.from_value({"grouped_gemm": ["triton", "torch"]})
    pinned = ModulePlan(precision=plan("mxfp4").precision, kernels=orders)
    with pytest.raises(UnsupportedError, match="grouped_gemm"):
        GroupedLinearKernels.select(pinned, CPU, torch.float32, wgrad_dtype=torch.float32, accumulate=False)


def test_groups_serve_several_layers_and_a_wait_for_the_gpu_is_reported(request: Any) -> None:
    counts = LOADS["uneven"]
    x, w, _, dy = inputs(seeded(request), counts, 64, 32)
    groups = Groups.of(torch.tensor(counts), sum(counts), CPU)
    of = plan()
    y = grouped_linear(x, w, groups, grouped_call(of))
    assert torch.equal(y, run(grouped_call(of), counts, x, w, None, dy)[0])
    orders = KernelOrders.from_value({"grouped_gemm": "per_expert"})
    pinned = ModulePlan(precision=of.precision, kernels=orders)
    kernels = GroupedLinearKernels.select(pinned, CPU, torch.float32, wgrad_dtype=torch.float32, accumulate=False)
    assert "waits for the GPU" in kernels.choices["grouped fprop GEMM"]


def test_weights_have_their_scales_where_the_gemms_read_them(request: Any) -> None:
    """gfx950's layout holds tiles of 32 rows: it is written where none of them belongs to two experts."""
    calls = grouped_call(plan("mxfp4_none"))
    kernels = replace(calls.kernels, weight_layouts={"fprop": "gfx950", "dgrad": "plain"})
    for outputs, layout in ((64, "gfx950"), (40, "plain")):
        x, w, _, dy = inputs(seeded(request), (33, 7), 64, outputs)
        call = GroupedLinearCall(plan=calls.plan, kernels=kernels)
        row, column = kernels.quantize_weights(w, *operand_specs(calls.plan, "w"), [None, None])
        assert (row.scale_layout, column.scale_layout) == (layout, "plain")
        for mine, theirs in zip(run(call, (33, 7), x, w, None, dy)[:3], run(calls, (33, 7), x, w, None, dy)[:3]):
            assert torch.equal(mine, theirs)
