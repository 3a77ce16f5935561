"""Attention over a context-parallel group equals attention on one rank: values and every gradient, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from primus_turbo_plugin.errors import ConfigError, ShapeError
from primus_turbo_plugin.functional.attention import attention
from primus_turbo_plugin.functional.context_parallel import ContextParallel
from primus_turbo_plugin.kernels.attention import AttentionMask, Dropout, Packing
from tests.distributed.context_parallel_cases import (
    algorithms_for,
    check_against_one_rank,
    inputs,
    over_all,
    share,
)
from tests.support.distributed import RankInfo, ranks
from tests.support.linear import megatron_config, start_megatron

Context = ContextParallel | None
SOME = Dropout(probability=0.25, seed=torch.tensor([1234567]))


def all_algorithms(heads: int, groups: int) -> list[ContextParallel]:
    return [over_all(algorithm) for algorithm in algorithms_for(heads, groups)]


MASKS = {
    "causal": AttentionMask(causal=True),
    "all": AttentionMask(),
    "causal window": AttentionMask(causal=True, window=(5, 0)),
    "long causal window": AttentionMask(causal=True, window=(17, 0)),
    "window": AttentionMask(window=(3, 9)),
    "self": AttentionMask(causal=True, window=(0, 0)),
}


@ranks(world_size=[2, 3, 4])
def test_dense_batches_equal_one_rank(rank_info: RankInfo) -> None:
    """Every mask, with as many groups as heads, one, and numbers between; values narrower than keys; sinks and softcap."""
    world = rank_info.world_size
    heads = 2 * world
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for name, mask in MASKS.items():
            if dtype is not torch.float64 and name in ("causal window", "self"):
                continue
            for groups in {1, heads, *((2, world) if name in ("causal", "window") else ())}:
                softcap = 1.5 if name in ("causal", "window") else 0.0
                dropout = SOME if name in ("all", "long causal window") else None
                sinks = torch.randn(heads, dtype=torch.float64).to(dtype)

                def run(
                    q: Tensor, k: Tensor, v: Tensor, context: Context, sinks: Tensor, mask: AttentionMask = mask,
                    softcap: float = softcap, dropout: Dropout | None = dropout,
                ) -> Tensor:  # fmt: skip
                    more = {"softcap": softcap, "dropout": dropout}
                    return attention(q, k, v, mask=mask, sinks=sinks, context=context, **more)

                tensors = inputs((24, 2), dtype, heads=heads, groups=groups)
                check_against_one_rank(rank_info, tensors, run, all_algorithms(heads, groups), sinks=sinks)


@ranks(world_size=[2, 3, 4])
def test_packed_sequences_equal_one_rank(rank_info: RankInfo) -> None:
    """With padding behind sequences, whose length then cuts through a rank's chunks, an empty one, one of padding only, tokens
    behind the last."""
    world = rank_info.world_size
    rooms, lengths = [4 * world, 0, 2 * world, 6 * world, 2 * world], [4 * world - 3, 0, 2 * world, 7, 0]

    def cumulative(values: list[int]) -> Tensor:
        return torch.tensor([0, *values], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    for padded in (False, True):
        ends = cumulative(lengths if padded else rooms)
        starts = cumulative(rooms) if padded else None
        packing = Packing(cu_seqlens_q=ends, cu_seqlens_k=ends, cu_seqlens_q_padded=starts, cu_seqlens_k_padded=starts)
        for dtype in (torch.float64, torch.bfloat16):
            for causal, window in ((True, (-1, -1)), (False, (-1, -1)), (True, (4, 0)), (False, (2, 3))):
                mask = AttentionMask(causal=causal, window=window, packing=packing)
                dropout = SOME if padded else None

                def run(
                    q: Tensor, k: Tensor, v: Tensor, context: Context, mask: AttentionMask = mask,
                    dropout: Dropout | None = dropout,
                ) -> Tensor:  # fmt: skip
                    return attention(q, k, v, layout="thd", mask=mask, dropout=dropout, context=context)

                everything = [*(r for r in rooms if r), *((2 * world,) if padded else ())]
                tensors = inputs((sum(everything),), dtype, heads=2 * world, groups=world)
                check_against_one_rank(rank_info, tensors, run, all_algorithms(2 * world, world), rooms=everything)


@ranks(world_size=[2, 4])
def test_a_mask_tensor_and_a_bias_have_this_ranks_queries_and_all_keys(rank_info: RankInfo) -> None:
    masked, by_head = torch.rand(2, 1, 24, 24) < 0.3, torch.rand(1, 4, 24, 24) < 0.3
    for mask_tensor in (masked, by_head, masked[:, :, :1]):
        for causal in (True, False):
            for bias_shape in (None, (1, 4, 24, 24), (2, 1, 1, 24), (1, 4, 24, 1)):
                contexts = all_algorithms(4, 2)
                more = {} if bias_shape is None else {"bias": torch.randn(bias_shape, dtype=torch.float64)}
                if more:
                    contexts = contexts[:2]  # an all-to-all refuses a bias

                def run(
                    q: Tensor, k: Tensor, v: Tensor, context: Context, bias: Tensor | None = None,
                    mask_tensor: Tensor = mask_tensor, causal: bool = causal,
                ) -> Tensor:  # fmt: skip
                    def own(x: Tensor | None) -> Tensor | None:
                        whole = context is None or x is None or x.shape[2] == 1
                        return x if whole else share(x, rank_info, dim=2)

                    mask = AttentionMask(causal=causal, masked=own(mask_tensor))
                    return attention(q, k, v, mask=mask, bias=own(bias), context=context)

                check_against_one_rank(rank_info, inputs((24, 2), torch.float64), run, contexts, **more)


@ranks(world_size=2)
def test_gradients_of_keys_are_rounded_once_after_the_sum_over_ranks(rank_info: RankInfo) -> None:
    """Also where an all-to-all hands a group to both ranks."""
    for context in all_algorithms(4, 1):
        qkv = inputs((16, 1), torch.bfloat16, groups=1)
        local = [share(x, rank_info).requires_grad_() for x in qkv]
        exact = [x.double().requires_grad_() for x in qkv]
        dout = torch.randn(16, 1, 4, 6).bfloat16()
        out = attention(*local, context=context)
        _, dk, dv = torch.autograd.grad(out, local, share(dout, rank_info))
        _, want_dk, want_dv = torch.autograd.grad(attention(*exact), exact, dout.double())
        torch.testing.assert_close(dv.double(), share(want_dv, rank_info), rtol=1.01 * 2**-8, atol=1e-6)
        # A ring takes delta from the output, which was rounded: off by 2^-9 of it, times probabilities and queries of 16 rows.
        slack = 16 * 2**-9 if context.ring_group is not None else 1e-6
        torch.testing.assert_close(dk.double(), share(want_dk, rank_info), rtol=1.01 * 2**-8, atol=slack)


@ranks(world_size=[2, 4])
def test_runs_repeat_bit_for_bit(rank_info: RankInfo) -> None:
    for context in all_algorithms(4, 1):
        for window in ((-1, -1), (9, 0)):
            qkv = [share(x, rank_info).requires_grad_() for x in inputs((32, 2), torch.float32, groups=1)]
            runs = []
            for _ in range(3):
                out = attention(*qkv, mask=AttentionMask(causal=True, window=window), context=context)
                runs.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
            for again in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(runs[0], again)), context.algorithm


@ranks(world_size=4)
def test_what_cannot_be_shared_is_named(rank_info: RankInfo) -> None:
    x = torch.ones(5, 1, 2, 4)
    for algorithm in ("p2p", "all_gather"):
        with pytest.raises(ShapeError, match=r"sequence 0 has 20 tokens\. Pad it to a multiple of 8"):
            attention(x, x, x, context=over_all(algorithm))
    x = torch.ones(2, 1, 6, 4)
    with pytest.raises(ShapeError, match=r"6 query heads with 6 key heads.*a multiple of 4.*cp_comm_type to p2p"):
        attention(x, x, x, context=over_all("a2a"))
    x, bias = torch.ones(2, 1, 4, 4), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ShapeError, match="the bias is not handed on"):
        attention(x, x, x, bias=bias, context=over_all("a2a"))
    with pytest.raises(ConfigError, match=r"two levels of groups and there are none.*hierarchical"):
        ContextParallel(group=dist.group.WORLD, algorithm="a2a+p2p")
    world = dist.group.WORLD
    with pytest.raises(ConfigError, match=r"groups of 4 \(a2a\) and 4 \(p2p\) ranks don't make up"):
        ContextParallel(group=world, algorithm="a2a+p2p", levels=(world, world))


@pytest.mark.megatron
@ranks(world_size=[2, 4], megatron=True)
@pytest.mark.parametrize("packed", [False, True])
def test_the_module_equals_one_rank_dropout_and_sinks_included(rank_info: RankInfo, packed: bool) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType

    from primus_turbo_plugin.modules import TurboDotProductAttention

    world = rank_info.world_size
    start_megatron(context_parallel_size=world)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    groups.hcp = list(over_all("a2a+p2p").levels or ())  # Megatron needs einops to make them
    fields = {"hidden_size": 32, "num_query_groups": 2, "attention_dropout": 0.3, "softmax_type": "learnable"}
    rooms = [16, 8] if packed else None
    ends = torch.tensor([0, 16, 24], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends) if packed else None

    def module(size: int, algorithm: str | None) -> Any:
        config = megatron_config(**fields, context_parallel_size=size, cp_comm_type=algorithm)
        attention_module = TurboDotProductAttention(
            config, 1, AttnMaskType.causal, "self", cp_comm_type=algorithm, pg_collection=groups
        )
        with torch.no_grad():
            attention_module.softmax_offset.copy_(torch.linspace(-1, 1, 4))
        return attention_module

    alone = module(1, None)
    modules = {kind: module(world, kind) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p")}

    def run(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        model_parallel_cuda_manual_seed(77, force_reset_rng=True)
        chosen = alone if context is None else modules[context.algorithm]
        return chosen(q, k, v, None, packed_seq_params=params)

    tokens = (24,) if packed else (24, 2)
    contexts = [over_all(kind) for kind in modules]  # type: ignore[arg-type]
    check_against_one_rank(rank_info, inputs(tokens, torch.float64, v_dim=8), run, contexts, rooms=rooms)


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


@pytest.mark.megatron
@ranks(world_size=[2, 3], megatron=True)
def test_tokens_stand_where_megatron_puts_them(rank_info: RankInfo) -> None:
    """Megatron's own split of a batch against the places that dropout and the schedule count in."""
    import inspect

    from megatron.core.utils import get_batch_on_this_cp_rank

    from primus_turbo_plugin.functional.context_parallel.sequences import places, sequences_of

    world = rank_info.world_size
    start_megatron(context_parallel_size=world)
    tokens = torch.arange(12 * world)
    arguments: dict[str, Any] = {"is_hybrid_cp": False, "cp_group": dist.group.WORLD}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    batch = {"tokens": tokens[None], "attention_mask": None, "cu_seqlens": None}
    mine = get_batch_on_this_cp_rank(batch, **{k: v for k, v in arguments.items() if k in known})["tokens"][0]
    assert torch.equal(mine, share(tokens, rank_info))
    assert torch.equal(mine, places(sequences_of(None, 12, world, "q"), 12, rank_info.rank, world).long())
