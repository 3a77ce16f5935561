"""Quantised linears split over ranks multiply the codes that one rank would: operand by operand, then the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.errors import ShapeError
from primus_turbo_plugin.functional.linear import linear
from primus_turbo_plugin.functional.linear_call import LinearCall, TensorParallel
from primus_turbo_plugin.precision.quantized_tensor import QuantizedTensor
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import leaf, make_call, plan, relative_error

RECIPES = ("mxfp4", "mxfp4_all", "mxfp4_none", "mxfp8", "fp8_block128")


class _Recorder:
    """Kernels that note the operands of each GEMM, as values."""

    def __init__(self, call: LinearCall) -> None:
        self.operands: dict[str, tuple[Tensor, Tensor]] = {}
        inner = call.kernels

        class Kernels:
            dtype, wgrad_dtype = inner.dtype, inner.wgrad_dtype
            is_stochastic, wanted_specs = inner.is_stochastic, inner.wanted_specs
            quantize = staticmethod(inner.quantize)

            @staticmethod
            def gemm_nt(gemm: str, a: Any, b: Any, out: Tensor | None = None) -> Tensor:
                self.operands[gemm] = (_values(a), _values(b))
                return inner.gemm_nt(gemm, a, b, out)

        self.kernels: Any = Kernels


def _values(operand: Tensor | QuantizedTensor) -> Tensor:
    """As multiplied: still rotated, so that every code shows."""
    return operand.decode()[:, : operand.contraction] if isinstance(operand, QuantizedTensor) else operand.clone()


def _run(recipe: str, parallel: TensorParallel, x: Tensor, w: Tensor, dy: Tensor) -> tuple[dict[str, Tensor], Any]:
    of = plan(recipe)
    recorder = _Recorder(make_call(of, x.dtype))
    call = LinearCall(plan=of, kernels=recorder.kernels, parallel=parallel)
    leaves = [leaf(x), leaf(w)]
    y = linear(*leaves, None, call)
    y.backward(dy)
    return {"y": y.detach(), "dx": leaves[0].grad, "dw": leaves[1].grad}, recorder.operands


def _check(rank_info: RankInfo, recipe: str, mode: Any, sequence_parallel: bool, tokens: int) -> None:
    size, rank = rank_info.world_size, rank_info.rank
    g = torch.Generator().manual_seed(rank_info.seed)
    k = n = (128 if "128" in recipe else 32) * size
    x, w, dy = (torch.randn(*shape, generator=g).bfloat16() for shape in ((tokens, k), (n, k), (tokens, n)))
    whole, operands = _run(recipe, TensorParallel(), x, w, dy)
    parallel = TensorParallel(mode=mode, group=dist.group.WORLD, sequence_parallel=sequence_parallel)

    def own(t: Tensor, dim: int, split: bool = True) -> Tensor:
        return t.chunk(size, dim=dim)[rank].contiguous() if split else t

    column = mode == "column"
    x_own = own(x, 0, sequence_parallel) if column else own(x, 1)
    dy_own = own(dy, 1) if column else own(dy, 0, sequence_parallel)
    got, mine = _run(recipe, parallel, x_own, own(w, 0 if column else 1), dy_own)
    # Which dimension of each operand [outer, contraction] this rank holds a part of; None: all of it.
    parts = {
        "fprop": (None, 0) if column else (1, 1),
        "dgrad": (1, 1) if column else (None, 0),
        "wgrad": (0, None) if column else (None, 0),
    }
    for gemm, dims in parts.items():
        for operand, reference, dim in zip(mine[gemm], operands[gemm], dims):
            expected = reference if dim is None else own(reference, dim)
            assert torch.equal(operand, expected), (recipe, mode, sequence_parallel, tokens, gemm)
    expected_y = own(whole["y"], 1) if column else own(whole["y"], 0, sequence_parallel)
    expected_dx = own(whole["dx"], 0, sequence_parallel) if column else own(whole["dx"], 1)
    expected_dw = own(whole["dw"], 0 if column else 1)
    for name, value in {"y": expected_y, "dx": expected_dx, "dw": expected_dw}.items():
        assert relative_error(got[name], value) < 6e-3, name  # partial sums are rounded to bf16 before they are added


@ranks(world_size=[2, 3])
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_split_layers_multiply_the_codes_of_the_whole(rank_info: RankInfo, mode: str, sequence_parallel: bool) -> None:
    """Tokens that fill blocks on every rank (quantised before they are sent) and that do not (sent first)."""
    for recipe in RECIPES:
        for tokens in ((128 if "128" in recipe else 32) * rank_info.world_size, 40 * rank_info.world_size):
            _check(rank_info, recipe, mode, sequence_parallel, tokens)


@ranks(world_size=[2])
def test_rowwise_and_tensorwise_scales_span_a_shard_and_stay_accurate(rank_info: RankInfo) -> None:
    """Their scales cannot equal TP=1's; the results must still be FP8-close to the exact ones."""
    size, rank = rank_info.world_size, rank_info.rank
    g = torch.Generator().manual_seed(rank_info.seed)
    x, w, dy = (torch.randn(*shape, generator=g) for shape in ((64, 64), (64, 64), (64, 64)))
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        parallel = TensorParallel(mode="column", group=dist.group.WORLD, sequence_parallel=True)
        got, _ = _run(recipe, parallel, x.chunk(size)[rank], w.chunk(size)[rank], dy.chunk(size, 1)[rank].contiguous())
        assert relative_error(got["y"], (x @ w.t()).chunk(size, 1)[rank]) < 0.05
        assert relative_error(got["dx"], (dy @ w).chunk(size)[rank]) < 0.05
        assert relative_error(got["dw"], (dy.t() @ x).chunk(size)[rank]) < 0.05


@ranks(world_size=[2])
def test_a_refused_padding_counts_the_tokens_of_all_ranks(rank_info: RankInfo) -> None:
    """16 tokens on each of two ranks fill a block of 32."""
    parallel = TensorParallel(mode="column", group=dist.group.WORLD, sequence_parallel=True)
    call = make_call(plan("mxfp4", padding="refuse"), torch.float32, parallel=parallel)
    w = leaf(torch.randn(32, 64))
    linear(torch.randn(16, 64), w, None, call).sum().backward()
    assert w.grad is not None
    with pytest.raises(ShapeError, match=r"tokens, the contraction of wgrad .* got 34"):
        linear(torch.randn(17, 64), w, None, call)


@ranks(world_size=[2])
def test_codes_and_not_bf16_travel_where_blocks_do_not_straddle_ranks(rank_info: RankInfo) -> None:
    """A quarter of the bytes is what quantising before the all-gather is for."""
    sent: list[Tensor] = []
    from primus_turbo_plugin.communication import collectives

    gather = collectives._all_gather
    try:
        collectives._all_gather = lambda out, source, **kw: (sent.append(source), gather(out, source, **kw))[1]
        for tokens, dtypes in ((64, {torch.uint8}), (40, {torch.uint8, torch.bfloat16})):
            sent.clear()
            x = torch.randn(tokens, 64).bfloat16()
            w = torch.randn(32, 64).bfloat16()
            parallel = TensorParallel(mode="column", group=dist.group.WORLD, sequence_parallel=True)
            call = make_call(plan("mxfp4"), torch.bfloat16, parallel=parallel)
            y = linear(leaf(x), leaf(w), None, call)
            y.backward(torch.ones_like(y))
            assert {t.dtype for t in sent} == dtypes
            if tokens == 64:  # x row-wise in forward, columnwise in backward: codes and scales
                assert sum(t.nbytes for t in sent) == 2 * (x.numel() // 2 + x.numel() // 32)
    finally:
        collectives._all_gather = gather
