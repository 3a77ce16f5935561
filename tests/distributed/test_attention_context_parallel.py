"""Attention over a context-parallel group equals attention on one rank: values and every gradient, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.kernels.attention import AttentionMask, Packing
from tests.functional.attention_oracle import relative_error
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

# Sums over ranks in another order: some roundings of 2^-24. bf16: one rounding each of two nearly equal numbers.
BARS = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2**-7}


def share(x: Tensor, info: RankInfo, dim: int = 0, rooms: list[int] | None = None) -> Tensor:
    """This rank's chunks of every sequence along `dim`, as Megatron's `get_batch_on_this_cp_rank` deals them out."""
    parts = []
    for sequence in x.split(rooms or [x.shape[dim]], dim):
        chunks = sequence.chunk(2 * info.world_size, dim)
        parts += [chunks[info.rank], chunks[2 * info.world_size - 1 - info.rank]]
    return torch.cat(parts, dim)


def check_against_one_rank(
    info: RankInfo, qkv: list[Tensor], run: Any, rooms: list[int] | None = None, **more: Tensor
) -> None:
    """`run(q, k, v, group, **more)`: with the group on shares, without on everything. `more` are inputs every rank has whole."""
    dtype = qkv[0].dtype
    whole = [x.clone().requires_grad_() for x in qkv]
    extra = {name: x.clone().requires_grad_() for name, x in more.items()}
    want = run(*whole, None, **extra)
    dout = torch.randn(want.shape).to(dtype)
    want_grads = torch.autograd.grad(want, [*whole, *extra.values()], dout)

    local = [share(x, info, rooms=rooms).requires_grad_() for x in qkv]
    extra = {name: x.clone().requires_grad_() for name, x in more.items()}
    got = run(*local, dist.group.WORLD, **extra)
    got_grads = torch.autograd.grad(got, [*local, *extra.values()], share(dout, info, rooms=rooms))
    assert relative_error(got, share(want.detach(), info, rooms=rooms)) <= BARS[dtype]
    for position in range(3):
        assert got_grads[position].dtype == dtype
        full = share(want_grads[position], info, rooms=rooms)
        assert relative_error(got_grads[position], full) <= BARS[dtype], position
    for grad, full in zip(got_grads[3:], want_grads[3:]):
        total, scale = grad.double(), grad.double().abs()
        dist.all_reduce(total)  # as finalize_model_grads does for parameters
        dist.all_reduce(scale)  # each rank rounds its part, and the parts may cancel
        assert (total - full.double()).abs().max() <= BARS[dtype] * max(scale.max().item(), 0.5)


def inputs(
    tokens: tuple[int, ...], dtype: torch.dtype, heads: int = 4, groups: int = 2, v_dim: int = 6
) -> list[Tensor]:
    sizes = ((heads, 8), (groups, 8), (groups, v_dim))
    return [torch.randn(*tokens, *size, dtype=torch.float64).to(dtype) for size in sizes]


@ranks(world_size=[2, 4])
def test_dense_batches_equal_one_rank(rank_info: RankInfo) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for mask in (
            AttentionMask(causal=True),
            AttentionMask(),
            AttentionMask(causal=True, window=(5, 0)),
            AttentionMask(window=(3, 9)),
            AttentionMask(causal=True, window=(0, 0)),
        ):
            for groups in (1, 4):
                sinks = torch.randn(4, dtype=torch.float64).to(dtype)

                def run(
                    q: Tensor, k: Tensor, v: Tensor, group: Any, sinks: Tensor, mask: AttentionMask = mask
                ) -> Tensor:
                    return attention(q, k, v, mask=mask, sinks=sinks, context_group=group)

                check_against_one_rank(rank_info, inputs((24, 2), dtype, groups=groups), run, sinks=sinks)


@ranks(world_size=[2, 4])
def test_packed_sequences_equal_one_rank(rank_info: RankInfo) -> None:
    """With padding behind sequences, whose length then cuts through the middle of a rank's chunks."""
    rooms, lengths = [16, 0, 8, 24], [13, 0, 8, 7]

    def cumulative(values: list[int]) -> Tensor:
        return torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    for padded in (False, True):
        ends = cumulative(lengths if padded else rooms)
        starts = cumulative(rooms) if padded else None
        packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends, cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts)
        for dtype in (torch.float64, torch.bfloat16):
            for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (True, (4, 0)), (False, (2, 3))):
                mask = AttentionMask(causal=causal, window=window, packing=packing)

                def run(q: Tensor, k: Tensor, v: Tensor, group: Any, mask: AttentionMask = mask) -> Tensor:
                    return attention(q, k, v, layout="thd", mask=mask, context_group=group)

                check_against_one_rank(rank_info, inputs((sum(rooms),), dtype), run, rooms=[r for r in rooms if r])


@ranks(world_size=[2, 4])
def test_a_mask_tensor_and_a_bias_have_this_ranks_queries_and_all_keys(rank_info: RankInfo) -> None:
    masked = torch.rand(2, 1, 24, 24) < 0.3
    bias = torch.randn(1, 4, 24, 24, dtype=torch.float64)

    def run(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        own = (lambda x: x) if group is None else (lambda x: share(x, rank_info, dim=2))
        mask = AttentionMask(causal=True, masked=own(masked))
        return attention(q, k, v, mask=mask, bias=own(bias), context_group=group)

    check_against_one_rank(rank_info, inputs((24, 2), torch.float64), run)


@ranks(world_size=2)
def test_gradients_of_keys_are_rounded_once_after_the_sum_over_ranks(rank_info: RankInfo) -> None:
    qkv = inputs((16, 1), torch.bfloat16)
    local = [share(x, rank_info).requires_grad_() for x in qkv]
    exact = [x.double().requires_grad_() for x in qkv]
    dout = torch.randn(16, 1, 4, 6).bfloat16()
    out = attention(*local, context_group=dist.group.WORLD)
    _, dk, dv = torch.autograd.grad(out, local, share(dout, rank_info))
    _, want_dk, want_dv = torch.autograd.grad(attention(*exact), exact, dout.double())
    for got, want in ((dk, want_dk), (dv, want_dv)):
        torch.testing.assert_close(got.double(), share(want, rank_info), rtol=1.01 * 2**-8, atol=1e-6)


@ranks(world_size=[2, 4])
def test_runs_repeat_bit_for_bit(rank_info: RankInfo) -> None:
    qkv = [share(x, rank_info).requires_grad_() for x in inputs((32, 2), torch.float32)]
    runs = []
    for _ in range(3):
        out = attention(*qkv, mask=AttentionMask(causal=True), context_group=dist.group.WORLD)
        runs.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again))


@ranks(world_size=2)
def test_a_sequence_that_cannot_be_dealt_out_is_named(rank_info: RankInfo) -> None:
    from primus_turbo_plugin.errors import ShapeError

    x = torch.ones(5, 1, 2, 4)
    with pytest.raises(ShapeError, match=r"sequence 0 has 10 tokens\. Pad it to a multiple of 4"):
        attention(x, x, x, context_group=dist.group.WORLD)


@pytest.mark.megatron
@ranks(world_size=[2, 4], megatron=True)
@pytest.mark.parametrize("packed", [False, True])
def test_the_module_equals_one_rank_dropout_and_sinks_included(rank_info: RankInfo, packed: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    start_megatron(context_parallel_size=rank_info.world_size)
    fields = {"hidden_size": 32, "num_query_groups": 2, "attention_dropout": 0.3, "softmax_type": "learnable"}
    rooms = [16, 8] if packed else None
    ends = torch.tensor([0, 16, 24], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends) if packed else None
    modules = []
    for size in (1, rank_info.world_size):
        config = megatron_config(**fields, context_parallel_size=size, cp_comm_type="all_gather")
        modules.append(TurboDotProductAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="all_gather"))
    with torch.no_grad():
        modules[0].softmax_offset.copy_(torch.linspace(-1, 1, 4))
        modules[1].softmax_offset.copy_(torch.linspace(-1, 1, 4))

    def run(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        model_parallel_cuda_manual_seed(77, force_reset_rng=True)
        return modules[0 if group is None else 1](q, k, v, None, packed_seq_params=params)

    tokens = (24,) if packed else (24, 2)
    check_against_one_rank(rank_info, inputs(tokens, torch.float64, v_dim=8), run, rooms=rooms)


@pytest.mark.megatron
@ranks(world_size=2, megatron=True)
def test_a_batch_may_bring_its_own_group_or_none(rank_info: RankInfo) -> None:
    """Dynamic context parallelism: the lengths say over which ranks the batch is split."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    start_megatron(context_parallel_size=2)
    config = megatron_config(hidden_size=32, num_query_groups=2, attention_dropout=0.0, context_parallel_size=2)
    module = TurboDotProductAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="all_gather")
    ends = torch.tensor([0, 8], dtype=torch.int32)
    qkv = inputs((8,), torch.float32, v_dim=8)
    alone = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, local_cp_size=1)
    together = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, local_cp_size=2, cp_group=dist.group.WORLD
    )
    whole = module(*qkv, None, packed_seq_params=alone)
    parts = module(*(share(x, rank_info) for x in qkv), None, packed_seq_params=together)
    torch.testing.assert_close(parts, share(whole, rank_info), rtol=1e-5, atol=1e-5)
