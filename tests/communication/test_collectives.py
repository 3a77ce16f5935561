"""The collectives against what they are documented to give, in real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from primus_turbo_plugin.communication.collectives import (
    all_gather,
    all_gather_last_dim,
    all_reduce,
    group_size,
    reduce_scatter,
)
from primus_turbo_plugin.errors import ShapeError
from tests.support.distributed import RankInfo, ranks


def _of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@ranks(world_size=[1, 2, 3, 4])
def test_collectives_keep_rank_order_and_sum(rank_info: RankInfo) -> None:
    """Wrong order would hand a rank another's tokens, which no shape check sees."""
    rank, size, group = rank_info.rank, rank_info.world_size, dist.group.WORLD
    assert group_size(group) == size
    for rows, columns in ((1, 1), (5, 3), (0, 4)):
        mine = [_of_rank(r, rows, columns) for r in range(size)]
        assert torch.equal(all_gather(mine[rank], group).wait(), torch.cat(mine))
        assert torch.equal(all_gather_last_dim(mine[rank], group).wait(), torch.cat(mine, dim=1))
        whole = [_of_rank(r, size * rows, columns) for r in range(size)]
        total = torch.stack(whole).sum(0)
        share = reduce_scatter(whole[rank], group).wait()
        torch.testing.assert_close(share, total[rank * rows : (rank + 1) * rows])
        torch.testing.assert_close(all_reduce(whole[rank].clone(), group).wait(), total)


@ranks(world_size=2)
def test_strided_inputs_are_neither_misread_nor_written(rank_info: RankInfo) -> None:
    rank, group = rank_info.rank, dist.group.WORLD
    whole = [_of_rank(r, 6, 4) for r in range(2)]
    turned = whole[rank].t()  # [4, 6], not contiguous
    before = turned.clone()
    assert torch.equal(all_gather(turned, group).wait(), torch.cat([w.t() for w in whole]))
    torch.testing.assert_close(all_reduce(turned, group).wait(), (whole[0] + whole[1]).t())
    torch.testing.assert_close(reduce_scatter(turned, group).wait(), (whole[0] + whole[1]).t()[2 * rank : 2 * rank + 2])
    assert torch.equal(turned, before)


@ranks(world_size=2)
def test_rows_that_do_not_divide_are_refused_before_anything_is_sent(rank_info: RankInfo) -> None:
    with pytest.raises(ShapeError, match=r"3 rows .* size 2\. Pad the sequence"):
        reduce_scatter(torch.zeros(3, 2), dist.group.WORLD)


def test_no_group_is_a_group_of_one() -> None:
    x = torch.randn(3, 2)
    for collective in (all_gather, all_gather_last_dim, reduce_scatter, all_reduce):
        assert collective(x, None).wait() is x
